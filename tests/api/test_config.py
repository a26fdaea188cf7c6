"""Locks that hold or raise, preferences of a block, policies that change while calls run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
import layerzero.sync
from layerzero.runtime import Runtime, current
from layerzero.selection.policy import Policy, make_rule
from layerzero.selection.policy.rules import Rule
from layerzero.spec.condition import Condition
from tests.clocks import FakeClock

X = torch.randn(3, 16)


@pytest.fixture(autouse=True)
def own_runtime() -> Iterator[Runtime]:
    """Nothing that a test configures reaches another."""
    with lz.start(lz.Settings(warm="off")) as opened:
        yield opened


def test_a_lock_holds() -> None:
    """A locked kernel serves every call that it can take; unlock gives the choice back."""
    free = lz.which("rms_norm", X)
    lz.lock("rms_norm", "reference.rms_norm")
    assert lz.which("rms_norm", X) == "reference.rms_norm"
    assert lz.get_locks() == {"rms_norm": "reference.rms_norm"}
    lz.unlock("rms_norm")
    assert lz.which("rms_norm", X) == free
    assert lz.get_locks() == {}


def test_a_lock_that_cannot_hold_raises() -> None:
    """K19: a CUDA kernel locked on the CPU is an error with its reason, never a silent fallback."""
    lz.lock("attention", "torch.attention.sdpa_flash")
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(
        lz.NoKernelFoundError, match=r"(?s)the lock .* cannot hold.*sdpa_flash: PLATFORM_MISMATCH"
    ):
        layerzero.sync.attention(q, q, q)


def test_a_lock_on_what_does_not_exist_raises_at_once() -> None:
    """Unknown op, unknown kernel: PolicyValidationError with near names, and nothing changed."""
    with pytest.raises(lz.PolicyValidationError, match="rms_norm"):
        lz.lock("rms_nrm", "reference.rms_norm")
    with pytest.raises(lz.PolicyValidationError, match=r"reference\.rms_norm"):
        lz.lock("rms_norm", "reference.rms_nrm")
    assert lz.get_locks() == {}


@pytest.mark.parametrize("scope", [lz.prefer, lz.disable])
def test_a_rule_for_an_op_that_does_not_exist_is_refused(scope: Any) -> None:
    """A name written wrong is no rule that says nothing; kernels of other machines may be named."""
    with lz.start(scoped=True):
        for wrong in ("rms_nrm", "rsm_*/causal"):
            with pytest.raises(lz.PolicyValidationError, match="unknown op"), scope("torch.*", op=wrong):
                pass
            rules: tuple[dict[str, Any], ...] = ({"deny": "torch.*"}, {"prefer": "torch.*"})
            for rule in rules:
                with pytest.raises(lz.PolicyValidationError, match="unknown op"):
                    lz.add_policy(**rule, op=wrong)
        with pytest.raises(lz.PolicyValidationError, match="prefer or deny, got neither"):
            lz.add_policy(op="rms_norm")
        with scope("gaudi.*", op="rms_*"), scope("torch.*", op="attention/causal"), scope("torch.*"):
            lz.add_policy(deny="gaudi.*", op="rms_norm")


def test_backend_for_one_call() -> None:
    """`backend=` is a lock of that call alone."""
    layerzero.sync.rms_norm(X, backend="reference")
    assert lz.last_selection().kernel == "reference.rms_norm"  # type: ignore[union-attr]
    layerzero.sync.rms_norm(X)
    assert lz.last_selection().kernel != "reference.rms_norm"  # type: ignore[union-attr]
    with pytest.raises(lz.PolicyValidationError, match="nonesuch"):
        layerzero.sync.rms_norm(X, backend="nonesuch")


def test_a_locked_kind_leaves_other_kinds_free() -> None:
    """`attention/causal` locks causal calls only."""
    q = torch.randn(1, 2, 4, 8)
    lz.lock("attention/causal", "reference.attention")
    assert lz.which("attention", q, q, q, is_causal=True) == "reference.attention"
    assert lz.which("attention", q, q, q) != "reference.attention"


def test_prefer_and_disabled_are_local_to_their_context() -> None:
    """Two tasks and a thread: a block's preference reaches none of the others."""
    free = lz.which("rms_norm", X)
    seen: dict[str, str] = {}

    async def inside(entered: asyncio.Event, leave: asyncio.Event) -> None:
        with lz.prefer("reference.*"):
            entered.set()
            await leave.wait()
            seen["inside"] = lz.which("rms_norm", X)
            with lz.disable("reference.*"):
                seen["nested"] = lz.which("rms_norm", X)

    async def main() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.ensure_future(inside(entered, leave))
        await entered.wait()
        seen["neighbour"] = lz.which("rms_norm", X)
        thread = threading.Thread(target=lambda: seen.setdefault("thread", lz.which("rms_norm", X)))
        thread.start()
        thread.join()
        leave.set()
        await task

    asyncio.run(main())
    assert seen == {"inside": "reference.rms_norm", "nested": free, "neighbour": free, "thread": free}


def test_disabled_without_names_leaves_the_references() -> None:
    """`disable()` is fallback only."""
    with lz.disable():
        assert lz.which("rms_norm", X) == "reference.rms_norm"


def test_awaited_calls_of_a_context_batch_under_its_policy() -> None:
    """Callers inside and outside of a block never share a launch."""
    weight = torch.randn(8, 16)

    async def one() -> str:
        await lz.linear(X, weight)
        return lz.last_selection().kernel  # type: ignore[union-attr]

    async def preferring() -> str:
        with lz.prefer("reference.*"):
            return await one()

    async def main() -> list[str]:
        return await asyncio.gather(*[preferring() if i % 2 else one() for i in range(16)])

    kernels = asyncio.run(main())
    assert set(kernels[1::2]) == {"reference.linear"}
    assert "reference.linear" not in kernels[::2]


@pytest.mark.parametrize("forked", [False, True], ids=["here", "child"])
def test_a_timeboxed_policy_ends_by_itself(forked: bool) -> None:
    """E19: after `for_s` the rule is gone, without a call in between, in a forked child too."""
    clock = FakeClock()
    runtime = Runtime(lz.Settings(warm="off"), clock=clock)
    rule = make_rule("lock", "reference.rms_norm", op="rms_norm", until=clock.now() + 60.0)
    runtime.set_program_policy(Policy((rule,)))
    device = runtime.device("cpu")
    if forked:
        clock._due.clear()  # the parent's timers
        runtime.reset_after_fork()
    generation = device.dispatch_version
    assert runtime.policy.rules
    clock.advance(59.0)
    assert device.dispatch_version == generation
    clock.advance(2.0)
    assert not runtime.policy.rules
    assert device.dispatch_version == generation + 1
    runtime.close()
    assert clock.waiting == 0


def test_a_broken_policy_file_changes_nothing(tmp_path: Path) -> None:
    """FS-018: the error names file and line; the policy in force stays."""
    good = tmp_path / "good.yaml"
    good.write_text("version: 1\nrules:\n  - lock: reference.rms_norm\n    op: rms_norm\n")
    lz.load_policy(good)
    assert lz.which("rms_norm", X) == "reference.rms_norm"
    bad = tmp_path / "bad.yaml"
    bad.write_text("version: 1\nrules:\n  - lok: torch\n    op: rms_norm\n")
    with pytest.raises(lz.PolicyLoadError, match="lok") as caught:
        lz.load_policy(bad)
    assert caught.value.line == 3 and f"{bad}:3: " in str(caught.value)
    assert lz.which("rms_norm", X) == "reference.rms_norm"


def test_an_unknown_setting_is_refused_with_near_names() -> None:
    """Nothing is changed by a call that is refused."""
    before = lz.get_config()
    with pytest.raises(lz.ConfigurationError, match="tie_band"):
        lz.configure(tie_bnd=0.1)
    assert lz.get_config() is before
    assert lz.configure(tie_band=0.1).tie_band == 0.1


def test_a_policy_swapped_under_load_is_always_a_whole_policy() -> None:
    """CS-031: 1,000 live keys, 8 readers, hundreds of swaps: every choice obeys one of the two policies."""
    runtime = current()
    inputs = [torch.randn(rows, 16) for rows in range(1, 126)]
    kernels = ("torch.rms_norm.native", "reference.rms_norm")
    policies = [Policy((make_rule("lock", name, op="rms_norm"),)) for name in kernels]
    runtime.set_program_policy(policies[0])
    wrong: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for x in inputs:
                selection = lz.select("rms_norm", x)
                if selection.kernel not in kernels or "locked by" not in selection.why:
                    wrong.append(selection.kernel)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for number in range(200):
        runtime.set_program_policy(policies[number % 2])
        assert lz.which("rms_norm", inputs[number % 125]) == kernels[number % 2]
        time.sleep(0.002)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_quarantine_is_remembered_and_lifted(tmp_path: Path) -> None:
    """A quarantined kernel stays out in the next runtime of the same environment, until it is lifted."""
    with lz.start(lz.Settings(state_dir=str(tmp_path)), scoped=True) as first:
        chosen = lz.which("rms_norm", X)
        first.quarantine(chosen, "wrong by one percent")
        other = lz.which("rms_norm", X)
        assert other != chosen
        with pytest.raises(KeyError, match="nonesuch"):
            first.quarantine("nonesuch", "")
    with lz.start(lz.Settings(state_dir=str(tmp_path)), scoped=True) as second:
        explained = lz.explain("rms_norm", X).selection
        assert explained.kernel == other
        reasons = explained.candidate(chosen).rejected
        assert [r.reason for r in reasons] == [lz.Reason.QUARANTINED]
        assert "wrong by one percent" in str(reasons[0])
        second.lift(chosen)
        assert lz.which("rms_norm", X) == chosen
    with lz.start(lz.Settings(state_dir=str(tmp_path)), scoped=True):
        assert lz.which("rms_norm", X) == chosen


@pytest.mark.parametrize(
    ("batching", "linear", "attention"),
    [("all", {8: 1}, {8: 1}), ("rows", {8: 1}, {1: 8}), ("off", {1: 8}, {1: 8})],
)
def test_batching_can_be_off_or_for_rows_only(
    batching: str, linear: dict[int, int], attention: dict[int, int]
) -> None:
    """`Settings.batching` decides which ops may share launches."""
    weight, q = torch.randn(8, 16), torch.randn(1, 2, 4, 8)

    async def sizes(awaitables: Sequence[Awaitable[object]]) -> dict[int, int]:
        await asyncio.gather(*awaitables)
        found: dict[int, int] = current_runtime.device("cpu").loop_drivers.stats().sizes
        return found

    for op, expected in (("linear", linear), ("attention", attention)):
        with lz.start(lz.Settings(batching=batching), scoped=True) as current_runtime:  # type: ignore[arg-type]
            calls = [lz.linear(X, weight) if op == "linear" else lz.attention(q, q, q) for _ in range(8)]
            assert asyncio.run(sizes(calls)) == expected


@pytest.mark.timeout(420)  # it compiles every kernel there is
def test_eager_warming_leaves_nothing_cold() -> None:
    """warm="eager": when the device is there, its kernels are loaded or blocked with a reason, no others."""
    with lz.start(lz.Settings(warm="eager"), scoped=True) as runtime:
        registry = runtime.device("cpu").registry
        elsewhere = {k.id for k in registry.all() if k.slow_import and "cpu" not in k.capability.platforms}
        assert registry.unready() - elsewhere <= registry.blocked().keys()
        assert elsewhere and elsewhere <= registry.unready()


def test_eager_warming_loads_nothing_that_the_policy_denies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that no request can get is not compiled before start returns; one that some can get is."""
    monkeypatch.setenv("LAYERZERO_DENY", "native.*,zentorch.*,triton.*,onednn.*")
    with lz.start(lz.Settings.load(warm="eager", device="cpu"), scoped=True) as runtime:
        registry = runtime.device("cpu").registry
        denied = {k.id for k in registry.all() if k.slow_import and k.id.startswith("native.")}
        assert denied and denied <= registry.unready()
    denial = Rule(action="deny", patterns=("native.*",))
    only_long = Rule(action="deny", patterns=("native.*",), when=(Condition("T", ">", 9),))
    lock = Rule(action="lock", patterns=("native.mlp.cpu",), op="mlp")
    for rules, expected in (((denial,), True), ((only_long,), False), ((denial, lock), False)):
        assert Policy(rules).always_denies("native.mlp.cpu", "native", "mlp") is expected
    assert not Policy((denial,)).always_denies("torch.mlp", "torch", "mlp")


def test_a_cluster_is_refused_by_name() -> None:
    """What this version does not do is an error, not a silence."""
    with (
        pytest.raises(lz.ConfigurationError, match="cluster"),
        lz.start(lz.Settings(cluster="auto"), scoped=True),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster": "auto"}, "cluster is read when a runtime opens"),
        ({"cluster_devices": 2}, "cluster_devices is read when a runtime opens"),
        ({"freeze_gc": True}, "freeze_gc is read when a runtime opens"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "cuda:999"}, "device needs"),
        ({"device": "gpu"}, 'device needs "auto", "cpu", "cuda" or "cuda:<index>", got'),
        ({"device": "cuda:-1"}, "device needs"),
    ],
)
def test_a_change_that_could_not_take_hold_is_refused(changes: dict[str, Any], said: str) -> None:
    """And changes nothing."""
    with lz.start(lz.Settings(), scoped=True) as runtime:
        before = runtime.settings
        with pytest.raises(lz.ConfigurationError, match=said):
            lz.configure(**changes)
        assert runtime.settings is before


def test_what_is_no_argument_at_all_is_refused_by_name() -> None:
    """Instead of an error out of the inside that names nothing."""
    x = torch.ones(2, 4)
    anything: Any = 3
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: lz.start(anything), TypeError, "settings needs layerzero.Settings, got int"),
        (lambda: lz.which(anything, x), TypeError, "op needs an op's name, got int"),
        (lambda: lz.dry_run("rms_norm", x, hardware=anything), TypeError, "hardware needs a Hardware"),
        (lambda: lz.compile(anything), TypeError, "fn needs a function, got int"),
        (lambda: lz.tree_mask(anything), TypeError, "parents needs a sequence of ints, got int"),
        (lambda: lz.warmup_blocking(anything), TypeError, "manifest needs a Manifest"),
        (lambda: lz.lock("rms_norm", anything), lz.PolicyValidationError, "lock needs a glob"),
        (lambda: lz.lock("rms_norm", "torch", when=anything), lz.PolicyValidationError, "when needs a"),
    ]
    for call, error, said in cases:
        with pytest.raises(error, match=said):
            call()
