"""A kernel of the user's own answers in every style of call: added to a runtime, or brought by a plugin."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import layerzero as lz
from layerzero.backends import plugins
from layerzero.ops import table
from tests.kernels import kernel

WIDTH = 8
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
SQUARE = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
HEADS = X.view(1, 1, 3, WIDTH)

Call = Callable[..., Any]


class Asked(NamedTuple):
    """An op, tensors for it, and a call of `lz.sync`, of `lz` or of `torch.ops.layerzero` with them."""

    op: str
    tensors: tuple[Tensor, ...]
    call: Callable[[Any, tuple[Tensor, ...]], Any]


OPS = [
    Asked("rms_norm", (X, SQUARE[0]), lambda at, t: at.rms_norm(*t)),
    Asked("linear", (X, SQUARE), lambda at, t: at.linear(*t)),
    Asked("attention", (HEADS, HEADS, HEADS), lambda at, t: at.attention(*t)),
]


def once(asked: Asked) -> Call:
    return lambda *tensors: asked.call(lz.sync, tensors)


def awaited(asked: Asked) -> Call:
    async def wait(tensors: tuple[Tensor, ...]) -> Any:
        return await asked.call(lz, tensors)

    return lambda *tensors: asyncio.run(wait(tensors))


def awaited_together(asked: Asked) -> Call:
    async def wait(tensors: tuple[Tensor, ...]) -> Any:
        outs = await asyncio.gather(*(asked.call(lz, tensors) for _ in range(5)))
        assert all(torch.equal(out, outs[0]) for out in outs)
        return outs[0]

    return lambda *tensors: asyncio.run(wait(tensors))


def bound(asked: Asked) -> Call:
    run = lz.bind(asked.op, *asked.tensors)
    return lambda *tensors: run(*tensors)


def operator(asked: Asked) -> Call:
    return lambda *tensors: asked.call(torch.ops.layerzero, tensors)


def compiled(asked: Asked) -> Call:
    return torch.compile(once(asked), fullgraph=True, backend="aot_eager")


def compiled_operator(asked: Asked) -> Call:
    return torch.compile(operator(asked), fullgraph=True, backend="aot_eager")


def compiled_by_inductor(asked: Asked) -> Call:
    return torch.compile(once(asked), fullgraph=True)


def compiled_for_all_sizes(asked: Asked) -> Call:
    return torch.compile(once(asked), fullgraph=True, backend="aot_eager", dynamic=True)


class _Module(torch.nn.Module):
    def __init__(self, asked: Asked) -> None:
        super().__init__()
        self.asked = asked

    def forward(self, *tensors: Tensor) -> Any:
        return self.asked.call(lz.sync, tensors)


def exported(asked: Asked) -> Call:
    return torch.export.export(_Module(asked), asked.tensors).module()


def saved(asked: Asked) -> Call:
    file = io.BytesIO()
    torch.export.save(torch.export.export(_Module(asked), asked.tensors), file)
    file.seek(0)
    return torch.export.load(file).module()


def traced(asked: Asked) -> Call:
    return torch.jit.trace(once(asked), asked.tensors, check_trace=False)  # type: ignore[no-any-return]


def recorded(asked: Asked) -> Call:
    return make_fx(once(asked))(*asked.tensors)


def with_a_gradient(asked: Asked) -> Call:
    run = compiled(asked)
    return lambda x, *rest: run(x.clone().requires_grad_(), *rest).detach()


STYLES = [
    once, awaited, awaited_together, bound, operator, compiled, compiled_operator, compiled_by_inductor,
    compiled_for_all_sizes, exported, saved, traced, recorded, with_a_gradient,
]  # fmt: skip


@pytest.fixture(autouse=True)
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[lz.Runtime]:
    """The process's runtime, of the test's own; a plugin is installed, and nothing compiled before."""
    torch._dynamo.reset()

    def announced(group: str, name: str, what: str) -> Any:
        return ([own("rms_norm")] if group == plugins.ENTRY_POINT_GROUP else (),)

    monkeypatch.setattr(plugins, "_announced", announced)
    with lz.start(lz.Settings(warm="off", plugins=getattr(request, "param", ()))) as opened:
        yield opened
    torch._dynamo.reset()


def twice(op: str) -> Call:
    """The op's outputs doubled: right shapes, and numbers of nobody else."""
    return lambda *full: table.get(op).reference(*full) * 2


def own(op: str, backend: str = "acme") -> Any:
    return kernel(f"{backend}.{op}.twice", twice(op), launch_us=0.001, rank=-1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("asked", "style"),
    [
        pytest.param(asked, style, id=f"{asked.op}-{style.__name__}")
        for asked in OPS
        for style in STYLES
        if asked is OPS[0] or style is not compiled_by_inductor
    ],
)
def test_a_kernel_that_is_added_answers_from_the_next_call_until_it_is_removed(
    runtime: lz.Runtime, asked: Asked, style: Callable[[Asked], Call]
) -> None:
    """Of functions that were made before it, and of those that are made while it is there."""
    before = style(asked)
    plain = before(*asked.tensors)
    for _ in range(3):
        torch.testing.assert_close(before(*asked.tensors), plain)
    for _ in range(2):
        runtime.add_kernel(own(asked.op))
        assert lz.which(asked.op, *asked.tensors) == f"acme.{asked.op}.twice"
        for run in (before, style(asked)):
            for _ in range(3):
                torch.testing.assert_close(run(*asked.tensors), 2 * plain, msg="not heard")
        runtime.remove_kernel(f"acme.{asked.op}.twice")
        for _ in range(3):
            torch.testing.assert_close(before(*asked.tensors), plain, msg="heard after its end")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("runtime", [("acme",)], indirect=True)
def test_a_kernel_of_a_plugin_answers(style: Callable[[Asked], Call]) -> None:
    """As one that was added."""
    asked = OPS[0]
    run = style(asked)
    for _ in range(3):
        wanted = 2 * torch.nn.functional.rms_norm(X, (WIDTH,), asked.tensors[1], 1e-6)
        torch.testing.assert_close(run(*asked.tensors), wanted, msg="not heard")


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_frozen_graph_calls_it_whatever_its_name(runtime: lz.Runtime, backend: str) -> None:
    """It is not traced: what a user's function does is not known to be torch's operators."""
    asked = OPS[0]
    plain = lz.sync.rms_norm(*asked.tensors)
    runtime.add_kernel(own("rms_norm", backend))
    with lz.compile_choice("freeze") as chosen:
        run = compiled(asked)
        torch.testing.assert_close(run(*asked.tensors), 2 * plain)
    assert [(choice.kernel, choice.inlined) for choice in chosen.choices] == [
        (f"{backend}.rms_norm.twice", False)
    ]
    runtime.remove_kernel(f"{backend}.rms_norm.twice")
    torch.testing.assert_close(run(*asked.tensors), plain)
