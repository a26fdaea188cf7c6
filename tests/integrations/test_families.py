"""Families of transformers, small and random: patched, they give what they gave, in every precision."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.integrations.patches import rope
from tests.integrations import models
from tests.integrations.models import transformers

# The parts of a family that an op serves, and how often each op is called in one forward.
SERVED: dict[str, dict[str, int]] = {
    "llama": {"attention": 2, "rms_norm": 5, "rope": 2, "mlp": 2},
    "qwen2": {"attention": 2, "rms_norm": 5, "rope": 2, "mlp": 2},
    "qwen3": {"attention": 2, "rms_norm": 9, "rope": 2, "mlp": 2},
    "gemma2": {"attention": 2, "rms_norm": 9, "rope": 2, "mlp": 2},
    "gemma3": {"attention": 2, "rms_norm": 13, "rope": 2, "mlp": 2},
    "mistral": {"attention": 2, "rms_norm": 5, "rope": 2, "mlp": 2},
    "phi": {"attention": 2, "layer_norm": 3, "rope": 2, "mlp": 2},
    "phi3": {"attention": 2, "rms_norm": 5, "rope": 2, "mlp": 2},
    "glm": {"attention": 2, "rms_norm": 5, "rope": 2, "mlp": 2},
    "cohere": {"attention": 2, "layer_norm": 3, "rope": 2, "mlp": 2},
    "granite_swa": {"attention": 2, "rms_norm": 5, "rope": 2, "mlp": 2},
    "mimo_v2_flash": {"attention": 2, "rms_norm": 5, "rope": 2, "mlp": 1},
    "gpt2": {"attention": 2, "layer_norm": 5},
    "opt": {"attention": 2, "layer_norm": 5},
    "falcon": {"attention": 2, "layer_norm": 3, "rope": 2, "mlp": 2},
    "mixtral": {"attention": 2, "rms_norm": 5, "rope": 2},
    "deepseek_v3": {"attention": 2, "rms_norm": 9, "mlp": 2},
    "bert": {"attention": 2, "layer_norm": 6},
    "roberta": {"attention": 2, "layer_norm": 6},
    "deberta": {"attention": 2, "layer_norm": 6},
    "deberta_first": {"attention": 2, "layer_norm": 6},
    "t5": {"attention": 6, "rms_norm": 12, "mlp": 4},
    "bart": {"attention": 6, "layer_norm": 12},
    "whisper": {"attention": 6, "layer_norm": 12},
    "vit": {"attention": 2, "layer_norm": 5, "mlp": 2},
    "clip": {"attention": 4, "layer_norm": 11},
}
# Of the largest number: what other roundings of the same numbers come to.
NEAR = {torch.float32: 5e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@pytest.fixture(autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """A runtime whose counters start at zero."""
    with lz.start(lz.Settings.load(warm="off", device="cpu")) as opened:
        yield opened


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Compare to what the dtype's roundings allow."""
    bound = NEAR[dtype] * float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, atol=bound, rtol=0)


@pytest.mark.parametrize("family", SERVED)
def test_a_family_gives_what_it_gave(runtime: lz.Runtime, family: str) -> None:
    """In three precisions, padded left and right, each part through its op; unpatched, the same bits."""
    whole = models.build(family)
    for dtype in NEAR:
        model = copy.deepcopy(whole).to(dtype)
        sides = ("left", "right") if dtype is torch.float32 else ("left",)
        before = [models.answer(model, family, side) for side in sides]
        parameters = {name: id(p) for name, p in model.named_parameters()}
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        lz.patch(model)
        for side, theirs in zip(sides, before, strict=True):
            with models.counting() as calls:
                close(models.answer(model, family, side), theirs, dtype)
            assert calls == SERVED[family]
        lz.unpatch(model)
        assert torch.equal(models.answer(model, family, sides[0]), before[0])
        assert {name: id(p) for name, p in model.named_parameters()} == parameters
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert runtime.device().health.statuses() == () and runtime.device().counters.total("own_forward") == 0


# Dynamic caches of the last two slide with their windows; transformers quantizes none of those.
CACHES = [("llama", "dynamic"), ("llama", "static"), ("llama", "quantized"), ("mistral", "dynamic")]
CACHES += [("mistral", "static"), ("gemma3", "dynamic"), ("gemma3", "static")]


@pytest.mark.parametrize(("family", "cache"), CACHES)
@torch.no_grad()
def test_generation_with_each_cache_gives_the_same_tokens(family: str, cache: str) -> None:
    """Greedy, padded on the left, beyond the window of the families that have one."""
    model = models.build(family)
    given = models.text(9, 4)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

    def generate() -> Tensor:
        options["disable_compile"] = True
        if cache == "quantized":
            pages = transformers.QuantizedCache("fp8", model.config)
            options["past_key_values"] = pages
        else:
            options["cache_implementation"] = cache
        tokens: Tensor = model.generate(**given, **options)
        return tokens

    before = generate()
    lz.patch(model)
    with models.counting() as calls:
        after = generate()
    assert torch.equal(before, after) and calls["attention"] == 12 and calls["rope"] == 12


@torch.no_grad()
def test_beams_drafts_and_encoders_give_the_same_tokens() -> None:
    """Beam search, assisted generation, and sequences from an encoder."""
    llama, draft, given = models.build("llama"), models.build("llama", num_hidden_layers=1), models.text(9, 4)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    alone = {"input_ids": given["input_ids"][:1]}
    t5, bart = models.build("t5"), models.build("bart")

    def generate() -> list[Tensor]:
        return [
            llama.generate(**given, num_beams=3, **options),
            llama.generate(**alone, assistant_model=draft, **options),
            t5.generate(**given, num_beams=2, **options),
            bart.generate(**given, **options),
        ]

    before = generate()
    for model in (llama, draft, t5, bart):
        lz.patch(model)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(generate(), before, strict=True))


def test_a_pipeline_gives_the_same_text() -> None:
    """A text-generation pipeline around a model that is patched under it."""
    tokenizers = pytest.importorskip("tokenizers", reason="words become ids with it: .[tokenizers]")
    words = {f"w{number}": number for number in range(97)}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=split, pad_token="w0", eos_token="w2")
    model = models.build("llama")
    pipe = transformers.TextGenerationPipeline(model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 4, "do_sample": False, "max_length": None}
    before = pipe(["w3 w5 w8", "w9"], batch_size=2, **options)
    lz.patch(model)
    with models.counting() as calls:
        assert pipe(["w3 w5 w8", "w9"], batch_size=2, **options) == before
    assert calls["attention"] == 8


def test_continuous_batching_gives_the_same_tokens(runtime: lz.Runtime) -> None:
    """Its pages are read and written, and attention is the op's."""
    model = models.build("llama")
    prompts = [[5, 9, 3, 11], [7, 4], [8, 8, 30, 2, 41, 60]]
    config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = transformers.ContinuousBatchingConfig(
        block_size=8, num_blocks=32, max_batch_tokens=16, use_cuda_graph=False
    )

    def generate() -> list[list[int]]:
        found = model.generate_batch(prompts, generation_config=config, continuous_batching_config=pages)
        by_prompt = {tuple(result.prompt_ids): result.generated_tokens for result in found.values()}
        return [by_prompt[tuple(prompt)] for prompt in prompts]

    before = generate()
    lz.patch(model)
    with models.counting() as calls:
        assert generate() == before and all(len(tokens) == 5 for tokens in before)
    assert calls["attention"] > 0 and runtime.device().counters.total("own_attention") == 0


def parts_of(family: str) -> Any:
    """A model in training and its batch with labels: the next tokens, but for those of padding."""
    model = models.build(family).train()
    batch = models.text(9, 5, side="right")
    return model, {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "falcon"])
def test_twenty_steps_of_training_are_equal(family: str) -> None:
    """Losses and weights after 20 steps of AdamW, with and without checkpoints; no logits are computed."""
    results: list[tuple[Tensor, list[Tensor]]] = []
    for patched in (False, True):
        model, batch = parts_of(family)
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        if patched:
            lz.patch(model)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for step in range(20):
            if step == 10:
                model.activation_checkpointing_enable({"use_reentrant": False})
            output = model(**batch)
            if patched and family != "gemma3":
                assert type(output.logits).__name__ == "LazyLogits" and output.logits.computed is None
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(output.loss.detach())
        results.append((torch.stack(losses), [p.detach() for p in model.parameters()]))
    (theirs, their_weights), (ours, our_weights) = results
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    assert ours[-1] < ours[0] - 0.1
    for mine, other in zip(our_weights, their_weights, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-3)


def test_logits_of_a_fused_loss_are_there_when_read() -> None:
    """Their numbers and their gradients are the model's own, also summed over a given number of targets."""
    model, batch = parts_of("llama")
    grads: list[list[Tensor]] = []
    outputs = []
    for patched in (False, True):
        if patched:
            lz.patch(model)
        model.zero_grad()
        output = model(**batch, num_items_in_batch=7)
        assert output.logits.shape == (2, 9, 97) and output.logits.dtype is torch.float32
        (output.loss + output.logits.float().logsumexp(-1).mean()).backward()
        outputs.append(output)
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss)
    assert torch.equal(outputs[1].logits + 0, outputs[0].logits)
    for ours, theirs in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_a_loss_that_scales_its_logits_stays_the_models_own() -> None:
    """Gemma's soft cap reads the logits: loss and gradients are as they were."""
    model, batch = parts_of("gemma2")
    before = model(**batch).loss
    after = lz.patch(model)(**batch).loss
    torch.testing.assert_close(after, before)


@torch.no_grad()
def test_patched_twice_copied_moved_pickled() -> None:
    """Each is patched and gives the same numbers; each is unpatched alone."""
    model = lz.patch(models.build("llama"))
    before = models.answer(model, "llama")
    assert lz.patch(model) is model
    loaded: Any = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), loaded, copy.deepcopy(model).double().float()):
        assert str(lz.patch_table(other)) == str(lz.patch_table(model))
        with models.counting() as calls:
            assert torch.equal(models.answer(other, "llama"), before)
        assert calls == SERVED["llama"]
        lz.unpatch(other)
        with models.counting() as calls:
            close(models.answer(other, "llama"), before)
        assert calls == {}
    with models.counting() as calls:
        assert torch.equal(models.answer(model, "llama"), before) and calls == SERVED["llama"]


@torch.no_grad()
def test_models_that_share_a_configuration() -> None:
    """Whichever is unpatched first, the name from before both comes back, and every number is right."""
    one = models.build("llama")
    other = type(one)(one.config).eval()
    before = [models.answer(model, "llama") for model in (one, other)]
    for first, last in ((one, other), (other, one)):
        lz.patch(lz.patch(first) and last)
        for model, theirs in zip((one, other), before, strict=True):
            close(models.answer(model, "llama"), theirs)
        lz.unpatch(first)
        close(models.answer(last, "llama"), before[0] if last is one else before[1])
        lz.unpatch(last)
        assert type(one.config._attn_implementation) is str and one.config._attn_implementation == "sdpa"
        with models.counting() as calls:
            assert torch.equal(models.answer(first, "llama"), before[0] if first is one else before[1])
        assert calls == {}


@torch.no_grad()
def test_weights_that_change_count_at_once() -> None:
    """Written in place, loaded, or another tensor: no copy of a weight is asked any more."""
    model = lz.patch(models.build("gemma2"))
    before = models.answer(model, "gemma2")
    other = models.build("gemma2")
    for parameter in other.parameters():
        parameter.mul_(1.5)
    theirs = models.answer(other, "gemma2")
    model.load_state_dict(other.state_dict())
    close(models.answer(model, "gemma2"), theirs)
    for mine, new in zip(model.parameters(), models.build("gemma2").parameters(), strict=True):
        mine.data = new.data.clone()
    close(models.answer(model, "gemma2"), before)


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
@torch.no_grad()
def test_an_additive_mask_whose_rows_see_nothing(hidden: float) -> None:
    """Queries of padding that see no key leave every number finite, and those of real tokens as they are."""
    model, given = models.build("llama"), models.text(9, 5)
    before = models.answer(model, "llama")
    seen = given["attention_mask"].bool()
    visible = torch.ones(9, 9, dtype=torch.bool).tril() & seen[:, None, None] & seen[:, None, :, None]
    mask = torch.zeros(visible.shape).masked_fill(~visible, hidden)
    logits = lz.patch(model)(input_ids=given["input_ids"], attention_mask=mask).logits
    assert logits.isfinite().all()
    close(logits[seen], before)


@torch.no_grad()
def test_only_the_parts_asked_for() -> None:
    """Another part stays the model's own; an unknown one is an error."""
    model = lz.patch(models.build("llama"), parts=["norm"])
    with models.counting() as calls:
        models.answer(model, "llama")
    assert calls == {"rms_norm": 5} and model.config._attn_implementation == "sdpa"
    assert lz.patch(model, parts=["norm"]) is model
    with pytest.raises(ValueError, match="unpatched first to patch mlp: it is patched for norm"):
        lz.patch(model, parts=["norm", "mlp"])
    with pytest.raises(ValueError, match="parts needs some of attention, norm, rope, mlp, loss, got 'norms'"):
        lz.patch(models.build("llama"), parts=["norms"])
    with pytest.raises(ValueError, match="parts needs a collection of names, got the string 'norm'"):
        lz.patch(models.build("llama"), parts="norm")


def test_the_table_says_what_was_not_replaced_and_why() -> None:
    """A row for each class of module, and a reason where no op serves it."""
    table = lz.patch_table(lz.patch(models.build("gpt2")))
    why = {(row.part, row.module): (row.count, row.op, row.why) for row in table.rows}
    assert why["norm", "LayerNorm"] == (5, "layer_norm", "")
    assert why["mlp", "GPT2MLP"] == (2, None, "its projections are Conv1D, not torch's Linear")
    assert "GPT2MLP" in str(table) and table.ops("attention") == {"attention"}
    mixtral = lz.patch_table(lz.patch(models.build("mixtral")))
    (experts,) = [row for row in mixtral.rows if row.part == "mlp"]
    assert experts.module == "MixtralExperts" and "experts are chosen before it" in experts.why
    deberta = lz.patch_table(lz.patch(models.build("deberta")))
    assert deberta.ops("attention") == {"attention"} and deberta.ops("norm") == {"layer_norm"}
    for family, module in (
        ("bart", "BartDecoderLayer"),
        ("bert", "BertIntermediate"),
        ("opt", "OPTDecoderLayer"),
    ):
        rows = lz.patch_table(lz.patch(models.build(family))).rows
        found = {row.module: row.why for row in rows if row.part == "mlp"}
        assert found[module] == "its projections are in no module of their own"
    with pytest.raises(ValueError, match="this GPT2LMHeadModel is not"):
        lz.patch_table(models.build("gpt2"))


class PixelNorm(torch.nn.GroupNorm):
    """One group: of a matrix it norms the last axis, of an image all but the first."""


@torch.no_grad()
def test_a_norm_of_another_formula_stays_the_models_own() -> None:
    """What a class is called does not matter: its numbers do."""
    model = models.build("llama")

    class OddRMSNorm(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            normed: Tensor = super().forward(hidden_states)
            return normed * 2

    model.model.norm.__class__ = OddRMSNorm
    model.model.added = torch.nn.Sequential(PixelNorm(1, 4))
    before = models.answer(model, "llama")
    table = lz.patch_table(lz.patch(model))
    assert [row.why for row in table.rows if row.module == "OddRMSNorm"] == ["it computes something else"]
    assert [row.op for row in table.rows if row.module == "PixelNorm"] == [None]
    close(models.answer(model, "llama"), before)


def test_tables_that_do_not_repeat_stay_the_files_own() -> None:
    """A call at the first position decides nothing; other columns go to the file's function for good."""
    own = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    rotation: Any = rope.rotation_of.__wrapped__(own)
    q, k = (torch.randn(1, heads, 3, 8, generator=torch.Generator().manual_seed(1)) for heads in (4, 2))
    angles = torch.arange(24.0).view(1, 3, 8)
    repeated = torch.cat((angles[..., :4], angles[..., :4]), -1)
    for tables, repeats in ((torch.zeros(1, 3, 8), None), (angles, False), (repeated, False)):
        for ours, theirs in zip(
            rotation(q, k, tables.cos(), tables.sin()), own(q, k, tables.cos(), tables.sin()), strict=True
        ):
            assert torch.equal(ours, theirs)
        assert rotation.repeats is repeats
    other: Any = rope.rotation_of.__wrapped__(own)
    with models.counting() as calls:
        other(q, k, repeated.cos(), repeated.sin())
    assert calls == {"rope": 1} and other.repeats
    # The same file's function serves every model of its class: each pair of tables is looked at, and cosines
    # that come with other sines are another pair.
    cos, sin = repeated.cos(), repeated.sin()
    for pair in ((angles.cos(), angles.sin()), (cos, sin), (cos, -sin), (cos, sin)):
        for ours, theirs in zip(other(q, k, *pair), own(q, k, *pair), strict=True):
            close(ours, theirs)


@torch.no_grad()
def test_hooks_and_subclasses_are_not_passed_by(runtime: lz.Runtime) -> None:
    """A hook on a projection runs, and the call is counted with its reason."""
    model = lz.patch(models.build("llama"))
    seen: list[str] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append("hook"))
    with models.counting() as calls:
        models.answer(model, "llama")
    assert seen == ["hook"] and calls["mlp"] == 1
    assert runtime.device().counters.get("own_forward", part="mlp", why="hooks") == 1


@torch.no_grad()
def test_nothing_is_drawn_while_patching() -> None:
    """The program's random numbers after a patch are those without it."""
    model = models.build("llama")
    torch.manual_seed(7)
    lz.patch(model)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))


@torch.no_grad()
def test_a_model_without_numbers_is_patched() -> None:
    """On the meta device its shapes go through; with numbers it computes by the ops."""
    with torch.device("meta"):
        model = lz.patch(transformers.LlamaForCausalLM(models.build("llama").config)).eval()
    assert model(input_ids=torch.ones((1, 4), dtype=torch.long, device="meta")).logits.shape == (1, 4, 97)
    model.to_empty(device="cpu")
    plain = models.build("llama")
    model.load_state_dict(plain.state_dict())
    model.model.rotary_emb = plain.model.rotary_emb
    with models.counting() as calls:
        close(models.answer(model, "llama"), models.answer(plain, "llama"))
    assert calls == SERVED["llama"]


@torch.no_grad()
def test_models_are_patched_while_they_are_made(tmp_path: Path) -> None:
    """Loaded or built inside they are patched, whole; outside again they are not."""
    plain = models.build("llama")
    before = models.answer(plain, "llama")
    plain.save_pretrained(tmp_path)
    with lz.patch_on_load():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        made = transformers.AutoModelForCausalLM.from_config(plain.config)
        only, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and str(lz.patch_table(made)) == str(lz.patch_table(loaded))
    for model in (loaded, only):
        with models.counting() as calls:
            close(models.answer(model, "llama"), before)
        assert calls == SERVED["llama"]
        lz.unpatch(model)
        assert torch.equal(models.answer(model, "llama"), before)
    with pytest.raises(ValueError, match="patched first"):
        lz.unpatch(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    with pytest.raises(ValueError, match="parts needs some of"), lz.patch_on_load(parts=["all"]):
        pass


def test_a_model_that_no_op_serves_is_named() -> None:
    """Patched by hand it is an error with the reasons; loaded, a warning."""

    class Odd(transformers.PreTrainedModel):  # type: ignore[misc]
        config_class = transformers.LlamaConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear = torch.nn.Linear(2, 2)

    with pytest.raises(ValueError, match="model needs a part that an op serves, there is none:\nOdd"):
        lz.patch(Odd(transformers.LlamaConfig()))
