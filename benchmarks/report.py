"""Writes the tables of docs/performance.md from the JSON documents of the scripts; the prose around them is kept.

    python benchmarks/report.py benchmarks/results

The page has places for them, each between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``: one of every script's
name, `runs` for when and where they ran, and `missed` for the numbers that do not reach their bars. Of a script that is
not among the documents everything is kept as it stands.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script
    sys.path[0] = str(_ROOT)

from benchmarks.measure import Json  # noqa: E402

_GIB = 2**30
_HEAD = ("number", "bar", "here", "half of the rounds", "reached", "of what")
_RUNS_HEAD = ("script", "date", "commit", "machine", "load before and after", "software", "asked for")
_NOT_REACHED = "**no**"
_ORDER = ("engine", "cluster", "broadcast", "index_scale", "disk", "replay")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: a claim (`claims.py`) as a document has it."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    side: str
    bar: float | None
    holds: bool | None
    note: str

    def cells(self) -> tuple[str, ...]:
        """As text, in the order of the table's head."""
        return (
            self.name,
            "" if self.bar is None else f"{'≥' if self.side == '>=' else '≤'} {shown(self.bar, self.unit, exact=True)}",
            shown(self.value, self.unit),
            "" if self.low == self.high else f"{shown(self.low)} to {shown(self.high)}",
            {True: "yes", False: _NOT_REACHED, None: ""}[self.holds],
            self.note,
        )


@dataclass(frozen=True, slots=True)
class Document:
    """What one script printed."""

    benchmark: str
    arguments: Mapping[str, Json]
    run: Mapping[str, Json]
    rows: Sequence[Row]

    @classmethod
    def parse(cls, text: str, source: str) -> "Document":
        """ValueError, naming `source`, for anything but a script's document."""
        try:
            found = json.loads(text)
            rows = [Row(**claim) for claim in found["results"]["claims"]]
            return cls(found["benchmark"], found["arguments"], found["run"], rows)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{source} is no document of a benchmark: {type(error).__name__}: {error}") from error


def shown(value: float, unit: str = "", *, exact: bool = False) -> str:
    """Three digits that count, and the unit; `exact` for numbers that somebody chose, which have no more."""
    if exact or float(value).is_integer():
        text = f"{value:,g}" if abs(value) < 1e6 else f"{value:,.0f}"
    elif abs(value) >= 100:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.3f}" if abs(value) < 1 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    return _lines(_HEAD, [_line(row.cells()) for row in rows])


def runs_table(lines: Mapping[str, str]) -> str:
    """When, where and how each script ran: a line by its name."""
    return _lines(_RUNS_HEAD, [lines[name] for name in sorted(lines, key=_rank_of)])


def run_line(document: Document) -> str:
    """When, where and how this one ran."""
    run = document.run
    return _line(
        (
            f"`{document.benchmark}`",
            str(run["date"])[:10],
            f"{str(run['commit'] or 'unknown')[:10]}{' and changes' if run['is_tree_dirty'] else ''}",
            f"{run['cpu']}, {run['num_cores']} cores, {_gib(run['ram_nbytes'])} GiB",
            _loads(run["load_average"]),
            f"Python {run['python']}, torch {run['torch']}, Ray {run['ray']}",
            _asked(document.arguments),
        )
    )


def with_documents(page: str, documents: Sequence[Document]) -> str:
    """The page with the tables of these documents. ValueError for a script that has no place in it."""
    page = with_blocks(page, {document.benchmark: table(document.rows) for document in documents})
    known = {line.split("`")[1]: line for line in block_of(page, "runs").splitlines() if line.startswith("| `")}
    runs = known | {document.benchmark: run_line(document) for document in documents}
    missed = [line for name in _ORDER for line in block_of(page, name).splitlines() if f"| {_NOT_REACHED} |" in line]
    return with_blocks(
        page,
        {"runs": runs_table(runs), "missed": _lines(_HEAD, missed) if missed else "Every number reached its bar."},
    )


def with_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """The page with other contents in its places. ValueError for a block that has no place in it."""
    for name, content in blocks.items():
        place = _place_of(page, name)
        page = f"{page[: place.start]}\n{content}\n{page[place.stop :]}"
    return page


def block_of(page: str, name: str) -> str:
    """What stands in this place of the page. ValueError if there is no such place."""
    return page[_place_of(page, name)].strip("\n")


def main() -> int:
    """Write the page; the exit status."""
    arguments = _parse_arguments()
    try:
        paths = sorted(Path(arguments.results).glob("*.json"))
        documents = [Document.parse(path.read_text(encoding="utf-8"), str(path)) for path in paths]
        if not documents:
            raise ValueError(f"{arguments.results} has no documents (*.json)")
        page = Path(arguments.page)
        page.write_text(with_documents(page.read_text(encoding="utf-8"), documents), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _place_of(page: str, name: str) -> slice:
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    found = [match.span(1) for match in re.finditer(f"{re.escape(begin)}(.*?){re.escape(end)}", page, re.DOTALL)]
    if len(found) != 1:
        raise ValueError(f"the page has {len(found)} places {begin} … {end}; one is needed")
    return slice(*found[0])


def _lines(head: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join((_line(head), _line(("---",) * len(head)), *lines))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _rank_of(benchmark: str) -> int:
    return _ORDER.index(benchmark) if benchmark in _ORDER else len(_ORDER)


def _gib(nbytes: Json) -> str:
    return f"{float(str(nbytes)) / _GIB:.0f}"


def _loads(load: Json) -> str:
    assert isinstance(load, Mapping)
    return " and ".join(f"{load[when][0]:.1f}" for when in ("before", "after"))  # type: ignore[index]  # as emitted


def _asked(arguments: Mapping[str, Json]) -> str:
    """Arguments that say something, without the paths of this machine."""
    given = {name: value for name, value in arguments.items() if value not in (None, False, [], "")}
    return ", ".join(_word(name.replace("_", " "), value) for name, value in given.items())


def _word(name: str, value: Json) -> str:
    if value is True:
        return name
    if isinstance(value, list | tuple):
        return f"{name} {'/'.join(map(str, value))}"
    return f"{name} {Path(str(value)).name}"


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write the tables of docs/performance.md.")
    parser.add_argument("results", metavar="FOLDER", help="with the JSON documents of the scripts")
    page = _ROOT / "docs" / "performance.md"
    parser.add_argument("--page", default=page, metavar="FILE", help="(docs/performance.md)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
