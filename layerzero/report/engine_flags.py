"""The flags by which vLLM and SGLang choose kernels: what each choice runs, out of `engines.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

FP8_CACHE = "float8_e4m3fn"


class FlagValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One value of a flag: the kernels, as globs, that it runs on compute capabilities `sm`, ends included.

    Without kernels it is a value that the engine has and no kernel here is timed for. `like` are kernels of
    our own that do the same work in other code: shown, never counted. A `plugin` is ours, and takes any of
    its kernels; `parts` are those of serving that the value decides, all of a flag's where it names none.
    """

    value: str
    kernels: tuple[str, ...] = ()
    like: tuple[str, ...] = ()
    sm: tuple[int, int] = (50, 999)
    plugin: bool = False
    parts: tuple[str, ...] = ()

    def runs(self, kernel: str) -> bool:
        """Whether the engine runs this very kernel for the value."""
        return any(fnmatchcase(kernel, glob) for glob in self.kernels)

    def resembles(self, kernel: str) -> bool:
        """Whether a kernel of ours is like the engine's for the value."""
        return any(fnmatchcase(kernel, glob) for glob in self.like)


class Flag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A flag, the parts of serving that it decides, and the names of its values, also for a latent cache."""

    name: str
    parts: tuple[str, ...]
    choices: str = ""
    latent: str = ""


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine's command and its flags; `values` by name, the engine's first preference first."""

    command: str
    values: dict[str, tuple[FlagValue, ...]]
    flags: tuple[Flag, ...]

    def choices_of(self, flag: Flag, *, is_latent: bool) -> tuple[FlagValue, ...]:
        """The values of a flag for a model."""
        values = self.values.get(flag.latent if is_latent and flag.latent else flag.choices, ())
        return tuple(value for value in values if not value.parts or set(flag.parts) <= set(value.parts))


ENGINES: Mapping[str, Engine] = msgspec.convert(
    tomllib.loads(Path(__file__).with_name("engines.toml").read_text("utf-8")), dict[str, Engine]
)
