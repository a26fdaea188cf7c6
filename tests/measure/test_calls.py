"""Calls as values: what is described can be made again, and asks the same."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerzero.measure import shapes
from layerzero.measure.calls import Call, Operand, Workload, call, tensor, workload_of
from layerzero.ops import table as ops_table
from layerzero.spec.errors import ConfigurationError, UnknownOpError
from tests.backends.cases import Case, cases
from tests.backends.cases import call as made_call

OPS = ("attention", "paged_attention", "ragged_attention", "rms_norm", "layer_norm", "linear", "mlp", "rope")


@given(st.sampled_from(OPS).flatmap(lambda op: st.sampled_from(list(cases(op)))))
def test_a_described_call_asks_the_same(case: Case) -> None:
    """Shapes, strides, dtypes, flags and index tensors come back: the request is the same one."""
    op = ops_table.get(case.op)
    args = made_call(case, torch.float32)
    if {"score_mod", "block_mask"} & set(case.asks):  # functions: no values
        with pytest.raises(ConfigurationError, match="described by values"):
            Call.of(op, args)
        return
    described = Call.of(op, args)
    again = msgspec.json.decode(msgspec.json.encode(described), type=Call).make()
    before, after = op.check(args), op.check(again)
    assert after.replace(alignment=0) == before.replace(alignment=0)
    for ours, theirs in zip(args, again, strict=True):
        if isinstance(ours, torch.Tensor) and ours.dtype in (torch.int32, torch.int64):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_standard_shapes_are_valid_calls(platform: str) -> None:
    """Every standard shape passes its op's check; none stands there twice; quick is a part of the whole."""
    whole = shapes.standard_calls(None, platform)
    assert len({str(c) for c in whole}) == len(whole) > 100
    for made in whole:
        op = ops_table.get(made.op)
        on_meta = {
            n: torch.empty(v.shape, dtype=getattr(torch, v.dtype), device="meta")
            if isinstance(v, Operand)
            else v
            for n, v in made.args.items()
        }
        op.check(op.build(**on_meta)[1])
    quick = shapes.standard_calls(None, platform, quick=True)
    assert {c.op for c in quick} == {c.op for c in whole} and {str(c) for c in quick} < {
        str(c) for c in whole
    }


def test_early_shapes_are_of_every_op() -> None:
    """Tuning that ends early has seen every op before any op a second time."""
    made = shapes.standard_calls(None, "cuda")
    assert len({c.op for c in made[:11]}) == 11
    for op in ("attention", "paged_attention", "rms_norm"):
        half = sum(c.op == op for c in made[: len(made) // 2])
        assert abs(half / sum(c.op == op for c in made) - 0.5) < 0.1, "ops advance together"


def test_paged_pages_are_owned_once() -> None:
    """The pages of a made call are all different, so that the op's own guard lets it through."""
    made = shapes.paged_call(3, 4, 2, 40, 16, 8, "float32")
    op = ops_table.get("paged_attention")
    args = made.make()
    assert op.validate_values is not None
    op.validate_values(args)
    tables = args[3]
    assert tables.unique().numel() == tables.numel()


def test_a_workload_comes_from_a_file_a_list_or_itself(tmp_path: object) -> None:
    """What `save` wrote `tune` can read; what is no call is refused."""
    from pathlib import Path

    path = Path(str(tmp_path)) / "trace.json"
    workload = Workload((shapes.norm("rms_norm", 4, 8, "float32"),), "mine")
    workload.save(path)
    assert workload_of(str(path)) == workload == workload_of(workload)
    assert workload_of(list(workload.calls)).calls == workload.calls
    path.write_text('{"calls": [{"op": 3}]}')
    with pytest.raises(ConfigurationError, match=r"trace\.json"):
        workload_of(path)
    with pytest.raises(TypeError, match="workload needs calls, got int"):
        workload_of([1])  # type: ignore[list-item]
    with pytest.raises(UnknownOpError):
        workload_of([Call("no_such_op", {})])


def test_a_call_needs_its_arguments() -> None:
    """A missing or unknown argument is an error when the call is written, not when it is made."""
    with pytest.raises(TypeError, match="weight"):
        call("linear", x=tensor(2, 3))
    with pytest.raises(TypeError, match="wait"):
        call("rms_norm", x=tensor(2, 3), wait=3)
