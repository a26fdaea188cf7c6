"""Paged, ragged and latent attention against published definitions; LZ_DEFINITIONS names their folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from layerzero.backends.native import KERNELS
from layerzero.ops import table
from layerzero.ops.attention.lse import from_base_2

FOLDER = os.environ.get("LZ_DEFINITIONS", "")
KINDS = {"gqa_paged": "paged_attention", "gqa_ragged": "ragged_attention", "mla_paged": "mla_attention"}
FILES = sorted(p for kind in KINDS for p in Path(FOLDER or "/nonexistent").glob(f"definitions/{kind}/*.json"))

LENGTHS = [1, 70, 129]
QUERIES = [1, 5, 64]


def sizes(definition: dict[str, Any]) -> dict[str, int]:
    """The definition's fixed axes."""
    return {name: axis["value"] for name, axis in definition["axes"].items() if "value" in axis}


def published(definition: dict[str, Any], inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What the definition's own reference gives; its log-sum-exp is of base 2."""
    scope: dict[str, Any] = {}
    exec(definition["reference"], scope)
    result = scope["run"](**inputs)
    out, lse = (result["output"], result["lse"]) if isinstance(result, dict) else result
    return out, from_base_2(lse)


def metadata(axes: dict[str, int], size: int, names: set[str]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Index inputs of the definition for LENGTHS, and the same as a table and lengths."""
    pages = [-(-n // size) for n in LENGTHS]
    ids = torch.randperm(sum(pages), dtype=torch.int32)
    given = {
        "kv_indptr": torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32),
        "kv_indices": ids,
        "qo_indptr": torch.tensor([0, *torch.tensor(QUERIES).cumsum(0).tolist()], dtype=torch.int32),
        "kv_last_page_len": torch.tensor([(n - 1) % size + 1 for n in LENGTHS], dtype=torch.int32),
    }
    tables = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    for row, own in enumerate(ids.split(pages)):
        tables[row, : len(own)] = own
    return {n: t for n, t in given.items() if n in names}, tables, torch.tensor(LENGTHS)


@pytest.mark.skipif(not FILES, reason="LZ_DEFINITIONS names no folder of definitions")
@pytest.mark.parametrize("path", FILES or [Path("none")], ids=lambda p: p.stem)
def test_published_definitions_agree(path: Path) -> None:
    """The op's reference and the compiled kernel give what the definition gives, in natural logarithms."""
    definition = json.loads(path.read_text())
    kind, names, axes = path.parent.name, set(definition["inputs"]), sizes(definition)
    decode = "qo_indptr" not in names
    tokens, size = len(LENGTHS) if decode else sum(QUERIES), axes.get("page_size", 1)
    index, tables, lens = metadata(axes, size, names)
    count, random = int(index["kv_indptr"][-1]), torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).bfloat16()

    scale = 0.1
    if kind == "mla_paged":
        heads, ckv, kpe = axes["num_qo_heads"], axes["head_dim_ckv"], axes["head_dim_kpe"]
        data = [
            rand(tokens, heads, ckv),
            rand(tokens, heads, kpe),
            rand(count, size, ckv),
            rand(count, size, kpe),
        ]
        keys = ["q_nope", "q_pe", "ckv_cache", "kpe_cache"]
    else:
        hq, hk, d = axes["num_qo_heads"], axes["num_kv_heads"], axes["head_dim"]
        if kind == "gqa_ragged":
            index["kv_indptr"] = torch.tensor(
                [0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32
            )
            shape: tuple[int, ...] = (sum(LENGTHS), hk, d)
        else:
            shape = (count, size, hk, d)
        data, keys = [rand(tokens, hq, d), rand(*shape), rand(*shape)], ["q", "k_cache", "v_cache"]
        keys = ["q", "k", "v"] if kind == "gqa_ragged" else keys
    wanted, wanted_lse = published(
        definition, {**dict(zip(keys, data, strict=True)), **index, "sm_scale": scale}
    )
    op = table.get(KINDS[kind])
    where = [index["qo_indptr"], index["kv_indptr"]] if kind == "gqa_ragged" else [tables, lens]
    named = {} if kind == "gqa_ragged" else {"cu_seqlens_q": index.get("qo_indptr")}
    args = op.build(*data, *where, **named, is_causal=not decode, scale=scale, return_lse=True)[1]
    op.check(args)
    (kernel,) = [k for k in KERNELS if k.op == op.name]
    for run in (op.reference, kernel.load()):
        out, lse = run(*args)
        assert_close(out.float(), wanted.float(), atol=2e-2, rtol=2e-2)
        assert_close(lse, wanted_lse, atol=1e-3, rtol=1e-3)
