"""What ranks agree on: plans that come late, settings and memory that bound choices, modes that yield."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not declared

import layerzero as lz
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.memory import WorkspaceBudget
from layerzero.actors.group.config import GroupConfig
from layerzero.actors.group.plan import AgreedPlan
from layerzero.actors.group.rank_group import RankGroup
from layerzero.actors.group.steps import Steps
from layerzero.actors.remote.stores import TorchStore
from layerzero.ops import table as ops_table
from layerzero.spec.errors import ConfigurationError, ConsistencyError, DeviceLostError, NoKernelFoundError
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings
from tests.kernels import device, kernel

RMS = ops_table.get("rms_norm")
GIB = 1 << 30


def joined(own: list[LocalDevice], store: Any = None, **more: Any) -> list[Steps]:
    """One rank a device, all in this process."""
    store = store or TorchStore(HashStore())
    options: dict[str, Any] = {"timeout_s": 10.0, **more}
    groups = [
        RankGroup(each, store, GroupConfig(rank=rank, ranks=len(own), **options))
        for rank, each in enumerate(own)
    ]
    at_once(*(rank_group.join for rank_group in groups))
    return [Steps(rank_group) for rank_group in groups]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The result of each call, run in threads of their own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def two(**settings: Any) -> list[LocalDevice]:
    kernels = [kernel("a.rms_norm", launch_us=1.0), kernel("b.rms_norm", launch_us=9.0)]
    return [device(kernels, Settings(**settings)) for _ in range(2)]


def chosen(own: LocalDevice, snapshot: Any) -> str:
    return own.launch_planned(RMS, (torch.ones(2, 8), None, 1e-6), snapshot)[1].kernel


def without_a(steps: Steps, version: int, activate_at: int) -> AgreedPlan:
    """The plan in force less the kernel that it would choose."""
    old = steps.group.agreed_plan
    assert old is not None
    only = {group: ("b.rms_norm",) for group in old.kernels}
    return msgspec.structs.replace(old, version=version, kernels=only, activate_at=activate_at)


def step(first: Steps, other: Steps) -> tuple[str, str]:
    """The kernels that both ranks choose in their next step."""
    mine, (_, theirs) = first.start_step("step", ["a"]), other.next_step(10.0)
    return chosen(first.group.device, mine), chosen(other.group.device, theirs)


def close(*walks: Steps) -> None:
    for walk in walks:
        walk.close()


# -- plans that come late -------------------------------------------------------------------------------


def test_a_plan_that_is_agreed_after_its_step_holds_from_the_next() -> None:
    """Three steps were taken when the ranks agree on a plan for step 2: the fourth is the first under it."""
    first, other = joined(two())
    assert [step(first, other) for _ in range(3)] == [("a.rms_norm",) * 2] * 3
    plan = without_a(first, 2, 2)
    at_once(lambda: first.group.propose(plan), lambda: other.group.agree(2))
    assert step(first, other) == ("b.rms_norm",) * 2
    assert first.group.plan_digest == other.group.plan_digest
    close(first, other)


class Slow(TorchStore):
    """A store whose decision on plan 2 the follower sees only when `told` is set; `asked` says it waits."""

    def __init__(self) -> None:
        super().__init__(HashStore())
        self.asked, self.told = threading.Event(), threading.Event()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        if key.endswith("/2/outcome"):
            self.asked.set()
            self.told.wait(10.0)
        return super().get(key, timeout_s)


def test_a_follower_waits_for_the_outcome_that_rank_0_acts_on() -> None:
    """Rank 0 steps under the new plan while the follower has voted and not heard: it waits, and follows."""
    store = Slow()
    first, other = joined(two(), store)
    with ThreadPoolExecutor(3) as pool:
        proposed = pool.submit(first.group.propose, without_a(first, 2, 1))
        agreed = pool.submit(other.group.agree, 2)
        assert store.asked.wait(10.0)
        proposed.result(10.0)
        mine = first.start_step("step", ["a"])
        following = pool.submit(other.next_step, 10.0)
        assert not agreed.done() and not following.done()
        store.told.set()
        _, theirs = following.result(10.0)
    assert chosen(first.group.device, mine) == chosen(other.group.device, theirs) == "b.rms_norm"
    close(first, other)


def test_the_newest_of_two_plans_that_are_due_holds() -> None:
    """A plan for later that is overtaken by a newer one never comes."""
    first, other = joined(two())
    old = first.group.agreed_plan
    assert old is not None
    at_once(lambda: first.group.propose(without_a(first, 2, 3)), lambda: other.group.agree(2))
    newer = msgspec.structs.replace(old, version=3, activate_at=2)
    at_once(lambda: first.group.propose(newer), lambda: other.group.agree(3))
    assert [step(first, other) for _ in range(4)] == [("a.rms_norm",) * 2] * 4
    assert first.group.agreed_plan == other.group.agreed_plan == newer
    close(first, other)


def test_a_version_is_agreed_on_once() -> None:
    """The store keeps every outcome: a plan under a used version is refused before anybody waits."""
    first, other = joined(two())
    with pytest.raises(ConfigurationError, match="version needs to be above 1, got 1"):
        first.group.propose(without_a(first, 1, 5))
    with pytest.raises(ConfigurationError, match="version needs to be above 1, got 0"):
        other.group.agree(0)
    close(first, other)


def test_a_plan_that_nobody_voted_for_is_refused_at_once() -> None:
    """A step message under a plan of its own making fails the rank group without a wait."""
    first, other = joined(two(), timeout_s=600.0)
    first.group._schedule.add("elsewhere", 2, 1)
    first.group._plans["elsewhere"] = without_a(first, 2, 1)
    first.start_step("step", ["a"])
    with pytest.raises(ConsistencyError, match="plan of rank 0's step 1 needs 'elsewhere'"):
        other.next_step(10.0)
    close(first, other)


def test_a_follower_that_stalls_fails_the_gang_in_time() -> None:
    """It reads nothing: when its line is full, rank 0 waits as long as it was given and says whom for."""
    first, other = joined(two(), timeout_s=1.0)
    many = torch.zeros(1 << 16)
    with pytest.raises(DeviceLostError, match=r"rank 1 has taken nothing for 1 s and its line is full"):
        for _ in range(1000):
            first.start_step("step", ["a"], [many])
    assert first.group.failure is not None
    close(first, other)


# -- what bounds choices --------------------------------------------------------------------------------


def sized(kernel_id: str, workspace: int, us: float) -> Kernel:
    made = kernel(kernel_id, launch_us=us)
    object.__setattr__(made, "workspace_bytes", lambda request: workspace)
    return made


def roomy(free: int) -> LocalDevice:
    """A device with so much free memory, whose cheapest kernel wants 8 GiB of it."""
    own = device([sized("big.rms_norm", 8 * GIB, 0.1), sized("small.rms_norm", 0, 90.0)])
    own._inputs.budget = WorkspaceBudget(own.device, own.hardware, own.clock.now, lambda _: free)
    own.workspace_budget._total = 80 * GIB
    own.workspace_budget.refresh(own.settings)
    return own


@pytest.mark.parametrize("poor", [0, 1, 2])
def test_the_poorest_ranks_memory_bounds_every_rank(poor: int) -> None:
    """Alone the ranks choose apart; in the rank group all take what fits the least, and say whose memory it
    was."""
    own = [roomy(10 * GIB if rank == poor else 64 * GIB) for rank in range(3)]
    alone = ["small.rms_norm" if rank == poor else "big.rms_norm" for rank in range(3)]
    assert [chosen(each, None) for each in own] == alone
    walks = joined(own)
    assert [chosen(walk.group.device, walk.group.state_for()) for walk in walks] == ["small.rms_norm"] * 3
    for walk in walks:
        x = (torch.ones(2, 8), None, 1e-6)
        plan = walk.group.device.launch_planned(RMS, x, walk.group.state_for())[1]
        (reason,) = plan.selection.candidate("big.rms_norm").rejected
        assert reason.reason is lz.Reason.MEMORY_HEADROOM_EXCEEDED
        assert "at most 4.0 GiB (the least of any rank of the rank group), got 8.0 GiB" in str(reason)
        assert reason.counterfactual == "8.0 GiB of memory free on every rank"
    close(*walks)


def test_memory_that_nobody_knows_bounds_nothing() -> None:
    """Where no rank can say what is free, and no limit is set, every workspace is taken."""
    own = [roomy(0), roomy(0)]
    walks = joined(own)
    assert walks[0].group.agreed_plan is not None and walks[0].group.agreed_plan.memory is None
    assert chosen(own[1], walks[1].group.state_for()) == "big.rms_norm"
    close(*walks)


def test_rank_0s_settings_hold_for_all() -> None:
    """A rank with another default_gain would choose otherwise; training refuses it by name."""
    kernels = [kernel("a.rms_norm", launch_us=1.0), kernel("b.rms_norm", launch_us=1.01)]
    object.__setattr__(kernels[1], "default", True)
    own = [device(kernels, Settings(default_gain=gain, tie_band=0.0)) for gain in (0.0, 0.5)]
    assert [chosen(each, None) for each in own] == ["a.rms_norm", "b.rms_norm"]
    walks = joined(own)
    assert [chosen(walk.group.device, walk.group.state_for()) for walk in walks] == ["a.rms_norm"] * 2
    close(*walks)
    own = [device(kernels, Settings(default_gain=gain)) for gain in (0.0, 0.5)]
    with pytest.raises(ConsistencyError, match=r"rank 1 needs what rank 0 has, got other settings .*0\.5"):
        joined(own, mode="training")


def test_measurements_that_come_after_joining_change_no_choice() -> None:
    """One rank reads or makes measurements later: its own choices follow them, the rank group's do not."""
    walks = joined(two())
    own = walks[1].group.device
    own.set_costs(lambda kernel, *_: (1e9 if kernel.id == "a.rms_norm" else 1.0, "a test"))
    assert chosen(own, None) == "b.rms_norm"
    assert [chosen(walk.group.device, walk.group.state_for()) for walk in walks] == ["a.rms_norm"] * 2
    close(*walks)


# -- modes that yield -----------------------------------------------------------------------------------


def test_without_an_invariant_kernel_all_ranks_take_another_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Asked for and not to be had: one common choice and a warning on each; strict refuses instead."""
    walks = joined(two(), tp_invariant=True)
    with caplog.at_level(logging.WARNING, "layerzero"):
        assert [chosen(walk.group.device, walk.group.state_for()) for walk in walks] == ["a.rms_norm"] * 2
    warned = [
        record.getMessage() for record in caplog.records if "selection.without_mode" in record.getMessage()
    ]
    assert len(warned) == 2 and all("tp_invariant" in text for text in warned)
    close(*walks)
    strict = joined(two(strict=True), tp_invariant=True)
    with pytest.raises(NoKernelFoundError, match="TP_INVARIANCE_REQUIRED"):
        chosen(strict[0].group.device, strict[0].group.state_for())
    close(*strict)


def test_invariance_that_nobody_asked_for_bars_nobody() -> None:
    """A rank group that does not ask chooses as one device does."""
    kernels = [kernel("a.rms_norm", launch_us=1.0), kernel("b.rms_norm", launch_us=9.0, tp_invariant=True)]
    own = [device(kernels) for _ in range(2)]
    walks = joined(own)
    assert [chosen(walk.group.device, walk.group.state_for()) for walk in walks] == ["a.rms_norm"] * 2
    close(*walks)


# -- several models -------------------------------------------------------------------------------------


def test_models_of_one_gang_choose_apart_under_one_plan() -> None:
    """A choice for the draft is not the target's; a new plan holds for both from the same step."""
    first, other = joined(two())
    for walk in (first, other):
        walk.models.update(draft="draft", verify="target")
    mine, (_, theirs) = first.start_step("draft", ["a"]), other.next_step(10.0)
    assert chosen(first.group.device, mine) == chosen(other.group.device, theirs) == "a.rms_norm"
    assert first.group.selections_digest("draft") == other.group.selections_digest("draft") != ""
    assert first.group.selections_digest("target") == ""
    assert (
        first.group.state_for("target") is not mine
        and "rms_norm" not in first.group.state_for("target").tables
    )
    at_once(lambda: first.group.propose(without_a(first, 2, 2)), lambda: other.group.agree(2))
    for name in ("verify", "draft"):
        mine, (_, theirs) = first.start_step(name, ["a"]), other.next_step(10.0)
        assert chosen(first.group.device, mine) == chosen(other.group.device, theirs) == "b.rms_norm"
    close(first, other)


def test_a_models_choice_that_differs_is_noticed_at_its_next_step() -> None:
    """The digest of a step is that of its own model."""
    first, other = joined(two())
    for walk in (first, other):
        walk.models.update(draft="draft", verify="target")
    first.start_step("draft", ["a"])
    _, theirs = other.next_step(10.0)
    chosen(first.group.device, first.group.state_for("draft"))
    assert theirs.agreed_terms is not None
    theirs.agreed_terms.record_call("b.rms_norm")
    first.start_step("verify", ["a"])
    other.next_step(10.0)
    first.start_step("draft", ["a"])
    with pytest.raises(ConsistencyError, match="selections of rank 0's step 3"):
        other.next_step(10.0)
    close(first, other)
