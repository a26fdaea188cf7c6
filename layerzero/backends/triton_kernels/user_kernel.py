"""A user's own Triton function as a kernel: described by capability, its launches checked and counted.

    def prepare(x, weight, eps):
        out = torch.empty_like(x)
        rows, width = x.shape
        return TritonLaunch((rows,), (x, weight, out, width, eps), {"BLOCK": next_power_of_2(width)}, out)

    rt.add_kernel(triton_kernel("acme.rms_norm.triton", "rms_norm", my_function, prepare, capability))

`prepare` takes the op's full argument tuple. From there on the function is a kernel like any other: judged,
priced, loaded in the background, replaced inside the call when it fails.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from layerzero.spec.capability import Capability
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.kernel import Efficiency, Kernel
from layerzero.spec.reasons import Reason

# CUDA C programming guide, table of technical specifications; the same on all compute capabilities.
GRID_LIMITS = (2**31 - 1, 65535, 65535)
# triton.language.core.TRITON_MAX_TENSOR_NUMEL
MAX_BLOCK = 1 << 20
MAX_WARPS = 32
_WARM_LAUNCHES = 4096


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """One launch: the grid, the function's arguments, its compile-time constants, what the call returns.

    `constants` may hold Triton's own options too (num_warps, num_stages).
    """

    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    result: Tensor | tuple[Tensor, ...]


def check_launch(launch: Any) -> None:
    """Refuse a launch that the device or Triton would refuse, or take for something else.

    Raises: TypeError: it is no TritonLaunch, or a part has another type. ValueError: a number does not fit.
    """
    if not isinstance(launch, TritonLaunch):
        raise TypeError(f"prepare needs to return a TritonLaunch, got {type(launch).__name__}")
    grid = launch.grid
    if not isinstance(grid, tuple) or not 1 <= len(grid) <= 3:
        raise ValueError(f"grid needs a tuple of 1 to 3 numbers, got {grid!r}")
    for axis, (size, limit) in enumerate(zip(grid, GRID_LIMITS, strict=False)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"grid[{axis}] needs an int, got {type(size).__name__}: {size!r}")
        if not 1 <= size <= limit:
            raise ValueError(f"grid[{axis}] needs an int in [1, {limit}], got {size}")
    for name, value in launch.constants.items():
        if name.startswith("BLOCK") or name == "num_warps":
            limit = MAX_WARPS if name == "num_warps" else MAX_BLOCK
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} needs an int, got {type(value).__name__}: {value!r}")
            if not 1 <= value <= limit or value & (value - 1):
                raise ValueError(f"{name} needs a power of two in [1, {limit}], got {value}")
    parts = launch.result if isinstance(launch.result, tuple) else (launch.result,)
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"result needs a tensor or a tuple of tensors, got {type(launch.result).__name__}")


@dataclass(slots=True)
class Launches:
    """What became of a kernel's launches: how many, and how many programs were compiled for them."""

    count: int = 0
    variants: set[Any] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def compiled(self) -> int:
        """Programs compiled or read from Triton's cache; every further launch found its program ready."""
        return len(self.variants)

    def note(self, program: Any) -> None:
        """Count one launch of a program (None in the interpreter, which compiles nothing)."""
        with self._lock:
            self.count += 1
            if program is not None:
                self.variants.add(getattr(program, "hash", id(program)))


LAUNCHES: dict[str, Launches] = {}


def triton_kernel(
    kernel_id: str,
    op: str,
    function: Any,
    prepare: Callable[..., TritonLaunch],
    capability: Capability,
    *,
    efficiency: Efficiency | None = None,
    rank: int = 30,
) -> Kernel:
    """A kernel of `op` that launches the Triton `function` as `prepare` says; register it with `add_kernel`.

    Args: function: what `@triton.jit` or `@triton.autotune` gave; kernel_id `<yours>.<op>[.<variant>]`.
    Raises: TypeError: function is no Triton function, prepare cannot be called. ValueError: kernel_id is
        malformed, or names a backend of LayerZero's own.
    """
    if not callable(prepare):
        raise TypeError(f"prepare needs a function, got {type(prepare).__name__}")
    if not hasattr(function, "run") or not hasattr(function, "__getitem__"):
        raise TypeError(f"function needs to be decorated with triton.jit, got {type(function).__name__}")
    backend = kernel_id.partition(".")[0]
    if backend in ("reference", "torch", "triton", "layerzero"):
        raise ValueError(f"kernel_id needs a backend name of your own before the dot, got {backend!r}")
    launches = LAUNCHES.setdefault(kernel_id, Launches())

    def load() -> Callable[..., Any]:
        importlib.import_module("triton")
        checked: set[Any] = set()

        def run(*args: Any) -> Any:
            launch = prepare(*args)
            shape = (launch.grid, *launch.constants.items()) if isinstance(launch, TritonLaunch) else None
            if shape not in checked:
                check_launch(launch)
                if len(checked) < _WARM_LAUNCHES:
                    checked.add(shape)
            launches.note(function[launch.grid](*launch.arguments, **launch.constants))
            return launch.result

        return run

    return Kernel(
        id=kernel_id,
        op=op,
        backend=backend,
        capability=capability,
        load=load,
        efficiency=efficiency or Efficiency(0.5, 0.7, 20.0, "an estimate for a user's kernel; tune measures"),
        tie_break_order=rank,
        distributions=("triton>=3.6",),
    )


def compile_ahead(
    function: Any, signature: Mapping[str, str], constants: Mapping[str, Any], *, sm: int, num_warps: int = 4
) -> int:
    """Compile a Triton function for a compute capability (90 for 9.0) that need not be here.

    Args: signature: each parameter's Triton type, such as "*bf16" or "i32"; those in `constants` may be left
        out.
    Returns: the size of the machine code in bytes.
    Raises: BackendNotAvailableError: Triton cannot compile it; `.context["reason"]` is JIT_FAILED.
    """
    triton = importlib.import_module("triton")
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", sm, 32)
    types = {name: "constexpr" if name in constants else signature[name] for name in function.arg_names}
    try:
        source = compiler.ASTSource(function, types, constexprs=dict(constants))
        compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    except Exception as error:  # the compiler's passes raise whatever they like
        raise BackendNotAvailableError(
            f"{function.__name__} does not compile for sm {sm}: {type(error).__name__}: {error}"[:600],
            backend="triton",
            reason=Reason.JIT_FAILED,
        ) from error
    return len(compiled.asm["cubin"])
