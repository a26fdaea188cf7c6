"""Models of transformers on our attention: same outputs, same tokens, and really through the op."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.integrations import transformers as integration
from tests import children
from tests.integrations.models import counting

transformers: Any = pytest.importorskip("transformers", reason="the model library is missing: .[hf]")


@pytest.fixture(autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """A runtime whose counters start at zero."""
    with lz.start(lz.Settings.load(warm="off", device="cpu")) as opened:
        yield opened


def llama() -> Any:
    """A small Llama with grouped heads."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def bert() -> Any:
    """A small encoder."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def batch(*lengths: int) -> dict[str, Tensor]:
    """Token ids padded to the longest, on the left as for generation, and their mask."""
    longest = max(lengths)
    ids = torch.randint(3, 97, (len(lengths), longest), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(longest).flip(0) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


@pytest.mark.parametrize("make", [llama, bert])
@pytest.mark.parametrize("lengths", [(9,), (9, 4, 6)])
@torch.no_grad()
def test_a_patched_model_computes_the_same(make: Any, lengths: tuple[int, ...]) -> None:
    """With and without padding, before, while and after it is patched."""
    model, given = make(), batch(*lengths)
    before = model(**given)[0]
    assert lz.patch(model) is model and lz.patch(model) is model
    with counting() as calls:
        during = model(**given)[0]
    assert calls["attention"] == 2
    real = given["attention_mask"].bool()
    torch.testing.assert_close(during[real], before[real], atol=2e-6, rtol=1e-4)
    lz.unpatch(model)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(**given)[0], before, atol=0, rtol=0)


def test_every_layer_goes_through_the_op() -> None:
    """With every kernel denied the model cannot answer: its attention is ours."""
    model = lz.patch(llama())
    with torch.no_grad(), lz.disable("*"), pytest.raises(lz.NoKernelFoundError):
        model(**batch(9))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_generation_gives_the_same_tokens(cache: str) -> None:
    """Prefill and decode, of a padded batch, over both kinds of cache."""
    model, given = llama(), batch(9, 4)
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0,
               "disable_compile": True}  # fmt: skip
    before = model.generate(**given, **options)
    after = lz.patch(model).generate(**given, **options)
    assert torch.equal(before, after)


def test_gradients_flow_through_a_patched_model() -> None:
    """Training a patched model gives the same gradients."""
    plain, patched, given = llama(), lz.patch(llama()), batch(9)
    for model in (plain, patched):
        model(**given, labels=given["input_ids"]).loss.backward()
    for one, other in zip(plain.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-3)


def gpt_oss(**more: Any) -> Any:
    """A small GPT-OSS: a learnt sink a head, every other layer with a window."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
        max_position_embeddings=64, **more,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def sparse(**more: Any) -> Any:
    """A small DeepSeek-V3.2, whose indexer lets each query see some keys."""
    torch.manual_seed(0)
    config = transformers.DeepseekV32Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        index_topk=3, index_n_heads=2, index_head_dim=16, max_position_embeddings=64, first_k_dense_replace=1,
        **more,
    )  # fmt: skip
    return transformers.DeepseekV32ForCausalLM(config).eval()


@pytest.mark.parametrize("make", [gpt_oss, sparse])
@torch.no_grad()
def test_what_a_model_says_beside_the_mask_counts(runtime: lz.Runtime, make: Any) -> None:
    """Sinks, and indices of the keys that a query sees, change the logits as they do unpatched."""
    model, given = make(), batch(9, 4, 6)
    before = model(**given).logits
    during = lz.patch(model)(**given).logits
    real = given["attention_mask"].bool()
    torch.testing.assert_close(during[real], before[real], atol=2e-6, rtol=1e-4)
    assert runtime.device().counters.total("own_attention") == 0
    torch.testing.assert_close(lz.unpatch(model)(**given).logits, before, atol=0, rtol=0)


def bigbird(**more: Any) -> Any:
    """A small decoder whose layers do not say that they are causal: its masks do, and it knows no SDPA."""
    torch.manual_seed(0)
    config = transformers.BigBirdPegasusConfig(
        vocab_size=97, d_model=64, decoder_layers=2, encoder_layers=2, decoder_attention_heads=4,
        encoder_attention_heads=4, decoder_ffn_dim=96, encoder_ffn_dim=96, max_position_embeddings=64,
        pad_token_id=0, is_decoder=True, is_encoder_decoder=False, **more,
    )  # fmt: skip
    return transformers.BigBirdPegasusForCausalLM(config).eval()


@pytest.mark.parametrize("lengths", [(9,), (9, 4)])
@torch.no_grad()
def test_a_model_whose_masks_alone_are_causal_stays_causal(lengths: tuple[int, ...]) -> None:
    """No mask is left out for a model that does not know SDPA, in a copy of it either."""
    model, given = bigbird(), batch(*lengths)
    given = given if len(lengths) > 1 else {"input_ids": given["input_ids"]}
    before = model(**given).logits
    real = batch(*lengths)["attention_mask"].bool()
    for patched in (lz.patch(model), copy.deepcopy(model)):
        torch.testing.assert_close(patched(**given).logits[real], before[real], atol=2e-6, rtol=1e-4)


def captioning() -> Any:
    """A small GIT: its images alone go through the interface, its text adds masks to scores."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.GitConfig(
        vocab_size=97, vision_config={**sizes, "image_size": 32, "patch_size": 16},
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes,
    )  # fmt: skip
    return transformers.GitForCausalLM(config).eval()


def test_a_part_with_attention_of_its_own_gets_masks_that_it_can_add() -> None:
    """A captioning model, padded on the left."""
    model, given = captioning(), batch(9, 4)
    seen = given["attention_mask"].bool()
    with torch.no_grad():
        theirs = model(**given).logits
        ours = lz.patch(model)(**given).logits
    torch.testing.assert_close(ours[seen], theirs[seen], atol=1e-5, rtol=1e-5)


def sharing() -> Any:
    """A small Gemma 4, whose last layers share keys of earlier ones, for the last queries alone."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_global_key_value_heads=2, head_dim=8, global_head_dim=8,
        max_position_embeddings=64, sliding_window=64, num_kv_shared_layers=2, vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=8, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    return transformers.Gemma4ForCausalLM(config).eval()


@pytest.mark.parametrize("make", [llama, bigbird, captioning, sharing])
@torch.no_grad()
def test_a_model_that_is_switched_to_our_implementation_gets_the_masks_that_it_needs(make: Any) -> None:
    """By name and without a patch, and back: what models of its class say decides, as with one."""
    model, padded = make(), batch(9, 4)
    seen, own = padded["attention_mask"].bool(), model.config._attn_implementation
    alone = {"input_ids": batch(9)["input_ids"]}

    def answers() -> list[Tensor]:
        last = model(**alone, logits_to_keep=2) if make is sharing else model(**alone)
        return [model(**padded).logits[seen], last.logits]

    before = answers()
    model.set_attn_implementation("layerzero")
    with counting() as calls:
        torch.testing.assert_close(answers(), before, atol=1e-5, rtol=1e-4)
    assert calls.get("attention", 0) == (0 if make is captioning else 8 if make is sharing else 4)
    model.set_attn_implementation(own)
    torch.testing.assert_close(answers(), before, atol=0, rtol=0)


def test_sinks_learn(runtime: lz.Runtime) -> None:
    """Their gradient, and every other, through a patched model equals the model's own."""
    model, given = gpt_oss(), batch(9, 4)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(**given).logits[given["attention_mask"].bool()].pow(2).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    before = gradients()
    lz.patch(model)
    for ours, theirs in zip(gradients(), before, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    assert runtime.device().counters.total("own_attention") == 0


def own_calls(opened: lz.Runtime, argument: str) -> float:
    """Calls that an argument sent to the model's own implementation."""
    return opened.device().counters.get("own_attention", argument=argument)


@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_an_argument_nobody_knows_goes_to_the_models_own(
    runtime: lz.Runtime, caplog: pytest.LogCaptureFixture, own: str, masked: bool
) -> None:
    """It is named once, counted at each call, and the answer is the model's."""
    integration._WARNED.clear()
    model = llama()
    model.set_attn_implementation(own)
    given = batch(9, 4) if masked else {"input_ids": batch(9)["input_ids"]}
    before = model(**given).logits
    lz.patch(model)
    seen: list[Any] = []
    kind = type(model.model.layers[0].self_attn)
    replaced = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return replaced(self, *args, **kwargs, novelty=torch.ones(1))

    kind.forward = forward
    try:
        during = model(**given).logits
    finally:
        kind.forward = replaced
    real = given["attention_mask"].bool() if masked else slice(None)
    torch.testing.assert_close(during[real], before[real], atol=2e-6, rtol=1e-4)
    assert len(seen) == own_calls(runtime, "novelty") == 2
    said = caplog.text
    assert said.count("transformers.own_attention") == 1 and "novelty" in said


@torch.no_grad()
def test_weights_of_attention_are_asked_of_the_models_own(runtime: lz.Runtime) -> None:
    """`output_attentions=True` gives what an eager model gives, and blames no kernel."""
    model, given = llama(), {"input_ids": batch(9)["input_ids"]}
    model.set_attn_implementation("eager")
    before = model(**given, output_attentions=True).attentions
    during = lz.patch(model)(**given, output_attentions=True).attentions
    assert len(before) == len(during) == 2
    for ours, theirs in zip(during, before, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert runtime.device().health.statuses() == ()


@torch.no_grad()
def test_a_position_bias_is_added(runtime: lz.Runtime) -> None:
    """T5's learnt biases go through the op."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, attn_implementation="sdpa"
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    given = {**batch(9, 4), "decoder_input_ids": batch(7, 7)["input_ids"]}
    before = model(**given).logits
    with counting() as calls:
        torch.testing.assert_close(lz.patch(model)(**given).logits, before, atol=1e-5, rtol=1e-4)
    assert calls["attention"] == 6 and own_calls(runtime, "position_bias") == 0


def test_a_copy_of_a_patched_model_is_patched() -> None:
    """It can be unpatched alone, and what was in use before comes back in each."""
    model = lz.patch(llama())
    other = copy.deepcopy(model)
    lz.unpatch(other)
    assert other.config._attn_implementation == "sdpa" and type(other.config._attn_implementation) is str
    assert type(model.config._attn_implementation) is not str
    lz.unpatch(model)
    with pytest.raises(ValueError, match="patched first"):
        lz.unpatch(other)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("keys", [1, 3, 5, 7])
def test_a_causal_call_counts_from_the_first_as_sdpa_does(keys: int, biased: bool) -> None:
    """Whatever the lengths: a module that says nothing of causality, called without a mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v = (torch.randn(2, 4, length, 8) for length in (5, keys, keys))
    more = {"position_bias": torch.randn(1, 4, 5, keys)} if biased else {}
    theirs = sdpa_attention_forward(torch.nn.Module(), q, k, v, None, **more)[0]
    torch.testing.assert_close(integration.forward(torch.nn.Module(), q, k, v, None, **more)[0], theirs)


def test_an_implementation_that_is_named_while_a_model_is_patched_stays() -> None:
    """Attention is as its caller asked last; what is ours comes off."""
    for named, left in (("eager", "eager"), ("layerzero", "sdpa")):
        model = lz.patch(llama())
        model.set_attn_implementation("eager")
        model.set_attn_implementation(named)
        with torch.no_grad(), counting() as calls:
            model(**batch(9))
        assert calls.get("attention", 0) == (0 if named == "eager" else 2) and calls["rms_norm"] == 5
        lz.unpatch(model)
        assert model.config._attn_implementation == left and type(model.config._attn_implementation) is str


@torch.no_grad()
def test_a_mask_that_only_a_patched_model_makes_is_asked_for() -> None:
    """Named in the configuration alone, a sparse model would see every key: an error says what to do."""
    lz.patch(llama())
    model = sparse(attn_implementation="layerzero")
    with pytest.raises(ValueError, match=r"indices of .* needs a model given to layerzero.patch"):
        model(**batch(9))


def test_what_cannot_be_patched_is_named() -> None:
    """Other modules, and models that were not patched."""
    with pytest.raises(
        TypeError, match=r"needs a transformers\.PreTrainedModel or a diffusers\.ModelMixin, got Linear"
    ):
        lz.patch(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got the class LlamaForCausalLM"):
        lz.patch(transformers.LlamaForCausalLM)
    with pytest.raises(ValueError, match="this LlamaForCausalLM is not"):
        lz.unpatch(llama())


FROM_CONFIG = """
import torch
import layerzero.integrations.transformers
from transformers import AutoModelForCausalLM, LlamaConfig

sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
ids = torch.arange(9)[None]
logits = []
for name in ("sdpa", "layerzero"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), attn_implementation=name).eval()
    logits.append(model(input_ids=ids).logits)
torch.testing.assert_close(*logits)
import layerzero as lz
print(lz.last_selection().op)
"""


def test_a_model_is_built_with_the_implementation_by_name(tmp_path: Path) -> None:
    """Importing the integration is enough; nothing has to be patched before."""
    ended = children.run(FROM_CONFIG, folder=tmp_path)
    assert ended.stdout.strip() == "attention", ended.stderr


def test_a_model_with_the_implementation_by_name_is_one_graph_of_our_operators() -> None:
    """No break, the eager numbers, and attention is the operator in both layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    graphs: list[str] = []

    def kept(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph.code)
        return graph

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, max_position_embeddings=64)
    model: Any = LlamaForCausalLM(config).eval()
    ids = torch.arange(18).view(2, 9)
    with torch.no_grad():
        plain = model(ids).logits
        model.set_attn_implementation("layerzero")
        compiled: Any = torch.compile(model, fullgraph=True, backend=kept)
        logits = compiled(ids).logits
    torch.testing.assert_close(logits, plain)
    assert len(graphs) == 1 and graphs[0].count("layerzero.attention") == 2, graphs
