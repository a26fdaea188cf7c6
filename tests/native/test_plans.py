"""Blocking calls that the compiled twin knows: what it may answer, and when Python has to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from layerzero.calls.call_cache import BlockingCallCache
from tests.children import Child
from tests.kernels import kernel

WIDTH = 8


@pytest.fixture
def runtime() -> Iterator[lz.Runtime]:
    """A runtime of the test's own."""
    with lz.start() as opened:
        yield opened


def plans_of(op: str) -> Any:
    """The plans that `lz.sync`'s function of `op` asks first."""
    call = getattr(lz.sync, op)
    cells = dict(zip(call.__code__.co_freevars, call.__closure__, strict=True))
    known: BlockingCallCache = cells["cache"].cell_contents
    return known.entries


def answers(x: Tensor, *more: Any, op: str = "rms_norm", **named: Any) -> bool:
    """Whether the twin answers this call by itself."""
    return plans_of(op).run((x, *more), named) is not NotImplemented


def marked(kernel_id: str, value: float) -> lz.Kernel:
    """A kernel of rms_norm whose result says that it ran."""
    return kernel(kernel_id, lambda x, weight, eps: torch.full_like(x, value), launch_us=1000.0)


def test_the_third_call_is_answered_without_python(runtime: lz.Runtime) -> None:
    """A decision, a hit in Python, and from then on the twin, however the arguments are written."""
    x, weight = torch.randn(2, WIDTH), torch.randn(WIDTH)
    want = torch.nn.functional.rms_norm(x, (WIDTH,), weight, eps=1e-6)
    assert not answers(x, weight)
    lz.sync.rms_norm(x, weight)
    lz.sync.rms_norm(x, weight)
    assert answers(x, weight) and answers(x, weight=weight)
    torch.testing.assert_close(lz.sync.rms_norm(x, weight), want)
    torch.testing.assert_close(lz.sync.rms_norm(weight=weight, x=x), want)
    assert lz.last_selection().request.dims == {"N": 2, "C": WIDTH}  # type: ignore[union-attr]


def test_what_differs_is_not_answered(runtime: lz.Runtime) -> None:
    """Shape, strides, dtype, alignment, a number, a gradient: each makes another call."""
    x, weight = torch.randn(2, WIDTH), torch.randn(WIDTH)
    for _ in range(2):
        lz.sync.rms_norm(x, weight)
    shifted = torch.randn(2 * WIDTH + 1)[1:].view(2, WIDTH)
    assert answers(x, weight) and answers(torch.randn(2, WIDTH), weight)
    assert not answers(torch.randn(3, WIDTH), weight)
    assert not answers(torch.randn(WIDTH, 2).t(), weight)
    assert not answers(x.double(), weight) and not answers(x, weight.double())
    assert not answers(shifted, weight)
    assert not answers(x, weight, eps=1e-5) and not answers(x)
    assert not answers(x, weight, epsilon=1e-5) and not answers(x, weight, 1e-5, 2)
    assert not answers(torch.randn(2, WIDTH, requires_grad=True), weight)


def test_modes_and_scopes_are_other_calls(runtime: lz.Runtime) -> None:
    """No grad and inference have plans of their own; scopes, autocast and dispatch modes are Python's."""
    x, weight = torch.randn(2, WIDTH), torch.randn(WIDTH)
    for _ in range(2):
        lz.sync.rms_norm(x, weight)
    with torch.no_grad():
        assert not answers(x, weight)
    with torch.inference_mode():
        assert not answers(x, weight)
    with lz.prefer("torch"):
        assert not answers(x, weight)
    with torch.autocast("cpu"):
        assert not answers(x, weight)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Seen():  # type: ignore[no-untyped-call]
        assert not answers(x, weight)
    assert answers(x, weight)


def test_policy_and_runtime_end_what_is_known(runtime: lz.Runtime) -> None:
    """A lock takes hold at the next call, its end too; nothing is known in the next runtime."""
    x, weight = torch.randn(2, WIDTH), torch.randn(WIDTH)
    runtime.add_kernel(marked("acme.rms_norm.seven", 7.0))
    for _ in range(3):
        lz.sync.rms_norm(x, weight)
    lz.lock("rms_norm", "acme.rms_norm.seven")
    for _ in range(4):
        assert float(lz.sync.rms_norm(x, weight)[0, 0]) == 7.0
    lz.unlock("rms_norm")
    assert float(lz.sync.rms_norm(x, weight)[0, 0]) != 7.0
    for _ in range(3):
        lz.sync.rms_norm(x, weight)
    assert plans_of("rms_norm").size > 0
    runtime.close()
    with lz.start():
        assert plans_of("rms_norm").size == 0
        torch.testing.assert_close(lz.sync.rms_norm(x), torch.nn.functional.rms_norm(x, (WIDTH,), eps=1e-6))


def test_a_kernel_that_fails_is_replaced(runtime: lz.Runtime) -> None:
    """The next kernel answers inside the call; an error of the caller's control flow passes through."""
    raised: list[BaseException] = []

    def failing(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if raised:
            raise raised[0]
        return torch.full_like(x, 7.0)

    runtime.add_kernel(kernel("acme.rms_norm.failing", failing, launch_us=0.001))
    x, weight = torch.randn(2, WIDTH), torch.randn(WIDTH)
    for _ in range(3):
        assert float(lz.sync.rms_norm(x, weight)[0, 0]) == 7.0
    assert answers(x, weight)
    raised.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        lz.sync.rms_norm(x, weight)
    raised[:] = [RuntimeError("broken")]
    want = torch.nn.functional.rms_norm(x, (WIDTH,), weight, eps=1e-6)
    torch.testing.assert_close(lz.sync.rms_norm(x, weight), want)
    selection = lz.last_selection()
    assert selection is not None and selection.kernel != "acme.rms_norm.failing"


def test_data_is_checked_in_known_calls_too(runtime: lz.Runtime) -> None:
    """What a call's data may hold is looked at before its kernel, however often such a call was made."""
    weight = torch.randn(4, WIDTH)
    for _ in range(3):
        lz.sync.embedding(torch.tensor([0, 3]), weight)
    assert answers(torch.tensor([1, 2]), weight, op="embedding")
    for _ in range(2):
        with pytest.raises(ValueError, match="4"):
            lz.sync.embedding(torch.tensor([0, 4]), weight)


BLOCKING_PROGRAM = """
import time
import torch
import layerzero as lz
from layerzero.native import COMPILING, FAST_PATH, UNUSED
from tests.native.twins import compiled as compiled

x = torch.randn(1, 8)
for _ in range(3):
    lz.sync.rms_norm(x)
for _ in range(1200):
    if FAST_PATH.state not in (UNUSED, COMPILING):
        break
    time.sleep(0.1)
print(FAST_PATH.describe())
"""


def test_a_program_that_only_blocks_takes_the_twin_up(tmp_path: Path) -> None:
    """No event loop is needed for it: the second call of an op has it loaded behind the calls."""
    variables = {**os.environ, "LAYERZERO_NATIVE": "on"}
    ended = Child(BLOCKING_PROGRAM, folder=tmp_path, variables=variables).ended(240.0)
    assert ended.stdout.strip() == "compiled", ended.stderr
