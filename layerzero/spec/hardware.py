"""What a device is: one frozen record, probed once, never guessed later."""

from __future__ import annotations

import functools
import os
import platform as host
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import msgspec
import torch

from layerzero.spec.gpu_map import gpu_map, row_of


class GPUGeneration(IntEnum):
    """NVIDIA's generations in order; UNKNOWN sorts last and never counts as supported."""

    TURING = 75
    AMPERE = 80
    ADA_LOVELACE = 89
    HOPPER = 90
    BLACKWELL = 100
    UNKNOWN = 999


class MMAFamily(StrEnum):
    """The matrix instructions a generation has, which is what kernels are written for."""

    NONE = "none"
    WMMA = "wmma"
    WGMMA = "wgmma"
    TCGEN05 = "tcgen05"


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One device and the software under it.

    `sm` is the compute capability times ten (90 for 9.0), None off CUDA; `arch` is what other vendors build
    code for (gfx942). `peak_flops` (per dtype, FLOP/s) and `bandwidth` (bytes/s) are the
    roofline's two roofs: estimates that order kernels, not claims.
    """

    platform: str
    device: str
    name: str
    vendor: str
    sm: int | None = None
    arch: str = ""
    isa: frozenset[str] = frozenset()
    torch: str = ""
    cuda: str | None = None
    driver: str | None = None
    threads: int = 1
    memory_bytes: int = 0
    peak_flops: Mapping[str, float] = {}
    bandwidth: float = 2e10

    @property
    def generation(self) -> GPUGeneration:
        """The GPU generation; UNKNOWN for anything that is no NVIDIA GPU we have a row for."""
        return generation_of(self.sm)

    @property
    def tensor_core_generation(self) -> int | None:
        """NVIDIA's own count of its tensor cores' generations; None where it is not known."""
        row = row_of(gpu_map().tensor_cores, self.sm)
        return row.generation if row is not None else None

    @property
    def mma_family(self) -> MMAFamily:
        """The matrix instruction family; SM 12.x has no tcgen05 although it is Blackwell."""
        return mma_family_of(self.sm)


def device_class(hardware: Hardware) -> str:
    """What a stored quarantine holds for: the device's kind and the software under it."""
    parts = (hardware.name, hardware.torch, hardware.cuda, hardware.driver)
    return " / ".join(part for part in parts if part)


def generation_of(sm: int | None) -> GPUGeneration:
    """The generation of a compute capability (times ten); UNKNOWN where the map has another name for it."""
    row = row_of(gpu_map().generation, sm) if sm is not None else None
    return GPUGeneration.__members__.get(row.name, GPUGeneration.UNKNOWN) if row else GPUGeneration.UNKNOWN


def mma_family_of(sm: int | None) -> MMAFamily:
    """The matrix instruction family of a compute capability (times ten)."""
    row = row_of(gpu_map().family, sm) if sm is not None else None
    return MMAFamily(row.name) if row and row.name in set(MMAFamily) else MMAFamily.NONE


def probe(device: str | torch.device = "cpu") -> Hardware:
    """The record of one device of this process; cached, since it cannot change while we run."""
    return _probe(str(torch.device(device)))


@functools.cache
def _probe(device: str) -> Hardware:
    return _probe_cuda(device) if torch.device(device).type == "cuda" else _probe_cpu(device)


def _probe_cuda(device: str) -> Hardware:
    if not torch.cuda.is_available():
        raise ValueError(f"device {device!r} needs CUDA, which this process does not have; use device='cpu'")
    properties = torch.cuda.get_device_properties(torch.device(device))
    sm = properties.major * 10 + properties.minor
    return Hardware(
        platform="rocm" if torch.version.hip else "cuda",
        device=device,
        name=properties.name,
        vendor="amd" if torch.version.hip else "nvidia",
        sm=None if torch.version.hip else sm,
        arch=str(getattr(properties, "gcnArchName", "")).partition(":")[0] if torch.version.hip else "",
        torch=str(torch.__version__),  # a plain str: TorchVersion cannot be encoded
        cuda=torch.version.cuda,
        driver=_cuda_driver(),
        threads=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        **_cuda_roofs(sm),
    )


def _cuda_roofs(sm: int) -> dict[str, Any]:
    roof = row_of(gpu_map().roof, sm)
    half, bandwidth = (roof.half, roof.bandwidth) if roof is not None else (1e14, 1.5e12)
    peak_flops = {"float16": half, "bfloat16": half, "float32": half / 15, "float64": half / 30}
    return {"peak_flops": peak_flops, "bandwidth": bandwidth}


def hypothetical_gpu(
    sm: int, *, cuda: str = "13.0", driver: str = "580.0", memory_bytes: int = 80 << 30
) -> Hardware:
    """An NVIDIA GPU that need not be here, for planning: its roofs are those of its compute capability.

    Raises: ValueError: `sm` (times ten: 90 is 9.0) is no compute capability of any GPU, or `cuda` no version.
    """
    if re.fullmatch(r"\d+(\.\d+)*", cuda) is None:
        raise ValueError(f"cuda needs a version such as 13.0, got {cuda!r}")
    known = gpu_map().capabilities
    if isinstance(sm, bool) or sm not in known:
        every = ", ".join(map(str, sorted(set(known))))
        raise ValueError(f"sm needs a compute capability times ten ({every}), such as 90 for 9.0, got {sm!r}")
    return Hardware(
        platform="cuda",
        device="cuda:0",
        name=f"an imagined sm {sm // 10}.{sm % 10}",
        vendor="nvidia",
        sm=sm,
        torch=str(torch.__version__),
        cuda=cuda,
        driver=driver,
        memory_bytes=memory_bytes,
        **_cuda_roofs(sm),
    )


def _cuda_driver(version: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    text = version.read_text() if version.exists() else ""
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else None


def _probe_cpu(device: str) -> Hardware:
    vendor, name, flags = _cpu_identity()
    isa = frozenset(flags & _ISA_NAMES)
    threads = torch.get_num_threads()
    # Two fused multiply-adds a cycle over the vector width at 2.5 GHz: an upper bound that orders kernels.
    lanes = 16 if "avx512f" in isa else 8 if "avx2" in isa else 4
    peak = threads * 2.5e9 * lanes * 4 / 2
    bf16 = peak * 2 if {"avx512_bf16", "amx_bf16"} & isa else peak / 4
    return Hardware(
        platform="cpu" if device == "cpu" else torch.device(device).type,
        device=device,
        name=name,
        vendor=vendor,
        isa=isa,
        torch=str(torch.__version__),
        threads=threads,
        memory_bytes=_memory_bytes(),
        peak_flops={"float32": peak, "float64": peak / 2, "bfloat16": bf16, "float16": peak / 4},
        bandwidth=1.2e10 * max(1, min(threads, 8)),
    )


_ISA_NAMES = {
    "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "amx_bf16", "amx_int8", "neon", "asimd", "sve",
}  # fmt: skip


@functools.cache
def initialize_vector_math() -> None:
    """Make the process's first call of MKL's vector functions from one thread, once.

    Where several threads make that call at once, some of them may take a less exact variant: the first
    large `exp` (or `sqrt`, `sin`, ...) of one process in seventy was off by 1e-4 (torch 2.13, Intel CPU). A
    thread of its own, since torch's modes are the caller's.
    """
    first = threading.Thread(target=lambda: torch.exp(torch.zeros(1, device="cpu")), name="layerzero-settle")
    first.start()
    first.join()


def _cpu_identity() -> tuple[str, str, set[str]]:
    """Vendor, model name and instruction flags; from /proc/cpuinfo where there is one."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.exists() else ""
    fields: dict[str, str] = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    machine, vendors = host.machine(), {"AuthenticAMD": "amd", "GenuineIntel": "intel"}
    vendor = vendors.get(fields.get("vendor_id", ""), "arm" if machine in {"aarch64", "arm64"} else "unknown")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    # Not platform.processor(): where it knows nothing it starts a process to ask.
    return vendor, fields.get("model name", machine), flags


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device, what torch holds unused included; 0 where unknown.

    On CUDA what torch holds in pieces beside blocks in use does not count: no large block comes out of them,
    and it cannot be given back to the driver.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused_reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        pieces = torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0)
        return int(free + max(0, unused_reserved - pieces))
    meminfo = Path("/proc/meminfo")
    text = meminfo.read_text() if meminfo.exists() else ""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else _memory_bytes()


def host_free_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory of this machine that can be had, or what is left of this container's share of it."""
    free = free_memory(torch.device("cpu"))
    with suppress(OSError, ValueError):
        share = int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text())
        return max(0, min(free, share))
    return free
