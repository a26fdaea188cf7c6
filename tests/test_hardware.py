"""What a device is: generations and instruction families by compute capability, one probe a device."""

from __future__ import annotations

import msgspec
import pytest

from layerzero.hardware import GPUGeneration, Hardware, MMAFamily, generation_of, mma_family_of, probe

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
