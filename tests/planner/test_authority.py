"""What a plan follows from: policy, health, formats, captures; and its file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz
from layerzero.planner.planned import PlannedBlock
from layerzero.planner.search import CoverProblem, search
from layerzero.runtime import Runtime, install, uninstall
from layerzero.selection.context import AgreedState
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.modes import CAPTURE
from layerzero.spec.kernel import Kernel
from tests.kernels import kernel
from tests.planner.blocks import WIDTH, decoder, feed_forward, rows, weight

X, RESIDUAL = rows(), rows(seed=3)


@pytest.fixture
def opened() -> Iterator[Callable[..., Runtime]]:
    """Opens a runtime of these kernels; closed at the end."""
    runtimes: list[Runtime] = []

    def start(made: list[Kernel], **settings: Any) -> Runtime:
        chosen = lz.Settings(perfdb=None, shipped_tables=False, warm="off", **settings)
        runtime = Runtime(chosen, kernels=lambda: made)
        runtime.started = True
        install(runtime)
        runtimes.append(runtime)
        return runtime

    yield start
    for runtime in runtimes:
        uninstall(runtime)
        runtime.close()


def kernels_of(planned: PlannedBlock) -> list[str]:
    """The kernels of a plan's steps."""
    return [step.kernel for step in planned.record.steps if step.kernel]


def test_a_kernel_that_is_denied_later_is_not_run_again() -> None:
    """A denial of a plan's kernel makes the next call plan anew, without it."""
    block = feed_forward()
    with lz.start(scoped=True), torch.no_grad():
        planned = lz.plan(block, X, RESIDUAL)
        denied = next(k for k in kernels_of(planned) if ".add_rms_norm" in k)
        expected = planned(X, RESIDUAL)
        lz.add_policy(deny=denied)
        result = planned(X, RESIDUAL)
        assert denied not in kernels_of(planned)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        before = kernels_of(planned)
        with lz.disable("torch", op="linear"):
            planned(X, RESIDUAL)
            assert not any(k.startswith("torch.linear") for k in kernels_of(planned))
        planned(X, RESIDUAL)
        assert kernels_of(planned) == before


def test_an_op_that_is_denied_later_is_an_error_with_its_code() -> None:
    """Where no kernel of an op may run any more, the next call says so, with the code of each reason."""
    block = feed_forward()
    with lz.start(scoped=True), torch.no_grad():
        planned = lz.plan(block, X, RESIDUAL)
        with lz.disable("*", op="linear"), lz.disable("*", op="mlp"):
            with pytest.raises(lz.NoKernelFoundError, match="POLICY_DENIED") as caught:
                planned(X, RESIDUAL)
            reasons = {r.reason.value for c in caught.value.trace for r in c.rejected}
        assert "POLICY_DENIED" in reasons
        planned(X, RESIDUAL)


def test_a_change_that_decides_nothing_keeps_the_plan() -> None:
    """A policy about another op leaves the program as it is; nothing is planned twice."""
    block = feed_forward()
    with lz.start(scoped=True), torch.no_grad():
        planned = lz.plan(block, X, RESIDUAL)
        planned(X, RESIDUAL)
        before = planned._last
        lz.add_policy(deny="torch.*", op="embedding")
        planned(X, RESIDUAL)
        assert planned._last is before


def test_a_lock_holds_in_a_plan() -> None:
    """Every step of a locked op runs on the locked kernel, and `backend=` on the one it names."""

    def block(x: Tensor, residual: Tensor) -> Tensor:
        return lz.sync.rms_norm(lz.sync.rms_norm(x + residual), backend="torch")

    with lz.start(scoped=True), torch.no_grad():
        lz.lock("rms_norm", "reference")
        lz.lock("add_rms_norm", "reference")
        planned = lz.plan(block, X, RESIDUAL)
        assert set(kernels_of(planned)) <= {
            "reference.rms_norm",
            "reference.add_rms_norm",
            "torch.rms_norm.native",
        }
        assert kernels_of(planned)[-1] == "torch.rms_norm.native"
        torch.testing.assert_close(planned(X, RESIDUAL), block(X, RESIDUAL))


def test_a_kernel_that_fails_is_replaced_within_the_call(opened: Callable[..., Runtime]) -> None:
    """A step whose kernel raises is answered by the next kernel of its op, and the failure is counted."""

    def broken(*args: Any) -> Any:
        raise RuntimeError("planted")

    runtime = opened([kernel("bad.rms_norm", broken, launch_us=1.0), kernel("good.rms_norm", launch_us=9.0)])
    planned = lz.plan(lambda x: lz.sync.rms_norm(x) * 2, X)
    assert kernels_of(planned) == ["bad.rms_norm"]
    torch.testing.assert_close(planned(X), lz.sync.rms_norm(X, backend="good") * 2)
    assert any(s.name == "fallbacks" for s in runtime.device().counters.snapshot())


def test_a_kernel_that_does_not_load_leaves_its_step_to_the_next(opened: Callable[..., Runtime]) -> None:
    """The plan that is made meanwhile holds the op's next kernel; what is planned later knows of it."""

    def load() -> Any:
        raise ImportError("no such library")

    opened([kernel("gone.rms_norm", load=load, launch_us=1.0), kernel("good.rms_norm", launch_us=9.0)])
    planned = lz.plan(lambda x: lz.sync.rms_norm(x) * 2, X)
    for _ in range(2):
        torch.testing.assert_close(planned(X), lz.sync.rms_norm(X, backend="good") * 2)
    assert kernels_of(planned) == ["good.rms_norm"]


def test_an_operand_is_made_dense_once_for_all_that_need_it(opened: Callable[..., Runtime]) -> None:
    """Two fast kernels that need dense rows share one copy, which alone would pay for neither."""
    opened([kernel("dense.rms_norm", launch_us=1.0, contiguous=True), kernel("any.rms_norm", launch_us=2.5)])
    strided = rows(3, 2 * WIDTH)[:, ::2]

    def block(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(lz.sync.rms_norm(x, eps=eps) for eps in (1e-6, 1e-3, 0.1))

    alone, together = lz.plan(lambda x: lz.sync.rms_norm(x), strided), lz.plan(block, strided)
    assert kernels_of(alone) == ["any.rms_norm"]
    assert kernels_of(together) == ["dense.rms_norm"] * 3
    assert len(together.record.conversions) == 1
    assert together.record.transform_cost_total == together.record.conversions[0].cost_us > 0
    for got, wanted in zip(together(strided), block(strided), strict=True):
        torch.testing.assert_close(got, wanted)


def test_operands_that_an_op_refuses_together_are_passed_over(opened: Callable[..., Runtime]) -> None:
    """Keys that a rotation leaves in float32 beside values in bfloat16 are no call of the append."""
    opened(
        [kernel("wide.rope", launch_us=1.0, dtypes=frozenset({"float32"})),
         kernel("any.append_kv", layouts=frozenset({"NHD"}))]
    )  # fmt: skip
    cos, sin = lz.rope_tables(16, 8)
    k_cache, v_cache = (torch.zeros(2, 16, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    q, v = (torch.randn(3, heads, 16).to(torch.bfloat16) for heads in (4, 2))

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = lz.sync.rope(q, k, torch.arange(3), cos, sin)
        lz.sync.append_kv(k, v, k_cache, v_cache, torch.arange(3))
        return q

    planned = lz.plan(block, q, v * 2, v)
    assert kernels_of(planned) == ["wide.rope", "any.append_kv"]
    torch.testing.assert_close(planned(q, v * 2, v), block(q, v * 2, v))
    assert torch.equal(v_cache[0, :3], v)


@pytest.mark.parametrize("is_held", [False, True])
def test_what_is_converted_before_a_write_is_converted_again_behind_it(
    opened: Callable[..., Runtime], is_held: bool
) -> None:
    """A pool that is read dense is made dense anew once it is written, held by the block or given to it."""
    opened(
        [kernel("any.append_kv"), kernel("dense.rms_norm", launch_us=1.0, contiguous=True),
         kernel("any.rms_norm", launch_us=90.0)]
    )  # fmt: skip
    whole = torch.rand(2, 16, 2, 32) + 1
    pool, values = whole[..., :16], torch.zeros(2, 16, 2, 16)
    keys, slots = torch.zeros(3, 2, 16), torch.arange(3)

    def block(keys: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        k_cache = given[0] if given else pool
        before = lz.sync.rms_norm(k_cache)
        lz.sync.append_kv(keys, keys, k_cache, values, slots)
        return before, lz.sync.rms_norm(k_cache)

    args = (keys,) if is_held else (keys, pool)
    start = whole.clone()
    planned = lz.plan(block, *args)
    assert kernels_of(planned).count("dense.rms_norm") == 2
    assert len(planned.record.conversions) == 2
    result = planned(*args)
    whole.copy_(start)
    for got, wanted in zip(result, block(*args), strict=True):
        torch.testing.assert_close(got, wanted)


def test_strict_mode_converts_nothing(opened: Callable[..., Runtime]) -> None:
    """Under strict no value is copied or cast for a kernel, whatever it would gain."""
    opened(
        [kernel("dense.rms_norm", launch_us=1.0, contiguous=True), kernel("any.rms_norm", launch_us=90.0)],
        strict=True,
    )
    planned = lz.plan(lambda x: lz.sync.rms_norm(x), rows(3, 2 * WIDTH)[:, ::2])
    assert kernels_of(planned) == ["any.rms_norm"]
    assert planned.record.transform_cost_total == 0


def test_a_dtype_is_kept_wide_between_kernels_that_need_it_wide(opened: Callable[..., Runtime]) -> None:
    """Where two ops in a row only have kernels for float32, the value between them is not cast back."""
    opened([kernel("wide.rms_norm", dtypes=frozenset({"float32"}), mixed_dtypes=False)])
    x = rows(dtype=torch.bfloat16)
    planned = lz.plan(lambda x: lz.sync.rms_norm(lz.sync.rms_norm(x, eps=0.5)), x)
    assert [(c.before.split()[0], c.after.split()[0]) for c in planned.record.conversions] == [
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
    ]
    result = planned(x)
    assert result.dtype is torch.bfloat16
    wide = lz.sync.rms_norm(lz.sync.rms_norm(x.float(), eps=0.5)).to(torch.bfloat16)
    assert torch.equal(result, wide)


def test_attention_reads_the_layout_that_its_operands_have(opened: Callable[..., Runtime]) -> None:
    """A kernel for dense tokens before heads takes transposed views of such tensors without a copy."""
    opened([kernel("tokens.attention", layouts=frozenset({"BSHD"}), contiguous=True)])

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = lz.sync.attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return mixed.transpose(1, 2).reshape(2, 6, -1)

    args = tuple(torch.randn(2, 6, 4, 8) for _ in range(3))
    planned = lz.plan(block, *args)
    assert not planned.record.conversions
    assert planned.record.transform_cost_total == pytest.approx(1.5)
    q, k, v = (t.transpose(1, 2) for t in args)
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(planned(*args), expected.reshape(2, 6, -1), rtol=1e-4, atol=1e-4)


def test_equal_layers_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one shape with weights of their own share the decision, and each keeps its weights."""
    calls: list[CoverProblem] = []

    def counted(problem: CoverProblem, *rest: Any) -> Any:
        calls.append(problem)
        return search(problem, *rest)

    monkeypatch.setattr("layerzero.planner.planned.search", counted)

    def layer(seed: int) -> Callable[[Tensor], Tensor]:
        first, second = weight(16, WIDTH, seed=seed), weight(16, WIDTH, seed=seed + 1)
        return lambda x: F.linear(x, first) + F.linear(x, second)

    with lz.start(scoped=True), torch.no_grad():
        layers = [layer(seed) for seed in range(4)]
        planned = [lz.plan(fn, X) for fn in layers]
        warm = len(calls)
        fresh = [PlannedBlock(fn) for fn in layers]
        for fn, one, other in zip(layers, planned, fresh, strict=True):
            torch.testing.assert_close(one(X), fn(X), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(other(X), fn(X), rtol=1e-4, atol=1e-4)
        assert len(calls) == warm
        assert len({one.record.digest for one in planned}) == 1


def test_a_compiled_step_runs_by_plans() -> None:
    """`lz.compile` of a planned block runs a plan for each bucket, and gives the block's rows."""
    layer, args = decoder()
    with lz.start(scoped=True), torch.no_grad():
        expected = layer(*args)
        step = lz.compile(lz.plan(layer, *args), buckets=(4,), fill={"slots": 127})
        torch.testing.assert_close(step(*args), expected, rtol=1e-4, atol=1e-4)
        assert step.buckets == (4,)


def always(state: DispatchState, *_: object) -> DispatchState:
    """The state of a rank group's step, whatever is asked."""
    return state


def test_ranks_of_a_group_run_one_plan() -> None:
    """Plans made under agreed terms have one digest, and count each step towards the group's comparison."""
    block = feed_forward()
    with lz.start(scoped=True) as runtime, torch.no_grad():
        device = runtime.device()
        ready = frozenset(k.id for k in device.kernels()) - device.registry.unready()
        digests = []
        for _ in range(2):
            terms = AgreedState(ready)
            state = device.agreed_snapshot(device.snapshot.policy, terms)
            planned = PlannedBlock(block)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("layerzero.planner.planned.context_snapshot", partial(always, state))
                planned(X, RESIDUAL)
                with pytest.raises(lz.ConfigurationError, match="measure needs one process"):
                    lz.plan(block, X, RESIDUAL, measure=True)
            digests.append((planned.record.digest, terms.digest))
        assert digests[0] == digests[1]
        assert digests[0][1] != AgreedState(ready).digest


def test_a_measured_plan_is_the_fastest_of_those_timed() -> None:
    """`measure` times plans with other fusions beside the best one, and keeps the one of the least median."""
    block = feed_forward()
    with lz.start(scoped=True), torch.no_grad():
        planned = lz.plan(block, X, RESIDUAL, measure=True)
        measured_us = planned.record.measured_us
        assert "none" in measured_us
        fastest = min(measured_us, key=lambda name: measured_us[name])
        used = sorted(step.fusion for step in planned.record.steps if step.fusion)
        assert ", ".join(f"{used.count(kind)} {kind}" for kind in dict.fromkeys(used)) == fastest.replace(
            "none", ""
        )
        torch.testing.assert_close(planned(X, RESIDUAL), block(X, RESIDUAL), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("aten.add_", lambda x: x.add_(1)),
        ("BLOCK_NOT_TRACEABLE", lambda x: x * 2 if x.sum() > 0 else x),
        ("BLOCK_NOT_TRACEABLE", lambda x: x[: int(x.sum().item())]),
    ],
)
def test_what_cannot_be_traced_is_said(words: str, make: Callable[[Tensor], Tensor]) -> None:
    """A function that writes in place or looks at numbers is refused, with a reason code."""
    with lz.start(scoped=True), pytest.raises(lz.BlockError, match=words) as caught:
        lz.plan(make, X)
    assert caught.value.problem.reason.value in {"BLOCK_OP_WRITES", "BLOCK_NOT_TRACEABLE"}


# -- files ---------------------------------------------------------------------------------------------------


def saved(path: Path) -> Callable[..., Any]:
    """A block whose plan is in a file."""
    block = feed_forward()
    with torch.no_grad():
        lz.plan(block, X, RESIDUAL).save(path)
    return block


def test_a_plan_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    """A loaded plan has the digest of the saved one, gives its numbers, and is not searched for."""
    path = tmp_path / "plans.json"
    block = feed_forward()
    with lz.start(scoped=True), torch.no_grad():
        planned = lz.plan(block, X, RESIDUAL)
        planned.save(path)
        loaded = lz.load_plan(path, block, X, RESIDUAL)
        assert loaded.record.digest == planned.record.digest
        torch.testing.assert_close(loaded(X, RESIDUAL), planned(X, RESIDUAL))


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a file of plans as someone with an editor would."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("PLAN_FORMAT", lambda d: d.update(format=0)),
        ("PLAN_FORMAT", lambda d: d.pop("plans")),
        ("PLAN_DAMAGED", lambda d: d["plans"][0].update(block="0")),
        ("PLAN_DAMAGED", lambda d: d["plans"].clear()),
        ("PLAN_DAMAGED", lambda d: d.update(more=1)),
        ("PLAN_ENVIRONMENT_DIFFERS", lambda d: d["hardware"].update(torch="1.0.0")),
        ("PLAN_ENVIRONMENT_DIFFERS", lambda d: d.update(capabilities="0")),
    ],
)
def test_a_file_that_does_not_hold_is_refused_by_name(
    tmp_path: Path, code: str, change: Callable[[dict[str, Any]], object]
) -> None:
    """An old, altered or foreign file is refused with its path and a reason code."""
    path = tmp_path / "plans.json"
    with lz.start(scoped=True), torch.no_grad():
        block = saved(path)
        changed(path, change)
        with pytest.raises(lz.PlanRefusedError, match=code) as caught:
            lz.load_plan(path, block, X, RESIDUAL)
    assert str(path) in str(caught.value)
    assert caught.value.path == str(path)
    assert caught.value.problems[0].reason.value == code


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    """Wherever a file ends too early, it is refused as damaged."""
    path = tmp_path / "plans.json"
    with lz.start(scoped=True), torch.no_grad():
        block = saved(path)
        whole = path.read_bytes()
        for length in range(0, len(whole) - 2, len(whole) // 12):
            path.write_bytes(whole[:length])
            with pytest.raises(lz.PlanRefusedError, match="PLAN_DAMAGED"):
                lz.load_plan(path, block, X, RESIDUAL)


def test_another_block_other_sizes_or_another_policy_are_refused(tmp_path: Path) -> None:
    """A plan of another block, of other sizes or under another policy is refused, each with its code."""
    path = tmp_path / "plans.json"
    with lz.start(scoped=True), torch.no_grad():
        block = saved(path)
        with pytest.raises(lz.PlanRefusedError, match="PLAN_BLOCK_DIFFERS"):
            lz.load_plan(path, lambda x, y: lz.sync.rms_norm(x + y), X, RESIDUAL)
        with pytest.raises(lz.PlanRefusedError, match="PLAN_BLOCK_DIFFERS"):
            lz.load_plan(path, block, rows(9), rows(9))
        lz.add_policy(deny="torch.*", op="embedding")
        with pytest.raises(lz.PlanRefusedError, match="PLAN_POLICY_DIFFERS"):
            lz.load_plan(path, block, X, RESIDUAL)


def test_a_kernel_out_of_service_is_named(tmp_path: Path) -> None:
    """A plan that names a kernel which rests is refused with the kernel and why."""
    path = tmp_path / "plans.json"
    with lz.start(scoped=True) as runtime, torch.no_grad():
        block = feed_forward()
        planned = lz.plan(block, X, RESIDUAL)
        planned.save(path)
        name = next(k for k in kernels_of(planned) if ".add_rms_norm" in k)
        for _ in range(20):
            runtime.device().health.failure(name, "planted")
        with pytest.raises(
            lz.PlanRefusedError, match=f"PLAN_KERNEL_REFUSED.*{name}.*CIRCUIT_OPEN|QUARANTINED"
        ):
            lz.load_plan(path, block, X, RESIDUAL)


def test_a_kernel_that_rests_after_a_plan_was_loaded_is_planned_around(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls go on without it, and say that the file is not followed; once it serves again, the file is."""
    path = tmp_path / "plans.json"
    with lz.start(scoped=True) as runtime, torch.no_grad():
        block, health = saved(path), runtime.device().health
        loaded = lz.load_plan(path, block, X, RESIDUAL)
        expected, before = loaded(X, RESIDUAL), kernels_of(loaded)
        name = next(k for k in before if ".add_rms_norm" in k)
        health.quarantine(name, "planted")
        torch.testing.assert_close(loaded(X, RESIDUAL), expected, rtol=1e-4, atol=1e-4)
        assert name not in kernels_of(loaded)
        assert "plan.file_not_followed" in caplog.text and name in caplog.text
        health.lift(name)
        torch.testing.assert_close(loaded(X, RESIDUAL), expected, rtol=1e-4, atol=1e-4)
        assert kernels_of(loaded) == before


class Prices:
    """The costs of ops, in microseconds."""

    def __init__(self, **us: float) -> None:
        self.us = us

    def __call__(self, kernel: Kernel, *_: object) -> tuple[float, str]:
        return self.us[kernel.op], "measured"

    def fingerprint(self, op: str) -> object:
        """Equal for equal prices."""
        return self.us.get(op)


def test_a_file_decides_for_its_own_block_alone(tmp_path: Path, opened: Callable[..., Runtime]) -> None:
    """What is planned beside a loaded plan is searched for, by the prices of now."""
    device = opened([kernel("one.rms_norm"), kernel("one.add_rms_norm")]).device()
    path, block = tmp_path / "plans.json", lambda x, residual: lz.sync.rms_norm(x + residual)
    device.set_costs(Prices(rms_norm=1.0, add_rms_norm=0.5))
    lz.plan(block, X, RESIDUAL).save(path)
    device.set_costs(Prices(rms_norm=1.0, add_rms_norm=500.0))
    assert kernels_of(lz.load_plan(path, block, X, RESIDUAL)) == ["one.add_rms_norm"]
    beside = lz.plan(block, rows(9), rows(9))
    beside(X, RESIDUAL)
    assert kernels_of(beside) == ["one.rms_norm"]


def test_a_capture_runs_what_was_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a capture a rehearsed plan is run though a kernel came since; without one it is said."""
    block, other = feed_forward(), rows(9)
    with lz.start(scoped=True) as runtime, torch.no_grad():
        device = runtime.device()
        monkeypatch.setattr(device, "mode", lambda: CAPTURE)
        planned = PlannedBlock(block)
        with lz.rehearse_capture():
            planned(X, RESIDUAL)
        before = planned._last
        lz.add_policy(deny="native.*")
        planned(X, RESIDUAL)
        assert planned._last is before
        with pytest.raises(lz.CudaGraphUnsafeError, match="needs a plan from before it"):
            planned(other, other)
