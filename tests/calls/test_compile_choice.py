"""`lz.compile_choice`: what is chosen while compiling is in the graph, is told, and ends with the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs

import layerzero as lz
from layerzero.calls import inlining
from layerzero.operators.choice import CHOICE

# torch's own recording backend does it.
pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")


@pytest.fixture(autouse=True)
def runtime() -> Iterator[None]:
    """A policy of its own, and nothing compiled before."""
    torch._dynamo.reset()
    with lz.start(lz.Settings(warm="off")):
        yield
    assert CHOICE.mark is None and CHOICE.inline is None
    CHOICE.serves.clear()
    torch._dynamo.reset()


def traced(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """What a compiled function gives, and the operators of its graph below autograd."""
    backend = AotEagerAndRecordGraphs()
    out = torch.compile(fn, fullgraph=True, backend=backend)(*args)
    nodes = backend.fw_graphs[0].graph.nodes
    return out, [str(node.target) for node in nodes if node.op == "call_function"]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return lz.sync.rms_norm(x, weight) + 1


def test_a_frozen_kernel_of_torch_is_in_the_graph_and_told() -> None:
    """By a lock the reference: its operators; without, the operator of the op."""
    x, weight = torch.randn(3, 8), torch.randn(8)
    wanted = norm(x, weight)
    lz.lock("rms_norm", "reference.rms_norm")
    with lz.compile_choice("freeze") as chosen:
        out, targets = traced(norm, x, weight)
    assert "aten.rsqrt.default" in targets and not any("layerzero" in target for target in targets)
    torch.testing.assert_close(out, wanted)
    (choice,) = chosen.choices
    assert (choice.op, choice.kernel, choice.inlined) == ("rms_norm", "reference.rms_norm", True)
    assert "locked" in choice.why
    lz.lock("rms_norm", "native")
    _, targets = traced(norm, x, weight)
    assert "layerzero.rms_norm.default" in targets


def test_gradients_go_through_a_frozen_kernel() -> None:
    """They are torch's own of the operators in the graph."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    with lz.compile_choice("freeze"):
        out, targets = traced(norm, x, weight)
    out.sum().backward()
    assert not any("layerzero" in target for target in targets) and x.grad is not None
    other = x.detach().requires_grad_()
    norm(other, weight).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)


def test_what_is_not_made_of_torchs_operators_stays_an_operator() -> None:
    """A kernel in C++; so does a call whose sizes follow from data. Both run."""
    lz.lock("rms_norm", "native")
    x, weight = torch.randn(3, 8), torch.randn(8)
    with lz.compile_choice("freeze") as chosen:
        out, targets = traced(norm, x, weight)
    torch.testing.assert_close(out, norm(x, weight))
    assert "layerzero.rms_norm.default" in targets
    (choice,) = chosen.choices
    assert choice.kernel == "native.rms_norm.rows" and not choice.inlined
    assert choice.why == "is not made of torch's operators: chosen where the graph runs"


def test_a_change_of_the_choice_compiles_a_function_anew() -> None:
    """As a function, until it is called again; graphs of both kinds stay apart."""
    seen: list[bool] = []

    def backend(graph: Any, example: Any) -> Any:
        names = [n.args[-1] for n in graph.graph.nodes if "layerzero" in str(n.target)]
        seen.append(str(names[0]).startswith("compile_choice:freeze"))
        return graph.forward

    run = torch.compile(norm, fullgraph=True, backend=backend)
    x, weight = torch.randn(3, 8), torch.randn(8)
    run(x, weight)
    lz.compile_choice("freeze")
    try:
        run(x, weight)
        run(x, weight)
    finally:
        lz.compile_choice("runtime")
    run(x, weight)
    assert seen == [False, True]


def test_what_was_compiled_inside_stays_frozen_after_the_block() -> None:
    """It is not compiled again until another choice is made for the process; so in a block of a block."""
    seen: list[list[str]] = []

    def backend(graph: Any, example: Any) -> Any:
        seen.append([str(n.args[-1]) for n in graph.graph.nodes if "layerzero" in str(n.target)])
        return graph.forward

    run = torch.compile(norm, fullgraph=True, backend=backend)
    x, weight = torch.randn(3, 8), torch.randn(8)
    with lz.compile_choice("runtime"), lz.compile_choice("freeze"):
        run(x, weight)
    for _ in range(3):
        run(x, weight)
    with lz.compile_choice("freeze"):
        run(x, weight)
    assert len(seen) == 1 and seen[0][0].startswith("compile_choice:freeze")
    lz.compile_choice("runtime")
    run(x, weight)
    run(x, weight)
    assert len(seen) == 2 and seen[1][0].startswith("compile_choice:guarded:")


def test_a_norm_is_frozen_as_torchs_where_only_its_cost_chose_another() -> None:
    """The compiler fuses it; a preference of the policy keeps the kernel that it prefers."""
    x, weight = torch.randn(3, 8), torch.randn(8)
    lz.sync.rms_norm(x, weight, backend="native.rms_norm.rows")  # loaded, so that it may be chosen
    with lz.compile_choice("freeze") as chosen:
        out, targets = traced(norm, x, weight)
    torch.testing.assert_close(out, norm(x, weight))
    assert lz.which("rms_norm", x, weight) == "native.rms_norm.rows"
    assert not any("layerzero" in target for target in targets)
    assert chosen.choices[0].kernel == "torch.rms_norm.native"
    assert chosen.choices[0].why == "fused by the compiler, in the place of native.rms_norm.rows"
    torch._dynamo.reset()
    lz.add_policy(prefer="native", op="rms_norm")
    with lz.compile_choice("freeze") as chosen:
        _, targets = traced(norm, x, weight)
    assert "layerzero.rms_norm.default" in targets and chosen.choices[0].kernel == "native.rms_norm.rows"


def test_a_small_call_is_frozen_as_torchs_where_a_call_from_the_graph_costs_more_than_it_gains() -> None:
    """A kernel of our own that gains microseconds stays out of graphs; one that gains more is called."""

    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return lz.sync.mlp(x, up, down)

    def frozen(rows: int, width: int) -> tuple[str | None, str, bool]:
        torch._dynamo.reset()
        sizes = (rows, width), (8 * width, width), (width, 4 * width)
        args = [torch.randn(size, generator=torch.Generator().manual_seed(0)) for size in sizes]
        lz.sync.mlp(*args, backend="native.mlp.packed")  # loaded, so that it may be chosen
        with lz.compile_choice("freeze") as chosen:
            out, targets = traced(block, *args)
        torch.testing.assert_close(out, block(*args), rtol=1e-3, atol=1e-2)
        (choice,) = chosen.choices
        assert choice.inlined is not any("layerzero" in target for target in targets)
        return lz.which("mlp", *args), choice.why, choice.inlined

    kernel, why, inlined = frozen(2, 16)
    assert kernel == "native.mlp.packed" and inlined
    assert why == "a call from the graph costs more than it gains, in the place of native.mlp.packed"
    kernel, _, inlined = frozen(64, 512)
    assert kernel == "native.mlp.packed" and not inlined


def test_a_gain_within_the_error_of_prices_is_none_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called gains more than that; were prices off by their whole, nothing would be called."""
    sizes = (64, 512), (4096, 512), (512, 2048)
    args = [torch.randn(size, generator=torch.Generator().manual_seed(0)) for size in sizes]
    lz.sync.mlp(*args, backend="native.mlp.packed")  # loaded, so that it may be chosen

    def holds_an_operator() -> bool:
        torch._dynamo.reset()
        with lz.compile_choice("freeze"):
            return any("layerzero" in target for target in traced(lambda *t: lz.sync.mlp(*t), *args)[1])

    assert holds_an_operator()
    monkeypatch.setattr(inlining, "_PRICE_ERROR", 1.0)
    assert not holds_an_operator()


def test_a_mode_that_does_not_exist_is_named() -> None:
    """With those that do."""
    with pytest.raises(ValueError, match="mode needs one of runtime, freeze, autotune, got 'frozen'"):
        lz.compile_choice("frozen")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_inductor_times_the_kernels_of_torch_beside_the_operator() -> None:
    """Its own registry knows the op while the choice holds, and not afterwards; the numbers are right."""
    from torch._inductor.lowering import user_lowerings

    operator = torch.ops.layerzero.rms_norm.default
    x, weight = torch.randn(64, 128), torch.randn(128)
    with lz.compile_choice("autotune") as chosen, torch.no_grad():
        assert operator in user_lowerings and torch.ops.layerzero.attention.default in user_lowerings
        assert torch.ops.layerzero.add_rms_norm.default not in user_lowerings  # two outputs
        out = torch.compile(norm, fullgraph=True)(x, weight)
    torch.testing.assert_close(out, norm(x, weight), rtol=1e-4, atol=1e-5)
    assert operator not in user_lowerings
    assert {choice.kernel for choice in chosen.choices} >= {"torch.rms_norm.native", "reference.rms_norm"}
