"""Torch's kernels inlined into compiled graphs by default, and the guard that ends with their choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import layerzero as lz
from benchmarks import compiled as compiled_benchmark
from layerzero.runtime import ACTIVE
from layerzero.selection.policy.policy import Policy
from layerzero.selection.policy.rules import make_rule

VIEWS = frozenset({"aten.permute.default", "aten.view.default"})
TORCHS, OTHER = "torch.rms_norm.native", "reference.rms_norm"


@pytest.fixture(autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """A runtime of its own that loads nothing behind calls, and nothing compiled before."""
    torch._dynamo.reset()
    with lz.start(lz.Settings(warm="off")) as opened:
        yield opened
    torch._dynamo.reset()


def _boxed(graph: Any, example: Any) -> Any:
    from torch._functorch._aot_autograd.utils import make_boxed_func

    return make_boxed_func(graph.forward)


def _as_inductor() -> Any:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


class Graphs:
    """A compiler that keeps what each graph calls below autograd; `lowered`, what Inductor gets of it."""

    def __init__(
        self, while_compiling: Callable[[], object] = lambda: None, *, lowered: bool = False
    ) -> None:
        self.calls: list[list[str]] = []
        self._while, self._lowered = while_compiling, lowered

    def __call__(self, graph: Any, example: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        self._while()
        table = _as_inductor() if self._lowered else None
        return aot_autograd(fw_compiler=self._keep, bw_compiler=_boxed, decompositions=table)(graph, example)

    def _keep(self, graph: Any, example: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        self.calls.append([str(node.target) for node in nodes])
        return _boxed(graph, example)

    @property
    def opaque(self) -> list[bool]:
        """Of each graph, whether it holds an operator of ours."""
        return [any("layerzero" in call for call in calls) for calls in self.calls]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return lz.sync.rms_norm(x, weight) + 1


def compiled(graphs: Graphs, fn: Callable[..., Any] = norm, **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, backend=graphs, **options)


def guards_of(run: Any, *args: Tensor, **named: Tensor) -> int:
    """How many guards a compiled function is checked by before each run."""
    torch._dynamo.reset()
    guards: list[Any] = []

    def keep(found: Any) -> list[bool]:
        guards.extend(found)
        return [True] * len(found)

    options: Any = {"guard_filter_fn": keep}
    compiled: Any = torch.compile(run, fullgraph=True, dynamic=False, backend="eager", options=options)
    with torch.no_grad():
        compiled(*args, **named)
    return len(guards)


X, WEIGHT = torch.randn(3, 8), torch.rand(8)


def chosen(run: Callable[..., Any]) -> str | None:
    """The kernel that answers from an operator in the graph; None where the graph holds it."""
    lz.sync.layer_norm(X, WEIGHT, WEIGHT)
    torch.testing.assert_close(run(X, WEIGHT), torch.nn.functional.rms_norm(X, (8,), WEIGHT, 1e-6) + 1)
    last = lz.last_selection()
    assert last is not None
    return None if last.op == "layer_norm" else last.kernel


def test_a_kernel_of_torch_is_in_the_graph_and_reported(runtime: lz.Runtime) -> None:
    """By default, with a count by kernel."""
    graphs = Graphs()
    run = compiled(graphs)
    for _ in range(3):
        assert chosen(run) is None
    assert graphs.opaque == [False]
    counted = runtime.counters.snapshot()
    assert any("compiled_calls_inlined" in str(series) and TORCHS in str(series) for series in counted)


def test_a_choice_that_moves_is_obeyed_by_the_next_call_with_one_graph_more(runtime: lz.Runtime) -> None:
    """By a policy, a quarantine, a lock, and back: two graphs for all of it."""
    graphs = Graphs()
    run = compiled(graphs)
    for _ in range(5):
        assert chosen(run) is None
        lz.add_policy(deny=TORCHS)
        assert chosen(run) == OTHER
        lz.reset_policy()
        assert chosen(run) is None
        runtime.quarantine(TORCHS, "to see it")
        assert chosen(run) == OTHER
        runtime.lift(TORCHS)
        assert chosen(run) is None
        lz.lock("rms_norm", OTHER)
        assert chosen(run) == OTHER
        lz.unlock("rms_norm")
    assert graphs.opaque == [False, True]
    assert "compiled_choices_moved" in str(runtime.counters.snapshot())


def test_a_circuit_that_opens_is_obeyed(runtime: lz.Runtime) -> None:
    """By the next call."""
    graphs = Graphs()
    run = compiled(graphs)
    assert chosen(run) is None
    device = runtime.device("cpu")
    for _ in range(device.settings.failures_to_open):
        device.health.failure(TORCHS, "planted")
    assert chosen(run) == OTHER


def test_what_a_scope_says_is_obeyed_there_alone() -> None:
    """Compiled before it, and compiled in it."""
    graphs = Graphs()
    run = compiled(graphs)
    for _ in range(3):
        assert chosen(run) is None
        with lz.prefer(OTHER):
            assert chosen(run) == OTHER
    assert graphs.opaque == [False, True]
    torch._dynamo.reset()
    run = compiled(graphs)
    with lz.disable(TORCHS):
        assert chosen(run) == OTHER
    assert chosen(run) is None
    assert graphs.opaque == [False, True, True, False]


def test_what_changes_no_choice_compiles_nothing(runtime: lz.Runtime) -> None:
    """A policy about another op, another runtime with the same kernels."""
    graphs = Graphs()
    run = compiled(graphs)
    assert chosen(run) is None
    lz.add_policy(deny="reference.layer_norm")
    runtime.device("cpu").refresh()
    assert chosen(run) is None
    with lz.Runtime(lz.Settings(warm="off")) as other:
        ACTIVE.put(other)
        assert chosen(run) is None
        lz.lock("rms_norm", OTHER)
        assert chosen(run) == OTHER
    ACTIVE.put(runtime)
    assert chosen(run) is None
    assert graphs.opaque == [False, True]


def test_a_choice_that_moves_while_a_graph_is_compiled_is_obeyed(runtime: lz.Runtime) -> None:
    """The graph is finished, and not run."""
    graphs = Graphs(lambda: lz.add_policy(deny=TORCHS))
    run = compiled(graphs)
    run(X, WEIGHT)
    assert chosen(run) == OTHER
    assert len(graphs.calls) == 2


def test_many_sizes_stay_below_the_limit_of_torch() -> None:
    """Each has at most two graphs; but for the first ones, one."""
    graphs = Graphs()
    run = compiled(graphs, dynamic=False)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for _ in range(2):
            for rows in range(2, 7):
                run(torch.randn(rows, 8), WEIGHT)
            with lz.prefer(OTHER):
                for rows in range(2, 7):
                    run(torch.randn(rows, 8), WEIGHT)
    assert graphs.opaque.count(False) == 3 and len(graphs.calls) == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's rule: a GPU computes while its host calls")
@pytest.mark.parametrize("shape", [(1, 16), pytest.param((8, 1), marks=pytest.mark.slow)])
def test_a_model_on_our_ops_is_the_program_that_it_is_on_torchs(shape: tuple[int, int]) -> None:
    """So that compiled it is never slower: Inductor gets the same operators of each, views set apart."""

    def program(ours: str) -> Counter[str]:
        graphs = Graphs(lowered=True)
        compiled_benchmark.compiled(compiled_benchmark.Model(ours), ids, backend=graphs)
        return Counter(call for call in graphs.calls[0] if call not in VIEWS)

    ids = torch.zeros(shape, dtype=torch.long)
    with torch.no_grad():
        plain = program("")
        assert plain["aten.mm.default"] == 9
        assert program("runtime") == plain


def test_a_model_on_our_ops_is_checked_by_few_more_guards_than_on_torchs() -> None:
    """Before each run: one for each op's function, and one of ours for all that may move a choice."""
    ids = torch.zeros((8, 1), dtype=torch.long)
    plain = guards_of(compiled_benchmark.Model(""), ids)
    assert guards_of(compiled_benchmark.Model("runtime"), ids) <= plain + 5


@pytest.mark.parametrize(("more", "named"), [((None, None), {}), ((), {"nobody": 1})])
def test_what_an_op_does_not_take_is_refused_in_a_graph_as_outside(more: Any, named: Any) -> None:
    """By an argument too many, and by name."""
    linear: Callable[..., Any] = lz.sync.linear
    for call, error in ((linear, TypeError), (compiled(Graphs(), linear), Exception)):
        with pytest.raises(error, match=r"takes 3 arguments|too many|'nobody'"):
            call(X, torch.eye(8), *more, **named)


def test_symbolic_sizes_hold_one_kernel_until_a_choice_may_depend_on_the_size(runtime: lz.Runtime) -> None:
    """One graph for all sizes, and one for whatever is chosen otherwise; a rule about sizes needs calls."""
    graphs = Graphs()
    run = compiled(graphs, dynamic=True)
    for rows in range(2, 6):
        run(torch.randn(rows, 8), WEIGHT)
    assert chosen(run) is None
    for rule in (
        make_rule("lock", OTHER, op="rms_norm"),
        make_rule("deny", TORCHS, op="rms_norm", when="C > 1000"),
    ):
        runtime.set_program_policy(Policy((rule,)))
        assert chosen(run) is not None
        lz.reset_policy()
        assert chosen(run) is None
    assert graphs.opaque == [False, True]


def test_a_product_of_symbolic_sizes_is_chosen_when_the_graph_runs() -> None:
    """Its fastest kernel is another one for other sizes."""
    graphs = Graphs()
    run = compiled(graphs, lz.sync.linear, dynamic=True)
    for rows in range(2, 4):
        run(torch.randn(rows, 8), torch.eye(8))
    assert graphs.opaque == [True]


def test_rotations_are_torchs_operators_whatever_is_faster_alone(runtime: lz.Runtime) -> None:
    """Fused they cost less than a call from the graph; and in the place of compiled code, too."""
    q, *operands = (
        torch.randn(1, 5, 2, 8),
        torch.randn(1, 5, 2, 8),
        torch.arange(5)[None],
        *torch.rand(2, 5, 4),
    )
    runtime.device("cpu").loader.load_now("native.rope.rows")
    graphs = Graphs()
    run = compiled(graphs, lambda q: lz.sync.rope(q, *operands)[0])
    torch.testing.assert_close(run(q), lz.sync.rope(q, *operands)[0])
    last = lz.last_selection()
    assert last is not None and last.kernel == "native.rope.rows"
    assert graphs.opaque == [False]


def test_an_export_holds_the_operator() -> None:
    """Strict or not, after a compilation that inlined."""

    class Norm(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return norm(x, WEIGHT)

    compiled(Graphs(), Norm())(X)
    for strict in (False, True):
        program = torch.export.export(Norm(), (X,), strict=strict)
        assert "layerzero.rms_norm.default" in str(program.graph)
        assert "guarded" not in str(program.graph)


def test_gradients_are_those_of_the_eager_call() -> None:
    """Through attention, a product and a norm."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        y = lz.sync.linear(lz.sync.rms_norm(x, w[0]), w)
        return lz.sync.attention(y[None, None], y[None, None], y[None, None], is_causal=True).square().sum()

    w = torch.randn(8, 8)
    graphs = Graphs()
    run, found = compiled(graphs, model), []
    for call in (run, model):
        x, weight = X.clone().requires_grad_(), w.clone().requires_grad_()
        call(x, weight).backward()
        found.append((x.grad, weight.grad))
    torch.testing.assert_close(found[0], found[1])
    assert graphs.opaque == [False]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_holds_kernels_as_well(mode: Callable[[], Any]) -> None:
    """Also below autograd's keys."""
    graphs = Graphs()
    run = compiled(graphs)
    with mode():
        assert chosen(run) is None
    assert graphs.opaque == [False]


@pytest.mark.parametrize(
    "settings",
    [{"kernel_times": True}, {"determinism": "strict"}, {"max_keys": 0}, {"check_rate": 0.5}],
    ids=str,
)
def test_where_every_call_is_watched_it_stays_a_call(settings: dict[str, Any]) -> None:
    """From the beginning, and from when it is asked for."""
    graphs = Graphs()
    run = compiled(graphs)
    assert chosen(run) is None
    lz.configure(warm="off", **settings)
    assert chosen(run) is not None
    assert graphs.opaque == [False, True]
    torch._dynamo.reset()
    assert chosen(compiled(graphs)) is not None


def test_torchs_switches_for_attention_end_a_graph_that_holds_it() -> None:
    """And serve it again afterwards."""
    q = torch.randn(1, 2, 4, 8)
    graphs = Graphs()
    run = compiled(graphs, lambda q: lz.sync.attention(q, q, q))
    wanted = run(q)
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        torch.testing.assert_close(run(q), wanted)
    run(q)
    assert graphs.opaque == [False, True]


def test_what_draws_or_writes_stays_a_call() -> None:
    """Numbers drawn are the op's own, and what it writes is there."""
    logits = torch.randn(2, 9)
    graphs = Graphs()
    run = compiled(graphs, lambda x: lz.sync.sample(x, seed=3))
    assert torch.equal(run(logits), lz.sync.sample(logits, seed=3))
    assert graphs.opaque == [True]


def test_attention_that_drops_stays_a_call() -> None:
    """And so does what reads numbers out of its tensors."""
    q = torch.randn(1, 2, 4, 8)
    graphs = Graphs()
    compiled(graphs, lambda q: lz.sync.attention(q, q, q, dropout_p=0.5))(q)
    assert graphs.opaque == [True]


def test_what_is_compiled_ahead_of_time_chooses_where_it_runs() -> None:
    """It may be stored, and another process load it."""
    run: Any = torch.compile(norm, fullgraph=True, backend="aot_eager")
    if not hasattr(run, "aot_compile"):
        pytest.skip("needs a torch whose compiled functions have aot_compile")
    stored = run.aot_compile(((X, WEIGHT), {}))
    assert chosen(stored) == TORCHS


def test_a_torch_whose_compiler_is_another_one_gets_operators_and_is_told_so(
    runtime: lz.Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the guard needs of torch is private there."""
    from layerzero.calls import inline_guards

    inline_guards._say_unguarded.cache_clear()
    graphs = Graphs()
    monkeypatch.setattr(inline_guards, "_is_ahead_of_time", lambda output: output.not_there)
    run = compiled(graphs)
    assert chosen(run) == TORCHS and chosen(run) == TORCHS
    assert graphs.opaque == [True]
    assert caplog.text.count("compile.unguarded") == 1
