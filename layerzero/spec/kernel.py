"""What a kernel is and what it can do, as data; `rejections` turns the data into every reason against it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import FEATURE_REASONS, HALF, INDEX_DTYPES, NAME_SETS, Capability
from layerzero.spec.condition import parse_limit
from layerzero.spec.hardware import Hardware
from layerzero.spec.reasons import Reason, Rejected

KERNEL_ID = re.compile(r"[a-z0-9_]{1,32}(\.[a-z0-9_]{1,48}){1,3}")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How near the roofs a kernel comes and what one launch costs; `source` says who measured it.

    `flops` and `bandwidth` are fractions of the device's peaks; `launch_us` is host and launch time in
    microseconds. They rank kernels until measurements of the machine at hand replace them.
    """

    flops: float
    bandwidth: float
    launch_us: float
    source: str


# Behind every other kernel: not timed yet, or to be taken by name alone.
LAST_CHOICE = (0.01, 0.01, 500.0)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel cuts attention into blocks of query rows, each of which one multiprocessor takes.

    `rows` are (head size, rows of a block) from the smallest: the first that is large enough holds. `packed`
    blocks hold rows of all query heads that share a head of keys. A kernel that `splits` cuts keys, too,
    where blocks are fewer than multiprocessors. `source` says where it is written.
    """

    rows: tuple[tuple[int, int], ...]
    packed: bool
    splits: bool
    source: str


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """One implementation of one op from one backend.

    `load()` imports what is needed and returns the callable that takes the op's full argument tuple; it may
    raise ImportError. `slow_import` says that loading is slow (vendor import, compilation), so that a call
    never waits for it. `distributions` are the installed distributions it needs, as requirement strings;
    where the first of a pair in `co_requirements` is installed, it needs the second, too.
    `tie_break_order` orders kernels inside the tie band: lower wins. `default` marks the library default of
    the op. `workspace_bytes(spec)` is what it allocates beyond its outputs; `copied_bytes(spec)` the part of
    it that operands are copied into. `tiling` says how it cuts a call, where the last wave of blocks tells.
    `descriptor` marks data alone: nothing here can run it, on any machine.
    `compile_key(spec)` names what is compiled together for a request, where loading alone compiles nothing,
    and `compile(spec)` compiles it; until then the kernel is not ready for requests of that unit.
    `on_disk(spec)` says whether what that would compile lies on disk, where every process finds it; a kernel
    that has it may be compiled by a process of its own. `compile_s` is about how long that takes, in
    seconds, which its gain has to repay (`Settings.payback_calls`).
    `origin`, "module:function", says what gives this kernel in another process, where no backend there
    has it; `isolated` is the place where it runs, "process" or an interpreter's path, empty in this process.
    `revision` says which of several this is, where its distributions' versions do not.
    """

    id: str
    op: str
    backend: str
    capability: Capability
    load: Callable[[], Callable[..., Any]]
    efficiency: Efficiency
    tie_break_order: int = 50
    slow_import: bool = False
    default: bool = False
    distributions: tuple[str, ...] = ()
    co_requirements: tuple[tuple[str, str], ...] = ()
    workspace_bytes: Callable[[CallSpec], int] | None = field(default=None)
    copied_bytes: Callable[[CallSpec], int] | None = field(default=None)
    tiling: Tiling | None = None
    compile_key: Callable[[CallSpec], str] | None = field(default=None)
    compile: Callable[[CallSpec], None] | None = field(default=None)
    on_disk: Callable[[CallSpec], bool] | None = field(default=None)
    compile_s: float = 0.0
    descriptor: bool = False
    origin: str = ""
    isolated: str = ""
    revision: str = ""

    @classmethod
    def of(
        cls,
        kernel_id: str,
        load: Callable[[], Callable[..., Any]],
        efficiency: tuple[float, float, float],
        measured: str,
        **fields: Any,
    ) -> Kernel:
        """The kernel `<backend>.<op>.<variant>`; `fields` are its own and those of its capability.

        A set of names may be one text (`dtypes="float32 bfloat16"`). `measured` is where `efficiency` comes
        from. What the kernels of a library have in common is a `functools.partial` of this.
        """
        backend, op = kernel_id.split(".")[:2]
        described = {name: fields.pop(name) for name in Capability.__struct_fields__ if name in fields}
        for name in described.keys() & NAME_SETS:
            if isinstance(described[name], str):
                described[name] = frozenset(described[name].split())
        capability = Capability(**described)
        return cls(kernel_id, op, backend, capability, load, Efficiency(*efficiency, measured), **fields)

    def __post_init__(self) -> None:
        if not KERNEL_ID.fullmatch(self.id):
            raise ValueError(
                f"kernel id needs <backend>.<op>[.<variant>] in lower snake case, got {self.id!r}"
            )
        if self.id.split(".")[0] != self.backend:
            raise ValueError(f"kernel id {self.id!r} needs to start with its backend {self.backend!r}")


def loading(
    find: Callable[[], Any], record: Any = None
) -> Callable[[Callable[..., Any]], Callable[[], Callable[..., Any]]]:
    """Make an adapter a kernel's `load`: what `find()` imports or compiles becomes its first argument.

    `record`, a named tuple of the op's arguments, is what the adapter takes in their place.
    """

    def of(adapter: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
        def load() -> Callable[..., Any]:
            library = find()
            if record is None:
                return MethodType(adapter, library)  # as cheap to call as a closure
            make = record._make

            def call(*args: Any) -> Any:
                return adapter(library, make(args))

            return call

        return load

    return of


def rejections(kernel: Kernel, spec: CallSpec, hardware: Hardware) -> list[Rejected]:
    """Every reason why `kernel` cannot serve `request` on `hardware`; an empty list accepts.

    Pure: the same three values give the same list on any machine.
    """
    capability = kernel.capability
    reasons = list(_hardware_rejections(capability, spec.dtype, hardware))
    # Most requests are plain: what cannot find anything is not asked.
    if spec.dtype not in capability.dtypes or set(spec.dtypes) != {spec.dtype}:
        reasons += _dtype_rejections(capability, spec)
    reasons += _layout_rejections(capability, spec)
    if not spec.features <= capability.features:
        reasons += _feature_rejections(capability, spec)
    if capability.only_with and not spec.features & capability.only_with:
        needs = _any_of_text(capability.only_with)
        reasons.append(Rejected(Reason.FEATURE_REQUIRED, "features", needs, "none of them", needs))
    if capability.limits:
        reasons += _limit_rejections(capability, spec)
    if spec.modes:
        reasons += _mode_rejections(capability, spec)
    return reasons


def _hardware_rejections(cap: Capability, dtype: str, hw: Hardware) -> Iterator[Rejected]:
    if hw.platform not in cap.platforms:
        yield Rejected(Reason.PLATFORM_MISMATCH, "platform", _any_of_text(cap.platforms), hw.platform)
        return
    if hw.platform == "cuda":
        yield from _cuda_rejections(cap, hw)
    if cap.archs is not None and hw.arch not in cap.archs:
        yield Rejected(Reason.ARCH_UNSUPPORTED, "arch", _any_of_text(cap.archs), hw.arch or "an unknown one")
    if hw.platform == "cpu":
        if cap.cpu_vendors is not None and hw.vendor not in cap.cpu_vendors:
            yield Rejected(Reason.CPU_VENDOR_UNSUPPORTED, "vendor", _any_of_text(cap.cpu_vendors), hw.vendor)
        needed = cap.isa | cap.half_isa if dtype in HALF else cap.isa
        if missing := needed - hw.isa:
            yield Rejected(Reason.ISA_MISSING, "isa", _all_text(missing), _all_text(hw.isa) or "none of them")
    if cap.torch_min is not None and version(hw.torch) < version(cap.torch_min):
        yield Rejected(Reason.TORCH_TOO_OLD, "torch", f">= {cap.torch_min}", hw.torch)
    if cap.torch_below is not None and version(hw.torch) >= version(cap.torch_below):
        yield Rejected(Reason.TORCH_TOO_NEW, "torch", f"< {cap.torch_below}", hw.torch)


def _cuda_rejections(cap: Capability, hw: Hardware) -> Iterator[Rejected]:
    sm = hw.sm or 0
    if cap.sm_min is not None and sm < cap.sm_min:
        yield Rejected(Reason.SM_TOO_OLD, "sm", f">= {cap.sm_min}", str(sm))
    if cap.sm_max is not None and sm > cap.sm_max:
        yield Rejected(Reason.SM_TOO_NEW, "sm", f"<= {cap.sm_max}", str(sm))
    if cap.mma_families is not None and hw.mma_family not in cap.mma_families:
        needs = _any_of_text(frozenset(m.value for m in cap.mma_families))
        yield Rejected(Reason.MMA_FAMILY_UNSUPPORTED, "mma_family", needs, hw.mma_family.value)
    if cap.cuda_min is not None and version(hw.cuda or "0") < version(cap.cuda_min):
        yield Rejected(Reason.CUDA_TOO_OLD, "cuda", f">= {cap.cuda_min}", str(hw.cuda))
    if cap.driver_min is not None and version(hw.driver or "0") < version(cap.driver_min):
        yield Rejected(Reason.DRIVER_TOO_OLD, "driver", f">= {cap.driver_min}", str(hw.driver))


def _dtype_rejections(cap: Capability, spec: CallSpec) -> Iterator[Rejected]:
    if spec.dtype not in cap.dtypes:
        yield Rejected(Reason.DTYPE_UNSUPPORTED, "dtype", _any_of_text(cap.dtypes), spec.dtype)
    floats = {d for d in spec.dtypes if d not in INDEX_DTYPES and d != "bool"}
    if len(floats) > 1 and not cap.mixed_dtypes:
        yield Rejected(
            Reason.DTYPES_MIXED, "dtypes", "one dtype", _all_text(floats), f"every operand {spec.dtype}"
        )
    for index in sorted({d for d in spec.dtypes if d in INDEX_DTYPES} - cap.index_dtypes):
        yield Rejected(Reason.INDEX_DTYPE_UNSUPPORTED, "index dtype", _any_of_text(cap.index_dtypes), index)


def _layout_rejections(cap: Capability, spec: CallSpec) -> Iterator[Rejected]:
    if cap.layouts and spec.layout not in cap.layouts:
        needs = _any_of_text(cap.layouts)
        yield Rejected(Reason.LAYOUT_UNSUPPORTED, "layout", needs, spec.layout or "none", f"layout={needs}")
    if cap.contiguous and not spec.contiguous:
        yield Rejected(Reason.NOT_CONTIGUOUS, "strides", "contiguous operands", "strided", ".contiguous()")
    if cap.last_stride1 and not spec.last_stride1:
        yield Rejected(
            Reason.STRIDE_LAST_DIM, "stride(-1)", "1", "another, or rows that overlap", ".contiguous()"
        )
    if spec.alignment < cap.alignment:
        yield Rejected(Reason.MISALIGNED, "alignment", f">= {cap.alignment} bytes", f"{spec.alignment} bytes")


def _feature_rejections(cap: Capability, spec: CallSpec) -> Iterator[Rejected]:
    for feature in sorted(spec.features - cap.features):
        if feature.startswith("act_"):
            activations = (f.removeprefix("act_") for f in cap.features if f.startswith("act_"))
            have, got = _any_of_text(frozenset(activations)), feature.removeprefix("act_")
            yield Rejected(Reason.ACTIVATION_UNSUPPORTED, "activation", have or "none", got)
            continue
        reason = FEATURE_REASONS.get(feature, Reason.FEATURE_UNSUPPORTED)
        if reason is Reason.SDPA_BACKEND_DISABLED:
            switch = feature.removeprefix("sdpa_no_")
            yield Rejected(reason, "sdpa_kernel", switch, f"{switch} switched off", f"{switch} switched on")
            continue
        if feature == "no_weight":
            yield Rejected(reason, "weight", "one", "none", "a weight")
        else:
            yield Rejected(reason, feature, f"calls without {feature}", feature, f"no {feature}")


def _limit_rejections(cap: Capability, spec: CallSpec) -> Iterator[Rejected]:
    for limit in map(parse_limit, cap.limits):
        if limit.when and limit.when not in spec.features and limit.when not in spec.modes:
            continue
        if not limit.holds(spec.dims):
            got, needs = limit.got(spec.dims), limit.needs()
            counter = f"{limit.dim} {needs}"
            yield Rejected(limit.code, limit.dim, needs, got, counter)


def _mode_rejections(cap: Capability, spec: CallSpec) -> Iterator[Rejected]:
    modes = spec.modes
    if "grad" in modes and not cap.gradient:
        yield Rejected(Reason.NO_GRADIENT, "grad", "no gradient", "requires_grad", "torch.no_grad()")
    if "deterministic" in modes and not cap.deterministic:
        off = "torch.use_deterministic_algorithms(False)"
        yield Rejected(Reason.NOT_DETERMINISTIC, "deterministic", "no determinism", "deterministic mode", off)
    if "batch_invariant" in modes and not cap.batch_invariant:
        yield Rejected(
            Reason.NOT_BATCH_INVARIANT, "determinism", "default", "strict", 'determinism="default"'
        )
    if "capture" in modes and not cap.graph_safe:
        yield Rejected(Reason.CUDA_GRAPH_UNSAFE, "capture", "no graph capture", "a capturing stream")
    if "autocast" in modes and not cap.autocast:
        off = "torch.autocast(..., enabled=False)"
        yield Rejected(Reason.AUTOCAST_UNSUPPORTED, "autocast", "no autocast", "autocast", off)
    if "tp_invariant" in modes and not cap.tp_invariant:
        yield Rejected(Reason.TP_INVARIANCE_REQUIRED, "tp", "no tensor-parallel invariance", "required")


def version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing: `"2.13.0+cpu"` gives `(2, 13, 0)`."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        digits = re.match(r"\d+", part)
        if not digits:
            break
        numbers.append(int(digits.group()))
    return tuple(numbers)


@functools.cache
def _any_of_text(values: frozenset[Any]) -> str:
    """The words of one of a capability's sets, which every refusal repeats."""
    return " or ".join(sorted(str(v) for v in values))


def _all_text(values: Any) -> str:
    return ", ".join(sorted(str(v) for v in values))
