"""Patched models under `torch.compile(fullgraph=True)`: whole, with the model's numbers, in as few graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import layerzero as lz
from layerzero.integrations.patches import mlp
from layerzero.integrations.patches.substitute import PARTS
from tests.integrations import models

FEW = ("llama", "gemma2", "bert", "t5")
EACH = [pytest.param(f, marks=() if f in FEW else pytest.mark.slow) for f in models.FAMILIES]
# These compute attention in functions of their own, which a compiled graph leaves as they are.
OWN_ATTENTION = frozenset({"deberta", "deberta_first", "falcon"})


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """No test sees what another has compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any) -> tuple[Any, CompileCounterWithBackend]:
    """The model compiled whole, and what counts its graphs; a break raises."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    return torch.compile(model, fullgraph=True, backend=counter), counter


def targets(counter: CompileCounterWithBackend) -> str:
    return " ".join(str(node.target) for graph in counter.graphs for node in graph.graph.nodes)


@pytest.mark.parametrize("family", EACH)
def test_a_patched_model_is_one_graph_with_the_numbers_of_the_model(family: str) -> None:
    """Every part patched; attention and feed-forward blocks are our operators."""
    model = models.build(family)
    plain = models.answer(model, family)
    table = lz.patch_table(lz.patch(model))
    run, counter = compiled(model)
    batch = models.inputs(family)
    with torch.no_grad():
        run(**batch)
    torch.testing.assert_close(models.answer(run, family), plain, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    assert ("layerzero.attention" in targets(counter)) is (family not in OWN_ATTENTION)
    blocks = any(f"layerzero.{op}." in targets(counter) for op in ("linear", "mlp"))
    # Falcon's projections are a class of its own, which no graph can try.
    assert blocks is (bool(table.ops("mlp")) and family != "falcon")


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
    assert ("layerzero.linear" in targets(counter)) is not dynamic


def graphs(model: Any) -> tuple[int, list[Tensor]]:
    """How many graphs three sizes need of a model that trains and rests, and what they gave."""
    run, counter = compiled(model)
    outs = []
    for training in (False, True):
        model.train(training)
        for tokens in (4, 5, 6):
            ids = torch.arange(2 * tokens).view(2, tokens) + 3
            out = run(input_ids=ids, labels=ids)
            outs += [out.logits.detach(), out.loss.detach()]
    return counter.frame_count, outs


@pytest.fixture(scope="module")
def plain_graphs() -> tuple[int, list[Tensor]]:
    """Of a model without a patch."""
    return graphs(models.build("llama"))


@pytest.mark.parametrize(
    "part", [p if p in ("attention", "loss") else pytest.param(p, marks=pytest.mark.slow) for p in PARTS]
)
def test_a_part_alone_compiles_whole_and_as_seldom_as_without_it(
    part: str, plain_graphs: tuple[int, list[Tensor]]
) -> None:
    """No graph more than the model without a patch has."""
    wanted, plain = plain_graphs
    model = models.build("llama")
    lz.patch(model, parts=[part])
    got, outs = graphs(model)
    assert got <= wanted
    for ours, theirs in zip(outs, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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
        new = " ".join(str(node.target) for graph in counter.graphs[seen:] for node in graph.graph.nodes)
        assert ("layerzero.attention" in new) is holds
