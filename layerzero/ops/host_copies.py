"""Host copies of small index tensors: lengths, offsets and page ids known without asking the device.

Code that makes such a tensor out of host values attaches them with `attach_host_copy`; a kernel that
needs the values calls `to_host_values`, which waits for the device only where no copy is attached. A copy is
valid while the tensor's version counter is unchanged: after an edit in place by torch the values are read
from the device again. A kernel that writes the tensor's memory without torch must call `drop_host_copy`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_NAME = "_layerzero_host_copy"
_MAX_CONCATENATED = 64


@dataclass(eq=False, slots=True)
class HostCopy:
    """The values of one tensor at one version; its identity stands for them."""

    values: Tensor
    version: int


def attach_host_copy(tensor: Tensor, values: Tensor) -> Tensor:
    """Note that `tensor` holds `values`, a CPU tensor that will not change; returns `tensor`.

    Nothing is noted of an inference tensor, which counts no versions: an edit would pass unseen.
    """
    if not tensor.is_inference():
        setattr(tensor, _NAME, HostCopy(values, tensor._version))
    return tensor


def drop_host_copy(tensor: Tensor) -> None:
    """Drop what was noted of `tensor`."""
    vars(tensor).pop(_NAME, None)


def host_copy_of(tensor: Tensor) -> HostCopy | None:
    """What was noted of `tensor`, if that still holds."""
    copy: HostCopy | None = getattr(tensor, _NAME, None)
    if copy is None or copy.version != tensor._version:
        return None
    return copy


def to_host_values(tensor: Tensor) -> Tensor:
    """The values of `tensor` on the CPU; waits for the device where no copy holds."""
    if tensor.device.type == "cpu":
        return tensor
    copy = host_copy_of(tensor)
    return copy.values if copy is not None else tensor.cpu()


def max_seqlen(offsets: Tensor, rows: int) -> int:
    """The longest sequence between offsets, or all `rows` where that would need asking the device.

    For kernels that take any bound: blocks beyond a sequence's end leave at once. A graph that is being
    captured will be replayed over other lengths, so there it is all rows too.
    """
    copy = host_copy_of(offsets)
    if copy is None or (offsets.is_cuda and torch.cuda.is_current_stream_capturing()):
        return rows
    return int(copy.values.diff().max())


def to_device_with_host_copy(values: Tensor, device: torch.device | str) -> Tensor:
    """`values` on `device`, with their host copy; versions are counted whatever mode the caller is in.

    A GPU fetches them from pinned memory, in its turn: a transfer out of ordinary memory would wait until
    everything launched before it has run.
    """
    with torch.inference_mode(False):
        if torch.device(device).type == "cuda" and values.device.type == "cpu":
            moved = values.pin_memory().to(device, non_blocking=True)
        else:
            moved = values.to(device)
        return attach_host_copy(moved, values) if moved is not values else moved


_CONCATENATED: OrderedDict[Hashable, tuple[tuple[HostCopy, ...], Tensor]] = OrderedDict()
_LOCK = threading.Lock()


def concat_with_host_copies(
    pieces: Sequence[Tensor], join: Callable[[Sequence[Tensor]], Tensor], *join_key: Hashable
) -> Tensor:
    """`join(pieces)`; `how` names the function and whatever else its result depends on.

    Where every piece has a host copy the joining happens there, one transfer replaces the device's copies,
    and the result is returned again while its pieces are unchanged: the layers of a step join the same
    tables.
    """
    copies = [host_copy_of(piece) for piece in pieces]
    known_copies = tuple(copy for copy in copies if copy is not None)
    if not pieces or len(known_copies) < len(pieces):
        return join(pieces)
    device = pieces[0].device
    # Another stream would not wait for the transfer.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    key = (device, stream, join_key, tuple(map(id, known_copies)))
    with _LOCK:
        cached = _CONCATENATED.get(key)
        if cached is not None and host_copy_of(cached[1]) is not None:
            _CONCATENATED.move_to_end(key)
            return cached[1]
    combined = to_device_with_host_copy(join([copy.values for copy in known_copies]), device)
    with _LOCK:
        _CONCATENATED[key] = (known_copies, combined)
        while len(_CONCATENATED) > _MAX_CONCATENATED:
            _CONCATENATED.popitem(last=False)
    return combined
