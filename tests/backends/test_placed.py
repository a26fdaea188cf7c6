"""No kernel that runs here ends the process, or reads beside its operands, wherever these stand in memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.reference import EVERY_FEATURE
from layerzero.ops import table
from layerzero.spec.kernel import rejections
from layerzero.spec.reasons import Reason
from layerzero.spec.settings import Settings
from tests import children, kernels
from tests.backends import cases
from tests.backends.placed import at

PROGRAM = "import sys; from tests.backends import placed; placed.main(*sys.argv[1:])"
ASKED = [k.id for k in cases.RUNNABLE if k.backend != "reference"]
# Up to seven in a process: what they share is imported once, and the one that ends it has been named.
BY_BACKEND = itertools.groupby(sorted(ASKED), lambda name: name.partition(".")[0])
TOGETHER = [ids[n : n + 7] for _, each in BY_BACKEND for ids in [[*each]] for n in range(0, len(ids), 7)]


@pytest.mark.parametrize("kernels_of_one", TOGETHER, ids=[f"{ids[0]} to {ids[-1]}" for ids in TOGETHER])
def test_operands_may_stand_anywhere(kernels_of_one: list[str], tmp_path: Path) -> None:
    """Odd addresses, gaps, columns first, no elements: right, or refused before the kernel sees them."""
    done = children.run(PROGRAM, *kernels_of_one, folder=tmp_path)
    last = done.stdout.strip().rsplit("\n", 1)[-1]
    assert (done.returncode, last) == (0, "done"), f"{last}\n{done.stderr[-3000:]}"


def _int8(offset_rows: int = 0, offset_weight: int = 0) -> tuple[Any, ...]:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randint(-9, 9, (16, 64), dtype=torch.int8)
    return (
        at(x, offset_rows),
        at(weight, offset_weight),
        torch.ones(16, 1),
        None,
        "float",
        None,
        None,
        None,
        0,
    )


@pytest.mark.parametrize(("rows", "weight"), [(1, 0), (8, 0), (0, 1), (0, 16)])
def test_an_address_that_a_kernel_cannot_read_from_is_a_reason_against_it(rows: int, weight: int) -> None:
    """Of rows and of weights; aligned ones are none."""
    kernel = next(k for k in cases.KERNELS if k.id == "torch.quantized_linear.int8pack")
    check = table.get("quantized_linear").check

    def against(*offsets: int) -> set[Reason]:
        return {r.reason for r in rejections(kernel, check(_int8(*offsets)), cases.HERE)} & {
            Reason.MISALIGNED
        }

    assert against(rows, weight) == {Reason.MISALIGNED}
    assert against(0, 0) == set()


@pytest.mark.parametrize(("rows", "weight"), [(1, 0), (0, 1), (1, 1)])
def test_a_plan_for_aligned_operands_may_meet_others(rows: int, weight: int) -> None:
    """A signature holds no addresses: the kernel gets copies then, of weights as of rows."""
    seen: list[tuple[int, int]] = []

    def body(x: Tensor, codes: Tensor, *rest: Any) -> Tensor:
        seen.append((x.data_ptr() % 32, codes.data_ptr() % 32))
        out: Tensor = table.get("quantized_linear").reference(x, codes, *rest)
        return out

    features = frozenset({"quant_int8", "scale_per_row", "inputs_float"})
    own = kernels.device(
        [kernels.kernel("a.quantized_linear", body, op="quantized_linear", alignment=32, features=features)],
        Settings(warm="off"),
    )
    op = table.get("quantized_linear")
    own.launch(op, _int8())
    args = _int8(rows, weight)
    torch.testing.assert_close(own.launch(op, args), op.reference(*args))
    assert seen == [(0, 0), (0, 0)]


@pytest.mark.parametrize("op", ["paged_attention", "mla_attention"])
def test_a_pool_at_an_odd_address_is_no_reason_to_copy_it(op: str) -> None:
    """A kernel that cannot read there is not asked: nothing is transformed."""
    args = cases.call(cases.Case(op), torch.float32)
    aligned = kernels.kernel(
        f"a.{op}",
        op=op,
        alignment=16,
        features=EVERY_FEATURE,
        layouts=frozenset({"NHD", "HND"} if op[0] == "p" else ()),
    )
    odd = [*args]
    position = 1 if op == "paged_attention" else 2
    odd[position] = at(args[position], 1)
    own = kernels.device([aligned, kernels.kernel(f"b.{op}", op=op, launch_us=500.0, features=EVERY_FEATURE)])
    assert own.launch_planned(table.get(op), args)[1].kernel == f"a.{op}"
    own = kernels.device([aligned, kernels.kernel(f"b.{op}", op=op, launch_us=500.0, features=EVERY_FEATURE)])
    assert own.launch_planned(table.get(op), tuple(odd))[1].kernel == f"b.{op}"


def test_no_kernel_of_an_op_that_writes_asks_for_alignment() -> None:
    """A copy of what is written would be written in its place."""
    assert not [k.id for k in cases.KERNELS if table.get(k.op).writes and k.capability.alignment > 1]
