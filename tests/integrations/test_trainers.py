"""Patched models under PEFT, accelerate, the Trainer, autocast and FSDP2: the numbers of unpatched ones."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.integrations.patches.substitute import SUBSTITUTE
from tests import children
from tests.integrations import models
from tests.integrations.models import transformers


@pytest.fixture(autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """A runtime whose counters start at zero."""
    with lz.start(lz.Settings.load(warm="off", device="cpu")) as opened:
        yield opened


def batch() -> dict[str, Tensor]:
    """Two rows of tokens with their labels."""
    ids = models.text(9, 9)["input_ids"]
    return {"input_ids": ids, "labels": ids}


def step(model: Any, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one batch, and the gradients that it gives."""
    model.zero_grad()
    loss = model(**batch(), **more).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(
    ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]], rtol: float
) -> None:
    """Compare two steps; gradients by the largest of each tensor."""
    torch.testing.assert_close(ours[0], theirs[0], atol=0, rtol=rtol)
    assert ours[1].keys() == theirs[1].keys() and ours[1]
    for name, grad in theirs[1].items():
        torch.testing.assert_close(ours[1][name], grad, atol=rtol * float(grad.abs().max()), rtol=0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # the library's own
@pytest.mark.parametrize("first", ["peft", "patch"])
def test_lora_layers_are_patched_around(runtime: lz.Runtime, first: str) -> None:
    """Whichever comes first: adapters train as they do, and all comes off again."""
    peft = pytest.importorskip("peft", reason="the adapters' library is missing: .[test]")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False, lora_dropout=0.0
    )

    def adapted(patched: bool) -> Any:
        model = models.build("llama").train()
        if patched and first == "patch":
            lz.patch(model)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
        return lz.patch(model) if patched else model

    theirs = step(adapted(False))
    model = adapted(True)
    with models.counting() as calls:
        same(step(model), theirs, 1e-4)
    assert calls["attention"] == 2 and calls["linear_cross_entropy"] == 1 and "mlp" not in calls
    lz.unpatch(model)
    with models.counting() as calls:
        same(step(model), theirs, 1e-6)
    assert calls == {}
    merged = lz.patch(model).merge_and_unload().eval()
    with models.counting() as calls:
        assert models.answer(merged, "llama").isfinite().all()
    assert calls["attention"] == calls["rope"] == 2


HEAD = ["lm_head"]


def the_adapter(peft: Any, kind: str) -> Any:
    """A configuration of PEFT's that reaches the last projection."""
    if kind == "ia3":
        return peft.IA3Config(target_modules=HEAD, feedforward_modules=[], init_ia3_weights=False)
    more: dict[str, Any] = {
        "lora": {"target_modules": HEAD},
        "dora": {"target_modules": HEAD, "use_dora": True},
        "parameter": {"target_modules": [], "target_parameters": ["lm_head.weight"]},
        "copies": {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]},
    }
    return peft.LoraConfig(r=2, init_lora_weights=False, **more[kind])


@pytest.mark.filterwarnings("ignore")  # PEFT's own
@pytest.mark.parametrize("first", ["peft", "patch"])
@pytest.mark.parametrize("kind", ["lora", "dora", "parameter", "copies", "ia3"])
def test_an_adapter_on_the_head_trains_as_it_did(first: str, kind: str) -> None:
    """In both orders, switched off as well; an unpatch reaches the modules that PEFT has copied."""
    peft = pytest.importorskip("peft", reason="the adapters' library is missing: .[test]")

    def adapted(patched: bool) -> Any:
        model = models.build("llama").train()
        if patched and first == "patch":
            lz.patch(model)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, the_adapter(peft, kind))
        return lz.patch(model) if patched and first == "peft" else model

    theirs, model = step(adapted(False)), adapted(True)
    with models.counting() as calls:
        same(step(model), theirs, 1e-4)
    assert calls["attention"] == 2
    with model.disable_adapter():
        torch.testing.assert_close(
            models.answer(model.eval(), "llama"), models.answer(models.build("llama"), "llama")
        )
    said = next(row for row in lz.patch_table(model).rows if row.part == "loss")
    assert said.op is not None or ("its head is " in said.why and "is Linear" not in said.why)
    lz.unpatch(model)
    with models.counting() as calls:
        same(step(model.train()), theirs, 1e-6)
    assert calls == {}
    assert not [name for name, module in model.named_modules() if SUBSTITUTE in module.__dict__]


def test_a_patched_model_inside_another_one_stays_patched() -> None:
    """The unpatch of what is around it takes its own."""
    inner = lz.patch(models.build("llama"))
    outer = models.build("llama")
    outer.inner = inner
    lz.unpatch(lz.patch(outer))
    with models.counting() as calls:
        models.answer(inner, "llama")
    assert calls.get("rms_norm") == 5


def quantized_by_class(model: Any) -> None:
    """Each module of exactly torch's class, by torch's own tool."""
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)


def quantized_by_torchao(model: Any) -> None:
    """Each module of torch's class or of one of it, whose weight becomes a tensor of a class of torchao's."""
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())


@pytest.mark.filterwarnings("ignore")  # of the libraries, some of which go soon
@pytest.mark.parametrize("first", ["quantize", "patch"])
@pytest.mark.parametrize("quantize", [quantized_by_class, quantized_by_torchao])
def test_a_patched_model_is_quantized_whole(quantize: Any, first: str) -> None:
    """The head too, whether it is looked for by class or by kind; then it answers as the unpatched one."""
    plain, model = models.build("llama"), models.build("llama")
    quantize(plain)
    if first == "patch":
        models.answer(lz.patch(model), "llama")  # its matrices lie together
    quantize(model)
    if first == "quantize":
        lz.patch(model)
    assert type(model.lm_head) is type(plain.lm_head)
    assert type(model.lm_head.weight) is type(plain.lm_head.weight)
    with models.counting() as calls:
        torch.testing.assert_close(
            models.answer(model, "llama"), models.answer(plain, "llama"), rtol=1e-3, atol=1e-4
        )
    assert calls["attention"] == 2 and "mlp" not in calls
    lz.unpatch(model)
    torch.testing.assert_close(
        models.answer(model, "llama"), models.answer(plain, "llama"), rtol=1e-4, atol=1e-5
    )


def test_the_head_is_torchs_own_while_nothing_trains() -> None:
    """`train` and `eval` change that, of a copy as well, and never a class that a library has made of it."""
    model = lz.patch(models.build("llama"))
    for each in (model, copy.deepcopy(model)):
        for trains in (True, False, True):
            assert each.train(trains) is each and (type(each.lm_head) is torch.nn.Linear) is not trains
            with models.counting() as calls:
                each(**batch())
            assert calls.get("linear_cross_entropy", 0) == trains
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    theirs = models.build("llama").train()
    torch.nn.utils.parametrizations.weight_norm(theirs.lm_head)
    same(step(model.eval().train()), step(theirs), 1e-4)
    same(step(lz.unpatch(model)), step(theirs), 1e-6)
    assert type(model.lm_head).__name__ == type(theirs.lm_head).__name__ == "ParametrizedLinear"


def test_accelerate_prepares_a_patched_model() -> None:
    """Its wrappers of forward go around ours; an unpatch below them leaves the model's own numbers."""
    accelerate = pytest.importorskip("accelerate", reason="the launcher's library is missing: .[test]")
    theirs = step(models.build("llama").train())
    accelerator = accelerate.Accelerator(cpu=True)
    model = lz.patch(models.build("llama").train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    with models.counting() as calls:
        same(step(prepared), theirs, 1e-4)
    assert calls["linear_cross_entropy"] == 1
    hooked = copy.deepcopy(models.build("llama"))
    lz.patch(hooked)
    accelerate.hooks.add_hook_to_module(hooked.model.norm, accelerate.hooks.ModelHook())
    lz.unpatch(hooked)
    with models.counting() as calls:
        assert torch.equal(models.answer(hooked, "llama"), models.answer(models.build("llama"), "llama"))
    assert calls == {}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_logits_read_without_gradients_have_theirs(mode: Any) -> None:
    """A count of right tokens before the backward pass takes no gradient away from a second loss."""
    found = []
    for patched in (False, True):
        model = models.build("llama").train()
        output = (lz.patch(model) if patched else model)(**batch())
        with mode():
            best = output.logits.argmax(-1)
        (output.loss + output.logits.logsumexp(-1).pow(2).mean()).backward()
        found.append((best, model.lm_head.weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-6, rtol=1e-4)


def test_logits_are_those_of_the_weights_of_their_step() -> None:
    """Read after the optimizer's step they are as they were, or refused; never those of the new weights."""
    model = lz.patch(models.build("llama").train())
    read, unread = (model(**batch()) for _ in range(2))
    before = read.logits.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    read.loss.backward()
    optimizer.step()
    assert torch.equal(read.logits.detach(), before)
    with pytest.raises(RuntimeError, match="read before its weights change"):
        unread.logits.argmax(-1)


class Cubed(torch.autograd.Function):
    """A loss as kernels of others have it: autograd gives it its operands as they are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.pow(3).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Three times the square."""
        (logits,) = ctx.saved_tensors
        return torch.mul(3 * logits.pow(2), *grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_of_autograd_gives_logits_their_gradient(dtype: torch.dtype) -> None:
    """Unread before, as they are and as float32, under autocast too; without gradients they have none."""
    found = []
    for patched in (False, True):
        model = models.build("llama").train()
        with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            output = (lz.patch(model) if patched else model)(**batch())
        cubed: Any = Cubed.apply
        (output.loss + cubed(output.logits) + cubed(output.logits.float())).backward()
        found.append((output.loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    same(found[1], found[0], rtol=1e-4 if dtype is torch.float32 else 0.03)
    with torch.no_grad():
        output = model(**batch())
    assert not output.logits.requires_grad and not output.logits.float().requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_were_written_stay_written(dtype: torch.dtype) -> None:
    """As those of the model, whose float32 logits `float` gives back."""
    model = models.build("llama").train().to(dtype)
    output = lz.patch(model)(**batch())
    assert (output.logits.float() is output.logits) == (dtype is torch.float32)
    output.logits.detach()[..., 0] = 7.0
    assert torch.all(output.logits.float()[..., 0] == 7.0)


def test_arguments_of_the_loss_do_not_reach_attention(runtime: lz.Runtime) -> None:
    """Targets that were shifted before, and another number that stands for none."""
    ids = batch()["input_ids"]
    model = models.build("llama").train()
    theirs = step(model, shift_labels=ids, ignore_index=5)
    same(step(lz.patch(model), shift_labels=ids, ignore_index=5), theirs, rtol=1e-4)
    assert runtime.device().counters.total("own_attention") == 0


def trained(folder: Path, patched: bool, **more: Any) -> tuple[list[float], Any]:
    """The losses of a Trainer's steps, and the model."""
    model = models.build("llama")
    if patched:
        lz.patch(model)
    rows = [{"input_ids": row, "labels": row} for row in models.text(9, 9, 9, 9, 9, 9, 9, 9)["input_ids"]]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **more,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bf16", [False, True])
def test_a_trainer_trains_a_patched_model(tmp_path: Path, bf16: bool) -> None:
    """Same losses as unpatched, with accumulated gradients, under autocast too; saved, it is plain."""
    pytest.importorskip("accelerate", reason="the Trainer needs it: .[test]")
    theirs, _ = trained(tmp_path, False, bf16=bf16)
    with models.counting() as calls:
        ours, model = trained(tmp_path, True, bf16=bf16)
    assert ours == pytest.approx(theirs, rel=2e-2 if bf16 else 1e-3) and len(ours) == 4
    assert calls["linear_cross_entropy"] == 8
    model.eval()
    before = models.answer(model, "llama")
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved").eval()
    with models.counting() as calls:
        torch.testing.assert_close(
            models.answer(loaded, "llama"), before, atol=1e-2 if bf16 else 1e-5, rtol=0
        )
    assert calls == {}


def test_autocast_gives_what_it_gave() -> None:
    """Loss and gradients in bfloat16 around a float32 model."""
    model = models.build("llama").train()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = step(model)
        ours = step(lz.patch(model))
    assert ours[0].dtype is torch.float32
    same(ours, theirs, 5e-2)


FSDP = """
import os, sys
import torch
import torch.distributed as dist
import torch.distributed.device_mesh
from torch.distributed.fsdp import fully_shard
import layerzero as lz
from tests.integrations import models

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))

def losses(patched, order):
    model = models.build("llama").train()
    if patched and order == "before":
        lz.patch(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if patched and order == "after":
        lz.patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = models.text(9, 9, 9, 9)["input_ids"][2 * rank : 2 * rank + 2]
    found = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    model.eval()
    with torch.no_grad():
        found.append(float(model(input_ids=ids).logits.square().mean()))
    return torch.tensor(found)

with lz.start(lz.Settings.load(warm="off", device="cpu")):
    theirs = losses(False, "")
    for order in ("before", "after"):
        with models.counting() as calls:
            torch.testing.assert_close(losses(True, order), theirs, atol=1e-5, rtol=1e-4)
        assert calls["attention"] == 8 and calls["rms_norm"] == 20, calls
dist.barrier()
dist.destroy_process_group()
print("equal")
"""


def test_fsdp_on_two_ranks(tmp_path: Path) -> None:
    """Sharded after the patch and before it: three steps and an evaluation as unpatched."""
    ranks = [children.Child(FSDP, str(rank), str(tmp_path / "store"), folder=tmp_path) for rank in range(2)]
    ended = [rank.ended() for rank in ranks]
    assert [result.stdout.strip() for result in ended] == ["equal"] * 2, [result.stderr for result in ended]
