"""transformers' attention interface over `lz.sync.attention`."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import torch
from torch import Tensor

import layerzero.sync as sync

NAME = "layerzero"

_BEFORE: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def patch(model: Any) -> Any:
    """Register our attention and have `model` use it."""
    if model in _BEFORE:
        return model
    _register()
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ValueError(f"model needs transformers' attention interface, {type(model).__name__} lacks it")
    _BEFORE[model] = before
    return model


def unpatch(model: Any) -> Any:
    """Restore what `patch` replaced."""
    if model not in _BEFORE:
        raise ValueError(f"model needs to be patched first, this {type(model).__name__} is not")
    model.set_attn_implementation(_BEFORE.pop(model))
    return model


def _register() -> None:
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    masking: Any = importlib.import_module("transformers.masking_utils")
    if NAME not in modeling.ALL_ATTENTION_FUNCTIONS:
        modeling.ALL_ATTENTION_FUNCTIONS.register(NAME, forward)
        # Boolean masks, left out where causal alone says it all.
        masking.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: (B, H, S, D) in, (B, S, H, D) out.

    What the op does not take, a traced call, a position bias or a paged cache of transformers, goes to
    transformers' own SDPA function.
    """
    if torch.compiler.is_compiling() or any(
        kwargs.get(name) is not None for name in ("position_bias", "cache")
    ):
        return _theirs(
            module, query, key, value, attention_mask,
            dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs,
        )  # fmt: skip
    queries = query.shape[2]
    wanted = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = bool(wanted) and attention_mask is None and queries > 1
    if causal and key.shape[2] > queries:
        # An empty static cache: what lies behind the prompt is not there yet.
        key, value = key[:, :, :queries], value[:, :, :queries]
    out = sync.attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=causal,
        scale=scaling,
        dropout_p=dropout,
        softcap=kwargs.get("softcap"),
    )
    return out.transpose(1, 2).contiguous(), None


def _theirs(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    module: Any = importlib.import_module("transformers.integrations.sdpa_attention")
    result: tuple[Tensor, None] = module.sdpa_attention_forward(*args, **kwargs)
    return result
