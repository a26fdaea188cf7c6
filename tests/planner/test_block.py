"""Blocks written by hand: what they hold, and what is wrong with them."""

import inspect

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.planner.block import Block
from layerzero.planner.tracing import trace
from layerzero.planner.values import place
from tests.planner.blocks import WIDTH, decoder, rows, weight

SUM = lz.BlockOp("total", "add", lz.Edge("x"), lz.Edge("residual"))
NORM = lz.BlockOp("normed", "rms_norm", lz.Edge("total"), torch.ones(WIDTH))


def test_a_block_runs_in_the_order_of_its_edges() -> None:
    """Ops written in any order run behind those that they read, and give what the ops give."""
    block = lz.Block(("x", "residual"), [NORM, SUM], ("normed", "total"))
    assert [op.name for op in block.ops] == ["total", "normed"]
    x, residual = rows(), rows(seed=2)
    with lz.start(scoped=True):
        normed, total = lz.plan(block, x, residual)(x, residual)
        expected = lz.sync.rms_norm(x + residual, torch.ones(WIDTH))
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, expected)


def test_an_op_with_several_outputs_is_read_by_number() -> None:
    """`Edge(name, 1)` is the second output, and a keyword argument of an op is given as one."""
    block = lz.Block(
        ("x", "residual"),
        [
            lz.BlockOp("fused", "add_rms_norm", lz.Edge("x"), lz.Edge("residual"), eps=0.5),
            lz.BlockOp("twice", "mul", lz.Edge("fused", 1), 2.0),
        ],
        (lz.Edge("twice"), lz.Edge("fused")),
    )
    x, residual = rows(), rows(seed=2)
    with lz.start(scoped=True):
        twice, normed = lz.plan(block, x, residual)(x=x, residual=residual)
        expected = lz.sync.add_rms_norm(x, residual, eps=0.5)[0]
    torch.testing.assert_close(twice, (x + residual) * 2)
    torch.testing.assert_close(normed, expected)


def first(name: str, source: str) -> lz.BlockOp:
    """An op that reads another."""
    return lz.BlockOp(name, "mul", lz.Edge(source), 2.0)


@pytest.mark.parametrize(
    ("code", "words", "make"),
    [
        ("BLOCK_CYCLIC", "a -> b -> c -> a", lambda: Block(
            ("x",), [first("a", "c"), first("b", "a"), first("c", "b")], ("c",))),
        ("BLOCK_CYCLIC", "a -> a", lambda: Block(("x",), [first("a", "a")], ("a",))),
        ("BLOCK_EDGE_MISSING", "op 'a' needs an edge from an op or input, such as x", lambda: Block(
            ("x",), [first("a", "xx")], ("a",))),
        ("BLOCK_EDGE_MISSING", "outputs", lambda: Block(("x",), [first("a", "x")], ("b",))),
        ("BLOCK_EDGE_MISSING", "output 1", lambda: Block(
            ("x",), [lz.BlockOp("a", "mul", lz.Edge("x", 1), 2.0)], ("a",))),
        ("BLOCK_EDGE_MISSING", "output -1", lambda: Block(("x",), [first("a", "x")], (lz.Edge("a", -1),))),
        ("BLOCK_NAME_TAKEN", "'x'", lambda: Block(("x",), [first("x", "x")], ("x",))),
        ("BLOCK_OP_UNKNOWN", "OVERLOAD, got 'rms_nrm'; did you mean rms_norm", lambda: lz.BlockOp(
            "a", "rms_nrm", lz.Edge("x"))),
        ("BLOCK_OP_UNKNOWN", "aten.NAME.OVERLOAD", lambda: lz.BlockOp("a", "os.system", "true")),
        ("BLOCK_OP_UNKNOWN", "aten.add.Nothing", lambda: lz.BlockOp("a", "aten.add.Nothing")),
        ("BLOCK_OP_WRITES", "aten.add_.Tensor", lambda: lz.BlockOp("a", "aten.add_.Tensor", lz.Edge("x"), 1)),
        ("BLOCK_EMPTY", "outputs", lambda: Block(("x",), [first("a", "x")], ())),
        ("BLOCK_EMPTY", "ops", lambda: Block(("x",), [], ("x",))),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_block_is_said(code: str, words: str, make: object) -> None:
    """A block that is no block is refused by name, with what it needs, what it got and a reason code."""
    with pytest.raises(lz.BlockError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.problem.reason.value == code
    assert code in str(caught.value)
    assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("inputs needs a sequence, got str", lambda: lz.Block("x", [first("a", "x")], ("a",))),
        ("ops needs BlockOp, got str: 'rms_norm'", lambda: lz.Block(("x",), ["rms_norm"], ("a",))),  # type: ignore[list-item]
        ("BlockOp needs a text for name", lambda: lz.BlockOp(1, "mul")),  # type: ignore[arg-type]
    ],
)
def test_values_of_other_types_are_named(words: str, make: object) -> None:
    """An argument of another type is a TypeError that names it."""
    with pytest.raises(TypeError, match=words):
        make()  # type: ignore[operator]


def test_an_output_that_an_op_does_not_have_is_said() -> None:
    """An edge to the third output of an op with two is found when the shapes are known."""
    block = lz.Block(
        ("x",), [lz.BlockOp("a", "add_rms_norm", lz.Edge("x"), lz.Edge("x")), first("b", "a")],
        (lz.Edge("a", 2),),
    )  # fmt: skip
    with lz.start(scoped=True), pytest.raises(lz.BlockError, match="BLOCK_EDGE_MISSING") as caught:
        lz.plan(block, rows())
    assert "2 tensors that 'a' gives" in str(caught.value)


def test_an_argument_that_does_not_fit_is_named_with_its_op() -> None:
    """An op's own words about an argument come with the op of the block that they are about."""
    block = lz.Block(("x",), [lz.BlockOp("a", "linear", lz.Edge("x"), weight(8, WIDTH + 1))], ("a",))
    with lz.start(scoped=True), pytest.raises(ValueError, match="x needs a last axis of 65") as caught:
        lz.plan(block, rows())
    assert "in op 'a' (linear) of the block" in caught.value.__notes__[0]


def test_a_block_is_called_with_as_many_tensors_as_it_has_inputs() -> None:
    """Too few arguments, and what is no tensor, are named."""
    block = lz.Block(("x", "residual"), [SUM], ("total",))
    with lz.start(scoped=True):
        with pytest.raises(TypeError, match="needs 2 tensors, x, residual, got 1"):
            lz.plan(block, rows())
        with pytest.raises(TypeError, match=r"plan needs a function, a torch.fx graph or a Block, got int"):
            lz.plan(3, rows())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="beam needs an int >= 1, got 0"):
            lz.plan(block, rows(), rows(), beam=0)
        with pytest.raises(ValueError, match="measure needs False, True, 'eager' or 'graph', got 'slow'"):
            lz.plan(block, rows(), rows(), measure="slow")


def test_who_reads_a_pool_waits_for_who_writes_it() -> None:
    """A write waits for the readers before it, and the readers behind it wait for it, views among them."""
    layer, args = decoder()
    k_cache = dict(inspect.getclosurevars(layer).nonlocals)["k_cache"]

    def block(*inputs: Tensor) -> tuple[Tensor, ...]:
        before = k_cache.flatten(0, 1) * 2
        return before, layer(*inputs), k_cache[:4] * 2

    with lz.start(scoped=True), torch.no_grad():
        placed = place(trace(block, args, {}), args)
    names = [op.written.name for op in placed.ops]
    write = names.index("append_kv")
    readers = [name for name in names if placed.ops[names.index(name)].after & {write}]
    assert names.index("mul") in placed.ops[write].after
    assert "paged_attention" in readers
    assert any(name.startswith("slice") for name in readers)


def test_inputs_may_be_views_of_one_tensor() -> None:
    """A sum of inputs stays before a write into another input: the next call may give a view of that."""
    keys, slots = torch.zeros(3, 2, 16), torch.arange(3)

    def block(pool: Tensor, values: Tensor, x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        lz.sync.append_kv(keys, keys, pool, values, slots)
        return lz.sync.rms_norm(total)

    pool, values, other = (torch.rand(2, 16, 2, 16) for _ in range(3))
    start = pool.clone()
    with lz.start(scoped=True), torch.no_grad(), lz.prefer("*", op="add_rms_norm"):
        planned = lz.plan(block, pool, values, other, other)
        result = planned(pool, values, other, pool)
        pool.copy_(start)
        torch.testing.assert_close(result, block(pool, values, other, pool))


def test_a_view_of_a_value_is_read_as_a_reshape() -> None:
    """A plan may keep the value in memory that has no such view; `reshape` copies there."""
    block = trace(lambda x: (x * 2).view(-1), (rows(),), {})
    assert [op.op for op in block.ops][-1] == "aten.reshape.default"
