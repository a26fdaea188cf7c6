"""`to_host`: the awaitable read-back of a result."""

from __future__ import annotations

from torch import Tensor

from layerzero.calls.blocking import context_runtime
from layerzero.calls.scope import SCOPE
from layerzero.native import FAST_PATH
from layerzero.runtime import ACTIVE
from layerzero.scheduler.readback import compact
from layerzero.scheduler.streams import resume_modes, suspend_modes


async def to_host(tensor: Tensor) -> Tensor:
    """`tensor` in host memory, by itself: no piece of a batch, safe to read, pickle and keep.

    Args: tensor of any shape and dtype, on the CPU or a CUDA device.
    Returns: a detached CPU tensor of the same shape and dtype. Copies that one loop turn asks for share an
        event and a wake; the event loop is never blocked.
    Raises: TypeError: the argument is no tensor.
    """
    if not isinstance(tensor, Tensor):
        raise _no_tensor(tensor)
    if FAST_PATH.module is not None:
        owned: Tensor = FAST_PATH.module.own(tensor)
        if owned is not NotImplemented:
            return owned
    plain = tensor.detach()
    if plain.device.type != "cuda":
        return compact(plain.cpu() if plain.device.type != "cpu" else plain)
    device = None if SCOPE.get() is not None else ACTIVE.devices.get(plain.device)
    if device is None:
        device = context_runtime().device(plain.device)
    driver = device.loop_drivers.current()
    modes = device.capture_modes()
    assert modes.stream is not None and driver.readback is not None
    suspend_modes(modes, driver)
    try:
        copied: Tensor = await driver.readback.read(plain, modes.stream)
        return copied
    finally:
        resume_modes(modes, driver)


def _no_tensor(value: object) -> TypeError:
    elsewhere = getattr(value, "advice", None)  # a handle of another process's tensor
    advice = f": {elsewhere}" if isinstance(elsewhere, str) else ""
    return TypeError(f"tensor needs a torch.Tensor, got {type(value).__name__}{advice}")
