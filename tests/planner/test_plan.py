"""Planned blocks: right numbers, chosen together, made again where what they follow from changes."""

import gc
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import layerzero as lz
from layerzero.planner.planned import PlannedBlock
from tests.planner.blocks import WIDTH, decoder, feed_forward, rows, weight


def step_of(planned: PlannedBlock, fusion: str) -> tuple[str, ...]:
    """The ops that the step of a kind of fusion covers."""
    return next(step.covers for step in planned.record.steps if step.fusion == fusion)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_planned_layer_gives_what_its_ops_give(dtype: torch.dtype) -> None:
    """A decoder layer over pages runs with fused steps and gives the numbers of the ops one by one."""
    layer, args = decoder(dtype)
    with lz.start(scoped=True), torch.no_grad():
        expected = layer(*args)
        planned = lz.plan(layer, *args)
        result = planned(*args)
        again = planned(*args)
    assert planned.record.fused_ops
    tolerance = 0.06 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(result, again)


def test_the_keys_that_a_layer_writes_are_read_behind_it() -> None:
    """Attention over a pool waits for the write into it, though no tensor goes from one to the other."""
    layer, args = decoder()
    with lz.start(scoped=True), torch.no_grad():
        planned = lz.plan(layer, *args)
        names = [name for step in planned.record.steps for name in step.covers]
    assert names.index("append_kv") < names.index("paged_attention")


@pytest.mark.parametrize("reads_keys", [False, True])
def test_a_rotation_is_one_step_with_the_write_of_its_keys(reads_keys: bool) -> None:
    """One op turns and writes; not where something else reads the turned keys."""
    cos, sin = lz.rope_tables(16, 32)
    k_cache, v_cache = (torch.zeros(4, 8, 2, 16) for _ in range(2))
    slots = torch.tensor([9, 0, 31])

    def block(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        q, k = lz.sync.rope(q, k, positions, cos, sin)
        lz.sync.append_kv(k, v, k_cache, v_cache, slots)
        return (q, k) if reads_keys else (q,)

    args: Any = (*(torch.randn(3, heads, 16) for heads in (4, 2, 2)), torch.tensor([4, 0, 30]))
    with lz.start(scoped=True), torch.no_grad():
        wanted = [*block(*args), k_cache.clone(), v_cache.clone()]
        planned = lz.plan(block, *args)
        for pool in (k_cache, v_cache):
            pool.zero_()
        got = [*planned(*args), k_cache, v_cache]
        with lz.prefer("*", op="rope_append_kv"):
            forced = lz.plan(block, *args)
    for mine, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, right)
    if reads_keys:
        assert all(step.fusion != "rope+append" for step in forced.record.steps)
    else:
        assert step_of(planned, "rope+append") == ("rope", "append_kv")


def test_the_record_says_what_is_fused_and_what_transforms_cost() -> None:
    """Kernels, fused ops, microseconds and the total of transforms are in the record and its text."""
    block = feed_forward()
    x, residual = rows(), rows(seed=3)
    with lz.start(scoped=True), torch.no_grad():
        planned = lz.plan(block, x, residual)
    record = planned.record
    assert step_of(planned, "add+norm") == ("add", "rms_norm")
    assert record.exact
    assert record.expected_us <= record.op_by_op_us
    parts = sum(step.expected_us for step in record.steps)
    assert record.expected_us == pytest.approx(parts + record.transform_cost_total)
    assert "add+norm: add, rms_norm" in str(record)
    assert record.as_plain()["fused_ops"][0] == ("add", "rms_norm")


@pytest.mark.parametrize(
    ("fusion", "op", "block", "inputs"),
    [
        ("add+norm", "add_layer_norm", lambda w: lambda x, y: sum_and_norm(x + y, w), 2),
        ("linears", "linear", lambda w: two_products(w, w[:8] * 2, None, None), 1),
        ("linears", "linear", lambda w: two_products(w, w * 2, w[:, 0].clone(), w[:, 1].clone()), 1),
        ("mlp", "mlp", lambda w: lambda x: F.linear(F.gelu(F.linear(x, w)), w.t().contiguous()), 1),
        ("gate+up+activation", "mlp", lambda w: gated(w, w * 0.5, w.t().contiguous()), 1),
        ("gate+up+activation", "mlp", lambda w: halves(torch.cat([w, w * 0.5]), w.t().contiguous()), 1),
        ("norm+linear", "rms_norm_linear", lambda w: lambda x: lz.sync.linear(
            lz.sync.rms_norm(x, w[0], eps=1e-3), w, w[:, 1].clone()), 1),
        ("linear+loss", "linear_cross_entropy", lambda w: lambda x: lz.sync.cross_entropy(
            lz.sync.linear(x, w), torch.arange(len(x)), reduction="none"), 1),
        ("add+norm+quantize", "add_rms_norm_quantize", lambda w: lambda x, y: lz.sync.quantize(
            lz.sync.rms_norm(x + y), format="int8"), 2),
        ("add+norm+quantize", "add_rms_norm_quantize", lambda w: lambda x, y: lz.sync.quantize(
            lz.sync.add_rms_norm(x, y)[0]), 2),
    ],
)  # fmt: skip
def test_each_fusion_is_found_and_right(fusion: str, op: str, block: Any, inputs: int) -> None:
    """Every kind of fusion is found as users write it, taken where it is preferred, and right."""
    args = tuple(rows(5, seed=seed) for seed in range(inputs))
    weights = weight(24, WIDTH)
    fn = block(weights)
    with lz.start(scoped=True), lz.prefer("*", op=op), torch.no_grad():
        planned = lz.plan(fn, *args)
        expected, result = fn(*args), planned(*args)
    assert len(step_of(planned, fusion)) > 1
    for got, wanted in zip(leaves(result), leaves(expected), strict=True):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=1e-4, atol=1e-4)


def sum_and_norm(total: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A layer norm beside its operand."""
    return lz.sync.layer_norm(total, w[0], w[1]), total


def two_products(
    first: Tensor, second: Tensor, *biases: Tensor | None
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Two products of one operand, one written with torch, and what reads them."""
    return lambda x: (lz.sync.linear(x, first, biases[0]) * 2, F.silu(F.linear(x, second, biases[1])))


def gated(gate: Tensor, up: Tensor, down: Tensor) -> Callable[[Tensor], Tensor]:
    """A gated block with the gate behind, in torch's words."""
    return lambda x: F.linear(F.linear(x, up) * F.gelu(F.linear(x, gate), approximate="tanh"), down)


def halves(both: Tensor, down: Tensor) -> Callable[[Tensor], Tensor]:
    """A gated block with one product for gate and up."""

    def block(x: Tensor) -> Tensor:
        gate, up = lz.sync.linear(x, both).chunk(2, -1)
        return lz.sync.linear(F.silu(gate) * up, down)

    return block


def leaves(result: Any) -> tuple[Tensor, ...]:
    """The tensors of a result."""
    return result if isinstance(result, tuple) else (result,)


def test_what_reads_memory_is_given_it_as_op_by_op() -> None:
    """Strides and bits that a function asks for are those of the op's own result, not of a fused one."""
    first, second = weight(16, WIDTH), weight(16, WIDTH, seed=2)

    def block(x: Tensor) -> tuple[Tensor, ...]:
        product = F.linear(x, first)
        return product.as_strided((3, 8), (16, 2)), product.view(torch.int32), F.linear(x, second)

    x = rows()
    with lz.start(scoped=True), lz.prefer("*", op="linear"):
        planned = lz.plan(block, x)
        for got, wanted in zip(planned(x), block(x), strict=True):
            assert got.dtype is wanted.dtype
            torch.testing.assert_close(got.view(torch.float32), wanted.view(torch.float32))


def test_weights_that_change_are_seen() -> None:
    """A weight that is changed in place counts from the next call, joined or not."""
    weights = [weight(16, WIDTH, seed=seed) for seed in range(3)]

    def block(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, each) + 1 for each in weights)

    x = rows()
    with lz.start(scoped=True):
        planned = lz.plan(block, x)
        assert step_of(planned, "linears") == ("linear", "linear_1", "linear_2")
        assert planned.record.held_bytes == 3 * 16 * WIDTH * 4
        weights[1].mul_(2)
        for got, wanted in zip(planned(x), block(x), strict=True):
            torch.testing.assert_close(got, wanted)


def test_a_plan_for_another_size_sees_weights_that_changed_before_it() -> None:
    """What an earlier plan joined is joined anew where a weight has changed since; every plan sees it."""
    first, second = weight(16, WIDTH), weight(16, WIDTH, seed=2)
    block = two_products(first, second, None, None)
    with lz.start(scoped=True):
        planned = lz.plan(block, rows())
        first.mul_(2)
        for count in (5, 3):
            for got, wanted in zip(planned(rows(count)), block(rows(count)), strict=True):
                torch.testing.assert_close(got, wanted)


def test_what_no_plan_reads_any_more_is_let_go() -> None:
    """A weight whose memory is replaced leaves nothing behind once the plans made of it are gone."""
    first, second = weight(16, WIDTH), weight(16, WIDTH, seed=2)
    with lz.start(scoped=True), pytest.MonkeyPatch.context() as patch:
        patch.setattr("layerzero.planner.planned.MAX_PROGRAMS", 1)
        planned = lz.plan(two_products(first, second, None, None), rows())
        for count in (4, 5, 6):
            first.data = first.clone()
            planned(rows(count))
        gc.collect()
        assert len(planned._weights._by_key) == 1


def test_weights_of_inference_mode_are_joined_anew_when_asked() -> None:
    """Tensors made in inference mode count no changes: `refresh_weights` takes them over."""
    with torch.inference_mode():
        first, second = weight(16, WIDTH), weight(16, WIDTH, seed=2)
    block, x = two_products(first, second, None, None), rows()
    with lz.start(scoped=True):
        planned = lz.plan(block, x)
        assert step_of(planned, "linears")
        with torch.inference_mode():
            first.mul_(2)
        planned.refresh_weights()
        torch.testing.assert_close(planned(x), block(x))


def test_a_block_may_switch_gradients_off() -> None:
    """`no_grad` inside a function that wants no gradient is no obstacle; where one is wanted, it is said."""
    weights = weight(16, WIDTH)

    def block(x: Tensor) -> Tensor:
        with torch.no_grad():
            return F.silu(F.linear(x, weights))

    with lz.start(scoped=True):
        torch.testing.assert_close(lz.plan(block, rows())(rows()), block(rows()))
        weights.requires_grad_()
        with pytest.raises(lz.BlockError, match="BLOCK_NOT_TRACEABLE"):
            lz.plan(block, rows())


def test_plans_for_other_sizes_share_what_they_hold() -> None:
    """Joined weights are made once for all sizes of a block, and stay what they are when another comes."""
    first, second = weight(16, WIDTH), weight(16, WIDTH, seed=2)
    with lz.start(scoped=True):
        planned = lz.plan(two_products(first, second, None, None), rows(3))
        before = planned._last.program.held if planned._last is not None else ()
        planned(rows(5))
        after = planned._last.program.held if planned._last is not None else ()
    assert len(planned.records) == 2
    assert len(before) == 1
    assert before == after


def test_weights_that_lie_side_by_side_take_no_more_memory() -> None:
    """Views of one tensor are joined without a copy, so that a plan holds nothing of its own."""
    whole = weight(48, WIDTH)
    q, k, v = whole.split(16)

    def block(x: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, q) + 1, F.linear(x, k) + 1, F.linear(x, v) + 1

    with lz.start(scoped=True):
        planned = lz.plan(block, rows())
    assert step_of(planned, "linears")
    assert planned.record.held_bytes == 0


def test_a_gradient_flows_into_weights_that_want_one() -> None:
    """Weights that require a gradient are not joined, and what the block gives has the ops' gradients."""
    weights = [weight(16, WIDTH, seed=seed).requires_grad_() for seed in range(2)]

    def block(x: Tensor, residual: Tensor) -> Tensor:
        normed = lz.sync.rms_norm(x + residual)
        return lz.sync.linear(normed, weights[0]) + lz.sync.linear(normed, weights[1])

    x, residual = rows(), rows(seed=2)
    with lz.start(scoped=True):
        planned = lz.plan(block, x, residual)
        planned(x, residual).sum().backward()
        gradients = [each.grad.clone() for each in weights if each.grad is not None]
        for each in weights:
            each.grad = None
        block(x, residual).sum().backward()
    assert not any(step.fusion == "linears" for step in planned.record.steps)
    for got, each in zip(gradients, weights, strict=True):
        torch.testing.assert_close(got, each.grad)


def test_a_weight_that_wants_a_gradient_later_gets_one() -> None:
    """A plan for frozen weights is made anew once one of them requires a gradient."""
    first, second = weight(16, WIDTH), weight(16, WIDTH, seed=2)
    x = rows()
    with lz.start(scoped=True):
        planned = lz.plan(lambda x: F.linear(x, first) * 2 + F.linear(x, second), x)
        assert step_of(planned, "linears")
        first.requires_grad_()
        planned(x).sum().backward()
    assert first.grad is not None
    torch.testing.assert_close(first.grad, 2 * x.sum(0).expand(16, -1))


@pytest.mark.parametrize("grad", [False, True])
def test_a_weight_that_a_module_has_in_the_place_of_another_is_the_one_that_counts(grad: bool) -> None:
    """A state loaded with `assign=True`, or a parameter that is set, of a module or a function over one."""
    module = nn.Sequential(nn.Linear(WIDTH, 16), nn.SiLU(), nn.Linear(16, WIDTH)).requires_grad_(False)
    other = nn.Sequential(nn.Linear(WIDTH, 16), nn.SiLU(), nn.Linear(16, WIDTH)).requires_grad_(False)
    x = rows()
    with lz.start(scoped=True), torch.set_grad_enabled(grad):
        for planned in (lz.plan(module, x), lz.plan(lambda x: module(x), x)):
            torch.testing.assert_close(planned(x), module(x))
            module.load_state_dict({n: p.clone() + 1 for n, p in other.state_dict().items()}, assign=True)
            torch.testing.assert_close(planned(x), module(x))
            module[0].bias = nn.Parameter(torch.randn(16), requires_grad=False)
            torch.testing.assert_close(planned(x), module(x))


def test_threads_plan_at_once() -> None:
    """Blocks that several threads plan are all right, each signature once, and torch is left as it was."""
    ours = nn.Module.__call__, nn.Module.__getattr__
    module = nn.Sequential(nn.Linear(WIDTH, 16), nn.SiLU(), nn.Linear(16, WIDTH)).requires_grad_(False)
    start, failed = threading.Barrier(4), []

    def work(planned: PlannedBlock, own: nn.Module) -> None:
        start.wait()
        try:
            for count in range(2, 8):
                torch.testing.assert_close(planned(rows(count)), module(rows(count)))
                torch.testing.assert_close(lz.plan(own, rows(count))(rows(count)), own(rows(count)))
        except BaseException as error:
            failed.append(error)

    with lz.start(scoped=True):
        planned = PlannedBlock(module)
        threads = [
            threading.Thread(target=work, args=(planned, nn.Linear(WIDTH, 8).requires_grad_(False)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert len(planned.records) == 6
    assert (nn.Module.__call__, nn.Module.__getattr__) == ours


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_transforms_and_tangents_go_through_a_planned_block() -> None:
    """What torch transforms, traces or differentiates forwards is computed op by op, written either way."""
    x, tangent, batch = rows(), rows(seed=3), torch.stack([rows(seed=seed) for seed in range(4)])
    ops = [
        lz.BlockOp("normed", "rms_norm", lz.Edge("x"), eps=0.5),
        lz.BlockOp("out", "mul", lz.Edge("normed"), lz.Edge("x")),
    ]

    def block(x: Tensor) -> Tensor:
        return lz.sync.rms_norm(x, eps=0.5) * x

    with lz.start(scoped=True):
        for source in (block, lz.Block(("x",), ops, ("out",))):
            planned = lz.plan(source, x)
            torch.testing.assert_close(planned(x), block(x))
            for got, wanted in zip(
                torch.func.jvp(planned, (x,), (tangent,)), torch.func.jvp(block, (x,), (tangent,)),
                strict=True,
            ):  # fmt: skip
                torch.testing.assert_close(got, wanted)
            total = torch.func.grad(lambda x, planned=planned: planned(x).sum())(x)
            torch.testing.assert_close(total, torch.func.grad(lambda x: block(x).sum())(x))
            torch.testing.assert_close(torch.vmap(planned)(batch), block(batch))
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, tangent)
                got, wanted = (torch.autograd.forward_ad.unpack_dual(f(dual)) for f in (planned, block))
                torch.testing.assert_close(got.tangent, wanted.tangent)
            outer = lz.plan(lambda x, planned=planned: planned(x) + 1, x)
            torch.testing.assert_close(outer(x), block(x) + 1)


def test_a_module_and_a_graph_are_planned_like_a_function() -> None:
    """An nn.Module, a GraphModule of torch.fx and its graph give plans of the same kernels."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False)
            self.down = nn.Linear(32, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
            return hidden

    module, x = Gate(), rows()
    traced = fx.symbolic_trace(module)
    fused: list[tuple[tuple[str, ...], ...]] = []
    with lz.start(scoped=True), torch.no_grad():
        expected = module(x)
        for block in (module, traced):
            planned = lz.plan(block, x)
            torch.testing.assert_close(planned(x), expected, rtol=1e-4, atol=1e-4)
            fused.append(planned.record.fused_ops)
            assert list(inspect.signature(planned).parameters) == ["x"]
        assert fused[0] == fused[1] != ()
        graph = fx.Graph()
        graph.output(graph.call_function(F.silu, (graph.placeholder("x"),)))
        torch.testing.assert_close(lz.plan(graph, x)(x), F.silu(x))


def test_other_sizes_are_planned_when_they_come() -> None:
    """A planned function takes other rows, keywords and nested arguments, each with a plan of its own."""
    scale = torch.rand(WIDTH)

    def block(pair: dict[str, Tensor], eps: float) -> dict[str, Tensor]:
        total = pair["x"] + pair["residual"]
        return {"total": total, "normed": lz.sync.rms_norm(total, scale, eps=eps), "x": pair["x"]}

    with lz.start(scoped=True):
        planned = lz.plan(block, {"x": rows(), "residual": rows()}, eps=1e-6)
        for count in (1, 5, 3):
            for eps in (1e-6, 0.5):
                pair = {"x": rows(count), "residual": rows(count, seed=3)}
                result, expected = planned(pair, eps=eps), block(pair, eps)
                assert result.keys() == expected.keys()
                assert result["x"] is pair["x"]
                torch.testing.assert_close(result["normed"], expected["normed"])
        assert len(planned.records) == 6


def test_one_tensor_may_be_two_arguments() -> None:
    """A plan that was made for one tensor in two places, or for a weight, takes others there."""
    x, y, w = rows(), rows(seed=3), weight(16, WIDTH)
    ops = [lz.BlockOp("normed", "add_rms_norm", lz.Edge("x"), lz.Edge("y"), w[0])]
    written = lz.Block(("x", "y"), ops, (lz.Edge("normed"), lz.Edge("normed", 1)))
    with lz.start(scoped=True):
        for block in (lambda x, y: x - 2 * y, lambda x, y: lz.sync.add_rms_norm(x, y, w[0])):
            planned = lz.plan(block, x, x)
            torch.testing.assert_close(planned(x, y), block(x, y))
        planned, expected = lz.plan(written, x, x), lz.sync.add_rms_norm(x, y, w[0])
        torch.testing.assert_close(planned(x, y), expected)
        planned = lz.plan(lambda x, other: F.linear(x, w) - F.linear(x, other), x, w)
        torch.testing.assert_close(planned(x, w * 2), -F.linear(x, w))


def test_arguments_are_told_apart_by_where_they_are() -> None:
    """Keywords and keys in another order, lists of other lengths, and minus zero mean what they say."""
    x, y = rows(), rows(seed=3)
    with lz.start(scoped=True):
        planned = lz.plan(lambda x, y: x - y, x=x, y=y)
        assert torch.equal(planned(y=y, x=x), x - y)
        by_key = lz.plan(lambda pair: pair["x"] - pair["y"], {"x": x, "y": y})
        assert torch.equal(by_key({"y": y, "x": x}), x - y)
        listed = lz.plan(lambda plus, minus: sum(plus) - sum(minus), [x, y], [x])
        assert torch.equal(listed([x], [y, x]), x - (y + x))
        scaled = lz.plan(lambda x, factor: x.abs() * factor, x, 0.0)
        assert torch.signbit(scaled(x, -0.0)).all()
        for _ in range(3):
            scaled(x, float("nan"))
        assert len(scaled.records) == 3


def test_an_awaited_op_in_a_block_is_told_with_its_blocking_twin() -> None:
    """What is planned is a plain function; the coroutine that nobody awaits is closed."""
    with lz.start(scoped=True):
        for fn in (lambda x: lz.rms_norm(x), _awaits):
            with pytest.raises(lz.BlockError, match=r"lz\.sync\.NAME instead of lz\.NAME, got a coroutine"):
                lz.plan(fn, rows())


async def _awaits(x: Tensor) -> Tensor:
    return await lz.rms_norm(x)
