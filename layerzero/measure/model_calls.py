"""The calls of one block of a model, out of the config.json that transformers keeps beside its weights.

Llamas and their kin (Mistral, Qwen, Mixtral, DeepSeek): RMS norms, rotary embeddings, paged attention over
grouped heads or over a latent cache, a gated feed-forward block or experts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from layerzero._util.files import read_given
from layerzero._util.strict_yaml import quote
from layerzero.measure.calls import Call, Operand, call, tensor
from layerzero.spec.errors import ConfigurationError

Span = tuple[int, int]
DEFAULT_ROWS: Span = (1, 256)
DEFAULT_CONTEXT: Span = (128, 32_768)
PAGE = 16
_GATES = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
# What a size is called in one family or another.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
KINDS = (
    "deepseek_v2", "deepseek_v3", "granite", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe",
)  # fmt: skip
_DTYPES = ("bfloat16", "float16", "float32")
_POSITIONS = 4096


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a block; `experts` and `latent` (the width of a latent cache) are 0 without any."""

    name: str
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float = 1e-6
    dtype: str = "bfloat16"
    activation: str = "swiglu"
    experts: int = 0
    top_k: int = 0
    latent: int = 0
    rope_dim: int = 0

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """The config.json at `path`, or in the folder that it is.

        Raises: ConfigurationError: it cannot be read, or lacks a size; the field is named.
        """
        config_path = Path(path)
        file = config_path / "config.json" if config_path.is_dir() else config_path
        try:
            values = json.loads(read_given(file).decode())
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"{file}: needs a model's config.json: {error}", path=str(file)
            ) from error
        if not isinstance(values, dict):
            raise ConfigurationError(f"{file} needs a JSON object, got {quote(values)}", path=str(file))
        return cls.of(values, str(file))

    @classmethod
    def of(cls, values: Mapping[str, Any], path: str = "config") -> ModelConfig:
        """The sizes that a config states; those of a model of texts and images are its texts'.

        Raises: ConfigurationError: a size is missing or none; the message begins with `path`.
        """
        if isinstance(text := values.get("text_config"), Mapping):
            values = text

        def size(*names: str, default: int | None = None) -> int:
            first_value = next(((n, values[n]) for n in names if values.get(n) is not None), None)
            if first_value is None and default is not None:
                return default
            name, value = first_value or (names[0], None)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                message = f"{path}: {name} needs a whole number of at least 1, got {quote(value)}"
                raise ConfigurationError(message, field=name)
            return value

        experts = next((size(name) for name in _EXPERTS if values.get(name)), 0)
        dtype = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16")
        gate, kind = str(values.get("hidden_act", "silu")), values.get("model_type")
        for field, value, needs in (
            ("model_type", kind, KINDS), ("dtype", dtype, _DTYPES), ("hidden_act", gate, tuple(_GATES)),
        ):  # fmt: skip
            if value not in needs:
                message = f"{path}: {field} needs one of {', '.join(needs)}, got {quote(value)}"
                raise ConfigurationError(message, field=field)
        heads, width = size("num_attention_heads"), size("hidden_size")
        latent = size("kv_lora_rank", default=0)
        eps = values.get("rms_norm_eps") or 1e-6
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
            message = f"{path}: rms_norm_eps needs a number between 0 and 1, got {quote(eps)}"
            raise ConfigurationError(message, field="rms_norm_eps")
        return cls(
            name=str(values.get("_name_or_path") or kind),
            width=width,
            inner=size("moe_intermediate_size", "intermediate_size")
            if experts
            else size("intermediate_size"),
            heads=heads,
            kv_heads=size("num_key_value_heads", default=heads),
            head_dim=size("head_dim", default=max(1, width // heads)),
            vocab=size("vocab_size"),
            eps=float(eps),
            dtype=dtype,
            activation=_GATES[gate],
            experts=experts,
            top_k=size("num_experts_per_tok") if experts else 0,
            latent=latent,
            rope_dim=size("qk_rope_head_dim") if latent else 0,
        )


def model_calls(model: ModelConfig, rows: Span, context: Span) -> Iterator[Call]:
    """The calls of a block at the ends of what is asked for: `rows` decoded at once, `context` before them.

    Raises: ValueError: a span is none.
    """
    for name, span in (("rows", rows), ("context", context)):
        _need_span(name, span)
    seen: dict[str, Call] = {}
    for count in dict.fromkeys(rows):
        for length in dict.fromkeys(context):
            seen |= {str(call): call for call in decode_calls(model, count, length)}
    for length in dict.fromkeys(context):
        seen |= {str(call): call for call in _prefill_calls(model, length)}
    yield from seen.values()


def _need_span(name: str, span: Span) -> None:
    whole = isinstance(span, tuple | list) and len(span) == 2
    if not whole or not all(isinstance(end, int) and not isinstance(end, bool) for end in span):
        raise ValueError(f"{name} needs two whole numbers, the first and the last, got {span!r}")
    if not 1 <= span[0] <= span[1]:
        raise ValueError(f"{name} needs numbers of at least 1 in order, got {span[0]} and {span[1]}")


def decode_calls(model: ModelConfig, rows: int, context: int, filled: int | None = None) -> Iterator[Call]:
    """One step of a block for `rows` sequences of `context` tokens, of which the pages hold `filled`."""
    pages = -(-context // PAGE)
    x = _floats(model, rows, model.width)
    norm = _floats(model, model.width)
    yield call("embedding", ids=_ids(rows, model.vocab), weight=_floats(model, model.vocab, model.width))
    yield call("rms_norm", x=x, weight=norm, eps=model.eps)
    tables = {
        "block_tables": tensor(rows, pages, dtype="int32", fill="permutation", bound=pages * rows),
        "seq_lens": tensor(rows, dtype="int32", fill="constant", bound=filled or context),
    }
    if model.latent:
        yield from _latent_attention(model, rows, pages, tables)
    else:
        yield from _grouped_attention(model, rows, pages, tables)
    yield call("add_rms_norm", x=x, residual=x, weight=norm, eps=model.eps)
    yield _feed_forward(model, x, rows)
    yield call("linear", x=x, weight=_floats(model, model.vocab, model.width))


def _grouped_attention(
    model: ModelConfig, rows: int, pages: int, tables: dict[str, Operand]
) -> Iterator[Call]:
    width, heads, kv_heads, dim = model.width, model.heads, model.kv_heads, model.head_dim
    x = _floats(model, rows, width)
    yield call("linear", x=x, weight=_floats(model, (heads + 2 * kv_heads) * dim, width))
    q, k = _floats(model, rows, heads, dim), _floats(model, rows, kv_heads, dim)
    yield _rope(q, k, rows, dim)
    cache = _floats(model, pages * rows, PAGE, kv_heads, dim)
    slots = tensor(rows, dtype="int64", fill="permutation", bound=pages * rows * PAGE)
    yield call("append_kv", k=k, v=k, k_cache=cache, v_cache=cache, slot_mapping=slots)
    yield call("paged_attention", q=q, k_cache=cache, v_cache=cache, **tables)
    yield call("linear", x=_floats(model, rows, heads * dim), weight=_floats(model, width, heads * dim))


def _latent_attention(
    model: ModelConfig, rows: int, pages: int, tables: dict[str, Operand]
) -> Iterator[Call]:
    latent, rotated = model.latent, model.rope_dim
    q_pe, kpe = _floats(model, rows, model.heads, rotated), _floats(model, rows, 1, rotated)
    yield _rope(q_pe, kpe, rows, rotated)
    yield call(
        "mla_attention",
        q_nope=_floats(model, rows, model.heads, latent),
        q_pe=q_pe,
        ckv_cache=_floats(model, pages * rows, PAGE, latent),
        kpe_cache=_floats(model, pages * rows, PAGE, rotated),
        scale=1.0 / math.sqrt(model.head_dim + rotated),
        **tables,
    )


def _rope(q: Operand, k: Operand, rows: int, dim: int) -> Call:
    table = tensor(_POSITIONS, dim // 2, dtype="float32")
    return call("rope", q=q, k=k, positions=_ids(rows, _POSITIONS), cos=table, sin=table)


def _feed_forward(model: ModelConfig, x: Operand, rows: int) -> Call:
    width, inner = model.width, model.inner
    if not model.experts:
        up, down = _floats(model, 2 * inner, width), _floats(model, width, inner)
        return call("mlp", x=x, w_up=up, w_down=down, activation=model.activation)
    up = _floats(model, model.experts, 2 * inner, width)
    down, logits = _floats(model, model.experts, width, inner), _floats(model, rows, model.experts)
    routed = {"x": x, "router_logits": logits, "w_up": up, "w_down": down}
    return call("moe", **routed, top_k=model.top_k, activation=model.activation)


def _prefill_calls(model: ModelConfig, length: int) -> Iterator[Call]:
    """Attention over a prompt of `length` tokens; a latent cache's prompts are products and their own."""
    if model.latent:
        return
    q = _floats(model, 1, model.heads, length, model.head_dim)
    kv = _floats(model, 1, model.kv_heads, length, model.head_dim)
    yield call("attention", q=q, k=kv, v=kv, is_causal=True)


def _floats(model: ModelConfig, *shape: int) -> Operand:
    scale = shape[-1] ** -0.5 if len(shape) == 2 else 1.0
    return tensor(*shape, dtype=model.dtype, scale=scale)


def _ids(count: int, bound: int) -> Operand:
    return tensor(count, dtype="int64", fill="below", bound=bound)
