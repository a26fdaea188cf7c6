"""A tensor that lives in another process: a handle that ships, and refuses everything else with advice."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

_ADVICE = (
    "this tensor lives on device {device!r} of another process: move the code to it with "
    "pool.run(fn, handle, on={device!r}), or the tensor to you with await pool.fetch(handle)"
)


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class RemoteTensor:
    """A handle of a tensor on a device of the pool; passed to `run` there, the code gets the tensor.

    `shape` and `dtype` may be read; anything that needs the data raises TypeError and says what to do.
    The tensor is freed with the last handle of the process that shipped it.
    """

    key: str
    device: str
    incarnation: str
    shape: tuple[int, ...]
    dtype: str

    def on_collected(self, free: Callable[[str], None]) -> RemoteTensor:
        """Call `free(key)` when this handle is collected."""
        weakref.finalize(self, free, self.key).atexit = False
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteTensor, (self.key, self.device, self.incarnation, self.shape, self.dtype)

    @property
    def advice(self) -> str:
        """What to do instead of using this handle as a tensor."""
        return _ADVICE.format(device=self.device)

    def __repr__(self) -> str:
        return f"RemoteTensor({list(self.shape)}, {self.dtype}, on {self.device!r})"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Tensor, name):
            self._refuse()
        raise AttributeError(f"RemoteTensor has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, RemoteTensor):
                value._refuse()
        raise TypeError("a tensor of another process cannot be used here; use pool.run or pool.fetch")

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(self.advice)

    # Python looks for these on the class alone.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = __getitem__ = _refuse


class RemoteTensorStore:
    """The tensors that a device keeps for others, by key."""

    def __init__(self, device: str, incarnation: str) -> None:
        self._device = device
        self._incarnation = incarnation
        self._tensors: dict[str, Tensor] = {}

    def add(self, tensor: Tensor) -> RemoteTensor:
        """Keep a tensor and return its handle."""
        key = uuid.uuid4().hex
        self._tensors[key] = tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        return RemoteTensor(key, self._device, self._incarnation, tuple(tensor.shape), dtype)

    def get(self, handle: RemoteTensor) -> Tensor:
        """The tensor of a handle.

        Raises: ValueError: it lives on another device. LookupError: it was freed, or lost with an
            incarnation.
        """
        if handle.device != self._device:
            raise ValueError(
                f"{handle!r} needs code on that device, got code on {self._device!r}: "
                f"move it with await pool.ship(handle, to={self._device!r})"
            )
        tensor = self._tensors.get(handle.key)
        if tensor is None:
            lost = "was lost with an earlier incarnation of its device"
            why = "was freed" if handle.incarnation == self._incarnation else lost
            raise LookupError(f"{handle!r} {why}; ship it again")
        return tensor

    def free(self, key: str) -> None:
        """Drop a tensor; unknown keys are ignored, since a restart has dropped them already."""
        self._tensors.pop(key, None)

    def __len__(self) -> int:
        return len(self._tensors)


class TensorPayload:
    """A tensor as bytes on its way between processes: one copy, no pickled code, no stranger's rows."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: Any) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorPayload, (self.dtype, self.shape, self.data)

    @classmethod
    def pack(cls, tensor: Tensor) -> TensorPayload:
        """Pack a tensor; a view is compacted, so that its neighbours' rows stay behind."""
        flat = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
        data = (
            flat.view(torch.uint8).numpy() if flat.numel() else flat.new_empty(0, dtype=torch.uint8).numpy()
        )
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)

    def unpack(self, device: torch.device | str) -> Tensor:
        """The tensor, in memory of its own on `device`."""
        dtype = getattr(torch, self.dtype)
        tensor = torch.empty(self.shape, dtype=dtype, device="cpu")
        if tensor.numel():
            # What the object store hands out is read-only; the copy is ours.
            tensor.view(-1).view(torch.uint8).numpy()[:] = self.data
        return tensor.to(device)
