"""The first of torch's vector functions in a process, which several threads may get wrong."""

from pathlib import Path

import pytest
import torch

from layerzero.spec import hardware
from tests import children

OPENED = """
import threading
import torch
seen, exp = [], torch.exp
torch.exp = lambda x, **named: (seen.append((x.numel(), threading.current_thread().name)), exp(x, **named))[1]
import layerzero as lz
x = torch.randn(4, 8)
lz.sync.linear(x, x)
lz.sync.linear(x, x)
assert seen == [(1, "layerzero-settle")], seen
"""


def test_opening_the_cpu_makes_the_first_call_from_one_thread(tmp_path: Path) -> None:
    """Before any kernel runs, and once a process."""
    done = children.run(OPENED, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_modes_of_the_caller_do_not_see_it() -> None:
    """A mode that refuses every operation is no reason to refuse opening."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, *_: object, **__: object) -> object:
            raise RuntimeError("no operation is expected here")

    hardware.initialize_vector_math.cache_clear()
    with Refuses():  # type: ignore[no-untyped-call]
        hardware.initialize_vector_math()
    with Refuses(), pytest.raises(RuntimeError, match="no operation"):  # type: ignore[no-untyped-call]
        torch.exp(torch.zeros(1))
