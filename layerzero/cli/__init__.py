"""The command `lz`: one file for each kind of question, gathered here."""

from __future__ import annotations

import ast
import errno
import importlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from layerzero import __version__
from layerzero.spec.errors import LayerZeroError

# The commands of each module; `lz --help` reads their first lines out of the sources, and imports none.
_COMMANDS_OF = {
    "capabilities": ("capabilities",),
    "consistency": ("consistency",),
    "doctor": ("doctor", "kernels"),
    "explain": ("explain", "which"),
    "judging.gate": ("gate",),
    "judging.parity": ("parity",),
    "judging.recommend": ("recommend",),
    "judging.report": ("compare", "report"),
    "policy": ("policy",),
    "quantize": ("quantize",),
    "top": ("top",),
    "trace": ("trace",),
    "tune": ("bench", "perfdb", "solve", "tune"),
    "warmup": ("ready", "warmup"),
}
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
COMMANDS = {name: module for module, names in _COMMANDS_OF.items() for name in names}


def first_line(name: str) -> str:
    """A command's line in `lz --help`: the first of its docstring."""
    path = Path(__file__).parent.joinpath(*COMMANDS[name].split(".")).with_suffix(".py")
    functions = (
        node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)
    )
    docstring = next(ast.get_docstring(node) or "" for node in functions if node.name == name)
    return docstring.partition("\n")[0].removesuffix(".")


class CommandGroup(click.Group):
    """The commands, each imported when it is run.

    An error of this library says what does not fit, with the command's usage and status 2. A file that cannot
    be read or written is reported by its name and reason, with status 1. A reader that has gone, as `head`
    does, ends the command without a word; where the output cannot be written, as on a full disk, that is
    said, with status 1.
    """

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run the command line; its output may fail in `--help`, too."""
        try:
            return super().main(*arguments, **options)
        except OSError as error:
            if error.filename is not None or error.errno not in _UNWRITTEN:
                raise
            _drop_output()
            with suppress(OSError):  # the same disk
                click.echo(f"Error: the output cannot be written: {error.strerror}", err=True)
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, by name."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(
            importlib.import_module(f"layerzero.cli.{COMMANDS[cmd_name]}"), cmd_name
        )
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in `lz --help`."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_line(name)) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:  # a shell may close it
                sys.stdout.flush()
        except BrokenPipeError:
            _drop_output()
            ctx.exit(0)
        except LayerZeroError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "") or self
            raise click.UsageError(str(error), click.Context(command, ctx, ctx.invoked_subcommand)) from error
        except OSError as error:
            if error.filename is None:
                raise
            raise click.ClickException(f"{error.filename}: {error.strerror}") from error
        return result


def _drop_output() -> None:
    """Let nothing that is still buffered fail again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="lz", message="%(prog)s %(version)s")
def main() -> None:
    """Choose, explain and check kernels from the command line.

    Exit status: 0 all well, 1 a problem was found, 2 the command line is wrong.
    """
