"""Write the tables of the documents from the JSON that the benchmarks committed.

A document marks the place:

    <!-- table: benchmarks/results/hot_path.json#calls -->
    (generated rows)
    <!-- /table -->

and the JSON file carries `{"tables": {"calls": {"columns": ["what", ...], "rows": [[...], ...]}}}`.  Text
cells are taken as they are, numbers are printed with three significant digits.  One number inside a sentence
is `<!-- value: FILE#key/key/0 -->(generated)<!-- /value -->`: the keys lead from the top of the JSON to it.
To write them: `python -m scripts.tables README.md`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PLACE = re.compile(r"(<!-- table: (?P<file>[^#\s]+)#(?P<name>\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: (?P<file>[^#\s]+)#(?P<keys>[^>]+?) -->).*?(<!-- /value -->)", re.DOTALL)


def cell(value: object) -> str:
    """Render one cell: three significant digits, thousands separated, text unchanged."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


def table(columns: list[str], rows: list[list[object]]) -> str:
    """Render a Markdown table that ends with a newline."""
    lines = [columns, ["---"] * len(columns), *([cell(v) for v in row] for row in rows)]
    for line in lines:
        if len(line) != len(columns):
            raise ValueError(f"a row needs {len(columns)} cells, got {len(line)}: {line}")
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rendered(text: str) -> str:
    """Return a document's text with every generated table written anew."""

    def fill(place: re.Match[str]) -> str:
        data = json.loads((ROOT / place["file"]).read_text())["tables"][place["name"]]
        return place.group(1) + table(data["columns"], data["rows"]) + place.group(4)

    def number(place: re.Match[str]) -> str:
        value: Any = json.loads((ROOT / place["file"]).read_text())
        for key in place["keys"].split("/"):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return place.group(1) + cell(value) + place.group(4)

    return VALUE.sub(number, PLACE.sub(fill, text))


def rewrite(what: str, rendered: Callable[[str], str]) -> int:
    """Rewrite the documents that the command line names, or all, and print which of them changed."""
    parser = argparse.ArgumentParser(description=f"write generated {what}")
    parser.add_argument("files", nargs="*", type=Path, default=DOCUMENTS)
    for path in parser.parse_args().files:
        before = path.read_text()
        after = rendered(before)
        path.write_text(after)
        print(f"{path.name}: {'rewritten' if after != before else 'unchanged'}")
    return 0


if __name__ == "__main__":
    sys.exit(rewrite("tables", rendered))
