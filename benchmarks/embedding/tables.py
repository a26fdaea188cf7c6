"""Shows the numbers of a session of the embedding service on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from embedding.report import WAYS

BAR = 36
# Columns whose words are names, to be copied whole.
WHOLE = {"way", "op", "kernel", "what"}


def show(console: Console, numbers: dict[str, Any]) -> None:
    """Print every table, the heading first, the targets last."""
    _heading(console, numbers)
    _parity(console, numbers["parity"])
    _query(console, numbers["query"])
    _ways(console, numbers)
    _kernels(console, numbers)
    _batches(console, numbers["batches"])
    _ratios(console, numbers["ratios"])
    _targets(console, numbers["targets"])


def _heading(console: Console, numbers: dict[str, Any]) -> None:
    where = numbers["environment"]
    place = where.get("gpu", where["cpu"])
    console.rule("LayerZero: all-MiniLM-L6-v2, one coroutine a text")
    console.print(
        f"{numbers['sentences']} sentences, {numbers['rounds']} rounds, {numbers['device']}: {place}, "
        f"{where['threads']} threads, torch {where['versions']['torch']}, float32"
    )


def _parity(console: Console, parity: dict[str, Any]) -> None:
    table = _table("Results against sentence-transformers", ("way", "largest difference", "lowest cosine"))
    for name, row in parity["ways"].items():
        table.add_row(WAYS[name], f"{row['max_abs_diff']:.1e}", f"{row['min_cosine']:.9f}")
    console.print(table)
    verdict = _verdict(parity["right"], "right", "WRONG")
    console.print(Text.assemble(f"cosine needs to be at least {parity['needs_cosine']}: ", verdict))


def _query(console: Console, query: dict[str, Any]) -> None:
    table = _table(f"Nearest to: {escape(query['text'])}", ("cosine", "sentence"), left_columns=(1,))
    for answer in query["answers"]:
        table.add_row(f"{answer['cosine']:.3f}", escape(answer["text"]))
    console.print(table)


def _ways(console: Console, numbers: dict[str, Any]) -> None:
    table = _table(
        "Throughput, latency, loop lag (medians over the rounds)",
        ("way", "texts/s", "p50 ms", "p99 ms", "lag p99 ms", "mean batch"),
    )
    for name in WAYS:
        row = numbers["ways"][name]
        table.add_row(
            WAYS[name],
            f"{row['throughput_per_s']:.0f}",
            f"{row['p50_ms']:.1f}",
            f"{row['p99_ms']:.1f}",
            f"{row['lag_p99_ms']:.1f}",
            f"{row['mean_batch']:.1f}",
        )
    console.print(table)
    console.print(
        f"(a) to (c) await LayerZero's ops, one coroutine a text; (d) is plain torch: sorted by length, "
        f"padded, in batches of {numbers['hand_batch']}. Arrivals: {numbers['offered_per_s']:.0f} texts/s "
        f"offered, {numbers['load']:.0%} of the best that (b) or (d) did."
    )


def _kernels(console: Console, numbers: dict[str, Any]) -> None:
    table = _table(
        "Which kernel served each op, and why",
        ("op", "call", "kernel", "us", "why"),
        left_columns=(0, 1, 2, 4),
    )
    for row in numbers["kernels"]:
        table.add_row(
            row["op"], escape(row["call"]), row["kernel"], f"{row['expected_us']:.0f}", escape(row["why"])
        )
    console.print(table)
    console.print(Text(numbers["explain"]), soft_wrap=True)


def _batches(console: Console, batches: dict[str, list[dict[str, int]]]) -> None:
    for name, bars in batches.items():
        table = _table(f"Batch sizes: {WAYS[name]}", ("requests", "launches", ""), left_columns=(2,))
        max_launches = max((bar["launches"] for bar in bars), default=1)
        for bar in bars:
            label = str(bar["from"]) if bar["from"] == bar["to"] else f"{bar['from']}-{bar['to']}"
            table.add_row(
                label, str(bar["launches"]), "█" * max(1, round(BAR * bar["launches"] / max_launches))
            )
        console.print(table)


def _ratios(console: Console, ratios: dict[str, list[float]]) -> None:
    for name, rounds in ratios.items():
        each = " ".join(f"{ratio:.2f}" for ratio in rounds)
        console.print(f"{name} by round: {each}; median {median(rounds):.2f}")


def _targets(console: Console, targets: list[dict[str, Any]]) -> None:
    table = _table("Targets", ("what", "needs", "measured", ""))
    for row in targets:
        table.add_row(row["what"], row["needs"], f"{row['got']:.2f}", _verdict(row["met"], "met", "MISSED"))
    console.print(table)


def _verdict(good: bool, yes: str, no: str) -> Text:
    return Text(yes, style="green") if good else Text(no, style="bold red")


def _table(title: str, columns: Iterable[str], left_columns: tuple[int, ...] = ()) -> Table:
    """Return an empty table: the first column and those in `left` hold words, the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for position, column in enumerate(columns):
        words = position in left_columns or (position == 0 and not left_columns)
        side: Literal["left", "right"] = "left" if words else "right"
        table.add_column(column, justify=side, overflow="fold", no_wrap=column in WHOLE)
    return table
