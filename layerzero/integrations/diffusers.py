"""Models and pipelines of diffusers on our ops: a backend of its attention dispatch, and processors.

Importing this module makes "layerzero" a name that `set_attention_backend`, `attention_backend(...)` and
`DIFFUSERS_ATTN_BACKEND` know. The names are members of an enumeration, which has no public way to add one:
the member is added to it here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from layerzero.integrations.patches.modules import Patch, apply, has_record, need_parts, substitutes
from layerzero.integrations.patches.rewire import rebind
from layerzero.integrations.patches.sdpa import replacements, scaled_dot_product_attention
from layerzero.integrations.patches.substitute import PARTS, PatchTable, Verdicts

NAME = "layerzero"
ONE_RANK = "is nothing that the backend 'layerzero' takes: it attends within one rank"


class _Every(frozenset[str]):
    """The arguments that the backend is given: all, so that it can refuse what it does not know."""

    def __contains__(self, name: object) -> bool:
        return True

    def __rsub__(self, names: Any) -> set[str]:
        return set()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
    **others: Any,
) -> Tensor:
    """Attention as diffusers' dispatch calls it: (B, S, H, D) in and out.

    attn_mask is what torch's function takes, or (B, keys). With `is_causal` query i sees the keys up to i.
    Raises: ValueError: context parallelism, the softmax's logarithms, or an argument that the op has not.
    """
    if _parallel_config is not None:
        raise ValueError(f"_parallel_config {ONE_RANK}; context parallelism needs a backend such as 'native'")
    strange = sorted(name for name, given in others.items() if given is not None)
    if return_lse or strange:
        names = ", ".join([*strange, *(["return_lse"] if return_lse else [])])
        raise ValueError(f"attention_kwargs: the backend 'layerzero' has no {names}")
    if attn_mask is not None and attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2)


def register() -> Any:
    """The member "layerzero" of diffusers' attention backends, added where it is not there yet."""
    dispatch: Any = importlib.import_module("diffusers.models.attention_dispatch")
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_, member._sort_order_ = "LAYERZERO", NAME, len(names._member_names_)
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = names._value2member_map_[NAME] = member
        registry.register(member)(attention)
        registry._supported_arg_names[member] = _Every()
    return names(NAME)


@functools.cache
def processor_class(kind: Any) -> type | None:
    """Processors of the class `kind` whose attention is the op; None where they do not call torch's."""
    call: Any = kind.__call__
    replaced = replacements(call)
    if not replaced:
        return None
    ours, traced = rebind(call, replaced), rebind(call, replaced, traced=True)

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (traced if torch.compiler.is_compiling() else ours)(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": __call__, "__module__": kind.__module__})


def patch(model: Any, parts: Iterable[str] = PARTS) -> Any:
    """Have `model` use our ops, until `unpatch`; patched already, it stays as it is."""
    chosen = need_parts(parts)
    if has_record(model, chosen):
        return model
    verdicts, done = Verdicts(), Patch(PatchTable(type(model).__name__, ()), chosen)
    if "attention" in chosen:
        _patch_attention(model, done, verdicts)
    done.substitutes += substitutes(model, chosen - {"attention"}, verdicts)
    done.table = PatchTable(type(model).__name__, verdicts.rows())
    apply(model, done)
    return model


def _patch_attention(model: nn.Module, done: Patch, verdicts: Verdicts) -> None:
    """Give every processor our backend, or the class of itself that calls the op."""
    backend = register()
    shared: set[int] = set()
    for module in model.modules():
        processor: Any = getattr(module, "processor", None)
        if processor is None or not callable(processor):
            if type(module).__name__.endswith("Attention"):
                verdicts.add("attention", module, None, "it has no attention processor")
            continue
        if getattr(processor, "_parallel_config", None) is not None:
            done.restore_settings()
            name = type(module).__name__
            raise ValueError(f"model needs no context parallelism, {name} has it enabled, which {ONE_RANK}")
        kind: Any = type(processor)
        if id(processor) in shared:
            verdicts.add("attention", module, "attention")
            continue
        shared.add(id(processor))
        if hasattr(processor, "_attention_backend"):
            done.set(processor, "_attention_backend", processor._attention_backend, backend)  # pyright: ignore[reportFunctionMemberAccess]
        elif not isinstance(processor, nn.Module) and (ours := processor_class(kind)) is not None:
            done.set(processor, "__class__", kind, ours)
        else:
            shared.discard(id(processor))
            verdicts.add(
                "attention", module, None, f"{type(processor).__name__} computes attention by itself"
            )
            continue
        verdicts.add("attention", module, "attention")


if importlib.util.find_spec("diffusers") is not None:
    register()  # `set_attention_backend("layerzero")` asks for no patch before it
