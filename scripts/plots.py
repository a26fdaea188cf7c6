"""Draw the pictures of the documents: bar charts of committed records, and 64 callers in one launch.

Each picture is two SVG files in `docs/images`, for light and for dark pages. The same record gives the same
bytes: `scripts/check_docs.py` fails where a file differs from its record.
To draw all: `python -m scripts.plots`.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape
from typing import Any

from scripts.tables import ROOT, cell

IMAGES = ROOT / "docs" / "images"
RESULTS = "benchmarks/results"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
WIDTH, LABELS, VALUES = 800, 290, 70  # of a chart: all of it, the left column, room for a value after its bar
BAR, GAP, HEAD, LEGEND, LETTERS = 15, 12, 34, 22, 44


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of one kind of page; `series` in the order in which charts use them."""

    name: str
    paper: str
    text: str
    muted: str
    line: str
    series: tuple[str, ...]


THEMES = (
    Theme("light", "#ffffff", "#1f2328", "#59636e", "#d1d9e0",
          ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#6e7781", "#bf8700")),
    Theme("dark", "#131416", "#e6edf3", "#9198a1", "#3d444d",
          ("#58a6ff", "#f0883e", "#56d364", "#bc8cff", "#8b949e", "#e3b341")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chart:
    """A bar chart of one table of a record: a group of bars a row, a bar a column.

    `keep` chooses rows; `reference` is a length at which a dashed line is drawn.
    """

    title: str
    file: str
    table: str
    labels: tuple[str, ...]
    values: tuple[str, ...]
    keep: Callable[[dict[str, Any]], bool] = field(default=lambda row: True)
    reference: float | None = None

    def groups(self) -> list[tuple[str, list[tuple[str, float | None]]]]:
        """What the record holds: each group's label, and each bar's series and value."""
        document = json.loads((ROOT / self.file).read_text())["tables"][self.table]
        rows = [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]
        return [
            (", ".join(cell(row[name]) for name in self.labels), [(name, row[name]) for name in self.values])
            for row in rows
            if self.keep(row)
        ]


CHARTS = {
    "service": Chart(
        "Embedding service, texts per second", f"{RESULTS}/embedding_demo.json", "service",
        ("way",), ("texts/s",),
    ),
    "generation_cpu": Chart(
        "Generation on two CPU cores, tokens per second (model; context)",
        f"{RESULTS}/lane.json", "generation",
        ("model, context",), ("one by one", "per op", "per layer", "per step", "by hand, paged"),
    ),
    "servers": Chart(
        "Median latency beside other servers, milliseconds (server, load)", f"{RESULTS}/lane.json", "servers",
        ("beside", "load"), ("LayerZero p50 ms", "its p50 ms"),
    ),
    "generation_h200": Chart(
        "Generation on one H200, 64 requests, tokens per second (layers, context; side)",
        f"{RESULTS}/lane_h200.json", "sides", ("layers, context", "side"), ("tokens/s",),
        lambda row: row["layers, context"].startswith("32,"),
    ),
    "speculation": Chart(
        "Speculation on two CPU cores, speed over plain decoding", f"{RESULTS}/speculation.json", "ways",
        ("draft",), ("speed over plain decoding",), reference=1.0,
    ),
    "calls": Chart(
        "Time that a blocking op adds to its kernel, microseconds", f"{RESULTS}/hot_path.json", "ops",
        ("op",), ("over it, us",),
    ),
}  # fmt: skip


def chart(spec: Chart, theme: Theme) -> str:
    """One chart as SVG."""
    groups = spec.groups()
    series = list(dict.fromkeys(name for _, bars in groups for name, _ in bars))
    longest = max(value for _, bars in groups for _, value in bars if value is not None)
    scale = (WIDTH - LABELS - VALUES - 16) / longest
    top = HEAD + (LEGEND if len(series) > 1 else 0)
    parts = [text(16, 22, spec.title, theme.text, 14, weight=600)]
    if len(series) > 1:
        parts += legend(series, theme)
    y = top + 8
    for label, bars in groups:
        middle = y + len(bars) * BAR / 2 + 4
        lines = textwrap.wrap(label.replace("`", ""), LETTERS)
        for index, words in enumerate(lines):
            offset = (index - (len(lines) - 1) / 2) * 13
            parts.append(text(LABELS - 8, middle + offset, words, theme.text, 12, anchor="end"))
        for index, (name, value) in enumerate(bars):
            if value is not None:
                colour = theme.series[series.index(name) % len(theme.series)]
                length = max(1.0, value * scale)
                parts.append(rectangle(LABELS, y + index * BAR + 1, length, BAR - 3, colour, radius=2))
                x = LABELS + length + 5
                parts.append(text(x, y + index * BAR + 11, cell(value), theme.muted, 11))
        y += len(bars) * BAR + GAP
    if spec.reference is not None:
        x = LABELS + spec.reference * scale
        parts.append(line(x, top, x, y - GAP / 2, theme.muted, dash="3 3"))
    parts.append(line(LABELS, top, LABELS, y - GAP / 2, theme.line))
    parts.append(text(16, y + 10, f"{spec.file}#{spec.table}", theme.muted, 10))
    return svg(WIDTH, round(y + 22), spec.title, parts, theme)


def legend(series: list[str], theme: Theme) -> list[str]:
    """A square and a name for each series, in one line."""
    parts, x = [], 16.0
    for index, name in enumerate(series):
        parts.append(rectangle(x, HEAD, 10, 10, theme.series[index % len(theme.series)], radius=2))
        parts.append(text(x + 15, HEAD + 9, name, theme.muted, 11))
        x += 15 + 6.3 * len(name) + 16
    return parts


def launch(theme: Theme) -> str:
    """64 coroutines await one op, meet in the batcher, and share one kernel launch."""
    blue, orange, green, *_ = theme.series
    parts = []
    for row in range(8):
        for column in range(8):
            y = 74 + row * 22
            parts.append(circle(34 + column * 22, y, 6, blue))
            parts.append(circle(706 + column * 22, y, 6, green))
    for row in range(8):
        y = 74 + row * 22
        parts.append(curve(198, y, 262, 151, theme.muted))
        parts.append(curve(636, 151, 696, y, theme.muted))
    parts.append(rectangle(264, 96, 132, 110, theme.paper, radius=8, stroke=theme.muted))
    parts += [rectangle(284, 136 + i * 7, 92, 4, blue, radius=1) for i in range(8)]
    parts.append(text(330, 122, "Batcher", theme.text, 15, anchor="middle", weight=600))
    parts.append(line(398, 151, 444, 151, orange, width=3, arrow=True))
    parts.append(rectangle(452, 74, 180, 154, theme.paper, radius=8, stroke=orange))
    parts.append(text(542, 98, "1 kernel launch", theme.text, 15, anchor="middle", weight=600))
    parts += [rectangle(476, 110 + i * 1.5, 132, 1, orange) for i in range(64)]
    parts.append(text(542, 222, "64 rows", theme.muted, 12, anchor="middle"))
    parts.append(text(111, 34, "64 coroutines", theme.text, 15, anchor="middle", weight=600))
    parts.append(text(111, 52, "await lz.linear(row, weight)", theme.muted, 12, anchor="middle", mono=True))
    parts.append(text(783, 34, "64 results", theme.text, 15, anchor="middle", weight=600))
    parts.append(text(783, 52, "views of one output", theme.muted, 12, anchor="middle"))
    parts.append(text(330, 228, "no timer: a busy device", theme.muted, 12, anchor="middle"))
    parts.append(text(330, 244, "gathers the next batch", theme.muted, 12, anchor="middle"))
    parts.append(text(542, 246, "the fastest eligible kernel,", theme.muted, 12, anchor="middle"))
    parts.append(text(542, 262, "with a reason against each other one", theme.muted, 12, anchor="middle"))
    return svg(894, 280, "64 callers meet in one kernel launch", parts, theme)


def svg(width: float, height: float, title: str, parts: Iterable[str], theme: Theme) -> str:
    """A whole file: a titled drawing on paper of the theme's colour."""
    marker = (
        '<defs><marker id="a" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="4" markerHeight="4" '
        'orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{theme.series[1]}"/></marker></defs>'
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(title)}" font-family="{escape(FONT)}">'
    )
    paper = f'<rect width="100%" height="100%" rx="8" fill="{theme.paper}"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", marker, paper, *parts, "</svg>"]) + "\n"


def text(
    x: float, y: float, words: str, colour: str, size: int, *,
    anchor: str = "start", weight: int = 400, mono: bool = False,
) -> str:  # fmt: skip
    """A line of text."""
    family = ' font-family="ui-monospace, SFMono-Regular, Menlo, monospace"' if mono else ""
    return (
        f'<text x="{x:.4g}" y="{y:.4g}" fill="{colour}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}"{family}>{escape(words)}</text>'
    )


def rectangle(
    x: float, y: float, width: float, height: float, fill: str, *, radius: int = 0, stroke: str = "none"
) -> str:
    """A filled rectangle."""
    return (
        f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" rx="{radius}" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )


def circle(x: float, y: float, radius: float, fill: str) -> str:
    """A dot."""
    return f'<circle cx="{x:.5g}" cy="{y:.5g}" r="{radius:g}" fill="{fill}"/>'


def line(
    x1: float, y1: float, x2: float, y2: float, colour: str, *,
    width: float = 1, dash: str = "", arrow: bool = False,
) -> str:  # fmt: skip
    """A straight line."""
    more = (f' stroke-dasharray="{dash}"' if dash else "") + (' marker-end="url(#a)"' if arrow else "")
    return (
        f'<line x1="{x1:.5g}" y1="{y1:.5g}" x2="{x2:.5g}" y2="{y2:.5g}" stroke="{colour}" '
        f'stroke-width="{width:g}"{more}/>'
    )


def curve(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    """A line that leaves and arrives level."""
    half = (x1 + x2) / 2
    return (
        f'<path d="M{x1:.5g} {y1:.5g}C{half:.5g} {y1:.5g} {half:.5g} {y2:.5g} {x2:.5g} {y2:.5g}" '
        f'fill="none" stroke="{colour}" stroke-width="1" opacity="0.7"/>'
    )


def drawn() -> dict[str, str]:
    """Every picture's file name and content."""
    files = {}
    for theme in THEMES:
        files[f"launch-{theme.name}.svg"] = launch(theme)
        files.update({f"{name}-{theme.name}.svg": chart(spec, theme) for name, spec in CHARTS.items()})
    return files


def main() -> int:
    """Write every picture whose content has changed, remove those that nothing draws, and print both."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    files = drawn()
    for path in sorted(IMAGES.glob("*.svg")):
        if path.name not in files:
            path.unlink()
            print(f"{path.name}: removed")
    for name, content in files.items():
        path = IMAGES / name
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
            print(f"{name}: drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
