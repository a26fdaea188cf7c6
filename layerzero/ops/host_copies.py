"""Host copies of small index tensors: lengths, offsets and page ids known without asking the device.

Whoever makes such a tensor out of host values says so with `remember`; a kernel that has to know the values
asks `host`, which waits for the device only where nobody said. A copy counts while the tensor's version
counter stands: an edit in place by torch moves it on, and the values are read from the device again.
A kernel of one's own that writes the tensor's memory must call `forget`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

_NAME = "_layerzero_host_copy"
_MAX_JOINED = 64


class Mirror:
    """The values of one tensor at one version; its identity stands for them."""

    __slots__ = ("values", "version")

    def __init__(self, values: Tensor, version: int) -> None:
        self.values = values
        self.version = version


def remember(tensor: Tensor, values: Tensor) -> Tensor:
    """Note that `tensor` holds `values`, a CPU tensor that nobody will change; gives `tensor` back.

    Nothing is noted of an inference tensor, which counts no versions: an edit would pass unseen.
    """
    if not tensor.is_inference():
        setattr(tensor, _NAME, Mirror(values, tensor._version))
    return tensor


def forget(tensor: Tensor) -> None:
    """Drop what was noted of `tensor`."""
    vars(tensor).pop(_NAME, None)


def mirror(tensor: Tensor) -> Mirror | None:
    """What was noted of `tensor`, if that still holds."""
    found: Mirror | None = getattr(tensor, _NAME, None)
    if found is None or found.version != tensor._version:
        return None
    return found


def host(tensor: Tensor) -> Tensor:
    """The values of `tensor` on the CPU; waits for the device where no copy holds."""
    if tensor.device.type == "cpu":
        return tensor
    found = mirror(tensor)
    return found.values if found is not None else tensor.cpu()


def longest(offsets: Tensor, rows: int) -> int:
    """The longest sequence between offsets, or all `rows` where that would need asking the device.

    For kernels that take any bound: blocks beyond a sequence's end leave at once. A graph that is being
    captured will be replayed over other lengths, so there it is all rows too.
    """
    found = mirror(offsets)
    if found is None or (offsets.is_cuda and torch.cuda.is_current_stream_capturing()):
        return rows
    return int(found.values.diff().max())


def on_device(values: Tensor, device: torch.device | str) -> Tensor:
    """`values` on `device`, with their host copy; versions are counted whatever mode the caller is in.

    A GPU fetches them from pinned memory, in its turn: a transfer out of ordinary memory would wait until
    everything launched before it has run.
    """
    with torch.inference_mode(False):
        if torch.device(device).type == "cuda" and values.device.type == "cpu":
            moved = values.pin_memory().to(device, non_blocking=True)
        else:
            moved = values.to(device)
        return remember(moved, values) if moved is not values else moved


_JOINED: OrderedDict[Hashable, tuple[tuple[Mirror, ...], Tensor]] = OrderedDict()
_LOCK = threading.Lock()


def joined(pieces: Sequence[Tensor], join: Callable[[Sequence[Tensor]], Tensor], *how: Hashable) -> Tensor:
    """`join(pieces)`; `how` names the function and whatever else its result depends on.

    Where every piece has a host copy the joining happens there, one transfer replaces the device's copies,
    and the result is given again while its pieces stand: the layers of a step join the same tables.
    """
    copies = [mirror(piece) for piece in pieces]
    known = tuple(copy for copy in copies if copy is not None)
    if not pieces or len(known) < len(pieces):
        return join(pieces)
    key = (_place(pieces[0].device), how, tuple(map(id, known)))
    with _LOCK:
        kept = _JOINED.get(key)
        if kept is not None and mirror(kept[1]) is not None:
            _JOINED.move_to_end(key)
            return kept[1]
    made = on_device(join([copy.values for copy in known]), pieces[0].device)
    with _LOCK:
        _JOINED[key] = (known, made)
        while len(_JOINED) > _MAX_JOINED:
            _JOINED.popitem(last=False)
    return made


def _place(device: torch.device) -> Hashable:
    """The device, and on CUDA its current stream: another one would not wait for the transfer."""
    return (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None)
