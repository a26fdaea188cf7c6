"""How results reach the user: rich tables on a terminal, aligned text in a pipe, JSON on demand."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import click
import msgspec

from layerzero.api.doctor import align_rows


def on_terminal(stream: TextIO | None) -> bool:
    """Whether a person watches `stream`; a process without a console, or whose shell closed it, has None."""
    return stream is not None and stream.isatty()


class Table(NamedTuple):
    """A part of a report: rows under column names; the row whose first cell is `mark` stands out."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    mark: str = ""


class Problem(str):
    """A part of a report: a line that says what is wrong."""


def show(json_: bool, plain: Any, *parts: str | Table) -> None:
    """Print what a command found: `plain` as JSON where that was asked for, else its parts for people."""
    if json_:
        as_json(plain)
        return
    for part in parts:
        if isinstance(part, Table):
            table(part.title, part.columns, part.rows, mark=part.mark)
        else:
            line(part, bad=isinstance(part, Problem))


def as_json(value: Any) -> None:
    """Print `value` as JSON with sorted keys and sets, so that equal values print alike."""
    encoded = msgspec.json.encode(value, order="deterministic")
    click.echo(msgspec.json.format(encoded, indent=2).decode())


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, mark: str = "") -> None:
    """Print one table; the row whose first cell is `mark` stands out on a terminal."""
    if not on_terminal(sys.stdout):
        click.echo(title)
        click.echo(align_rows([tuple(columns), *map(tuple, rows)] if rows else []))
        return
    from rich.console import Console

    Console().print(rich_table(title, columns, rows, mark=mark))


def rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, mark: str = "") -> Any:
    """The table as rich draws it; cells are text, never markup."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left", caption=None if rows else "none", header_style="bold")
    for name in columns:
        grid.add_column(name, overflow="fold")
    for row in rows:
        chosen = bool(mark) and row[0] == mark
        grid.add_row(*(Text(cell) for cell in row), style="bold green" if chosen else None)
    return grid


def line(text: str, *, bad: bool = False) -> None:
    """Print one line; coloured where it reports a problem on a terminal."""
    click.echo(click.style(text, fg="red") if bad else text)


@contextlib.contextmanager
def progress(title: str, quiet: bool, named: Callable[[Any], str]) -> Iterator[Any]:
    """A callback `(done, total, item)` that draws a bar on a terminal; None elsewhere, or where `quiet`."""
    if quiet or not on_terminal(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)

        def update(done: int, total: int, item: Any) -> None:
            bar.update(task, total=total, completed=done, description=named(item))

        yield update
