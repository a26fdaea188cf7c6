"""Run in a child process: kernels over operands at odd addresses, with odd strides, without elements.

Each call is printed before it runs, so that one that ends the process has a name. Every call goes the way of
a user's, through a device that knows one kernel alone: what selection refuses does not run. What lies beside
the operands in memory is NaN, so that a kernel that reads it shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from layerzero.actors.device.local_device import LocalDevice
from layerzero.ops import table
from layerzero.ops.op import Args
from layerzero.spec import tolerances
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings
from tests import kernels
from tests.backends import cases

# Rows, inner sizes and widths on and off what vectors and tiles take.
SIZES: tuple[dict[str, int], ...] = ({"N": 1, "K": 64, "C": 64, "D": 64}, {"N": 37, "K": 97, "C": 17})
OFFSETS = (1, 8)
# Sizes of nothing, as far as the op's calls may have them.
NOTHING = ("N", "B", "Sq", "Sk")
Stride = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A call whose operands stand somewhere, in words, and the case that its numbers are of."""

    case: cases.Case
    dtype: torch.dtype
    where: str
    args: Args

    def __str__(self) -> str:
        return f"{self.case} {str(self.dtype).removeprefix('torch.')}, {self.where}"


def at(tensor: Tensor, offset: int, stride: Stride | None = None) -> Tensor:
    """The same numbers `offset` elements behind a multiple of 64 bytes, with these strides, amid NaN."""
    steps = tensor.stride() if stride is None else stride
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, steps, strict=True))
    room = torch.empty(span + offset + 128 // tensor.itemsize, dtype=tensor.dtype, device=tensor.device)
    room.view(torch.uint8).fill_(0xFF)
    first = -room.data_ptr() % 64 // tensor.itemsize + offset
    return room.as_strided(tensor.shape, steps, first).copy_(tensor)


def strides(tensor: Tensor) -> dict[str, Stride]:
    """Ways to lie in memory beside the dense one."""
    dense = torch.empty(tensor.shape, device="meta").stride()
    ways = {"gaps between elements": tuple(2 * step for step in dense)}
    if tensor.dim() > 1:
        ways["gaps between rows"] = (*(3 * step for step in dense[:-1]), 1)
        ways["columns first"] = torch.empty(tuple(reversed(tensor.shape)), device="meta").stride()[::-1]
    return ways


def variants(args: Args) -> Iterator[tuple[str, Args]]:
    """The call at aligned addresses first, then with each tensor, and with all of them, placed otherwise."""
    tensors = [p for p, a in enumerate(args) if isinstance(a, Tensor) and a.numel()]

    def put(positions: list[int], offset: int, way: str = "") -> Args:
        return tuple(at(a, offset, strides(a).get(way)) if p in positions else a for p, a in enumerate(args))

    yield "all aligned", put(tensors, 0)
    for p in tensors:
        for offset in OFFSETS:
            yield f"operand {p} at element {offset}", put([p], offset)
        for way in strides(args[p]):
            yield f"operand {p} with {way}, at element 1", put([p], 1, way)
    yield "all at element 1", put(tensors, 1)
    yield "all with gaps between rows", put(tensors, 0, "gaps between rows")


def calls(kernel: Kernel) -> Iterator[Placed]:
    """Calls in each dtype and size, in every placement, and each ask of the op's at odd addresses."""
    base, layout = cases.base_of(kernel), ("bshd",) if kernel.capability.layouts == {"BSHD"} else ()
    for dtype in cases.dtypes(kernel):
        for sizes in SIZES if kernel.compile_key is None else ({},):  # else each shape is compiled first
            case = cases.Case(kernel.op, layout, sizes | base)
            for where, args in variants(cases.call(case, dtype)):
                yield Placed(case, dtype, where, args)
        for ask in cases.ASKS.get(kernel.op, ()) if kernel.compile_key is None else ():
            case = cases.Case(kernel.op, (*layout, ask), base)
            *_, odd, gaps = variants(cases.call(case, dtype))
            for where, args in (odd, gaps):
                yield Placed(case, dtype, where, args)


def nothing(kernel: Kernel) -> Iterator[Placed]:
    """Calls without elements, as far as there are any."""
    for dtype, size in itertools.product(cases.dtypes(kernel), NOTHING):
        case = cases.Case(kernel.op, dims={**cases.base_of(kernel), size: 0})
        try:
            args = cases.call(case, dtype)
            table.get(kernel.op).check(args)
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError):
            continue  # the op, or what makes its calls, knows no such size
        if any(isinstance(a, Tensor) and a.numel() == 0 for a in args):
            yield Placed(case, dtype, f"nothing along {size}", args)


def answer(device: LocalDevice, call: Placed) -> list[str] | None:
    """What is wrong with the kernel's answer to a call, in words; None where selection refused it."""
    op = table.get(call.case.op)
    own = tuple(
        at(a, a.data_ptr() % 64 // a.itemsize, a.stride()) if p in op.written(call.args) else a
        for p, a in enumerate(call.args)
    )
    try:
        with torch.no_grad():
            outs = cases.as_tuple(device.launch(op, own))
    except NoKernelFoundError:
        return None
    specs = op.outputs(call.args)
    wrong = [f"{o.shape}" for o, spec in zip(outs, specs, strict=True) if tuple(o.shape) != spec.shape]
    if all(out.numel() == 0 for out in outs) or call.where.startswith("nothing"):
        return wrong
    truths, bases = cases.expected(call.case, call.args)
    written = [own[p] for p in op.written(call.args)]
    for out, truth, base in zip(
        (*outs, *written), truths, bases, strict=False
    ):  # a baseline may have the LSE
        if out.is_floating_point() and out.itemsize > 1:
            wrong += tolerances.mismatches(out, truth, base.to(out.dtype))
    return wrong


def main(*kernel_ids: str) -> None:
    """Run all calls of some kernels, and say what is wrong.

    Raises: AssertionError: an answer is wrong, or no call of a kernel ran.
    """
    torch.set_num_threads(1)
    for kernel_id in kernel_ids:
        print(kernel_id, flush=True)
        run_all(kernel_id)
    print("done", flush=True)


def run_all(kernel_id: str) -> None:
    """Run all calls of one kernel; raises as `main`."""
    kernel = next(k for k in cases.KERNELS if k.id == kernel_id)
    device = kernels.device([kernel], Settings(warm="off"))
    ran, wrong = 0, []
    for call in itertools.chain(calls(kernel), nothing(kernel)):
        print(call, flush=True)
        problems = answer(device, call)
        ran += problems is not None
        wrong += [f"{call}: {text}" for text in problems or ()]
    assert not wrong, f"{kernel_id}\n" + "\n".join(wrong[:20])
    assert ran, kernel_id
