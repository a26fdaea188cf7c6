"""The compiled kernels against float64, in every batch, and what happens where they cannot be compiled."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.actors.device.registry import Registry
from layerzero.backends import native
from layerzero.native import building
from layerzero.ops import table
from layerzero.ops.op import Args
from layerzero.spec import tolerances
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason
from tests.backends import cases
from tests.ops.paged.paging import paged_call
from tests.ops.paged.test_mla import latent_call
from tests.ops.paged.test_ragged import operands

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernels are compiled on Linux only")
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)
APPEND, PAGED, RAGGED, LATENT = native.KERNELS


def run(kernel: Kernel, args: Args) -> tuple[Tensor, ...]:
    """The kernel's results for a call that its capability lets through."""
    op = table.get(kernel.op)
    assert rejections(kernel, op.check(args), cases.HERE) == []
    return cases.as_tuple(kernel.load()(*args))


def assert_right(kernel: Kernel, args: Args, *, softcap: bool = False) -> None:
    """The results are within tolerance of the reference in float64."""
    op = table.get(kernel.op)
    got, bases = run(kernel, args), cases.as_tuple(op.reference(*args))
    truths = cases.as_tuple(op.reference(*cases.widened(args)))
    for out, truth, base in zip(got, truths, bases, strict=True):
        assert tolerances.mismatches(out, truth, base, softcap=softcap) == []


OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": False},
    {"window": (20, -1)},
    {"window": (3, 2), "is_causal": False},
    {"softcap": 2.0},
    {"softcap": 2.0, "window": (20, 0)},
    {"scale": 0.4},
]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 64])
def test_pages_agree_with_float64(dtype: torch.dtype, layout: str, page_size: int) -> None:
    """Prefill, chunks, decode and empty sequences with every option; poison behind lengths is not read."""
    for number, options in enumerate(OPTIONS):
        index = torch.int64 if number % 2 else torch.int32
        args, _ = paged_call(
            [5, 40, 1, 0, 2], [5, 77, 130, 4, 0], widths=(16, 16), page_size=page_size, layout=layout,
            dtype=dtype, index=index, return_lse=True, seed=number, **options,
        )  # fmt: skip
        assert_right(PAGED, args, softcap="softcap" in options)


@needs_compiler
@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (64, 1), (12, 12), (8, 2)])
@pytest.mark.parametrize("widths", [(64, 64), (40, 24), (1, 3), (128, 128), (192, 128)])
def test_heads_of_every_shape_agree_with_float64(heads: tuple[int, int], widths: tuple[int, int]) -> None:
    """Groups beyond one block of rows, widths beyond whole vectors."""
    args, _ = paged_call([1, 1, 1], [33, 1, 70], heads=heads, widths=widths, decode=True, return_lse=True)
    assert_right(PAGED, args)


@needs_compiler
def test_a_pool_in_another_dtype_is_read_as_it_is() -> None:
    """Float32 queries over a bfloat16 pool: no cast of the pool, no cast of the result."""
    args, _ = paged_call([4], [50], dtype=torch.bfloat16)
    mixed = (args[0].float(), *args[1:])
    assert_right(PAGED, mixed)
    assert run(PAGED, mixed)[0].dtype == torch.float32


@needs_compiler
def test_a_pool_of_strided_layers_is_read_in_place() -> None:
    """Keys and values interleaved by page, as some servers keep them."""
    args, _ = paged_call([3, 1], [20, 40])
    both = torch.stack(args[1:3], 1)
    interleaved = (args[0], both[:, 0], both[:, 1], *args[3:])
    assert torch.equal(run(PAGED, args)[0], run(PAGED, interleaved)[0])


@needs_compiler
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_sequences_agree_with_float64(causal: bool) -> None:
    """Offsets of both kinds, sequences without queries or keys."""
    given, _ = operands([3, 50, 0, 2, 4], [70, 50, 3, 0, 2])
    for options in OPTIONS:
        rest = {name: value for name, value in options.items() if name != "is_causal"}
        args = table.get("ragged_attention").build(*given, is_causal=causal, return_lse=True, **rest)[1]
        assert_right(RAGGED, args, softcap="softcap" in options)


@needs_compiler
def test_latent_pages_agree_with_float64() -> None:
    """Keys of two pools, values out of the first."""
    args, _ = latent_call([3, 1, 2, 0], [3, 100, 9, 4], return_lse=True)
    assert_right(LATENT, args)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype, threads: int) -> None:
    """Whatever stands beside it, for any number of threads, its queries at once or one by one."""
    before = torch.get_num_threads()
    try:
        lengths, queries = [1, 64, 200, 33, 9, 130], [1, 1, 7, 33, 2, 40]
        args, _ = paged_call(queries, lengths, heads=(8, 2), widths=(64, 64), dtype=dtype, return_lse=True)
        together = run(PAGED, args)
        torch.set_num_threads(threads)
        cu = args[5]
        for row in range(len(lengths)):
            mine = slice(int(cu[row]), int(cu[row + 1]))
            own = torch.tensor([0, mine.stop - mine.start])
            alone = run(
                PAGED,
                (args[0][mine], *args[1:3], args[3][row : row + 1], args[4][row : row + 1], own, *args[6:]),
            )
            for part, whole in zip(alone, together, strict=True):
                assert torch.equal(part, whole[mine]), row
            last = slice(mine.stop - 1, mine.stop)
            step = run(
                PAGED,
                (args[0][last], *args[1:3], args[3][row : row + 1], args[4][row : row + 1], None, *args[6:]),
            )
            assert torch.equal(step[0], together[0][last]), "decode and prefill differ"
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_a_table_changed_in_place_is_seen() -> None:
    """Nothing of a table is remembered from one call to the next."""
    args, _ = paged_call([1, 1], [8, 8], decode=True)
    before = run(PAGED, args)[0]
    args[3][:, 0] = args[3].flip(0)[:, 0].clone()
    assert torch.equal(run(PAGED, args)[0], run(PAGED, (*args[:3], args[3].clone(), *args[4:]))[0])
    assert not torch.equal(before, run(PAGED, args)[0])


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: torch.tensor([[0, -1, 2], [3, 4, 5]])}, "got -1 at row 0, entry 1"),
        ({3: torch.tensor([[0, 1, 2], [3, 1 << 40, 5]])}, "at row 1, entry 1"),
        ({3: torch.tensor([[1, 1, 2], [3, 4, 5]])}, "page 1 at row 0, entries 0 and 1"),
        ({4: torch.tensor([25, 9])}, "seq_lens needs lengths"),
        ({4: torch.tensor([9, -1])}, "got -1 at 1"),
        ({5: torch.tensor([0, 9, 7])}, "never fall"),
        ({5: torch.tensor([0, 4, 60])}, "end at 7"),
    ],
)
def test_metadata_that_does_not_fit_is_refused_before_a_read(change: dict[int, Tensor], message: str) -> None:
    """The kernel looks at tables, lengths and offsets first, on every call."""
    args, _ = paged_call([4, 3], [16, 9])
    with pytest.raises(ValueError, match=message):
        PAGED.load()(*(change.get(position, value) for position, value in enumerate(args)))


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Modules are built into an empty cache folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.load_module.cache_clear()
    yield
    native.load_module.cache_clear()


def verdict() -> tuple[Reason, str]:
    """The reason with which a registry blocks the kernel after it failed to load."""
    registry = Registry([PAGED], lambda _: [])
    with pytest.raises(BackendNotAvailableError):
        registry.callable_of(PAGED.id)
    blocked = registry.blocked()[PAGED.id]
    return blocked.reason, blocked.got


def test_without_a_compiler_the_kernel_is_missing(build: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says what to install."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason, got = verdict()
    assert reason is Reason.BACKEND_MISSING and "no-such-compiler" in got


@needs_compiler
def test_a_source_that_does_not_compile_blocks_the_kernel(
    build: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compiler's first error is in the reason, and nothing half made stays behind."""
    broken = tmp_path / "broken.cpp"
    broken.write_text("int f( { return 1; }")
    own = building.SOURCES["layerzero_native"]
    monkeypatch.setitem(building.SOURCES, own.name, replace(own, source=broken))
    reason, got = verdict()
    assert reason is Reason.JIT_FAILED and "error" in got
    (left,) = (tmp_path / "layerzero" / "native").iterdir()
    assert left.suffix == ".lock"


def test_a_folder_that_others_can_write_is_not_trusted(build: None, tmp_path: Path) -> None:
    """Code is loaded from there."""
    folder = tmp_path / "layerzero" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    reason, got = verdict()
    assert reason is Reason.KERNEL_LOAD_FAILED and "writable by no other user" in got
