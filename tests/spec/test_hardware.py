"""What a device is: generations and instruction families by compute capability, one probe a device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from layerzero.spec import hardware
from layerzero.spec.hardware import (
    GPUGeneration,
    Hardware,
    MMAFamily,
    generation_of,
    hypothetical_gpu,
    mma_family_of,
    probe,
)

ROWS = [
    (None, "UNKNOWN", "none"), (70, "UNKNOWN", "none"), (75, "TURING", "wmma"), (80, "AMPERE", "wmma"),
    (86, "AMPERE", "wmma"), (88, "AMPERE", "wmma"), (89, "ADA_LOVELACE", "wmma"), (90, "HOPPER", "wgmma"),
    (100, "BLACKWELL", "tcgen05"), (103, "BLACKWELL", "tcgen05"), (110, "BLACKWELL", "tcgen05"),
    (120, "BLACKWELL", "wmma"), (121, "BLACKWELL", "wmma"), (999, "UNKNOWN", "none"),
]  # fmt: skip


@pytest.mark.parametrize(("sm", "generation", "family"), ROWS)
def test_compute_capabilities_map_to_generations(sm: int | None, generation: str, family: str) -> None:
    """Every listed capability has its generation and its matrix instructions; others are unknown (T3, K6)."""
    assert generation_of(sm).name == generation
    assert mma_family_of(sm).value == family


def test_generations_are_ordered() -> None:
    """Turing, Ampere, Ada, Hopper, Blackwell; unknown counts as newest and supports nothing (T1)."""
    known = [g.name for g in sorted(GPUGeneration)]
    assert known == ["TURING", "AMPERE", "ADA_LOVELACE", "HOPPER", "BLACKWELL", "UNKNOWN"]
    assert mma_family_of(GPUGeneration.UNKNOWN) is MMAFamily.NONE


def test_the_cpu_is_probed_once_and_is_plain_data() -> None:
    """One record, with its roofs, that survives JSON."""
    found = probe("cpu")
    assert found is probe("cpu")
    assert (found.platform, found.sm, found.generation) == ("cpu", None, GPUGeneration.UNKNOWN)
    assert found.bandwidth > 0 and found.peak_flops["float32"] > 0 and found.memory_bytes > 0
    assert msgspec.json.decode(msgspec.json.encode(found), type=Hardware) == found


# What torch and the driver say of an H200: names, versions and capability as in `graphs_h200.json`, the count
# of multiprocessors and the memory by the data sheet.
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 * 10**9
)
DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for  x86_64  580.159.04  Release Build  (dvs-builder@U22)"
)
MI300 = SimpleNamespace(
    name="AMD Instinct MI300X", major=9, minor=4, multi_processor_count=304, total_memory=192 * 2**30,
    gcnArchName="gfx942:sramecc+:xnack-",
)  # fmt: skip


def told(monkeypatch: pytest.MonkeyPatch, card: SimpleNamespace, **versions: str | None) -> None:
    """torch as it answers where this card is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for name, value in versions.items():
        monkeypatch.setattr(torch.version, name, value)


def test_an_nvidia_card_is_described_by_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200's properties give Hopper, its roofs, versions and instructions, and survive JSON (T3, K6)."""
    told(monkeypatch, H200, cuda="13.0", hip=None)
    found = hardware._probe_cuda("cuda:1")
    assert (found.platform, found.device, found.vendor, found.name) == (
        "cuda",
        "cuda:1",
        "nvidia",
        "NVIDIA H200",
    )
    assert (found.sm, found.generation, found.mma_family) == (90, GPUGeneration.HOPPER, MMAFamily.WGMMA)
    assert (found.tensor_core_generation, found.cuda, found.torch) == (4, "13.0", str(torch.__version__))
    assert (found.threads, found.memory_bytes, found.arch) == (132, 141 * 10**9, "")
    assert found.bandwidth > 3e12 and found.peak_flops["bfloat16"] > found.peak_flops["float32"] > 1e13
    assert msgspec.json.decode(msgspec.json.encode(found), type=Hardware) == found
    told(monkeypatch, SimpleNamespace(**{**vars(H200), "major": 8, "minor": 9}), cuda="13.0", hip=None)
    older = hardware._probe_cuda("cuda:0")
    assert (older.sm, older.generation) == (89, GPUGeneration.ADA_LOVELACE), "both digits count"


def test_an_amd_card_has_an_architecture_and_no_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ROCm `major` and `minor` are no compute capability; the architecture has no flags (T3)."""
    told(monkeypatch, MI300, cuda=None, hip="6.4")
    found = hardware._probe_cuda("cuda:0")
    assert (found.platform, found.vendor, found.sm, found.arch) == ("rocm", "amd", None, "gfx942")
    assert (found.generation, found.mma_family) == (GPUGeneration.UNKNOWN, MMAFamily.NONE)


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        (DRIVER, "580.159.04"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54  Tue Jun  6 22:20:39 UTC 2023", "535.54"),
        ("nothing that is a version", None),
        (None, None),
    ],
)
def test_the_driver_s_version_is_read_where_it_is_told(
    tmp_path: Path, text: str | None, driver: str | None
) -> None:
    """Both kinds of kernel module name their version; no file and no version are None (T3)."""
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text)
    assert hardware._cuda_driver(file) == driver


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_card_that_is_here_is_the_one_described() -> None:
    """The record of the live device has its name, capability, memory and versions (T3)."""
    found, card = probe("cuda:0"), torch.cuda.get_device_properties(0)
    assert (found.name, found.threads, found.memory_bytes) == (
        card.name, card.multi_processor_count, card.total_memory
    )  # fmt: skip
    if torch.version.hip is None:
        assert found.sm == 10 * card.major + card.minor and found.vendor == "nvidia"
        assert found.cuda == torch.version.cuda and (found.driver or "5")[0].isdigit()
    else:
        assert found.sm is None and found.arch.startswith("gfx")
    assert 0 < hardware.free_memory(torch.device("cuda:0")) <= found.memory_bytes


def test_cuda_that_is_not_here_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for a card in a process without CUDA says so (T3)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="'cuda:0' needs CUDA"):
        hardware._probe_cuda("cuda:0")


@pytest.mark.parametrize("cuda", ["banana", "", "13.", "cu130"])
def test_a_cuda_version_of_an_imagined_gpu_that_is_none_is_refused(cuda: str) -> None:
    """A mistyped version names the argument; it does not silently refuse or admit kernels."""
    with pytest.raises(ValueError, match=r"^cuda needs a version such as 13\.0, got"):
        hypothetical_gpu(90, cuda=cuda)
    assert hypothetical_gpu(90, cuda="12.8").cuda == "12.8"
