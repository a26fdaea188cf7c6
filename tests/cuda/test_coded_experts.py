"""Experts of quantized weights on a GPU in two launches, beside the reference; skipped elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.formats import QuantizedTensor
from layerzero.ops import table
from tests.cuda.captures import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SYNC: Any = lz.sync
# Format, how it is made, whether float16 may stand beside it.
WEIGHTS: list[tuple[str, dict[str, Any], bool]] = [
    ("int4", {"group_size": 128}, True),
    ("int4", {"group_size": 32, "symmetric": False}, True),
    ("nf4", {"group_size": 64}, True),
    ("mxfp4", {}, False),
    ("mxfp8", {}, False),
    ("nvfp4", {}, True),
    ("int8", {"granularity": "row"}, True),
    ("fp8_e4m3", {"granularity": "tensor"}, True),
    ("fp8_e4m3", {"granularity": "row"}, True),
    ("fp8_e4m3", {"granularity": "block", "group_size": 128}, True),
    ("fp8_e5m2", {"granularity": "group", "group_size": 128}, True),
]
HOW: tuple[dict[str, Any], ...] = (
    {}, {"activation": "geglu", "gate": "second", "weighed": "inputs"},
    {"activation": "geglu_tanh", "first_expert": 2, "shared": 2}, {"activation": "reglu"},
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def runtime() -> Iterator[lz.Runtime]:
    """A runtime that loads nothing behind calls."""
    with lz.start(lz.Settings.load(warm="off", device="cuda", perfdb=None)) as opened:
        yield opened


def stacked(parts: list[Tensor]) -> Tensor:
    """Parts of all experts in one tensor, of powers of two as well."""
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def weight(end: str, form: str, sizes: dict[str, Any], *shape: int) -> tuple[Tensor, dict[str, Any]]:
    """Codes (E, rows, K) and the arguments of `fused_experts` that say what they stand for."""
    each = [
        QuantizedTensor.quantize(
            torch.randn(shape[1:], device="cuda") * shape[-1] ** -0.5, form, **sizes
        ).arguments()
        for _ in range(shape[0])
    ]
    named = {
        f"{end}_{name}": stacked([part[name].contiguous().view(-1) for part in each]).view(
            shape[0], *each[0][name].shape
        )
        for name in ("scale", "zero_point", "tensor_scale")
        if isinstance(each[0].get(name), Tensor)
    }
    if named[f"{end}_scale"].dim() == 1:  # of a tensor: one for all experts
        named[f"{end}_scale"] = named[f"{end}_scale"][0]
    named |= {name: each[0][name] for name in ("format", "block_size") if name in each[0]}
    return torch.stack([part["weight"].view(torch.uint8) for part in each]).view(
        each[0]["weight"].dtype
    ), named


def mixture(rows: int, form: str, sizes: dict[str, Any], dtype: torch.dtype) -> tuple[list[Tensor], Any]:
    """Operands of 12 experts, of which one is nobody's and a choice is none here."""
    w_up, up = weight("up", form, sizes, 12, 768, 512)
    w_down, down = weight("down", form, sizes, 12, 512, 384)
    experts = torch.rand(rows, 12, device="cuda").argsort(-1)[:, :3].int()
    experts[experts == 5] = 4
    experts[0, 0] = -1
    x = torch.randn(rows, 520, device="cuda").to(dtype)[:, :512]
    return [x, experts, torch.rand(rows, 3, device="cuda"), w_up, w_down], up | down


@pytest.mark.parametrize("case", WEIGHTS, ids=lambda case: "-".join(map(str, [case[0], *case[1].values()])))
def test_experts_answer_as_the_reference_does(case: tuple[str, dict[str, Any], bool]) -> None:
    """One row to many an expert, both kinds of rows, gates, scores before and after, shared experts."""
    form, sizes, beside_float16 = case
    torch.manual_seed(0)
    op = table.get("fused_experts")
    for turn, rows in enumerate((1, 7, 60, 300, 2000)):
        dtype = torch.float16 if beside_float16 and turn % 2 else torch.bfloat16
        operands, named = mixture(rows, form, sizes, dtype)
        named = named | HOW[turn % 4]
        found = SYNC.fused_experts(*operands, backend="triton", **named)
        again = SYNC.fused_experts(*operands, backend="triton", **named)
        assert torch.equal(found, again)
        wanted = op.reference(*op.build(operands[0].double(), *operands[1:], **named)[1])
        error = float((found.double() - wanted).abs().max() / wanted.abs().max())
        assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), (rows, dtype, error)


def test_a_captured_mixture_follows_its_choices() -> None:
    """Which experts were chosen is read on the device alone."""
    torch.manual_seed(0)
    operands, named = mixture(40, "fp8_e4m3", {"granularity": "block", "group_size": 128}, torch.bfloat16)

    def step() -> Tensor:
        out: Tensor = SYNC.fused_experts(*operands, **named)  # no other kernel may be captured
        return out

    graph, out = captured(step)
    for _ in range(3):
        operands[1].copy_(torch.rand(40, 12, device="cuda").argsort(-1)[:, :3])
        graph.replay()
        assert torch.equal(out, SYNC.fused_experts(*operands, backend="triton", **named))
