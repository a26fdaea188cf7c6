"""Options that several commands share, and the runtime that a command works with."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from layerzero.api.start import start
from layerzero.runtime import Runtime
from layerzero.spec.errors import BackendNotAvailableError, ConfigurationError
from layerzero.spec.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


class SecondsRange(click.FloatRange):
    """So many seconds; click's own ranges let NaN in, which no bound holds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("needs a number of seconds, got nan", param, ctx)
        return number


json_option = click.option("--json", "json_", is_flag=True, help="Print JSON.")
device_option = click.option("--device", default=None, help="cpu, cuda or cuda:<index>.")


def target_options(command: F) -> F:
    """--device, --policy, --strict: what decides beside the call itself."""
    for option in (
        click.option("--strict", is_flag=True, help="Refuse layout, dtype and contiguity transforms."),
        click.option(
            "--policy",
            "policy_file",
            type=click.Path(exists=True, dir_okay=False),
            help="A policy file to put in force.",
        ),
        click.option(
            "--device", default=None, help="cpu, cuda or cuda:<index>; the default device if left out."
        ),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def runtime_of(device: str | None, policy_file: str | Path | None, strict: bool) -> Iterator[Runtime]:
    """A runtime of this command alone, which loads nothing in the background.

    Raises: click.UsageError: a setting, the policy or the device does not fit.
    """
    changes: dict[str, Any] = {"warm": "off", "cluster": None}  # of this process, whatever the variable says
    changes |= {} if device is None else {"device": device}
    changes |= {} if policy_file is None else {"policy": str(policy_file)}
    changes |= {"strict": True} if strict else {}
    try:
        opened = start(Settings.load(**changes), scoped=True)
        runtime = opened.__enter__()
    except (ConfigurationError, BackendNotAvailableError) as error:
        is_option = str(error).startswith(("device ", "policy "))
        raise click.UsageError(f"{'--' if is_option else ''}{error}") from error
    try:
        try:
            runtime.device()
        except (ValueError, RuntimeError) as error:
            hint = "; `--sm 90` asks about hardware that is not here" if "cuda" in str(device) else ""
            raise click.UsageError(f"--device: {error}{hint}") from error
        yield runtime
    finally:
        opened.__exit__(None, None, None)
