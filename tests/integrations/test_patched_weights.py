"""Weights of patched models in the hands of others: saved, shared, transformed, in a buffer, from threads."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import layerzero as lz
from layerzero.integrations import transformers
from layerzero.integrations.patches import mlp, norm
from layerzero.integrations.patches.modules import substitutes
from tests.integrations import models


@pytest.fixture(autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """A runtime whose counters start at zero."""
    with lz.start(lz.Settings.load(warm="off", device="cpu")) as opened:
        yield opened


def called(model: Any) -> Tensor:
    """The answer of a model, whose feed-forward blocks are our op's."""
    with models.counting() as calls:
        answer = models.answer(model, "llama")
    assert calls["mlp"] == 2
    return answer


def test_libraries_save_every_weight(tmp_path: Path) -> None:
    """Those that keep one of two parameters in the same storage, and those that write a storage whole."""
    accelerate = pytest.importorskip("accelerate", reason="the launcher's library is missing: .[test]")
    files = pytest.importorskip("safetensors.torch", reason="the file's library is missing: .[hf]")
    plain, model = models.build("llama"), lz.patch(models.build("llama"))
    called(model)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    files.save_model(model, tmp_path / "other.safetensors")
    for name in ("model.safetensors", "other.safetensors"):
        saved = files.load_file(tmp_path / name)
        assert saved.keys() == plain.state_dict().keys()
        assert all(torch.equal(saved[key], value) for key, value in plain.state_dict().items())
    sizes = []
    for each in (plain, model):
        file = io.BytesIO()
        torch.save(each.state_dict()["model.layers.0.mlp.gate_proj.weight"], file)
        sizes.append(file.tell())
    assert sizes[0] == sizes[1]


@torch.no_grad()
def test_weights_that_others_write_through_a_buffer_stay_in_it(runtime: lz.Runtime) -> None:
    """Parameters that are views of a vector, and those in memory that processes share."""
    plain, model = models.build("llama"), lz.patch(models.build("llama"))
    vectors = []
    for each in (plain, model):
        vectors.append(torch.nn.utils.parameters_to_vector(each.parameters()).clone())
        torch.nn.utils.vector_to_parameters(vectors[-1], each.parameters())
    models.answer(model, "llama")
    for vector in vectors:
        vector.mul_(1.5)
    torch.testing.assert_close(models.answer(model, "llama"), models.answer(plain, "llama"))
    shared = lz.patch(models.build("llama"))
    shared.share_memory()
    models.answer(shared, "llama")
    assert all(parameter.is_shared() for parameter in shared.parameters())
    assert runtime.device().counters.get("own_forward", part="mlp", why="weights apart") >= 4


@torch.no_grad()
def test_blocks_whose_weights_move_again_and_again_say_once_that_they_compute_alone(
    runtime: lz.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """Four moves are followed; from the fifth on both blocks are the model's own, in one warning."""
    mlp._warn_apart.cache_clear()
    model = lz.patch(models.build("llama"))
    for moves in range(7):
        before = runtime.device().counters.get("own_forward", part="mlp", why="weights apart")
        models.answer(model, "llama")
        alone = runtime.device().counters.get("own_forward", part="mlp", why="weights apart") - before
        assert (alone, caplog.text.count(mlp.WEIGHTS_APART)) == ((0, 0) if moves < mlp.JOINS else (2, 1))
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.clone()
    assert "LlamaMLP" in caplog.text


def test_a_weight_that_lies_by_columns_keeps_its_numbers() -> None:
    """As a transposed one of a checkpoint does; its neighbours lie by rows."""
    model = lz.patch(models.build("llama"))
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.t().contiguous().t()
    plain = models.answer(models.build("llama"), "llama")
    for _ in range(2):  # before and after the weights are joined
        torch.testing.assert_close(called(model), plain, rtol=1e-4, atol=1e-5)


def test_a_model_made_in_inference_mode_answers_inside_and_outside() -> None:
    """Its weights count no writes."""
    with torch.inference_mode():
        model = lz.patch(models.build("llama"))
        inside = called(model)
    torch.testing.assert_close(inside, called(model))
    torch.testing.assert_close(inside, models.answer(models.build("llama"), "llama"), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_models_side_by_side_are_one_transformed_call() -> None:
    """`vmap` over the weights of several, as `stack_module_state` gives them."""
    each = [lz.patch(models.build("llama")) for _ in range(2)]
    for parameter in each[1].parameters():
        parameter.mul_(1.1)
    weights, buffers = torch.func.stack_module_state(each)
    ids = models.text(9, 5)["input_ids"]

    def call(weights: Any, buffers: Any) -> Tensor:
        out: Any = torch.func.functional_call(each[0], (weights, buffers), (ids,), {"use_cache": False})
        logits: Tensor = out.logits
        return logits

    together = torch.func.vmap(call)({name: value.detach() for name, value in weights.items()}, buffers)
    for got, model in zip(together, each, strict=True):
        torch.testing.assert_close(got, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def replica(model: Any) -> Any:
    """A copy as torch's DataParallel makes one for another device: in place of that, other numbers."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, other in copies.items():
        for name, part in module._modules.items():
            other._modules[name] = None if part is None else copies[part]
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            setattr(other, name, value if value is None or name in module._buffers else value * 1.5)
    return copies[model]


@pytest.mark.parametrize("family", ["llama", "deberta"])
def test_replicas_compute_with_weights_of_their_own(runtime: lz.Runtime, family: str) -> None:
    """Shallow copies whose weights are elsewhere, and their gradients too; the model itself stays ours."""
    given = models.inputs(family, "left", torch.float32)
    answers, gradients = [], []
    for model in (models.build(family), lz.patch(models.build(family))):
        answer = replica(model)(**given).logits
        answer.pow(2).mean().backward()
        answers.append(answer)
        gradients.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)
    assert runtime.device().counters.get("own_forward", part="norm", why="copy") >= 2
    with models.counting() as calls:
        models.answer(model, family)
    assert calls.get("layer_norm", 0) + calls.get("rms_norm", 0) >= 2


def test_a_class_that_a_library_makes_of_a_patched_one_is_kept_by_copies() -> None:
    """As FSDP's: a copy is of that class, and what cannot be pickled is not pickled as another class."""
    model = lz.patch(models.build("llama"))
    norm: Any = model.model.norm
    norm.__class__ = wrapped = type("Wrapped", (type(norm),), {"__module__": __name__})
    assert type(copy.deepcopy(norm)) is wrapped
    with pytest.raises(pickle.PicklingError, match="Wrapped"):
        pickle.dumps(norm)


def test_threads_that_patch_one_model_at_once_patch_it_once() -> None:
    """An unpatch then leaves nothing of ours in it."""
    model = models.build("llama")
    together = threading.Barrier(2)

    def slowly(*args: Any) -> Any:
        # Broken: the other one waits for this patch, as it should.
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.2)
        return substitutes(*args)

    with mock.patch.object(transformers, "substitutes", slowly), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lz.patch, [model, model])) == [model, model]
    lz.unpatch(model)
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]
    assert type(model.config._attn_implementation) is str


class Doubled(nn.Module):
    """What a parametrization makes of a weight."""

    def forward(self, weight: Tensor) -> Tensor:
        """Twice its numbers."""
        return 2 * weight


def as_function(part: Any) -> None:
    """The weight is computed from another parameter."""
    parametrize.register_parametrization(part, "weight", Doubled(), unsafe=True)


def pruned(part: Any) -> None:
    """A hook puts the masked weight in place before each call."""
    prune.l1_unstructured(part, "weight", amount=0.5)


def as_view(part: Any) -> None:
    """Plain tensors, as FSDP's first form makes of each part of its flat parameter."""
    for name, parameter in list(part.named_parameters(recurse=False)):
        delattr(part, name)
        setattr(part, name, parameter * 1.5 + 0.25)


@pytest.mark.parametrize("change", [as_function, pruned, as_view])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_norm_whose_weight_is_no_parameter_any_more_keeps_it(family: str, change: Any) -> None:
    """Changed while the model is patched, it counts; unpatched, the numbers are the model's own."""
    answers = []
    for patched in (False, True):
        model = models.build(family)
        norms = [part for part in model.modules() if norm.is_norm(part)]
        if patched:
            lz.patch(model)
        for part in norms:
            change(part)
        answers.append(models.answer(model, family))
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(models.answer(lz.unpatch(model), family), answers[0], rtol=0, atol=0)


@torch.no_grad()
def test_a_block_that_drops_by_a_function_drops_while_it_trains() -> None:
    """Seed-OSS has no module for it: without gradients, too, training draws as it did."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
    for rate in (0.0, 0.5):
        config = models.transformers.SeedOssConfig(**sizes, residual_dropout=rate, attention_dropout=0.0)
        torch.manual_seed(0)
        model = models.transformers.SeedOssForCausalLM(config).train()
        answers = []
        for _ in range(2):
            torch.manual_seed(1)
            with models.counting() as calls:
                answers.append(model(**models.text(9, 9)).logits)
            lz.patch(model)
        torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-5)
        assert calls.get("mlp", 0) == (2 if rate == 0 else 0)


@torch.no_grad()
def test_a_hook_on_an_activation_changes_a_compiled_block() -> None:
    """The block's own code is compiled, with the hook in it."""
    answers = []
    for patched in (False, True):
        model = models.build("llama")
        block = (lz.patch(model) if patched else model).model.layers[0].mlp
        block.act_fn.register_forward_hook(lambda module, args, output: 2 * output)
        compiled: Any = torch.compile(block, backend="eager")
        answers.append(compiled(torch.ones(3, 32)))
    torch.testing.assert_close(answers[1], answers[0])


@pytest.mark.parametrize("everywhere", [False, True])
@torch.no_grad()
def test_hooks_on_what_lies_inside_a_block_run(everywhere: bool) -> None:
    """On an activation, as programs look into models, and on every module of the process."""
    model = lz.patch(models.build("llama"))
    seen: list[str] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(type(module).__name__)

    if everywhere:
        hooks = [nn.modules.module.register_module_forward_hook(hook)]
    else:
        hooks = [layer.mlp.act_fn.register_forward_hook(hook) for layer in model.model.layers]
    try:
        models.answer(model, "llama")
    finally:
        for each in hooks:
            each.remove()
    assert seen.count("SiLUActivation") == 2 and (seen.count("Linear") == 15) is everywhere
    called(model)
