"""`torch.compile` of calls through `lz.sync`: whole graphs, few, the kernel chosen when a graph runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import layerzero as lz
from layerzero.ops import table
from tests.backends import cases
from tests.operators.calls import call_of
from tests.ops.calls import parts


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """No test sees what another has compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Small(torch.nn.Module):
    """One block of a model: norms, attention over rotated heads, an MLP."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.heads = heads
        self.norm = torch.nn.Parameter(torch.rand(width, generator=generator) + 0.5)
        self.bias = torch.nn.Parameter(torch.randn(width, generator=generator) * 0.1)
        for name, shape in (
            ("qkv", (3 * width, width)), ("out", (width, width)), ("up", (4 * width, width)),
            ("down", (width, 2 * width)),
        ):  # fmt: skip
            weight = torch.randn(shape, generator=generator) * width**-0.5
            setattr(self, name, torch.nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        y = lz.sync.rms_norm(x, self.norm)
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in lz.sync.linear(y, self.qkv).chunk(3, -1)
        )
        seen = lz.sync.attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
        y, x = lz.sync.add_rms_norm(lz.sync.linear(seen, self.out), x, self.norm)
        x = x + lz.sync.mlp(y, self.up, self.down)
        return lz.sync.layer_norm(x, self.norm, self.bias)


def compiled(fn: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    """`fn` compiled whole, and what counts its graphs."""
    counter = CompileCounterWithBackend(options.pop("backend", "aot_eager"))
    return torch.compile(fn, fullgraph=True, backend=counter, **options), counter


@pytest.mark.parametrize("name", table.names())
def test_every_op_is_compiled_whole(name: str) -> None:
    """With `fullgraph=True`: the numbers of the eager call, and a graph that holds its operator alone."""
    call = call_of(cases.Case(name))
    assert call is not None
    op, named = getattr(lz.sync, name), call.named()
    run, counter = compiled(lambda **named: op(**named))
    if call.op.writes:
        wanted = op(**{k: v.clone() if isinstance(v, Tensor) else v for k, v in named.items()})
    else:
        wanted = op(**named)
    for got, right in zip(parts(run(**named)), parts(wanted), strict=True):
        assert got.dtype is right.dtype
        torch.testing.assert_close(got.float(), right.float(), rtol=1e-4, atol=1e-5)
    (graph,) = counter.graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [target for target in called if "getitem" not in target] == [f"layerzero.{name}.default"]


def test_defaults_and_globals_of_our_functions_are_not_looked_at_before_each_run() -> None:
    """A graph's guards grow with the ops of a model, not with what each could have been given."""
    model = Small().eval()
    run = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        run(torch.randn(1, 3, 32))
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(Small.forward)
    guards = str(entry.guard_manager)
    assert "lz'].sync" in guards and "__kwdefaults__['" not in guards
    scopes = {line.partition("G['___unnamed_scope")[2].partition("']")[0] for line in guards.splitlines()}
    assert len(scopes - {""}) == 1
    with pytest.raises(TypeError, match=r"rms_norm\(\): got an unexpected keyword argument 'weights'"):
        torch.compile(lambda x, **named: lz.sync.rms_norm(x, **named), backend="eager")(
            torch.randn(2, 4), weights=None
        )


def test_a_model_is_one_graph_for_all_sizes() -> None:
    """Of 12 sizes of batch and 12 of tokens the first is a graph of its own, and one more serves the rest."""
    model = Small()
    run, counter = compiled(model)
    with torch.no_grad():
        for size in range(2, 14):
            for x in (torch.randn(size, 7, 32), torch.randn(3, size, 32)):
                torch.testing.assert_close(run(x), model(x))
    assert counter.frame_count <= 4
    run, counter = compiled(model, dynamic=True)
    with torch.no_grad():
        for size in range(2, 14):
            run(torch.randn(size, size + 3, 32))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_a_batch_of_unknown_size_is_one_graph_without_a_guard_on_it(
    layout: Literal["BHSD", "BSHD"],
) -> None:
    """Nothing, one sequence or many: tracing asks an unbacked size no question."""
    run, counter = compiled(lambda q: lz.sync.attention(q, q, q, is_causal=True, layout=layout))
    for size in (2, 1, 5):
        q = torch.randn(size, 3, 4, 8)
        torch._dynamo.decorators.mark_unbacked(q, 0)
        wanted = lz.sync.attention(q, q, q, is_causal=True, layout=layout)
        torch.testing.assert_close(run(q), wanted)
    assert counter.frame_count == 1


def test_numbers_that_change_with_each_step_compile_no_new_graph() -> None:
    """A seed and an offset do; a temperature as a tensor does."""
    logits = torch.randn(4, 50)
    run, counter = compiled(lambda logits, seed, step, heat: lz.sync.sample(
        logits, temperature=heat, seed=seed, offset=step
    ))  # fmt: skip
    for step in range(12):
        heat = torch.full((4,), 0.5 + step / 10)
        got = run(logits, 100 + 3 * step, step, heat)
        assert torch.equal(got, lz.sync.sample(logits, temperature=heat, seed=100 + 3 * step, offset=step))
    assert counter.frame_count <= 3


def test_lengths_that_are_numbers_compile_no_new_graph() -> None:
    """Tracing asks nothing of a symbol: not even whether it is an int."""
    slopes = torch.rand(4)
    run, counter = compiled(lambda slopes, q_len, k_len: lz.sync.alibi(slopes, q_len, k_len), dynamic=True)
    for length in range(3, 12):
        torch.testing.assert_close(run(slopes, length, 2 * length), lz.sync.alibi(slopes, length, 2 * length))
    assert counter.frame_count <= 2


def test_gradients_are_those_of_the_eager_model() -> None:
    """Through norms, products, attention and the MLP at once."""
    model, twin = Small(), Small()
    x, other = (torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    run, counter = compiled(model)
    run(x.requires_grad_()).square().sum().backward()
    twin(other.requires_grad_()).square().sum().backward()
    assert counter.frame_count == 1
    torch.testing.assert_close(x.grad, other.grad)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_a_policy_that_changes_between_runs_changes_the_kernel_of_a_compiled_function() -> None:
    """The choice is made when the graph runs: no graph is compiled for it."""
    x, weight = torch.randn(6, 8), torch.randn(8)
    run, counter = compiled(lambda x: lz.sync.rms_norm(x, weight))
    seen = []
    with lz.start(scoped=True):
        for kernel in ("reference.rms_norm", "torch.rms_norm.native"):
            lz.lock("rms_norm", kernel)
            run(x)
            selection = lz.last_selection()
            assert selection is not None
            seen.append(selection.kernel)
            lz.unlock("rms_norm")
    assert seen == ["reference.rms_norm", "torch.rms_norm.native"]
    assert counter.frame_count == 1


def test_inductor_runs_the_operator_with_the_numbers_of_the_eager_model() -> None:
    """Inductor's own code around the operators, in C++."""
    model = Small().eval()
    run = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for size in (3, 9):
            x = torch.randn(2, size, 32)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


def test_what_torch_has_no_word_for_is_plain_torch_in_the_graph() -> None:
    """A score modifier."""
    q = torch.randn(1, 2, 5, 8)

    def run(q: Tensor) -> Tensor:
        return lz.sync.attention(q, q, q, score_mod=lambda score, b, h, i, j: score - (i - j).abs())

    traced, counter = compiled(run)
    torch.testing.assert_close(traced(q), run(q))
    assert all("layerzero" not in str(node.target) for node in counter.graphs[0].graph.nodes)


def test_dropout_has_a_gradient_of_the_numbers_that_it_dropped() -> None:
    """A gradient is zero exactly where the output's own mask was: attention to values of one hot each."""
    q = torch.zeros(1, 1, 6, 6)
    value = torch.eye(6)[None, None].requires_grad_()
    run, _ = compiled(lambda q, v: lz.sync.attention(q, q, v, dropout_p=0.5))
    out = run(q, value)
    out.sum().backward()
    assert value.grad is not None
    torch.testing.assert_close(value.grad.sum(-1)[0, 0] / 6, out.detach().sum(-2)[0, 0])
    assert 0 < int((out == 0).sum()) < 36


def test_an_argument_that_is_wrong_is_named_while_compiling() -> None:
    """By the op's own words."""
    run, _ = compiled(lambda x, weight: lz.sync.rms_norm(x, weight))
    with pytest.raises(Exception, match="weight needs 8 elements like x's last axis, got 3"):
        run(torch.randn(6, 8), torch.randn(3))


def test_changed_pools_are_seen_after_a_compiled_append() -> None:
    """A graph that writes into its arguments and reads them again."""

    def step(k: Tensor, pool: Tensor, other: Tensor, slots: Tensor) -> Tensor:
        lz.sync.append_kv(k, k, pool, other, slots)
        return pool.sum() + other.sum()

    run, counter = compiled(step)
    pool, other = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    assert float(run(torch.ones(3, 1, 8), pool, other, torch.tensor([0, 5, 7]))) == 48.0
    assert pool[1, 3].eq(1).all() and counter.frame_count == 1
