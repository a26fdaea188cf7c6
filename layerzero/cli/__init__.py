"""The command `lz`: one file for each kind of question, gathered here."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from layerzero import __version__

# Each command, the module that has it, and its line in `lz --help`, which imports none of them.
COMMANDS = {
    "bench": (
        "tune",
        "Time every kernel that takes a call against each other: median, tail, variance, winner, speed-up",
    ),
    "capabilities": (
        "capabilities",
        "Export what kernels claim; check such files, and overlays that take some of it away",
    ),
    "compare": (
        "judging.report",
        "Say what report SECOND differs in from report FIRST, by how much, and why",
    ),
    "consistency": (
        "consistency",
        "Compare versions, kernels, plans, numerics and batch order over all devices of a deployment",
    ),
    "doctor": ("doctor", "Examine the installation: hardware, torch, libraries, kernels, health, policy"),
    "explain": ("explain", "Show every kernel's verdict on a call and why one is taken"),
    "gate": (
        "judging.gate",
        "Run the stages of RELEASE.yaml and say whether all hold, but for what its waivers excuse",
    ),
    "kernels": ("doctor", "List the kernels and the state of each on a device"),
    "parity": (
        "judging.parity",
        "Compare MODEL, a folder or name of transformers, on our ops with itself in float64, as a checklist",
    ),
    "perfdb": (
        "tune",
        "Show what was measured on this machine: rows by op, and which of them count here",
    ),
    "policy": ("policy", "Work with policy files"),
    "quantize": (
        "quantize",
        "Round the matrices of the model in FOLDER to a number format and write them into a new folder",
    ),
    "ready": (
        "warmup",
        "Say whether a fresh process would serve MANIFEST without compiling; compiles nothing itself",
    ),
    "recommend": (
        "judging.recommend",
        "Print the flags that ENGINE should serve a model with, each with its reason and what others lose",
    ),
    "report": (
        "judging.report",
        "Write one HTML page about this machine to PATH, complete in itself: it opens without a network",
    ),
    "solve": (
        "solve",
        "Decide ranges of calls now and write the decisions to PATH, as a dispatch table",
    ),
    "top": ("top", "Watch the process whose metrics are at URL, until interrupted"),
    "trace": (
        "trace",
        "Record what ran when, for whom and why then, as a trace that Perfetto opens (ui.perfetto.dev)",
    ),
    "tune": (
        "tune",
        "Measure kernels on this machine, so that choices here rest on measurements from now on",
    ),
    "warmup": (
        "warmup",
        "Make the calls of MANIFEST ready on this machine, so that later processes find everything compiled",
    ),
    "which": ("explain", "Print the id of the kernel that a call gets; takes what `explain` takes"),
}


class Commands(click.Group):
    """The commands, each imported when it is run.

    A file that cannot be read or written is reported by its name and reason, with status 1. A reader that has
    gone, as `head` does, ends the command without a word.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command, by name."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(
            importlib.import_module(f"layerzero.cli.{COMMANDS[cmd_name][0]}"), cmd_name
        )
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in `lz --help`."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:  # a shell may close it
                sys.stdout.flush()
        except BrokenPipeError:
            # What is still buffered would fail again when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            ctx.exit(0)
        except OSError as error:
            if error.filename is None:
                raise
            raise click.ClickException(f"{error.filename}: {error.strerror}") from error
        return result


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="lz", message="%(prog)s %(version)s")
def main() -> None:
    """Choose, explain and check kernels from the command line.

    Exit status: 0 all well, 1 a problem was found, 2 the command line is wrong.
    """
