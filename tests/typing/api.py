"""What mypy --strict and pyright have to infer from the public surface; checked by tests/test_stubs.py.

Nothing here runs.
"""

from typing import assert_type

from torch import Tensor

import layerzero as lz


async def awaited(q: Tensor, k: Tensor, v: Tensor, flag: bool) -> None:
    """An awaited op gives what its blocking twin returns."""
    assert_type(await lz.attention(q, k, v), Tensor)
    assert_type(await lz.attention(q, k, v, is_causal=True, return_lse=False), Tensor)
    assert_type(await lz.attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(await lz.attention(q, k, v, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(await lz.add_rms_norm(q, q, backend="torch", priority=0, timeout=1.0), tuple[Tensor, Tensor])
    assert_type(await lz.rope(q, k, v, q, k), tuple[Tensor, Tensor])
    assert_type(await lz.sample(q, temperature=0.7, top_k=v, seed=None), Tensor)
    assert_type(await lz.mlp(q, k, v, activation="silu"), Tensor)


def blocking(q: Tensor, k: Tensor, v: Tensor, flag: bool) -> None:
    """A blocking op returns its tensors."""
    assert_type(lz.sync.attention(q, k, v), Tensor)
    assert_type(lz.sync.attention(q, k, v, window=(-1, 0), return_lse=True), tuple[Tensor, Tensor])
    assert_type(lz.sync.attention(q, k, v, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(lz.sync.linear(q, k, backend="zentorch"), Tensor)
    assert_type(lz.sync.add_rms_norm(q, q), tuple[Tensor, Tensor])
    assert_type(lz.sync.embedding(q, k, padding_idx=0), Tensor)


def inspected(q: Tensor) -> None:
    """Inspection gives records, not dictionaries."""
    assert_type(lz.select("rms_norm", q), lz.Selection)
    assert_type(lz.select_batch("rms_norm", [{"x": q}]), list[lz.Selection])
    assert_type(lz.which("rms_norm", q, batch=4), str)
    assert_type(lz.explain("rms_norm", q).selection, lz.Selection)
    assert_type(lz.last_selection(), lz.Selection | None)
    assert_type(lz.get_config(), lz.Settings)
    assert_type(lz.get_locks(), dict[str, str])
    assert_type([kernel.state for kernel in lz.list_kernels("attention")], list[str])
    with lz.disable("zentorch.*"), lz.prefer("torch", op="rms_norm") as nothing:
        assert_type(nothing, None)
    assert_type(lz.__version__, str)


async def opened() -> None:
    """A started runtime is a Runtime in both kinds of block."""
    async with lz.start(lz.Settings(device="cpu")) as rt:
        assert_type(rt, lz.Runtime)
    with lz.start() as rt:
        assert_type(rt, lz.Runtime)


def chosen_words(q: Tensor) -> None:
    """Words that an op takes are literals, and a bound op gives what the op gives."""
    lz.sync.mlp(q, q, q, activation="swigly")  # type: ignore[arg-type]  # pyright: ignore
    assert_type(lz.bind("rms_norm", q)(q), Tensor)
    assert_type(lz.bind("rms_norm", q).binding.plan.kernel, str)
    assert_type(lz.bind("add_rms_norm", q, q)(q, q), tuple[Tensor, Tensor])


def _rows(x: Tensor) -> Tensor:
    return x


def _words(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


async def own_functions(q: Tensor) -> None:
    """A function of one's own gives each caller rows, or its entry of the list."""
    assert_type(await lz.batched(_rows)(q), Tensor)
    assert_type(await lz.batched(_words)("a"), int)


def measured(q: Tensor) -> None:
    """A blocking twin takes what the awaited one takes, and nothing else; errors carry values of a type."""
    assert_type(lz.tune_blocking(ops=["rms_norm"], quick=True), lz.TuneReport)
    lz.tune_blocking(quik=True)  # type: ignore[call-arg]  # pyright: ignore
    try:
        assert_type(lz.compile(_rows)(q), Tensor)
    except lz.FileRefusedError as error:
        assert_type(error.problems, tuple[lz.Rejected, ...])
    with lz.rehearse_capture() as nothing:
        assert_type(nothing, None)
