"""What awaited calls under a context's own policy leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.blocking import context_snapshot
from layerzero.scheduler.core.round_robin import BatchQueue
from layerzero.selection.dispatch import DispatchState
from tests.native.twins import both_paths as both_paths


@pytest.mark.parametrize("how", ["preferred", "backend"])
@pytest.mark.asyncio
async def test_what_a_context_decided_goes_when_it_is_decided_anew(how: str) -> None:
    """Kernels rest and come back all day: the states of a scope or a `backend=` before that are not kept."""
    x, weight = torch.randn(2, 16), torch.randn(8, 16)
    named: dict[str, Any] = {"backend": "reference"} if how == "backend" else {}

    async def changed(device: LocalDevice) -> int:
        device.health.rest("torch.rms_norm.native", "a test")
        device.refresh()
        await asyncio.gather(*(lz.rms_norm(x, **named) for _ in range(3)))
        await asyncio.gather(*(lz.linear(x, weight, **named) for _ in range(3)))
        gc.collect()
        return sum(isinstance(kept, DispatchState) for kept in gc.get_objects())

    async with lz.start(lz.Settings(warm="off")) as runtime:
        with lz.prefer("reference") if how == "preferred" else contextlib.nullcontext():
            states = [await changed(runtime.device("cpu")) for _ in range(8)]
    assert states[-1] <= states[2], states


@pytest.mark.parametrize("how", ["preferred", "backend"])
@pytest.mark.asyncio
async def test_calls_of_a_context_meet_in_the_queues_of_before_a_change(how: str) -> None:
    """A queue for each state would be remembered until the bound of queues is reached, for nobody's use."""
    x = torch.randn(2, 16)
    named: dict[str, Any] = {"backend": "reference"} if how == "backend" else {}

    async def queues(device: LocalDevice) -> int:
        device.health.rest("torch.rms_norm.native", "a test")
        device.refresh()
        await asyncio.gather(*(lz.rms_norm(x, **named) for _ in range(3)))
        gc.collect()
        return sum(isinstance(kept, BatchQueue) for kept in gc.get_objects())

    async with lz.start(lz.Settings(warm="off")) as runtime:
        with lz.prefer("reference") if how == "preferred" else contextlib.nullcontext():
            counts = [await queues(runtime.device("cpu")) for _ in range(4)]
            with lz.disable("native") if how == "preferred" else contextlib.nullcontext():
                other = await queues(runtime.device("cpu"))
    assert counts[0] > 0 and counts == counts[:1] * 4
    assert other == counts[0] + (how == "preferred"), "calls of two policies do not meet"


def test_a_scope_that_is_asked_in_the_midst_of_a_change_does_not_keep_what_was_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread asks while states are made anew: a kernel that came back stayed out for its scope."""
    made = DispatchState.successor
    with lz.start(lz.Settings(warm="off"), scoped=True) as runtime, lz.prefer("reference"):
        device = runtime.device("cpu")

        def asked_meanwhile(state: DispatchState, *args: Any) -> DispatchState:
            context_snapshot(device, "rms_norm", None)
            return made(state, *args)

        assert context_snapshot(device, "rms_norm", None).version == device.snapshot.version
        monkeypatch.setattr(DispatchState, "successor", asked_meanwhile)
        device.refresh()
        assert context_snapshot(device, "rms_norm", None).version == device.snapshot.version


class AskedMeanwhile:
    """A table that another thread's first call of an op comes between, whenever it is looked at."""

    fingerprint = None

    def __init__(self, state: DispatchState) -> None:
        self._tables: dict[str, Any] = state.tables

    def rehearsed_plans(self) -> dict[Any, Any]:
        return {}

    @property
    def may_be_captured(self) -> bool:
        self._tables[f"op {len(self._tables)}"] = self
        return False


def test_an_op_may_be_asked_for_first_while_states_are_walked() -> None:
    """A kernel loads in the background, the next state is made there, and the program's next op is new."""
    with lz.start(lz.Settings(warm="off"), scoped=True) as runtime:
        state = DispatchState(1, runtime.policy)
        state.tables["linear"] = AskedMeanwhile(state)  # type: ignore[assignment]
        assert not state.may_be_captured
        assert state.successor(2, runtime.policy, None).captures == state.captures
