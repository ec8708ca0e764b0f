"""Writes the tables of docs/performance.md from the JSON documents of the scripts; the prose around them is kept.

    python benchmarks/report.py benchmarks/results

The page has places for them, each between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``: one of every script's
name, `runs` for when and where they ran, and `missed` for the numbers that do not reach their bars. A script that is
not among the documents keeps the table it has.
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
_ORDER = ("engine", "cluster", "broadcast", "index_scale", "replay")


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
            {True: "yes", False: "**no**", None: ""}[self.holds],
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
    lines = [_HEAD, ("---",) * len(_HEAD), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def runs_table(documents: Sequence[Document]) -> str:
    """When, where and how each script ran."""
    head = ("script", "date", "commit", "machine", "load before and after", "software", "asked for")
    lines: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for document in documents:
        run = document.run
        lines.append(
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
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def missed_table(documents: Sequence[Document]) -> str:
    """The rows that do not reach their bars; a sentence if there is none."""
    rows = [row for document in documents for row in document.rows if row.holds is False]
    return table(rows) if rows else "Every number reached its bar."


def blocks_of(documents: Sequence[Document]) -> dict[str, str]:
    """What stands in each place of the page."""
    ordered = sorted(documents, key=lambda document: _place(document.benchmark))
    blocks = {document.benchmark: table(document.rows) for document in ordered}
    return blocks | {"runs": runs_table(ordered), "missed": missed_table(ordered)}


def with_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """The page with other contents in its places. ValueError for a block that has no place in it."""
    for name, content in blocks.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        filled = f"{begin}\n{content}\n{end}"
        page, count = place.subn(lambda _, filled=filled: filled, page)  # type: ignore[misc]  # mypy: a default's type
        if count != 1:
            raise ValueError(f"the page has {count} places {begin} … {end}; one is needed")
    return page


def main() -> int:
    """Write the page; the exit status."""
    arguments = _parse_arguments()
    try:
        paths = sorted(Path(arguments.results).glob("*.json"))
        documents = [Document.parse(path.read_text(encoding="utf-8"), str(path)) for path in paths]
        if not documents:
            raise ValueError(f"{arguments.results} has no documents (*.json)")
        page = Path(arguments.page)
        page.write_text(with_blocks(page.read_text(encoding="utf-8"), blocks_of(documents)), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _place(benchmark: str) -> int:
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
