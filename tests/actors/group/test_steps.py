"""Rank groups of threads and processes in one machine: joining, agreeing, stepping, failing."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not declared

import layerzero as lz
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.group.channel import FollowerChannel, LeaderChannel
from layerzero.actors.group.config import GroupConfig
from layerzero.actors.group.plan import AgreedPlan, RankProfile, common_plan, profile_of
from layerzero.actors.group.rank_group import RankGroup
from layerzero.actors.group.step_message import (
    MAX_VALUES,
    StepSequence,
    check_sendable,
    decode,
    encode,
    pack,
    unpack,
)
from layerzero.actors.group.steps import Steps
from layerzero.actors.remote.stores import TorchStore
from layerzero.ops import table as ops_table
from layerzero.selection.cost.measured import MeasuredCosts, SourcedMeasurement
from layerzero.selection.cost.roofline import MEASURED
from layerzero.selection.policy import EMPTY, Policy, make_rule
from layerzero.spec.errors import ConfigurationError, ConsistencyError, DeviceLostError, KernelExecutionError
from tests import children
from tests.kernels import device, kernel
from tests.perfdb.rows import row

RMS = ops_table.get("rms_norm")


def group_of(devices: list[LocalDevice], **more: Any) -> list[RankGroup]:
    """One rank a device, joined, all in this process."""
    store = TorchStore(HashStore())
    groups = [
        RankGroup(each, store, GroupConfig(rank=rank, ranks=len(devices), timeout_s=5.0, **more))
        for rank, each in enumerate(devices)
    ]
    at_once([rank_group.join for rank_group in groups])
    return groups


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """The result of each call, run in threads of their own; the first error is raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def two(kernel_ids: tuple[str, ...] = ("a.rms_norm", "b.rms_norm")) -> list[LocalDevice]:
    return [device([kernel(k, launch_us=1.0 + n) for n, k in enumerate(kernel_ids)]) for _ in range(2)]


def chosen(own: LocalDevice, snapshot: Any) -> str:
    x = torch.ones(2, 8)
    return own.launch_planned(RMS, (x, None, 1e-6), snapshot)[1].kernel


# -- joining --------------------------------------------------------------------------------------------


def test_ranks_that_are_alike_share_a_plan() -> None:
    """Every rank holds the same plan under the same digest."""
    groups = group_of(two())
    assert groups[0].agreed_plan == groups[1].agreed_plan
    assert groups[0].plan_digest == groups[1].plan_digest != ""
    assert set(next(iter(groups[0].agreed_plan.kernels.values()))) == {"a.rms_norm", "b.rms_norm"}  # type: ignore[union-attr]
    for rank_group in groups:
        rank_group.close()


def test_a_kernel_that_one_rank_lacks_is_chosen_by_none() -> None:
    """The cheaper kernel is on rank 0 alone: both take the one they have in common."""
    own = [device([kernel("a.rms_norm", launch_us=1.0), kernel("b.rms_norm", launch_us=9.0)])]
    own.append(device([kernel("b.rms_norm", launch_us=9.0)]))
    groups = group_of(own)
    assert [chosen(rank_group.device, rank_group.state_for()) for rank_group in groups] == ["b.rms_norm"] * 2
    assert chosen(own[0], None) == "a.rms_norm"  # outside the rank group nothing changed
    for rank_group in groups:
        rank_group.close()


def test_training_mode_refuses_ranks_that_differ_on_every_rank() -> None:
    """A difference that inference would work around ends the start, with the same error everywhere."""
    own = [device([kernel("a.rms_norm"), kernel("b.rms_norm")]), device([kernel("b.rms_norm")])]
    store = TorchStore(HashStore())
    groups = [
        RankGroup(own[r], store, GroupConfig(rank=r, ranks=2, mode="training", timeout_s=5.0))
        for r in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        errors = [future.exception() for future in [pool.submit(rank_group.join) for rank_group in groups]]
    assert [type(error) for error in errors] == [ConsistencyError] * 2
    assert "a.rms_norm" in str(errors[0]) and str(errors[0]) == str(errors[1])
    for rank_group in groups:
        rank_group.close()


def test_rank_0s_policy_holds_for_all() -> None:
    """A follower without the rule obeys it inside the rank group."""
    own = two()
    own[0].set_policy(Policy((make_rule("deny", "a.rms_norm", op="rms_norm"),)))
    groups = group_of(own)
    assert [chosen(rank_group.device, rank_group.state_for()) for rank_group in groups] == ["b.rms_norm"] * 2
    for rank_group in groups:
        rank_group.close()


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    """No silent hang: the missing rank and the time stand in the error."""
    rank_group = RankGroup(two()[0], TorchStore(HashStore()), GroupConfig(rank=0, ranks=2, timeout_s=0.1))
    with pytest.raises(DeviceLostError, match=r"rank 1 did not join the rank group of 2 within 0.1 s"):
        rank_group.join()


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_gang_is_refused(rank: int, ranks: int) -> None:
    """The message says which ranks there are."""
    with pytest.raises(ConfigurationError, match="rank needs 0 to"):
        RankGroup(two()[0], TorchStore(HashStore()), GroupConfig(rank=rank, ranks=ranks))


def test_a_mode_that_is_none_is_refused() -> None:
    """Only inference and training exist."""
    with pytest.raises(ConfigurationError, match="mode needs 'inference' or 'training', got 'both'"):
        RankGroup(two()[0], TorchStore(HashStore()), GroupConfig(rank=0, ranks=1, mode="both"))  # type: ignore[arg-type]


def profile(rank: int, **more: Any) -> RankProfile:
    base = RankProfile(rank, "cpu", {"torch": "2.13"}, {"a": "1", "b": "1"}, "", "c0", 100)
    return msgspec.structs.replace(base, **more)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.sampled_from("12")), min_size=1, max_size=4))
def test_a_plan_holds_only_what_every_rank_has_alike(held: list[dict[str, str]]) -> None:
    """Property: a kernel is in the plan exactly if all ranks have it with one digest."""
    profiles = [profile(rank, kernels=kernels) for rank, kernels in enumerate(held)]
    wanted = {k for k in "abcd" if len({h.get(k) for h in held}) == 1 and k in held[0]}
    if not wanted:
        with pytest.raises(ConsistencyError, match="kernel in common"):
            common_plan(profiles, EMPTY, "inference")
    else:
        assert set(common_plan(profiles, EMPTY, "inference").kernels["cpu"]) == wanted


def test_the_poorest_rank_sets_the_memory_and_groups_keep_their_kernels() -> None:
    """Minimum memory over ranks; each kind of hardware agrees on its own kernels."""
    plan = common_plan(
        [
            profile(0, memory=70),
            profile(1, memory=50),
            profile(2, hardware_class="h200", kernels={"fa": "1"}),
        ],
        EMPTY,
        "inference",
    )
    assert plan.memory == 50
    assert plan.kernels == {"cpu": ("a", "b"), "h200": ("fa",)}


def test_measurements_count_only_where_all_ranks_hold_the_same() -> None:
    """Ranks with other tables would price, and so choose, differently; each reads its own copy of them."""
    ranks = two()
    for own, us in zip(ranks, (10.0, 10.0), strict=True):
        own.set_costs(priced(own, us))
    assert common_plan([profile_of(own, n) for n, own in enumerate(ranks)], EMPTY, "inference").measured
    ranks[1].set_costs(priced(ranks[1], 11.0))
    assert not common_plan([profile_of(own, n) for n, own in enumerate(ranks)], EMPTY, "inference").measured


def priced(own: LocalDevice, us: float) -> MeasuredCosts:
    """A cost model out of one measurement."""
    kernels = {each.id: each for each in own.kernels()}
    return MeasuredCosts([SourcedMeasurement(row("a.rms_norm", us), MEASURED)], kernels, own.hardware)


def test_versions_that_differ_are_named_in_training() -> None:
    """Which library, on which rank, against which version."""
    other = profile(1, versions={"torch": "2.12"})
    with pytest.raises(ConsistencyError, match=r"rank 1 .*torch 2\.12 for 2\.13"):
        common_plan([profile(0), other], EMPTY, "training")
    assert common_plan([profile(0), other], EMPTY, "inference").kernels


def test_tp_invariance_refuses_kernels_that_do_not_promise_it() -> None:
    """Asked for, it is part of every request of the rank group; the reason is the one that names it."""
    own = [device([kernel("a.rms_norm"), kernel("b.rms_norm", tp_invariant=True)]) for _ in range(2)]
    groups = group_of(own, tp_invariant=True)
    plan = own[0].launch_planned(RMS, (torch.ones(2, 8), None, 1e-6), groups[0].state_for())[1]
    assert plan.kernel == "b.rms_norm"
    (reason,) = plan.selection.candidate("a.rms_norm").rejected
    assert reason.reason is lz.Reason.TP_INVARIANCE_REQUIRED
    for rank_group in groups:
        rank_group.close()


# -- steps ----------------------------------------------------------------------------------------------


def walking(count: int = 2, **more: Any) -> list[Steps]:
    own = [device([kernel("a.rms_norm"), kernel("b.rms_norm", launch_us=9.0)]) for _ in range(count)]
    return [Steps(rank_group) for rank_group in group_of(own, **more)]


def test_followers_take_the_steps_that_rank_0_takes() -> None:
    """Function, requests in their order and arguments arrive; the end arrives too."""
    first, *others = walking(3)
    ids = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    first.start_step("step", ["b", "a"], [ids, [3, None, "x"]])
    for other in others:
        message, _ = other.next_step(5.0)
        assert (message.name, message.requests, message.number) == ("step", ("b", "a"), 1)
        values = other.values(message)
        assert torch.equal(values[0], ids) and values[0].dtype == torch.int32 and values[1] == [3, None, "x"]
    first.close()
    assert [other.next_step(5.0)[0].name for other in others] == ["", ""]
    for other in others:
        other.close()


@pytest.mark.parametrize(
    ("theirs", "what"),
    [(["b", "a"], "requests"), (["a"], "requests"), (["a", "b", "c"], "requests")],
    ids=["another order", "a split batch", "a stranger"],
)
def test_a_batch_that_a_rank_formed_otherwise_fails_before_the_collective(
    theirs: list[str], what: str
) -> None:
    """Reordered or split on one rank, the sums would be wrong or never end: both ranks raise instead."""
    first, other = walking()
    first.start_step("step", ["a", "b"])
    with pytest.raises(ConsistencyError, match=rf"{what} of rank 0's step .*on rank 1") as caught:
        other.start_step("step", theirs)
    assert caught.value.votes == {0: str(["a", "b"]), 1: str(theirs)}
    until = time.monotonic() + 5
    while first.group.failure is None and time.monotonic() < until:
        time.sleep(0.005)
    with pytest.raises(DeviceLostError, match="rank 1 cannot follow"):
        first.start_step("step", ["a", "b"])
    for steps in (first, other):
        steps.close()


def test_another_function_is_noticed() -> None:
    """A rank that is in another part of the program fails the rank group."""
    first, other = walking()
    first.start_step("prefill", ["a"])
    with pytest.raises(ConsistencyError, match="function of rank 0's step"):
        other.start_step("decode", ["a"])
    for steps in (first, other):
        steps.close()


def test_a_choice_that_differs_is_noticed_at_the_next_step() -> None:
    """A rank that chose another kernel than rank 0 is caught by the digest, before the next collective."""
    first, other = walking()
    snapshot = first.start_step("step", ["a"])
    _, theirs = other.next_step(5.0)
    chosen(first.group.device, snapshot)
    other.group.device.agreed_snapshot(EMPTY, theirs.agreed_terms)  # type: ignore[arg-type]
    theirs.agreed_terms.record_call("b.rms_norm")  # type: ignore[union-attr]  # as a rank with other prices would
    first.start_step("step", ["a"])
    with pytest.raises(ConsistencyError, match="selections of rank 0's step 2"):
        other.next_step(5.0)
    for steps in (first, other):
        steps.close()


def test_another_sequence_of_known_ops_is_noticed_at_the_next_step() -> None:
    """No choice is new in it: a step's message says what all steps before it ran."""
    first, other = walking()
    theirs: Any = None
    for _ in range(2):
        mine, (_, theirs) = first.start_step("step", ["a"]), other.next_step(5.0)
        assert chosen(first.group.device, mine) == chosen(other.group.device, theirs)
    chosen(other.group.device, theirs)  # once more than rank 0
    first.start_step("step", ["a"])
    with pytest.raises(ConsistencyError, match="selections of rank 0's step 3"):
        other.next_step(5.0)
    for steps in (first, other):
        steps.close()


def test_a_rank_that_says_nothing_after_a_step_holds_its_results_back_in_time() -> None:
    """They may be sums of other ops; a follower that waits for rank 0 notices where it is frozen, too."""
    first, other = walking()
    first.group.timeout_s = 0.05
    mine, (_, theirs) = first.start_step("step", ["a"]), other.next_step(5.0)
    chosen(first.group.device, mine)
    chosen(other.group.device, theirs)
    with pytest.raises(DeviceLostError, match=r"step 1 counts for no rank: ranks \[1\] did not end it"):
        first.end_step("step")
    assert isinstance(other.group.channel, FollowerChannel) and other.group.channel._silence_s is not None
    for steps in (first, other):
        steps.close()


def test_equal_choices_go_on() -> None:
    """The same choices have the same digest, however many steps."""
    first, other = walking()
    for _ in range(3):
        mine, (_, theirs) = first.start_step("step", ["a"]), other.next_step(5.0)
        assert chosen(first.group.device, mine) == chosen(other.group.device, theirs) == "a.rms_norm"
    assert first.group.selections_digest() == other.group.selections_digest() != ""
    for steps in (first, other):
        steps.close()


def test_a_kernel_that_raises_in_a_gang_is_not_replaced_by_one_rank() -> None:
    """The next kernel in one rank's order would leave the others behind."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("illegal instruction")

    own = [device([kernel("a.rms_norm", run=broken), kernel("b.rms_norm", launch_us=9.0)]) for _ in range(2)]
    groups = group_of(own)
    with pytest.raises(KernelExecutionError, match="no rank of a rank group falls back alone"):
        chosen(own[0], groups[0].state_for())
    assert chosen(own[0], None) == "b.rms_norm"  # outside the rank group it falls back
    for rank_group in groups:
        rank_group.close()


def test_a_new_plan_holds_from_its_step_on_every_rank() -> None:
    """Rank 0 takes a kernel out; until the named step both ranks keep it."""
    first, other = walking()
    old = first.group.agreed_plan
    assert old is not None
    group = next(iter(old.kernels))
    plan = msgspec.structs.replace(old, version=2, kernels={group: ("b.rms_norm",)}, activate_at=3)
    at_once([lambda: first.group.propose(plan), lambda: other.group.agree(2)])
    seen = []
    for _ in range(3):
        mine, (_, theirs) = first.start_step("step", ["a"]), other.next_step(5.0)
        seen.append((chosen(first.group.device, mine), chosen(other.group.device, theirs)))
    assert seen == [("a.rms_norm",) * 2] * 2 + [("b.rms_norm",) * 2]
    for steps in (first, other):
        steps.close()


def test_a_plan_that_one_rank_cannot_follow_changes_nothing() -> None:
    """The refusal names rank and kernel; the old plan goes on."""
    first, other = walking()
    old = first.group.agreed_plan
    assert old is not None
    other.group.device.registry.remove("a.rms_norm")
    plan = msgspec.structs.replace(old, version=2, activate_at=1)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(first.group.propose, plan), pool.submit(other.group.agree, 2)]
        errors = [str(call.exception()) for call in calls]
    assert all("rank 1 refuses: cannot run a.rms_norm" in error for error in errors)
    first.start_step("step", ["a"])
    other.next_step(5.0)
    assert first.group.agreed_plan is old
    for steps in (first, other):
        steps.close()


def test_a_follower_that_goes_is_noticed_without_a_step() -> None:
    """`on_failure` breaks whatever rank 0 waits in."""
    told: list[str] = []
    heard = threading.Event()

    def hear(why: str) -> None:
        told.append(why)
        heard.set()

    first, other = walking(on_failure=hear)
    other.close()
    assert heard.wait(5.0)
    assert told == ["rank 1 is gone"]
    with pytest.raises(DeviceLostError, match="rank 1 is gone"):
        first.start_step("step", ["a"])
    first.close()


def test_a_leader_that_goes_is_noticed_by_its_followers() -> None:
    """A cut line is an error, never a wait without end."""
    first, other = walking()
    first.group.close()
    with pytest.raises(DeviceLostError, match="rank 0 is gone"):
        other.next_step(5.0)
    other.close()


def test_a_silent_leader_is_noticed_where_a_limit_is_asked_for() -> None:
    """`next(timeout_s)` ends."""
    first, other = walking()
    with pytest.raises(DeviceLostError, match=r"rank 0 sent nothing for 0\.05 s"):
        other.next_step(0.05)
    for steps in (first, other):
        steps.close()


def test_nothing_but_manifests_is_sent_in_steady_state() -> None:
    """Followers say nothing, and the store is not asked: its contents stay as they were."""
    first, other = walking()
    keys = first.group._store._store.num_keys()  # type: ignore[attr-defined]
    for _ in range(20):
        mine, (_, theirs) = first.start_step("step", ["a"]), other.next_step(5.0)
        chosen(first.group.device, mine)
        chosen(other.group.device, theirs)
    assert first.group._store._store.num_keys() == keys  # type: ignore[attr-defined]
    leader = first.group.channel
    assert isinstance(leader, LeaderChannel)
    peer = leader._sockets[1]
    peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        peer.recv(1, socket.MSG_PEEK)
    peer.setblocking(True)
    for steps in (first, other):
        steps.close()


# -- step messages and lines --------------------------------------------------------------------------------


def test_a_request_stands_once_in_a_step() -> None:
    """A request that met itself in a batch is an error of the engine."""
    with pytest.raises(ValueError, match="requests needs each id once in a step, got b again"):
        StepSequence(0, 0).next_message("step", ["a", "b", "b"], "")


def test_a_step_that_cannot_be_said_is_not_counted() -> None:
    """Else the followers would miss its number in the next one, and the group would fail."""
    sequence = StepSequence(0, 0)
    for request in (torch.ones(1), 1 << 70):
        with pytest.raises((TypeError, OverflowError)):
            sequence.next_message("step", [request], "")  # type: ignore[list-item]
    assert sequence.next_message("step", ["a"], "").number == 1


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, "\ud800"])
def test_a_number_or_text_that_no_message_takes_is_its_callers_error(value: Any) -> None:
    """Alone and in a list, before there is a message."""
    for values in ([value], [[1, value]]):
        with pytest.raises(ValueError, match="forward needs integers of 64 bits and texts"):
            check_sendable(values, "forward")
    check_sendable([(1 << 64) - 1, -(1 << 63), "\u00e9"], "forward")


@pytest.mark.parametrize(
    "change", [{"epoch": 1}, {"number": 3}, {"plan_digest": "other"}, {"selections_digest": "other"}]
)
def test_a_manifest_from_elsewhere_is_refused(change: dict[str, Any]) -> None:
    """Another life of the rank group, a lost step, another plan, other selections: each by name."""
    leader, follower = StepSequence(0, 0), StepSequence(1, 0)
    message = leader.next_message("step", ["a"], "same")
    with pytest.raises(ConsistencyError):
        follower.accept(msgspec.structs.replace(message, **change), "same")
    follower.accept(message, "same")


numbers = st.one_of(
    st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.booleans(), st.none(), st.text()
)


@given(st.lists(st.one_of(numbers, st.lists(numbers)), max_size=5))
def test_plain_arguments_survive_the_way(values: list[Any]) -> None:
    """What is packed comes out."""
    assert unpack(pack(values, "step")) == values


def test_a_tensor_that_is_cut_short_is_refused() -> None:
    """Its head promises more than came: nothing is copied from beyond the frame."""
    packed = msgspec.msgpack.Decoder().decode(pack((torch.arange(8),), "step"))[0]
    short = msgspec.msgpack.encode([msgspec.msgpack.Ext(packed.code, bytes(packed.data[:-8]))])
    with pytest.raises(ConsistencyError, match="a step message's tensor needs 64 bytes, got 56"):
        unpack(short)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)])
def test_tensors_survive_the_way(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Dtype, shape and values, views included."""
    value = (torch.arange(6).reshape(2, 3) % 2).to(dtype)[: shape[0] if shape else 2]
    value = value.new_ones(shape) if value.shape != shape else value
    (back,) = unpack(pack([value], "step"))
    assert back.dtype == dtype and back.shape == value.shape and torch.equal(back, value)


def test_what_cannot_be_sent_is_named() -> None:
    """An object, and an activation: each says what to send instead."""
    with pytest.raises(TypeError, match=r"step needs tensors, numbers.*got object"):
        pack([object()], "step")
    with pytest.raises(ValueError, match=rf"at most {MAX_VALUES} bytes in a step message"):
        pack([torch.zeros(MAX_VALUES)], "step")


def test_a_frame_that_is_no_manifest_is_an_error() -> None:
    """Never half a step message."""
    with pytest.raises(ConsistencyError, match="needs to decode"):
        decode(encode(StepSequence(0, 0).next_message("step", ["a"], ""))[:-1])


@pytest.mark.parametrize("way", ["near", "tcp"])
def test_who_does_not_know_the_token_is_not_served(way: str) -> None:
    """A stranger's connection is closed and takes nobody's place, on both ways to rank 0."""
    leader = LeaderChannel([1])
    host, port, token, near = leader.address.decode().split(" ")
    near = near if way == "near" else "-"
    stranger = FollowerChannel(1, f"{host} {port} {'00' * 32} {near}".encode(), 5.0)
    friend = FollowerChannel(1, f"{host} {port} {token} {near}".encode(), 5.0)
    leader.accept(5.0, lambda _: None)
    leader.send(b"hello")
    assert friend.receive(5.0) == b"hello"
    with pytest.raises(DeviceLostError):
        stranger.receive(5.0)
    for each in (stranger, friend, leader):
        each.close()
    assert token != "00" * 32


def test_the_profile_of_a_device_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Digests depend on no hash seed: sets are sorted before they are hashed."""
    code = (
        "import layerzero as lz; from layerzero.runtime import current; "
        "from layerzero.actors.group.plan import profile_of; "
        "from layerzero.selection.cost.cost_model import TABLES; "
        "from layerzero.perfdb.shipped import read_table; "
        "from layerzero.selection.cost.measured import MeasuredCosts, SourcedMeasurement; "
        "from layerzero.selection.cost.roofline import SHIPPED; "
        "own = current().device('cpu'); "
        "rows = [SourcedMeasurement(r, SHIPPED) for r in read_table(TABLES / 'cpu_amd_avx2.json').rows]; "
        "own.set_costs(MeasuredCosts(rows, {k.id: k for k in own.registry.all()}, own.hardware)); "
        "p = profile_of(own, 0); assert own.costs.fingerprint('linear'); "
        "print(sorted(p.kernels.items()), p.costs, p.hardware_class)"
    )
    # The child has the hash seed that this run drew; a number given to a new interpreter is not that one.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    said = {other.stdout, children.run(code, folder=tmp_path).stdout}
    assert len(said) == 1 and "torch.attention" in said.pop()


def test_agreed_plans_have_one_spelling() -> None:
    """Two ranks encode one plan to the same bytes."""
    plan = common_plan([profile(0)], Policy((make_rule("deny", "x.*", op="attention"),)), "inference")
    assert msgspec.json.decode(plan.encoded(), type=AgreedPlan).encoded() == plan.encoded()


def test_a_device_that_is_alone_is_a_gang_of_one() -> None:
    """One rank needs nobody; its steps cost no line."""
    (steps,) = walking(1)
    assert steps.start_step("step", ["a"]) is steps.group.state_for()
    assert profile_of(steps.group.device, 0).rank == 0
    steps.close()


def test_a_group_needs_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout on the path has a version and no metadata."""

    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    (steps,) = walking(1)
    monkeypatch.setattr(importlib.metadata, "version", nothing)
    assert profile_of(steps.group.device, 0).versions["layerzero"] == lz.__version__
    steps.close()
