"""torch's `scaled_dot_product_attention` by `attention`, where a model's code calls it by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import layerzero.sync as sync
from layerzero.integrations.patches.rewire import reads

NAME = "scaled_dot_product_attention"


class _Beside:
    """A module of torch, of which some names are others."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function by `lz.sync.attention`; operands of a subclass or of other axes by torch's."""
    plain = all(type(x) is Tensor and x.device.type != "meta" and x.dim() == 4 for x in (query, key, value))
    if not plain or not (query.shape[0] == key.shape[0] == value.shape[0]) or key.shape[1] != value.shape[1]:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    queries, keys = query.shape[-2], key.shape[-2]
    if is_causal and (queries != keys or attn_mask is not None):
        # torch counts both from the first, the op from the last; and torch takes both masks.
        causal = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        if attn_mask is None:
            attn_mask = causal
        elif attn_mask.dtype == torch.bool:
            attn_mask = attn_mask & causal
        else:
            attn_mask = attn_mask.masked_fill(~causal, -torch.inf)
        is_causal = False
    out: Tensor = sync.attention(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, dropout_p=dropout_p
    )
    return out


_FUNCTIONAL = _Beside(functional, **{NAME: scaled_dot_product_attention})
_NN = _Beside(nn, functional=_FUNCTIONAL)
_OURS: tuple[tuple[Any, Any], ...] = (
    (functional, _FUNCTIONAL), (nn, _NN), (torch, _Beside(torch, nn=_NN)),
)  # fmt: skip


def replacements(function: Callable[..., Any]) -> dict[str, Any]:
    """The names by which `function` reaches torch's attention, with ours under them; none where none does."""
    names = reads(function)
    if NAME not in names:
        return {}
    file: dict[str, Any] = function.__globals__
    return {name: ours for name in names for module, ours in _OURS if file.get(name) is module}
