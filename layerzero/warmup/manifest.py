"""What a deployment has to have ready: calls, the critical ones apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from layerzero._util.files import decode_json, read_given
from layerzero.measure.calls import Call, Workload, call, tensor
from layerzero.spec.errors import ConfigurationError

FORMAT = 1
_PAGE = 16


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
        ordered = sorted(workload.calls, key=lambda c: -c.count)
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
        """What a Llama of Hugging Face's `config.json` calls in decoding `rows` sequences at once.

        The first number of rows is critical. Raises: ConfigurationError: no file, or no Llama.
        """
        config_values = _config(config)
        if config_values.get("model_type") != "llama":
            raise ConfigurationError(
                f"config needs model_type llama, got {config_values.get('model_type')!r}"
            )
        per_rows = [tuple(_llama(config_values, count, dtype)) for count in rows]
        others = tuple(c for group in per_rows[1:] for c in group)
        return cls(critical=per_rows[0], others=others, name=str(config_values.get("_name_or_path", "llama")))

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Manifest:
        """Read what `save` wrote.

        Raises: ConfigurationError: the file cannot be read, holds no manifest, or one of another format.
        """
        try:
            manifest = decode_json(read_given(path), Manifest)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise ConfigurationError(f"{path}: {error}", path=str(path)) from error
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


def _config(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    try:
        values: dict[str, Any] = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}", path=str(path)) from error
    return values


def _llama(config: Mapping[str, Any], rows: int, dtype: str) -> Iterator[Call]:
    wide, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or wide // heads
    eps, vocab = config["rms_norm_eps"], config["vocab_size"]

    def floats(*shape: int) -> Any:
        return tensor(*shape, dtype=dtype, scale=shape[-1] ** -0.5 if len(shape) == 2 else 1.0)

    def ids(count: int, bound: int) -> Any:
        return tensor(count, dtype="int64", fill="below", bound=bound)

    x, norm = floats(rows, wide), floats(wide)
    table = tensor(4096, dim // 2, dtype="float32")
    pages = floats(4 * rows, _PAGE, kv_heads, dim)
    yield call("embedding", ids=ids(rows, vocab), weight=floats(vocab, wide))
    yield call("rms_norm", x=x, weight=norm, eps=eps)
    yield call("linear", x=x, weight=floats((heads + 2 * kv_heads) * dim, wide))
    q, k = floats(rows, heads, dim), floats(rows, kv_heads, dim)
    yield call("rope", q=q, k=k, positions=ids(rows, 4096), cos=table, sin=table)
    slot_mapping = tensor(rows, dtype="int64", fill="permutation", bound=4 * rows * _PAGE)
    yield call("append_kv", k=k, v=k, k_cache=pages, v_cache=pages, slot_mapping=slot_mapping)
    yield call(
        "paged_attention",
        q=q,
        k_cache=pages,
        v_cache=pages,
        block_tables=tensor(rows, 4, dtype="int64", fill="permutation", bound=4 * rows),
        seq_lens=tensor(rows, dtype="int64", fill="constant", bound=3 * _PAGE),
    )
    yield call("linear", x=floats(rows, heads * dim), weight=floats(wide, heads * dim))
    yield call("add_rms_norm", x=x, residual=x, weight=norm, eps=eps)
    yield call("mlp", x=x, w_up=floats(2 * inner, wide), w_down=floats(wide, inner), activation="swiglu")
    yield call("linear", x=x, weight=floats(vocab, wide))
