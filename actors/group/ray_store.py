"""Where ranks on a pool's devices meet: a store in a Ray actor, with the contract of `AgreementStore`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from layerzero.spec.errors import DeviceLostError

_ASK_AGAIN = 8  # times that Ray repeats a question whose message was lost
_AT_ONCE = 1000
_PATIENCE_S = 30.0


class StoreActor:
    """The values of a `RayStore`, in an actor of their own."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Condition()

    async def put(self, key: str, value: bytes) -> None:
        """Write `value` under `key`."""
        async with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    async def gather(self, keys: Sequence[str], timeout_s: float) -> tuple[bytes | None, ...]:
        """What stands under `keys` once all are there, or after `timeout_s` seconds."""
        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: all(key in self._values for key in keys))
            return tuple(map(self._values.get, keys))

    async def swap(self, key: str, value: bytes) -> bytes:
        """Write `value` unless something stands under `key`; what stands there now."""
        async with self._changed:
            stored = self._values.setdefault(key, value)
            self._changed.notify_all()
            return stored


class RayStore:
    """A store in a Ray actor of the cluster that this process has joined; blocks the thread that asks.

    `opened` makes the actor, on the node that asks for it; every rank takes it by its `name`. Each question
    may be asked twice without harm, so Ray repeats those whose message it lost.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._actor: Any = None

    @staticmethod
    def create(name: str) -> Any:
        """Make the store; the actor's handle keeps it alive."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        remote: Any = ray.remote
        actor_class = remote(
            num_cpus=0, max_restarts=-1, max_task_retries=_ASK_AGAIN, max_concurrency=_AT_ONCE
        )(StoreActor)
        return actor_class.options(name=name, scheduling_strategy=strategy).remote()

    def put(self, key: str, value: bytes) -> None:
        """Write `value` under `key`.

        Raises: DeviceLostError: the store is gone; so of every method.
        """
        self._ask("put", 0.0, key, value)

    def take(self, key: str, timeout_s: float) -> bytes | None:
        """What stands under `key`, waiting for it; None after `timeout_s` seconds."""
        return self._gathered((key,), timeout_s)[0]

    def meet(self, keys: Sequence[str], timeout_s: float) -> tuple[bool, ...]:
        """Whether something stands under each of `keys`, once all are there or after `timeout_s` seconds."""
        return tuple(value is not None for value in self._gathered(keys, timeout_s))

    def _gathered(self, keys: Sequence[str], timeout_s: float) -> tuple[bytes | None, ...]:
        values: tuple[bytes | None, ...] = self._ask("gather", timeout_s, tuple(keys), timeout_s)
        return values

    def swap(self, key: str, value: bytes) -> bytes:
        """Write `value` unless something stands under `key`; what stands there now."""
        stored: bytes = self._ask("swap", 0.0, key, value)
        return stored

    def _ask(self, method: str, wait_s: float, *args: Any) -> Any:
        import ray
        from ray import exceptions

        try:
            if self._actor is None:
                self._actor = ray.get_actor(self.name)
            return ray.get(getattr(self._actor, method).remote(*args), timeout=wait_s + _PATIENCE_S)
        except (exceptions.RayActorError, exceptions.GetTimeoutError, ValueError) as error:
            what = f"the rank group's store {self.name!r} does not answer: {type(error).__name__}"
            raise DeviceLostError(what, retryable=True) from error


def address_here() -> str:
    """Where other nodes of the Ray cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())
