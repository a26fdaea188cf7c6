"""What a deployment has to have ready: calls, the critical ones apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from layerzero._util.files import decode_json, pretty_json, read_given, replace_own
from layerzero.measure.calls import Call, Workload, workload_of
from layerzero.measure.model_calls import PAGE, ModelConfig, decode_calls
from layerzero.ops.checks import need_int
from layerzero.spec.errors import ConfigurationError

FORMAT = 1


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The calls of a deployment: `critical` ones are waited for, `others` get ready in the background."""

    critical: tuple[Call, ...]
    others: tuple[Call, ...] = ()
    name: str = ""
    format: int = FORMAT

    @property
    def version(self) -> str:
        """The digest of the calls: equal manifests have equal versions."""
        calls = msgspec.json.encode((self.critical, self.others), order="deterministic")
        return hashlib.sha256(calls).hexdigest()[:16]

    @property
    def calls(self) -> tuple[Call, ...]:
        """Every call, the critical ones first."""
        return (*self.critical, *self.others)

    @classmethod
    def of(cls, workload: Workload, *, critical: int | None = None) -> Manifest:
        """A recorded workload as a manifest: the `critical` calls seen most often are (all by default)."""
        ordered = sorted(workload_of(workload).calls, key=lambda c: -c.count)
        count = len(ordered) if critical is None else critical
        return cls(critical=tuple(ordered[:count]), others=tuple(ordered[count:]), name=workload.name)

    @classmethod
    def of_model(
        cls,
        config: str | Path | Mapping[str, Any],
        *,
        rows: Sequence[int] = (1, 8, 64),
        dtype: str = "bfloat16",
    ) -> Manifest:
        """What a model of Hugging Face's `config.json` calls in decoding `rows` sequences at once.

        The first number of rows is critical. Raises: ConfigurationError: no file, or sizes of no Llama or its
        kin. ValueError, TypeError: `rows` are no numbers of sequences.
        """
        if not isinstance(rows, Sequence) or not rows:
            raise TypeError(f"rows needs numbers of sequences, such as (1, 8), got {rows!r}")
        for count in rows:
            need_int("rows", count, low=1)
        model = (
            ModelConfig.of({**config, "dtype": dtype})
            if isinstance(config, Mapping)
            else msgspec.structs.replace(ModelConfig.load(config), dtype=dtype)
        )
        per_rows = [tuple(decode_calls(model, count, 4 * PAGE, filled=3 * PAGE)) for count in rows]
        others = tuple(c for group in per_rows[1:] for c in group)
        return cls(critical=per_rows[0], others=others, name=model.name)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, whole or not at all.

        Raises: FileExistsError: another kind of file is at `path`. OSError: it cannot be written.
        """
        replace_own(Path(path), pretty_json(self), "critical")

    @classmethod
    def load(cls, path: str | Path) -> Manifest:
        """Read what `save` wrote.

        Raises: ConfigurationError: the file cannot be read, holds no manifest, or one of another format.
        """
        try:
            manifest = decode_json(read_given(path), Manifest)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            message = f"{path}: needs a manifest, as Manifest.save writes it: {error}"
            raise ConfigurationError(message, path=str(path)) from error
        manifest.need_format(str(path))
        return manifest

    def need_format(self, path: str) -> None:
        """Raises: ConfigurationError: it is of another format; `path` names it."""
        if self.format != FORMAT:
            raise ConfigurationError(f"{path}: format needs {FORMAT}, got {self.format}", path=path)


def manifest_of(what: Manifest | Workload | str | Path | Iterable[Call]) -> Manifest:
    """A manifest out of what a caller may give: itself, a recorded workload, a file, or calls."""
    if isinstance(what, Manifest):
        return what
    if isinstance(what, Workload):
        return Manifest.of(what)
    if isinstance(what, str | Path):
        return Manifest.load(what)
    if not isinstance(what, Iterable):
        raise TypeError(f"manifest needs a Manifest, a workload, a path or calls, got {type(what).__name__}")
    calls = tuple(what)
    for call_ in calls:
        if not isinstance(call_, Call):
            raise TypeError(f"manifest needs calls, got {type(call_).__name__}")
    return Manifest(critical=calls)
