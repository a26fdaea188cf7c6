"""Patched models under `torch.compile(fullgraph=True)`: whole, with the model's numbers, in as few graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import layerzero as lz
from layerzero.integrations.patches import mlp, norm, rope
from layerzero.integrations.patches.substitute import PARTS
from layerzero.runtime import current
from tests.calls.test_inline_guards import Graphs, guards_of
from tests.integrations import models

FEW = ("llama", "gemma2", "bert", "t5")
EACH = [pytest.param(f, marks=() if f in FEW else pytest.mark.slow) for f in models.FAMILIES]
# These compute attention in functions of their own, which a compiled graph leaves as they are.
OWN_ATTENTION = frozenset({"deberta", "deberta_first"})
LAYERS = 2
# Of each part, the operator that a graph of a model with a gradient and labels holds, and how often.
OPERATORS = {
    "attention": ("attention", LAYERS), "norm": ("rms_norm", 2 * LAYERS + 1), "rope": ("rope", LAYERS),
    "loss": ("cross_entropy", 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """No test sees what another has compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any, **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    """The model compiled whole, and what counts its graphs; a break raises."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    return torch.compile(model, fullgraph=True, backend=counter, **options), counter


def operators(counter: CompileCounterWithBackend) -> Counter[str]:
    """How often the graphs hold each of our operators."""
    nodes = (str(node.target).split(".") for graph in counter.graphs for node in graph.graph.nodes)
    return Counter(name for space, name, *_ in (n for n in nodes if len(n) > 1) if space == "layerzero")


@pytest.mark.parametrize("family", EACH)
def test_a_patched_model_is_one_graph_with_the_numbers_of_the_model(family: str) -> None:
    """Every part patched; attention, norms, rotations and feed-forward blocks are our operators."""
    model = models.build(family)
    plain = models.answer(model, family)
    table = lz.patch_table(lz.patch(model))
    run, counter = compiled(model)
    batch = models.inputs(family)
    with torch.no_grad():
        run(**batch)
    torch.testing.assert_close(models.answer(run, family), plain, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    found = operators(counter)
    assert bool(found["attention"]) is (family not in OWN_ATTENTION)
    assert bool(found["rms_norm"] or found["layer_norm"]) is bool(table.ops("norm"))
    # DeepSeek's rotation that is the op's is not the one that its configuration asks for.
    assert found["rope"] == (LAYERS if table.ops("rope") and family != "deepseek_v3" else 0)
    # Falcon's projections are a class of its own, which no graph can try.
    assert bool(found["linear"] or found["mlp"]) is (bool(table.ops("mlp")) and family != "falcon")


@pytest.mark.parametrize(("part", "more"), [("mlp", 8), ("norm", 18)])
def test_a_part_on_our_ops_is_guarded_by_few_more_guards_than_its_own(part: str, more: int) -> None:
    """Each is checked before each run: of a token, that is a part."""
    layer = models.build("llama").model.layers[0]
    module = layer.mlp if part == "mlp" else layer.input_layernorm
    instead = mlp.substitute(module) if part == "mlp" else norm.substitute(module)
    assert not isinstance(instead, str)
    own = guards_of(module, torch.randn(3, 32))
    instead.install()
    assert own < guards_of(module, torch.randn(3, 32)) <= own + more


@pytest.mark.parametrize("family", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_a_patched_model_is_guarded_by_as_many_guards_as_its_own(family: str) -> None:
    """The patch adds none for each module, nor for each time that a model asks for its name."""
    batch = models.inputs(family)
    own = guards_of(models.build(family), **batch)
    assert guards_of(lz.patch(models.build(family)), **batch) <= own + 10


def test_layers_compiled_one_by_one_share_the_graphs_that_they_share_without_a_patch() -> None:
    """No layer has a guard on what is its own."""
    graphs, outs, ids = [], [], models.text(9, 9)["input_ids"]
    for patched in (False, True):
        model = models.build("llama")
        if patched:
            lz.patch(model)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend=counter)
        with torch.no_grad():
            outs.append(model(input_ids=ids, use_cache=False).logits)  # a cache has layers of its own
        graphs.append(counter.frame_count)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
    assert graphs == [1, 1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_block_with_symbolic_sizes_stays_the_model_s_own(dynamic: bool) -> None:
    """Its op would be a call from the graph, which Inductor fuses nothing with."""
    module = models.build("llama").model.layers[0].mlp
    instead = mlp.substitute(module)
    assert not isinstance(instead, str)
    instead.install()
    counter = CompileCounterWithBackend("eager")
    x = torch.randn(3, 32)
    with torch.no_grad():
        compiled: Any = torch.compile(module, fullgraph=True, backend=counter, dynamic=dynamic)
        torch.testing.assert_close(compiled(x), instead.original(x))
    assert bool(operators(counter)["linear"]) is not dynamic


def graphs(model: Any) -> tuple[CompileCounterWithBackend, list[Tensor]]:
    """The graphs that three sizes need of a model that trains and rests, and what they gave."""
    run, counter = compiled(model)
    outs = []
    for training in (False, True):
        model.train(training)
        for tokens in (4, 5, 6):
            ids = torch.arange(2 * tokens).view(2, tokens) + 3
            out = run(input_ids=ids, labels=ids)
            outs += [out.logits.detach(), out.loss.detach()]
    return counter, outs


@pytest.fixture(scope="module")
def plain_graphs() -> tuple[int, list[Tensor]]:
    """How many graphs a model without a patch has, and what they gave."""
    counter, outs = graphs(models.build("llama"))
    return counter.frame_count, outs


@pytest.mark.parametrize(
    "parts", [" ".join(OPERATORS), *(pytest.param(part, marks=pytest.mark.slow) for part in PARTS)]
)
def test_parts_compile_whole_and_as_seldom_as_without_them(
    parts: str, plain_graphs: tuple[int, list[Tensor]]
) -> None:
    """No graph more than the model without a patch has; in each, whatever its sizes, they are operators."""
    wanted, plain = plain_graphs
    model = models.build("llama")
    lz.patch(model, parts=parts.split())
    got, outs = graphs(model)
    assert got.frame_count <= wanted
    held = [OPERATORS[part] for part in parts.split() if part in OPERATORS]
    assert operators(got) == {name: count * got.frame_count for name, count in held}
    for ours, theirs in zip(outs, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama", "gemma3"))]
)
def test_lengths_that_are_symbols_share_one_graph_of_operators(family: str) -> None:
    """For all batches and lengths, with the numbers and the gradients of the model as it is, run eagerly."""
    # Gemma compares its window with the length, so that shorter ones have a graph of their own.
    sizes = {"num_hidden_layers": 1} | ({"sliding_window": 32} if family == "gemma3" else {})
    model, plain = (models.build(family, **sizes).train() for _ in range(2))
    run, counter = compiled(lz.patch(model, ["norm", "rope", "loss"]), dynamic=True)
    for rows, tokens in ((2, 4), (3, 7), (5, 9)):
        ids = torch.arange(rows * tokens).view(rows, tokens) + 3
        got, wanted = (called(input_ids=ids, labels=ids) for called in (run, plain))
        torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-5)
        for output in (got, wanted):
            output.loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    held = operators(counter)
    assert held["rms_norm"] and held["rope"] == held["cross_entropy"] == 1


@pytest.mark.parametrize(
    ("family", "reads_logits"),
    [
        ("llama", False),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("gemma2", False, marks=pytest.mark.slow),
    ],
)
def test_a_step_compiled_whole_has_the_fused_loss(family: str, reads_logits: bool) -> None:
    """The gradients are those of the model as it is, and logits that are not read are not computed beside it.

    Gemma caps its logits, so that what its head gives is not what its loss is of.
    """
    ids = models.text(9, 9)["input_ids"]
    labels = ids.masked_fill(ids % 3 == 0, -100)
    model, plain = (models.build(family, num_hidden_layers=1).train() for _ in range(2))

    def step(model: Any) -> Tensor:
        output = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(5))
        loss: Tensor = output.loss + output.logits.square().mean() if reads_logits else output.loss
        return loss

    graphs, before = Graphs(lowered=True), held("linear_cross_entropy")
    got = torch.compile(step, fullgraph=True, backend=graphs)(lz.patch(model, ["loss"]))
    wanted = step(plain)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    for loss in (got, wanted):
        loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert (held("linear_cross_entropy") > before) is (family == "llama")
    # Attention four, the block three, the head one, and one more where its logits are read as well.
    assert graphs.calls[0].count("aten.mm.default") == 8 + reads_logits


def held(op: str) -> float:
    """How many calls of an op graphs hold in torch's operators."""
    counts = current().counters.snapshot().items()
    return sum(
        n for series, n in counts if series.name == "compiled_calls_inlined" and f"'{op}'" in str(series)
    )


def test_parts_that_train_in_a_graph_have_the_gradients_of_the_model() -> None:
    """Rotations and the loss in torch's operators, as the kernels of torch that a graph holds."""
    ids = models.text(9, 9)["input_ids"]
    labels = ids.masked_fill(ids % 3 == 0, -100)

    def gradients(patched: bool) -> dict[str, Tensor]:
        model: Any = models.build("llama").train()
        run = model
        if patched:
            run = torch.compile(lz.patch(model, ["rope", "loss"]), fullgraph=True, backend="aot_eager")
        loss: Tensor = run(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(5)).loss
        loss.backward()
        return {"loss": loss.detach()} | {name: value.grad for name, value in model.named_parameters()}

    ops = ("rope", "cross_entropy")
    plain, before = gradients(False), [held(op) for op in ops]
    for name, got in gradients(True).items():
        torch.testing.assert_close(got, plain[name], rtol=1e-4, atol=1e-5, msg=name)
    assert all(held(op) > count for op, count in zip(ops, before, strict=True))


def test_tables_of_unknown_columns_are_turned_by_the_model_s_own_function() -> None:
    """A layer is called with tables that no rotary module made, whose halves differ."""
    model = models.build("llama")
    attention = model.model.layers[0].self_attn
    x, tables = torch.randn(2, 4, 32), (torch.randn(2, 4, 8), torch.randn(2, 4, 8))
    with torch.no_grad():
        plain = attention(x, tables, None)[0]
        lz.patch(model, parts=["rope"])
        run, counter = compiled(attention)
        torch.testing.assert_close(run(x, tables, None)[0], plain, rtol=1e-4, atol=1e-5)
    assert not operators(counter)["rope"]


@pytest.mark.parametrize(
    ("family", "repeats"),
    [("llama", rope.HalvesTable), ("cohere", rope.PairsTable), ("gemma3", rope.HalvesTable)],
)
def test_a_rotary_module_says_which_columns_repeat(family: str, repeats: type) -> None:
    """And one whose columns all differ says nothing; its buffers are left as they were."""
    rotary = models.build(family).model.rotary_emb
    before = {name: value.clone() for name, value in rotary.named_buffers()}
    found = rope.tables_substitute(rotary)
    assert found is not None
    assert found.learnt == (repeats,)
    for name, value in rotary.named_buffers():
        torch.testing.assert_close(value, before[name])

    class DifferingRotary(type(rotary)):  # type: ignore[misc]
        def forward(self, *args: Any) -> Any:
            return tuple(table + torch.arange(table.shape[-1]) for table in super().forward(*args))

    rotary.__class__ = DifferingRotary
    assert rope.tables_substitute(rotary) is None


@pytest.mark.slow
def test_a_patched_model_that_trains_compiled_has_the_gradients_of_the_model() -> None:
    """Through Inductor, all parts, with labels."""
    ids = models.text(9, 9)["input_ids"]

    def gradients(patched: bool) -> dict[str, Tensor]:
        model = models.build("llama").train()
        if patched:
            lz.patch(model)
        compiled: Any = torch.compile(model, fullgraph=True)
        loss: Any = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        return {name: value.grad for name, value in model.named_parameters()}

    plain = gradients(False)
    for name, got in gradients(True).items():
        torch.testing.assert_close(got, plain[name], rtol=1e-4, atol=1e-5, msg=name)


def test_unpatched_it_compiles_anew_as_the_model_that_it_was() -> None:
    """No graph of the patched one runs on."""
    model = models.build("llama")
    plain = models.answer(model, "llama")
    run, counter = compiled(model)
    batch = models.inputs("llama")
    real = batch["attention_mask"].bool()
    for change, holds in ((lz.patch, True), (lz.unpatch, False), (lz.patch, True)):
        change(model)
        seen = len(counter.graphs)
        with torch.no_grad():
            torch.testing.assert_close(run(**batch).logits[real], plain, rtol=1e-4, atol=1e-5)
        del counter.graphs[:seen]
        assert bool(operators(counter)["attention"]) is holds
