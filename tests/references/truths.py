"""Who says what a definition's outputs are: its own source, plain torch, our float64 reference, FlashInfer.

Each truth is computed where its inputs are, and answers None where it has none for a definition.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.attention.lse import LN_2
from tests.references.definitions import Definition
from tests.references.measures import check_close
from tests.references.ours import CALLS, Inputs, epsilon_of, is_interleaved, kind_of, norm_weight

Outputs = tuple[Tensor, ...]
Truth = Callable[[Definition, Inputs], Outputs | None]
_WORKSPACE = 128 << 20


def published(definition: Definition, inputs: Inputs) -> Outputs | None:
    """The definition's own source; it may write what it is given."""
    copies = {name: v.clone() if isinstance(v, Tensor) else v for name, v in inputs.items()}
    return definition.compiled()(**copies)


def plain_torch(definition: Definition, inputs: Inputs) -> Outputs | None:
    """torch's own function for products and norms."""
    if definition.op_type == "gemm":
        return (torch.nn.functional.linear(inputs["A"], inputs["B"]),)
    if definition.op_type == "rmsnorm":
        x, weight = inputs["hidden_states"].float(), norm_weight(definition, inputs).float()
        x = x + inputs["residual"].float() if "residual" in inputs else x
        out = torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon_of(definition))
        kind = inputs["hidden_states"].dtype
        return (out.to(kind), x.to(kind))[: len(definition.outputs)]
    return None


def float64(definition: Definition, inputs: Inputs) -> Outputs | None:
    """Our own reference on the inputs in float64, rounded as the outputs are; no draws, no packed bits."""
    if definition.op_type in ("sampling", "moe"):
        return None
    wide = {n: v.double() if _is_number(v) else v for n, v in inputs.items()}
    outs = CALLS[kind_of(definition)](definition, wide, backend="reference")
    dtypes = [getattr(torch, port.dtype) for port in definition.outputs.values()]
    return tuple(out.to(dtype) for out, dtype in zip(outs, dtypes, strict=True))


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.itemsize > 1


# -- FlashInfer's own functions, not our adapters --------------------------------------------------------


def _norm(definition: Definition, i: Inputs) -> Outputs:
    import flashinfer

    x, eps = i["hidden_states"].clone(), epsilon_of(definition)
    if "residual" not in i:
        return (flashinfer.norm.rmsnorm(x, i["weight"], eps),)
    total = i["residual"].clone()
    flashinfer.norm.fused_add_rmsnorm(x, total, i["weight"], eps)
    return (x, total)[: len(definition.outputs)]


def _rope(definition: Definition, i: Inputs) -> Outputs:
    import flashinfer

    q, k, cache = i["q"], i["k"], i["cos_sin_cache"].float()
    turned = flashinfer.rope.apply_rope_with_cos_sin_cache(
        i["positions"], q.flatten(1), k.flatten(1), q.shape[-1], cache, is_neox=not is_interleaved(definition)
    )
    return turned[0].view_as(q), turned[1].view_as(k)


def _last(definition: Definition, i: Inputs) -> Tensor:
    full = torch.full_like(i["kv_indptr"][1:], definition.const["page_size"])
    last: Tensor = i.get("kv_last_page_len", full)
    return last


def _paged(definition: Definition, i: Inputs) -> Outputs:
    import flashinfer

    q, pages = i["q"], (i["k_cache"], i["v_cache"])
    floats = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
    heads = (q.shape[1], pages[0].shape[2], q.shape[2], definition.const["page_size"])
    table = (i["kv_indptr"], i["kv_indices"], _last(definition, i))
    named = {"sm_scale": i["sm_scale"], "q_data_type": q.dtype}
    if "qo_indptr" in i:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(floats, "NHD")
        wrapper.plan(i["qo_indptr"], *table, *heads, causal=True, **named)
    else:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(floats, "NHD", use_tensor_cores=True)
        wrapper.plan(*table, *heads, **named)
    return tuple(wrapper.run(q, pages, return_lse=True))


def _ragged(definition: Definition, i: Inputs) -> Outputs:
    import flashinfer

    q, k, v = i["q"], i["k"], i["v"]
    floats = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(floats, "NHD")
    wrapper.plan(
        i["qo_indptr"], i["kv_indptr"], q.shape[1], k.shape[1], q.shape[2], head_dim_vo=v.shape[2],
        causal=True, sm_scale=i["sm_scale"], q_data_type=q.dtype,
    )  # fmt: skip
    return tuple(wrapper.run(q, k, v, return_lse=True))


def _latent(definition: Definition, i: Inputs) -> Outputs:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    q, pools, page = (i["q_nope"], i["q_pe"]), (i["ckv_cache"], i["kpe_cache"]), definition.const["page_size"]
    rows = torch.arange(len(i["kv_indptr"]), dtype=torch.int32, device=q[0].device)
    lengths = (i["kv_indptr"].diff() - 1) * page + _last(definition, i)
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(_WORKSPACE, dtype=torch.uint8, device=q[0].device))
    wrapper.plan(
        metadata=MLAPlanMetadata.csr(
            qo_indptr=i.get("qo_indptr", rows), kv_indptr=i["kv_indptr"], kv_indices=i["kv_indices"],
            kv_len_arr=lengths.int(),
        ),
        num_heads=q[0].shape[1], head_dim_ckv=q[0].shape[2], head_dim_kpe=q[1].shape[2], page_size=page,
        causal="qo_indptr" in i, sm_scale=i["sm_scale"], q_data_type=q[0].dtype, kv_data_type=pools[0].dtype,
        query_layout="split", kv_cache_layout="split", lse_mode="basee",
    )  # fmt: skip
    out, lse = wrapper.run(query=q, kv_cache=pools, return_lse=True, return_lse_base_on_e=True)
    return out, lse / LN_2


def _samples(definition: Definition, i: Inputs) -> Outputs:
    import flashinfer

    sampling, probs = flashinfer.sampling, i["probs"]
    if "top_k" in i and "top_p" in i:
        drawn = sampling.top_k_top_p_sampling_from_probs(
            probs, i["top_k"], i["top_p"], filter_apply_order="top_k_first"
        )
    elif "top_k" in i:
        drawn = sampling.top_k_sampling_from_probs(probs, i["top_k"])
    else:
        drawn = sampling.top_p_sampling_from_probs(probs, i["top_p"])
    return (drawn,)


_FLASHINFER: Mapping[str, Callable[[Definition, Inputs], Outputs]] = MappingProxyType(
    {
        "rmsnorm": _norm, "rope": _rope, "gqa_paged": _paged, "gqa_ragged": _ragged, "mla_ragged": _ragged,
        "mla_paged": _latent, "sampling": _samples,
    }
)  # fmt: skip


def flashinfer_itself(definition: Definition, inputs: Inputs) -> Outputs | None:
    """What the library answers, called without our adapters."""
    asks = _FLASHINFER.get(kind_of(definition))
    if definition.op_type == "rmsnorm" and norm_weight(definition, inputs) is not inputs["weight"]:
        return None
    return None if asks is None else asks(definition, inputs)


def truths_on(device: torch.device) -> dict[str, Truth]:
    """The truths that can be had there, the published one first."""
    truths: dict[str, Truth] = {"published": published, "torch": plain_torch, "float64": float64}
    if device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None:
        truths["flashinfer"] = flashinfer_itself
    return truths


def need_agreement(answers: Mapping[str, Outputs], names: Sequence[str], scale: float) -> None:
    """Assert that every two truths agree; one that differs from all others is named as the odd one.

    Raises: AssertionError: with each pair that does not agree and how far it is apart.
    """
    apart: dict[tuple[str, str], str] = {}
    held = list(answers)
    for at, one in enumerate(held):
        for other in held[at + 1 :]:
            try:
                check_close(answers[one], answers[other], names, scale)
            except AssertionError as error:
                apart[one, other] = str(error)
    odd = [name for name in held if len(held) > 2 and sum(name in pair for pair in apart) == len(held) - 1]
    said = "; ".join(f"{one} and {other}: {why}" for (one, other), why in apart.items())
    assert not apart, f"{f'{odd[0]} is alone. ' if len(odd) == 1 else ''}{said}"
