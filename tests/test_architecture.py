"""The shape of the project as a test: who may import whom, what stays pure, how large a file may grow.

Modules are read, not imported. A new module must be entered in `LAYERS`, once its place is decided.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("lmcache_ray", "cluster")

# From the ground up: a module imports from its own layer and those below. A package stands for all its modules,
# unless one of them is listed itself.
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("values", (
        "lmcache_ray.errors", "lmcache_ray.compiled", "lmcache_ray.dtypes", "lmcache_ray.torch_dtypes",
        "lmcache_ray.layout",
        "lmcache_ray.arrays", "lmcache_ray.tokens", "lmcache_ray.chunking", "lmcache_ray.keys", "lmcache_ray.prompt",
        "lmcache_ray.splitmix", "lmcache_ray.kv_layer_groups", "lmcache_ray.metadata", "lmcache_ray.shape_spec",
        "lmcache_ray.config", "lmcache_ray.config_compat", "lmcache_ray.config_fields",
        "lmcache_ray.config_sources", "lmcache_ray.config_spelling",
        "lmcache_ray.tiers.spec", "lmcache_ray.tiers.counts", "lmcache_ray.tiers.hits",
    )),
    ("pure machines", (
        "lmcache_ray.index", "lmcache_ray.tiers", "lmcache_ray.broadcast.tags", "lmcache_ray.broadcast.log",
    )),
    ("protocols", (
        "lmcache_ray.connector.base", "lmcache_ray.broadcast.base", "lmcache_ray.index_service",
        "lmcache_ray.storage.base",
    )),
    ("implementations", (
        "lmcache_ray.arena", "lmcache_ray.connector", "lmcache_ray.broadcast", "lmcache_ray.clearing",
        "lmcache_ray.kv_pattern", "lmcache_ray.storage",
    )),
    ("one rank's bytes", (
        "lmcache_ray.shard", "lmcache_ray.first_rank",
        "lmcache_ray.tiers.chunk_threads", "lmcache_ray.tiers.rank_tiers",
    )),
    ("what moves chunks between tiers", (
        "lmcache_ray.tiers.local_ranks", "lmcache_ray.tiers.disk_tier", "lmcache_ray.tiers.remote_tier",
        "lmcache_ray.tiers.promoting", "lmcache_ray.tiers.tier_service", "lmcache_ray.tiers.local_index",
        "lmcache_ray.tiers.assembly",
    )),
    ("engine", ("lmcache_ray.retrieval", "lmcache_ray.engine", "lmcache_ray.world_engine")),
    ("composition", ("lmcache_ray.in_process_world", "lmcache_ray.build",)),
    ("standalone", ("lmcache_ray.standalone",)),
    ("cluster: values and pure machines", (
        "cluster.messages", "cluster.topology", "cluster.membership", "cluster.workload", "cluster.chat_workload",
        "cluster.expected_bytes", "cluster.report", "cluster.world", "cluster.requests", "cluster.packed_calls",
        "cluster.chaos_plan", "cluster.chaos_report", "cluster.rank_port", "cluster.record", "cluster.health",
    )),
    ("cluster: shared by its processes", (
        "cluster.deadline", "cluster.open_plans", "cluster.clients", "cluster.ray_calls", "cluster.introduction",
        "cluster.ray_record",
    )),
    ("cluster: one rank", ("cluster.rank", "cluster.rank_metadata", "cluster.kv_source")),
    ("cluster: calls to actors", (
        "cluster.rank_calls", "cluster.coordinator_client", "cluster.coordinator_index", "cluster.broadcaster",
    )),
    ("cluster: actors", (
        "cluster.rank_start", "cluster.recovery", "cluster.core", "cluster.housekeeping", "cluster.tier_ranks",
        "cluster.tier_status",
        "cluster.index_calls", "cluster.coordinator", "cluster.worker",
    )),
    ("cluster: placement", ("cluster.world_spec", "cluster.ray_session", "cluster.probe", "cluster.launch")),
    ("cluster: data paths of a client", (
        "cluster.link", "cluster.every_rank", "cluster.batching", "cluster.rounds", "cluster.lookups",
        "cluster.row_calls",
        "cluster.local_arenas", "cluster.result_memory", "cluster.views", "cluster.put_path", "cluster.get_path",
    )),
    ("cluster: client", ("cluster.calls", "cluster.upkeep", "cluster.client")),
    ("cluster: commands", (
        "cluster.replay_rank", "cluster.replay", "cluster.replay_name",
        "cluster.chaos_rank", "cluster.chaos_calls", "cluster.chaos_driver", "cluster.chaos_processes", "cluster.chaos",
        "cluster.tables", "cluster.cli",
        "cluster.outcome", "cluster.inspect_file", "cluster.commands", "cluster.__main__",
    )),
)

PURE = (
    "lmcache_ray.index", "lmcache_ray.broadcast.tags", "lmcache_ray.broadcast.log", "lmcache_ray.errors",
    "lmcache_ray.dtypes", "lmcache_ray.layout", "lmcache_ray.arrays", "lmcache_ray.tokens", "lmcache_ray.chunking",
    "lmcache_ray.keys", "lmcache_ray.prompt", "lmcache_ray.splitmix", "lmcache_ray.connector.base",
    "lmcache_ray.tiers.spec", "lmcache_ray.tiers.counts", "lmcache_ray.tiers.hits", "lmcache_ray.tiers.backlog",
    "lmcache_ray.tiers.calls", "lmcache_ray.tiers.health", "lmcache_ray.tiers.traffic",
    "lmcache_ray.tiers.tiered_index", "lmcache_ray.tiers.promotion", "lmcache_ray.tiers.write_behind",
    "lmcache_ray.storage.base", "lmcache_ray.storage.faults", "lmcache_ray.storage.breaker",
    "lmcache_ray.storage.shard_bytes", "lmcache_ray.storage.remote_names", "lmcache_ray.storage.remote_manifest",
    "lmcache_ray.storage.remote_space",
    "cluster.messages", "cluster.topology", "cluster.membership", "cluster.workload", "cluster.chat_workload",
    "cluster.expected_bytes", "cluster.report", "cluster.world", "cluster.requests", "cluster.packed_calls",
    "cluster.chaos_report", "cluster.rank_port", "cluster.record", "cluster.health", "lmcache_ray.tiers.recovery",
    "lmcache_ray.storage.chunk_format", "lmcache_ray.storage.chunk_frame", "lmcache_ray.storage.header_fields",
    "lmcache_ray.storage.disk_names", "lmcache_ray.storage.disk_space",
)
IMPURE_IMPORTS = frozenset((
    "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "glob", "io", "logging", "mmap", "multiprocessing", "os",
    "pathlib", "queue", "random", "ray", "sched", "secrets", "select", "selectors", "shutil", "signal", "socket",
    "subprocess", "tempfile", "threading", "time", "torch", "uuid", "warnings",
))
SAME_WHATEVER_IT_FINDS = "lmcache_ray.compiled"  # a compiled part answers as its twin in Python does
IMPURE_CALLS = frozenset(("open", "print", "input", "exec", "eval"))

MAX_FILE_LINES = {"lmcache_ray": 300, "cluster": 350}
MAX_FUNCTION_LINES = {"lmcache_ray": 50, "cluster": 60}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of both packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node`, without the bodies of ``if TYPE_CHECKING:``, which are never run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from statements(other)
            continue
        yield child
        yield from statements(child)


@cache
def imports_of(name: str) -> frozenset[str]:
    """What the module imports, anywhere in it: absolute dotted names, of the submodule where one is named."""
    path = modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= {imported if imported in modules() else source for imported in names}
    return frozenset(found)


def ours_imported_by(name: str) -> frozenset[str]:
    return frozenset(imported for imported in imports_of(name) if imported in modules())


def enclosing_packages(name: str) -> list[str]:
    """`a.b.c` -> a.b.c, a.b, a."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def layer_of(name: str) -> int:
    places = {listed: rank for rank, (_, names) in enumerate(LAYERS) for listed in names}
    for candidate in enclosing_packages(name):
        if candidate in places:
            return places[candidate]
    pytest.fail(f"{name} is in no layer: decide where it belongs and enter it in LAYERS of tests/test_architecture.py")


def is_pure(name: str) -> bool:
    return any(candidate in PURE for candidate in enclosing_packages(name))


# The two roots export lazily and are imported with any of their modules: they belong to no layer.
LAYERED = [name for name in modules() if name not in PACKAGES]


@pytest.mark.parametrize("name", LAYERED)
def test_imports_go_down(name: str) -> None:
    above = {imported for imported in ours_imported_by(name) - {*PACKAGES} if layer_of(imported) > layer_of(name)}
    layer = LAYERS[layer_of(name)][0]
    assert not above, f"{name} ({layer}) imports from above: {[(up, LAYERS[layer_of(up)][0]) for up in sorted(above)]}"


def test_no_import_cycle() -> None:
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail[trail.index(name):], name])}"
        if name not in finished:
            for imported in sorted(ours_imported_by(name) - {*PACKAGES, name}):
                visit(imported, (*trail, name))
            finished.add(name)

    for name in LAYERED:
        visit(name, ())


@pytest.mark.parametrize("name", modules())
def test_the_library_knows_neither_ray_nor_the_cluster(name: str) -> None:
    roots = {imported.partition(".")[0] for imported in imports_of(name)}
    if name.startswith("lmcache_ray"):
        assert not roots & {"ray", "cluster"}, f"{name} imports {sorted(roots & {'ray', 'cluster'})}"


@pytest.mark.parametrize("name", [name for name in modules() if name.startswith("cluster")])
def test_the_cluster_imports_itself_relatively(name: str) -> None:
    """`cluster` is a common name: an absolute import may find somebody else's."""
    for node in ast.walk(tree_of(modules()[name])):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            named = [node.module or ""]
        absolute = [found for found in named if found.partition(".")[0] == "cluster"]
        assert not absolute, f"{name}, line {node.lineno}: write this import of {absolute[0]} with a leading dot"


@pytest.mark.parametrize("name", [name for name in modules() if is_pure(name)])
def test_pure_modules_have_no_side_door(name: str) -> None:
    roots = {imported.partition(".")[0] for imported in imports_of(name)}
    assert not roots & IMPURE_IMPORTS, f"{name} is pure but imports {sorted(roots & IMPURE_IMPORTS)}"
    impure = {imported for imported in ours_imported_by(name) - {*PACKAGES} if not is_pure(imported)}
    impure.discard(SAME_WHATEVER_IT_FINDS)
    assert not impure, f"{name} is pure but imports {sorted(impure)}, which are not"
    calls = [node for node in ast.walk(tree_of(modules()[name])) if isinstance(node, ast.Call)]
    called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    assert not called & IMPURE_CALLS, f"{name} is pure but calls {sorted(called & IMPURE_CALLS)}"


@pytest.mark.parametrize("name", modules())
def test_files_and_functions_stay_small(name: str) -> None:
    path, package = modules()[name], name.partition(".")[0]
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_FILE_LINES[package], f"{path.name} has {num_lines} lines: it is probably two things"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES[package], f"{name}.{node.name} has {length} lines"


@pytest.mark.parametrize("name", modules())
def test_every_file_says_what_it_is(name: str) -> None:
    assert ast.get_docstring(tree_of(modules()[name])), f"{name} has no opening docstring"


def files_in_structure() -> set[str]:
    """The paths in the tables of section 7 of docs/structure.md. Within a cell a folder holds until the next one."""
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    found, package = set(), ""
    for line in text[text.index("## 7. Files") : text.index("## 8.")].splitlines():
        if line.startswith("### "):
            package = next(name for name in PACKAGES if f"`{name}/`" in line)
        folder = ""
        for named, file in re.findall(r"`(\w+/)?(\w+\.py)`", line.split("|")[1] if line.startswith("|") else ""):
            folder = named or folder
            found.add(f"{package}/{folder}{file}")
    return found


def test_the_structure_page_names_every_file_and_no_other() -> None:
    named = files_in_structure()
    there = {str(path.relative_to(ROOT)) for path in modules().values() if path.name != "__init__.py"}
    assert not there - named, f"docs/structure.md, section 7, does not say what lives in {sorted(there - named)}"
    assert not named - there, f"docs/structure.md, section 7, names files that are not there: {sorted(named - there)}"


@pytest.mark.parametrize("folder", ["unit", "contract"])
def test_quick_tests_do_not_import_ray(folder: str) -> None:
    for path in sorted((ROOT / "tests" / folder).rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                named = [node.module or ""]
            assert not any(found.partition(".")[0] == "ray" for found in named), f"{path} imports ray"


def loaded_by(*imported: str) -> set[str]:
    """The top-level modules in a fresh process after importing these."""
    code = f"import sys, {', '.join(imported)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_importing_a_package_loads_neither_torch_nor_ray() -> None:
    assert not loaded_by(*PACKAGES) & {"torch", "ray", "numpy", "pydantic"}


def test_pure_modules_load_neither_torch_nor_ray() -> None:
    assert not loaded_by(*(name for name in modules() if is_pure(name))) & {"torch", "ray"}


def test_everything_exported_is_there() -> None:
    code = """
import cluster, lmcache_ray
for package in (lmcache_ray, cluster):
    for name in package.__all__:
        assert getattr(package, name) is not None
try:
    lmcache_ray.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
else:
    raise AssertionError("an unknown name was found")
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
