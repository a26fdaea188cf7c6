"""A measurement: which kernel, on which exact sizes, in which environment, timed how, and what came out."""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Literal

import msgspec

from layerzero._util.version import installed_version
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel

Launch = Literal["eager", "graph"]
Cache = Literal["cold", "warm"]

MIN_SAMPLES = 5
# A call this long is an average by itself: fewer samples of it do.
LONG_US = 1e5
FEW_SAMPLES = 2
# Standard deviation over median above which a row says more about its neighbours than about itself.
MAX_SPREAD = 0.75
MAX_US = 6e8


class BenchmarkCase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The call that was timed: what a request holds, sizes exact, without what depends on the process."""

    op: str
    dtype: str
    dtypes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    layout: str = ""
    contiguous: bool = True
    dims: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of_request(cls, request: CallSpec, dtype: str | None = None) -> BenchmarkCase:
        """The benchmark case of a request; `dtype` is the one the kernel computes in, where that differs."""
        return cls(
            op=request.op,
            dtype=dtype or request.dtype,
            dtypes=tuple(sorted(set(request.dtypes))),
            features=tuple(sorted(request.features)),
            layout=request.layout,
            contiguous=request.contiguous,
            dims=tuple(sorted(request.dims.items())),
        )

    def digest(self) -> bytes:
        """Sixteen bytes that are equal for equal cases in every process."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).digest()


class Measurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One kernel's time on one benchmark case, in microseconds a call.

    `version` names the kernel's libraries; `launch` says whether the host is in the number ("eager") or a
    graph was replayed; `cache` whether operands were cold in the last-level cache. `variance` is that of the
    middle half of the samples. `timestamp` is seconds since 1970; `temperature_c`, `power_w` and `free_bytes`
    are rounded to buckets, None where they are unknown.
    """

    case: BenchmarkCase
    kernel: str
    version: str = ""
    launch: Launch = "eager"
    cache: Cache = "warm"
    median_us: float
    p95_us: float
    variance: float
    samples: int
    timestamp: int = 0
    temperature_c: int | None = None
    power_w: int | None = None
    free_bytes: int | None = None


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the software that a time holds for; a change of any field starts anew."""

    platform: str
    device: str
    vendor: str = ""
    sm: int | None = None
    isa: tuple[str, ...] = ()
    threads: int = 1
    torch: str = ""
    cuda: str | None = None
    driver: str | None = None

    @classmethod
    def of_hardware(cls, hardware: Hardware) -> Environment:
        """The environment of a probed device."""
        return cls(
            platform=hardware.platform,
            device=hardware.name,
            vendor=hardware.vendor,
            sm=hardware.sm,
            isa=tuple(sorted(hardware.isa)),
            threads=hardware.threads,
            torch=hardware.torch,
            cuda=hardware.cuda,
            driver=hardware.driver,
        )

    def digest(self) -> str:
        """Equal for equal environments, in every process."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).hexdigest()

    def differences(self, other: Environment) -> list[str]:
        """What differs, one `field: ours, theirs` each."""
        return [
            f"{name}: {getattr(self, name)}, {getattr(other, name)}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


def implausible_reason(row: Measurement) -> str:
    """Why a row must not move a choice; empty where it may."""
    numbers = (row.median_us, row.p95_us, row.variance)
    if not all(math.isfinite(n) and n >= 0 for n in numbers) or not 0 < row.median_us <= MAX_US:
        return "its times are no times"
    needed = MIN_SAMPLES if row.median_us < LONG_US else FEW_SAMPLES
    if row.samples < needed:
        return f"fewer than {needed} samples"
    if math.sqrt(row.variance) > MAX_SPREAD * row.median_us:
        return f"varies by more than {MAX_SPREAD:.0%}"
    return ""


def versions_of(kernel: Kernel) -> str:
    """The installed versions of the distributions that a kernel depends on, and where it runs, as one string.

    What was measured in this process says little of a kernel that runs in another, and the other way round.
    """
    place = [kernel.revision] if kernel.revision else []
    place += [f"isolated {kernel.isolated}"] if kernel.isolated else []
    return ", ".join([*(_version(text) for text in kernel.distributions), *place])


@functools.cache
def _version(requirement: str) -> str:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        name = Requirement(requirement).name
    except InvalidRequirement:
        name = requirement
    return f"{name} {installed_version(name) or 'missing'}"
