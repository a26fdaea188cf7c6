"""Known calls of torch's operators run without torch's dispatcher, and only where that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from layerzero import operators
from layerzero.native import FAST_PATH
from layerzero.ops import table
from tests.backends import cases
from tests.kernels import EVERYTHING, kernel
from tests.native.twins import compiled as compiled
from tests.operators.calls import call_of
from tests.ops.calls import parts

WIDTH = 8


@pytest.fixture(autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """A runtime of the test's own, whose choices change with nothing that is loaded in the background."""
    with lz.start(lz.Settings(warm="off")) as opened:
        yield opened


def overload(name: str = "rms_norm") -> Any:
    """torch's operator of an op."""
    return getattr(torch.ops.layerzero, name).default


class Dispatched:
    """Calls of an operator that reached torch's dispatcher."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, compiled: Any, name: str = "rms_norm") -> None:
        operator, schema = overload(name), operators.defined_schemas(name)[0]
        front = operator._op
        self.calls = 0

        def below(*args: Any, **named: Any) -> Any:
            self.calls += 1
            return front.below(*args, **named)

        plans = operators.known_calls(name)
        again = compiled.Operator(*schema.in_front(), plans, below, operators.laid_out)
        monkeypatch.setattr(operator, "_op", again)


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch, compiled: Any) -> Dispatched:
    return Dispatched(monkeypatch, compiled)


def test_a_known_call_does_not_reach_the_dispatcher(dispatched: Dispatched) -> None:
    """However its arguments are written, and by the plan that is noted; what differs does reach it."""
    x, weight = torch.randn(2, WIDTH), torch.randn(WIDTH)
    want = torch.nn.functional.rms_norm(x, (WIDTH,), weight, eps=1e-6)
    for _ in range(3):
        overload()(x, weight)
    seen = dispatched.calls
    for args, named in (
        ((x, weight), {}),
        ((x,), {"weight": weight}),
        ((), {"weight": weight, "x": x, "eps": 1e-6, "backend": None}),
    ):
        torch.testing.assert_close(overload()(*args, **named), want)
    assert dispatched.calls == seen
    assert lz.last_selection().request.dims == {"N": 2, "C": WIDTH}  # type: ignore[union-attr]
    overload()(x, weight, backend="reference.rms_norm")
    overload()(torch.randn(3, WIDTH), weight)
    overload()(x, weight, 1e-5)
    assert dispatched.calls == seen + 3
    with pytest.raises(RuntimeError, match="rms_norm"):
        overload()(x, weight, 1e-6, None, None)
    with pytest.raises(RuntimeError, match="rms_norm"):
        overload()(weight=weight)


def test_tensors_of_inference_mode_are_known_as_well(dispatched: Dispatched) -> None:
    """torch's dispatcher leaves autograd out for them: the kernel below it shares what is known."""
    with torch.inference_mode():
        x, weight = torch.randn(2, WIDTH), torch.randn(WIDTH)
        for _ in range(3):
            overload()(x, weight)
        seen = dispatched.calls
        overload()(x, weight)
    assert dispatched.calls == seen


def test_what_watches_or_transforms_sees_the_operator(dispatched: Dispatched) -> None:
    """A dispatch mode, a profiler, a transform, autocast, a scope: each by torch's dispatcher."""
    x, weight = torch.randn(2, WIDTH), torch.randn(WIDTH)
    for _ in range(3):
        overload()(x, weight)
    seen = dispatched.calls

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Seen():  # type: ignore[no-untyped-call]
        overload()(x, weight)
    assert dispatched.calls == seen + 1
    with torch.profiler.profile() as profile:
        overload()(x, weight)
    assert "layerzero::rms_norm" in {event.name for event in profile.events() or ()}
    torch.vmap(lambda x: overload()(x, weight))(x[:, None])
    count = dispatched.calls
    with torch.autocast("cpu"):
        overload()(x, weight)
    with lz.prefer("torch"):
        overload()(x, weight)
    assert dispatched.calls == count + 2


def test_a_policy_and_a_failing_kernel_are_heard_at_the_next_call(runtime: lz.Runtime) -> None:
    """As by `lz.sync`: nothing that was known outlives what it was decided by."""
    x, weight = torch.randn(2, WIDTH), torch.randn(WIDTH)
    broken: list[bool] = []

    def seven(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if broken:
            raise RuntimeError("broken")
        return torch.full_like(x, 7.0)

    want = overload()(x, weight)
    runtime.add_kernel(kernel("acme.rms_norm.seven", seven, launch_us=0.001))
    for _ in range(4):
        assert overload()(x, weight).eq(7.0).all()
    lz.lock("rms_norm", "reference.rms_norm")
    for _ in range(4):
        torch.testing.assert_close(overload()(x, weight), want)
    lz.unlock("rms_norm")
    for _ in range(4):
        assert overload()(x, weight).eq(7.0).all()
    broken.append(True)
    for _ in range(4):
        torch.testing.assert_close(overload()(x, weight), want)
    assert lz.last_selection().kernel != "acme.rms_norm.seven"  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_outputs_lie_in_memory_as_the_operator_promises(runtime: lz.Runtime, layout: str) -> None:
    """Known calls of a kernel that lays them out in another way."""
    shape = (2, 3, 5, 8)

    def elsewhere(q: Tensor, *rest: Any) -> Tensor:
        return torch.arange(q.numel(), dtype=q.dtype).view(q.shape[::-1]).permute(3, 2, 1, 0)

    runtime.add_kernel(
        kernel(
            "acme.attention.elsewhere", elsewhere, features=frozenset(EVERYTHING), layouts=frozenset({layout})
        )
    )
    lz.lock("attention", "acme.attention.elsewhere")
    q = torch.randn(shape)
    outs = [overload("attention")(q, q, q, layout=layout) for _ in range(4)]
    axes = (0, 2, 1, 3) if layout == "BHSD" else (0, 1, 2, 3)
    for out in outs:
        assert out.permute(axes).is_contiguous() and torch.equal(out, elsewhere(q))


@pytest.mark.parametrize("name", table.names())
def test_every_operator_takes_known_calls(name: str, compiled: Any) -> None:
    """With the numbers of the first call; a call that draws or writes into caches too."""
    call = call_of(cases.Case(name))
    assert call is not None and isinstance(call.operator._op, compiled.Operator)
    wanted, *_, got = (call.operator(*call.flat) for _ in range(4))
    if call.op.writes or call.op.stochastic:
        return
    for a, b in zip(parts(got), parts(wanted), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_without_the_compiled_twin_torchs_own_callable_is_back(compiled: Any) -> None:
    """And the operator keeps its place in every table: its hash is that of what torch calls."""
    operator = overload()
    before, tables = hash(operator), {operator: "here"}
    FAST_PATH.use(None)
    assert not isinstance(operator._op, compiled.Operator)
    assert tables[operator] == "here" and hash(operator) == before
    FAST_PATH.use(compiled)
    assert isinstance(operator._op, compiled.Operator) and tables[operator] == "here"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_finds_the_operator() -> None:
    """`torch.jit.script` looks operators up by what they call."""
    norm = torch.ops.layerzero.rms_norm

    def run(x: Tensor) -> Tensor:
        return norm(x)  # type: ignore[no-any-return]

    scripted: Any = torch.jit.script(run)
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(scripted(x), run(x))
