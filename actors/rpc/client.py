"""What a device pool asks of a device, wherever the device lives: in this process or in an actor of a
cluster.

`DeviceClient` has two implementations with the same semantics and the same errors: `LocalClient`
(`local_client.py`), which imports no ray, and `RayDevice` (`remote/ray_device.py`). One suite of tests runs
over both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Any, Protocol

import msgspec
from torch import Tensor

from layerzero.actors.rpc.tensors import RemoteTensor
from layerzero.spec.hardware import Hardware


class DeviceState(StrEnum):
    """The state of a device.

    STARTING -> RUNNING -> DRAINING -> CLOSED, and RUNNING -> RESTARTING -> RUNNING after a loss. HUNG is the
    moment between the watchdog's verdict and the end of the process. DEAD will not come back by itself.
    """

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    HUNG = "hung"
    RESTARTING = "restarting"
    DEAD = "dead"
    CLOSED = "closed"


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a device is: where it lives, the hardware under it, the versions and the kernels it has.

    `incarnation` names one run of its process; `device` is torch's name inside that process; `kernels`
    is a digest of the registry; `versions` maps distributions to versions.
    """

    name: str
    incarnation: str
    node: str
    pid: int
    device: str
    hardware: Hardware
    versions: dict[str, str]
    kernels: str


class DeviceHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How a device is: `why` says what took it out of RUNNING; times are in seconds.

    `in_flight` are hosted calls that run, `waiting` those that wait for a place; `kernel` is the kernel that
    has been running longest and `kernel_s` for how long; `blocked` maps kernels out of service to the reason.
    """

    name: str
    state: DeviceState
    incarnation: str = ""
    node: str = ""
    pid: int = 0
    in_flight: int = 0
    waiting: int = 0
    restarts: int = 0
    kernel: str = ""
    kernel_s: float = 0.0
    blocked: dict[str, str] = {}
    why: str = ""


class DeviceClient(Protocol):
    """One device as its pool sees it.

    All of its coroutines run on the event loop that opened it. `LayerZeroError`s and the hosted code's own
    exceptions arrive as they were raised, whichever process raised them.
    """

    @property
    def name(self) -> str:
        """The device's name in its pool."""
        ...

    @property
    def state(self) -> DeviceState:
        """Its present state."""
        ...

    @property
    def facts(self) -> DeviceFacts:
        """What it is, as of its present incarnation."""
        ...

    @property
    def load(self) -> int:
        """Calls sent and not answered."""
        ...

    async def wait_until_serving(self) -> None:
        """Wait until it serves again, or never will; returns at once where it does."""
        ...

    async def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        timeout_s: float | None = None,
        idempotent: bool = False,
        wait_for_restart: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run `fn(*args, **kwargs)` on the device and return its result; a coroutine function is awaited.

        Without `wait_for_restart`, a device that restarts is lost at once, retryable: another one serves.

        Raises: what `fn` raises. DeviceLostError: the device went; `retryable` is True where `fn` had not
            started. With `idempotent`, a call that had started is run again instead.
            DeadlineExceededError: `timeout_s` has passed; the call is cancelled on the device.
            TypeError: `fn` or an argument cannot travel to the device.
        """
        ...

    def stream(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        resume: bool = False,
        wait_for_restart: bool = True,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """The items that the async generator function `fn` yields on the device; plain values only.

        With `resume`, `fn` also gets `so_far`, a list of the items delivered already, and yields what follows
        them: after a loss it is called again on the device's next incarnation and nothing is delivered twice.
        A caller that has items from elsewhere passes them as `so_far`.

        Raises: as `run`.
        """
        ...

    async def forward(
        self,
        take: Callable[[Any], None],
        fn: Callable[..., Any],
        /,
        *args: Any,
        resume: bool = False,
        wait_for_restart: bool = True,
        **kwargs: Any,
    ) -> None:
        """Call `take` with each item of `stream`, in the turn of this event loop that brings it.

        No task runs for an item, so a process that passes on the items of many streams serves more of them.
        `take` may not wait.

        Raises: as `stream`; what `take` raises, which ends the generator on the device.
        """
        ...

    async def control(self, kind: str, body: Any = None, *, timeout_s: float = 10.0) -> Any:
        """Ask the handler that hosted code registered for `kind`; plain values, tens of microseconds.

        Raises: LookupError: no handler has that name. DeviceLostError: the device went.
        """
        ...

    async def put(self, tensor: Tensor | RemoteTensor) -> RemoteTensor:
        """Move a tensor to the device; the copy lives there until the handle is freed or collected."""
        ...

    async def fetch(self, handle: RemoteTensor) -> Tensor:
        """A copy, in this process, of a tensor that lives on the device.

        Raises: DeviceLostError: the incarnation of the device that held it has ended.
        """
        ...

    async def health(self) -> DeviceHealth:
        """How the device is now; never raises for a device that is in trouble."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take no more calls and let those that run end; False where `timeout_s` cut some off."""
        ...

    async def restart(self, *, drain_s: float = 30.0) -> None:
        """Drain, then begin a new incarnation with the same kernels, decisions and preparations."""
        ...

    async def prepare(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Run `fn(*args)` now, and again at the start of every later incarnation, before any call."""
        ...

    async def close(self) -> None:
        """End the device; every later call raises RuntimeClosedError. Idempotent."""
        ...
