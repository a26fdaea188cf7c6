"""Fake tensors, traces and transforms: none reaches a kernel, a breaker, a counter or a measurement."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import layerzero as lz
from layerzero.ops import table
from layerzero.runtime import Runtime
from tests.backends import cases
from tests.kernels import EVERYTHING, kernel
from tests.native.twins import both_paths as both_paths
from tests.operators.calls import OperatorCall, call_of
from tests.ops.calls import parts


class Spy:
    """The reference of an op as its only kernel, and how often it was called."""

    def __init__(self, runtime: Runtime, op: str) -> None:
        self.runtime, self.op, self.calls = runtime, table.get(op), 0
        features = frozenset({"prefill", "kv_strided", "scale_per_row", "inputs_float"} | EVERYTHING)
        features |= {"quant_int8", "quant_fp8_e4m3"}
        layouts = frozenset({"NHD"}) if op.endswith(("paged_attention", "append_kv")) else frozenset()
        if op == "attention":
            layouts = frozenset({"BHSD", "BSHD"})
        runtime.add_kernel(kernel(f"spy.{op}", self.run, features=features, layouts=layouts))
        lz.lock(op, f"spy.{op}")

    def run(self, *args: Any) -> Any:
        self.calls += 1
        return self.op.reference(*args)

    def state(self) -> tuple[Any, ...]:
        """All that a call of a kernel leaves behind."""
        health = self.runtime.device("cpu").health
        return (
            self.calls,
            self.runtime.counters.snapshot(),
            health.statuses(),
            health.blocked_kernels(),
        )


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with lz.start(lz.Settings(batching="all", warm="off", check_rate=0.0)) as opened:
        yield opened


def a_call(name: str) -> OperatorCall:
    found = call_of(cases.Case(name))
    assert found is not None
    return found


def fake(call: OperatorCall, mode: FakeTensorMode) -> dict[str, Any]:
    """The arguments of a call as fake tensors."""
    return {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.named().items()}


async def awaited(name: str, **named: Any) -> Any:
    """The awaited op, beside another caller where that may be, so that it is not a lone one's."""
    callers = 1 if table.get(name).writes else 2
    return (await asyncio.gather(*(getattr(lz, name)(**named) for _ in range(callers))))[0]


@pytest.mark.parametrize("name", table.names())
def test_a_fake_call_has_the_shapes_of_a_real_one_and_leaves_nothing_behind(
    runtime: Runtime, name: str
) -> None:
    """Blocking, awaited and as an operator; inside the mode and outside; the real call is remembered."""
    call = a_call(name)
    op, spy = getattr(lz.sync, name), Spy(runtime, name)
    real = parts(op(**call.named()))
    op(**call.named())
    asyncio.run(awaited(name, **call.named()))
    before = spy.state()
    mode = FakeTensorMode()
    named = fake(call, mode)
    with mode:
        inside = [op(**named), asyncio.run(awaited(name, **named))]
    flat = [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in call.flat]
    outside = [op(**named), asyncio.run(awaited(name, **named))]
    if not call.op.writes:
        outside.append(call.operator(*flat))
    for result in (*inside, *outside):
        assert [(o.shape, o.dtype) for o in parts(result)] == [(o.shape, o.dtype) for o in real]
        assert {type(o).__name__ for o in parts(result)} == {"FakeTensor"}
    assert spy.state() == before and spy.calls > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_traces_and_transforms_leave_nothing_behind(runtime: Runtime) -> None:
    """make_fx, export, torch.jit.trace, vmap over a transform, meta tensors."""
    spy = Spy(runtime, "rms_norm")
    x, weight = torch.randn(3, 5, 8), torch.randn(8)
    lz.sync.rms_norm(x, weight)
    bound = lz.bind("rms_norm", x, weight)
    bound(x, weight)
    before = spy.state()

    class Norm(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return lz.sync.rms_norm(x, weight) + bound(x, weight)

    for strict in (False, True):
        program = torch.export.export(Norm(), (x, weight), strict=strict)
        targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert targets.count("layerzero.rms_norm.default") == 2
    for mode in ("fake", "symbolic"):
        graph = make_fx(Norm(), tracing_mode=mode)(x, weight)
        assert "layerzero.rms_norm" in graph.code or "layerzero_rms_norm" in graph.code
    torch.func.grad(lambda x: lz.sync.rms_norm(x, weight).sum())(x)
    torch.func.jvp(lambda x: lz.sync.rms_norm(x, weight), (x,), (x,))
    assert lz.sync.rms_norm(x.to("meta"), weight.to("meta")).is_meta
    assert spy.state() == before
    traced: Any = torch.jit.trace(lambda x, weight: lz.sync.rms_norm(x, weight), (x, weight))
    assert "layerzero::rms_norm" in str(traced.graph)
    torch.testing.assert_close(traced(x[:2], weight), lz.sync.rms_norm(x[:2], weight))


def test_many_exports_leave_every_kernel_healthy() -> None:
    """What four exports did once: a healthy kernel's circuit open."""
    with lz.start(scoped=True) as runtime:
        x, weight = torch.randn(3, 8), torch.randn(8)
        lz.sync.rms_norm(x, weight)

        class Norm(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return lz.sync.rms_norm(x, weight)

        for _ in range(4):
            torch.export.export(Norm(), (x,))
        assert runtime.device("cpu").health.blocked_kernels() == {}
        assert runtime.counters.total("failures") == runtime.counters.total("fallbacks") == 0


def test_a_draw_without_a_seed_draws_nothing_while_it_is_traced() -> None:
    """torch's generator is where it was."""
    logits = torch.randn(3, 9)

    class Drawn(torch.nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return lz.sync.sample(logits)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    program = torch.export.export(Drawn(), (logits,))
    assert torch.equal(torch.get_rng_state(), before)
    first = program.module()(logits)
    torch.manual_seed(5)
    assert torch.equal(lz.sync.sample(logits), first)
