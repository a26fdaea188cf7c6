"""Solving: ranges out of measurements and prices, model blocks, what is held out, what guards a choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.api.solve import solve
from layerzero.measure.model_calls import ModelConfig, model_calls
from layerzero.measure.shapes import norm
from layerzero.measure.solving import solve_op
from layerzero.measure.tuning import publish
from layerzero.ops import table as ops_table
from layerzero.perfdb.record import BenchmarkCase, Measurement
from layerzero.runtime import Runtime
from layerzero.spec.errors import ConfigurationError
from tests.api.test_solve import closing, opened  # noqa: F401
from tests.kernels import kernel

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 50, "torch_dtype": "float32",
}  # fmt: skip


def row(name: str, rows: int, us: float, width: int = 64) -> Measurement:
    """One kernel's time at a number of rows."""
    case = BenchmarkCase(
        op="rms_norm", dtype="float32", dtypes=("float32",), dims=(("C", width), ("N", rows))
    )
    return Measurement(case=case, kernel=name, median_us=us, p95_us=us, variance=0.0, samples=9, timestamp=9)


def crossed(turn: int) -> list[Measurement]:
    """`small` wins up to `turn` rows, `large` above."""
    rows = []
    for count in (1, 4, 16, 64, 256, 1024, 4096):
        rows += [
            row("small.rms_norm", count, 10.0 + count),
            row("large.rms_norm", count, 10.0 + turn / 2 + count / 2),
        ]
    return rows


def runtime_of(closing: list[Runtime], rows: list[Measurement], **more: Any) -> Runtime:  # noqa: F811
    names = sorted({each.kernel for each in rows}) or ["small.rms_norm"]
    runtime = opened([kernel(name) for name in names], default_gain=0.0, tie_band=1e-6, **more)
    closing.append(runtime)
    if rows:
        publish(runtime.device("cpu"), rows)
    return runtime


def test_a_family_that_was_measured_nearly_everywhere_is_solved(
    tmp_path: Path,
    closing: list[Runtime],  # noqa: F811
) -> None:
    """Sizes are drawn only from what there is: the measured ones leave fewer than a sample has."""
    attention = ops_table.get("attention")
    lengths = [size << step for step in range(6, 13) for size in (2, 3)]
    rows = []
    for length in lengths:
        q, kv = torch.empty(1, 1, 1, 64), torch.empty(1, 1, length, 64)
        case = BenchmarkCase.of_request(attention.check(attention.build(q, kv, kv)[1]))
        rows += [
            msgspec.structs.replace(row("a.attention", 1, us), case=case, kernel=name)
            for name, us in (("a.attention", 90.0), ("b.attention", 80.0))
        ]
    runtime_of(closing, rows)
    table = solve(tmp_path / "table.json", ops=["attention"])
    assert {bucket.kernel for bucket in table.buckets} == {"b.attention"}
    assert table.held_out["attention"].calls == len(lengths)


def test_a_range_ends_where_one_kernel_takes_over(tmp_path: Path, closing: list[Runtime]) -> None:  # noqa: F811
    """Two ranges, cut near the turn; every size between and an octave around is in one of them."""
    runtime = runtime_of(closing, crossed(200))
    table = solve(tmp_path / "table.json", ops=["rms_norm"])
    ranges = [(b.kernel, b.ranges["N"]) for b in table.buckets]
    assert [name for name, _ in ranges] == ["small.rms_norm", "large.rms_norm"]
    (_, (first, turn)), (_, (after, last)) = ranges
    assert (first, last) == (1, 8192) and after == turn + 1 and 96 <= turn <= 384
    held = table.held_out["rms_norm"]
    assert (
        held.calls == 7 and held.loss < 0.05 and held.fixed_loss is not None and held.loss <= held.fixed_loss
    )
    lz.configure(dispatch_table=str(tmp_path / "table.json"))
    device = runtime.device("cpu")
    for rows in (1, 3, 17, 63, 1000, 5000):
        chosen = lz.select("rms_norm", torch.empty(rows, 64), torch.empty(64))
        lz.sync.rms_norm(torch.empty(rows, 64), torch.empty(64))
        last_selection = lz.last_selection()
        assert last_selection is not None and last_selection.ahead and len(last_selection.trace) == 1
        decided = device.table(ops_table.get("rms_norm")).recompute(chosen.request, use_dispatch_table=False)
        assert last_selection.kernel == chosen.kernel == decided.kernel and len(chosen.trace) == 2
        assert last_selection.expected_us == pytest.approx(10 + min(rows, 100 + rows / 2), rel=0.6)


def test_a_tree_that_knows_less_than_one_kernel_is_not_taken(closing: list[Runtime]) -> None:  # noqa: F811
    """Times that no neighbour tells: the one kernel that is best over all of them holds everywhere."""
    rows = []
    for position, count in enumerate((1, 4, 16, 64, 256, 1024)):
        rows += [
            row("large.rms_norm", count, 100.0),
            row("small.rms_norm", count, 1000.0 if position % 2 else 90.0),
        ]
    runtime = runtime_of(closing, rows)
    solved = solve_op(runtime.device("cpu"), ops_table.get("rms_norm"))
    assert {bucket.kernel for bucket in solved.buckets} == {"large.rms_norm"}
    assert solved.held_out is not None and solved.held_out.loss <= 0.12


def test_a_preference_is_no_loss(closing: list[Runtime]) -> None:  # noqa: F811
    """Solved under a preference, the preferred kernel holds, however slow; nothing is held out against it."""
    runtime = runtime_of(closing, crossed(200))
    lz.add_policy(prefer="large", op="rms_norm")
    solved = solve_op(runtime.device("cpu"), ops_table.get("rms_norm"))
    assert {bucket.kernel for bucket in solved.buckets} == {"large.rms_norm"} and solved.held_out is None


def test_a_model_s_block_is_decided_without_measurements(tmp_path: Path) -> None:
    """Every op of a small Llama, between the rows and contexts that are asked for, and no size beyond."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with lz.start(lz.Settings(perfdb=None, shipped_tables=False, warm="off", device="cpu"), scoped=True):
        table = solve(tmp_path / "t.json", model=tmp_path, rows=(1, 8), context=(16, 64),
                      ops=["rms_norm", "linear", "paged_attention", "rope"])  # fmt: skip
    by_op: dict[str, list[Any]] = {}
    for bucket in table.buckets:
        by_op.setdefault(bucket.op, []).append(bucket)
    assert by_op.keys() == {"rms_norm", "linear", "paged_attention", "rope"}
    assert max(b.ranges["N"][1] for b in by_op["rms_norm"]) == 8
    assert min(b.ranges["N"][0] for b in by_op["rms_norm"]) == 1
    assert {(b.ranges["K"], b.ranges["C"]) for b in by_op["linear"]} >= {((64, 64), (128, 128))}
    assert max(b.ranges["M"][1] for b in by_op["paged_attention"]) == 4


def test_experts_and_latent_attention_are_calls_of_a_block() -> None:
    """Mixtral's experts, DeepSeek's latent cache: calls that the ops accept, at both ends of each span."""
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    deepseek = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    hardware = lz.Runtime(lz.Settings(device="cpu", warm="off")).device().hardware
    for config, op in ((mixtral, "moe"), (deepseek, "mla_attention")):
        calls = list(model_calls(ModelConfig.of(config), (1, 4), (16, 32)))
        assert {call.request(hardware).op for call in calls} >= {op, "rms_norm", "rope"}
    assert len({str(call) for call in calls}) == len(calls)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "bert"}, "model_type needs one of"),
        ({"hidden_size": 0}, "hidden_size needs a whole number of at least 1, got 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads needs a whole number"),
        ({"vocab_size": None}, "vocab_size needs a whole number"),
        ({"torch_dtype": "int4"}, "dtype needs one of"),
        ({"hidden_act": "relu6"}, "hidden_act needs one of"),
    ],
)
def test_a_config_that_is_none_is_refused_by_field(change: dict[str, Any], says: str) -> None:
    """The field, what it needs and what it got."""
    with pytest.raises(ConfigurationError, match=says):
        ModelConfig.of({**LLAMA, **change})


def test_spans_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    """Not in order, not two, not whole; no JSON, no object, no file."""
    model = ModelConfig.of(LLAMA)
    for rows in ((4, 1), (0, 3), (1,), (1, 2.5), 7):
        with pytest.raises(ValueError, match="rows needs"):
            list(model_calls(model, rows, (1, 2)))  # type: ignore[arg-type]
    for text in ("{", "[]", None):
        path = tmp_path / "config.json"
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        with pytest.raises(ConfigurationError, match=r"config\.json"):
            ModelConfig.load(path)


def test_a_call_that_was_tuned_alone_is_decided_around_it(closing: list[Runtime]) -> None:  # noqa: F811
    """One measured size decides an octave down and up."""
    runtime = runtime_of(closing, [row("small.rms_norm", 16, 10.0), row("large.rms_norm", 16, 20.0)])
    (bucket,) = solve_op(runtime.device("cpu"), ops_table.get("rms_norm")).buckets
    assert bucket.kernel == "small.rms_norm" and bucket.ranges["N"] == (7, 32)
    asked = norm("rms_norm", 100, 64, "float32").request(runtime.device("cpu").hardware)
    wider = solve_op(runtime.device("cpu"), ops_table.get("rms_norm"), [asked]).buckets
    assert max(b.ranges["N"][1] for b in wider) == 128
