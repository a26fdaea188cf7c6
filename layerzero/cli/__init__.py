"""The command `lz`: one file for each kind of question, gathered here."""

from __future__ import annotations

from typing import Any

import click

from layerzero import __version__
from layerzero.cli.asking import explain, which
from layerzero.cli.capabilities import capabilities
from layerzero.cli.consistency import consistency
from layerzero.cli.looking import doctor, kernels
from layerzero.cli.measuring import bench, perfdb, solve, tune
from layerzero.cli.policies import policy
from layerzero.cli.warming import ready, warmup


class Commands(click.Group):
    """The commands; a file that cannot be read or written is told by its name and reason, with status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.filename is None:
                raise
            raise click.ClickException(f"{error.filename}: {error.strerror}") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="lz", message="%(prog)s %(version)s")
def main() -> None:
    """Choose, explain and check kernels from the command line.

    Exit status: 0 all well, 1 a problem was found, 2 the command line is wrong.
    """


for command in (
    doctor,
    kernels,
    explain,
    which,
    policy,
    tune,
    bench,
    solve,
    perfdb,
    warmup,
    ready,
    consistency,
    capabilities,
):
    main.add_command(command)
