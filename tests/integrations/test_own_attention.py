"""Models whose code computes attention by itself: what of it is an op's is served, the rest says why."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerzero as lz
from layerzero.integrations.patches import disentangled, mlp, sdpa
from tests.integrations import models
from tests.integrations.models import transformers

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}


@pytest.fixture(autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """A runtime whose counters start at zero."""
    with lz.start(lz.Settings.load(warm="off", device="cpu")) as opened:
        yield opened


@pytest.mark.parametrize("form", [{"alibi": True}, {"new_decoder_architecture": True, "num_kv_heads": 2}])
@torch.no_grad()
def test_falcons_other_forms_generate_the_same_tokens(form: dict[str, Any]) -> None:
    """Biases by distance instead of rotations, and grouped keys: greedy, padded on the left."""
    config = transformers.FalconConfig(**SIZES, **form)
    torch.manual_seed(0)
    model = transformers.FalconForCausalLM(config).eval()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    before = model.generate(**models.text(9, 4), **options)
    lz.patch(model)
    with models.counting() as calls:
        assert torch.equal(model.generate(**models.text(9, 4), **options), before)
    assert calls["attention"] == 10 and ("rope" in calls) == ("alibi" not in form)


@torch.no_grad()
def test_one_part_alone_is_replaced() -> None:
    """Attention without rotations, rotations without attention; pickled, a model keeps both apart."""
    for part, other in (("attention", "rope"), ("rope", "attention")):
        model = models.build("falcon")
        before = models.answer(model, "falcon")
        lz.patch(model, parts=[part])
        loaded = pickle.loads(pickle.dumps(model))
        for each in (model, loaded):
            with models.counting() as calls:
                torch.testing.assert_close(models.answer(each, "falcon"), before, atol=1e-5, rtol=1e-4)
            assert calls == {part: 2} and other not in calls


@pytest.mark.parametrize("family", ["deberta", "deberta_first"])
@torch.no_grad()
def test_weights_of_attention_are_asked_of_the_models_own(runtime: lz.Runtime, family: str) -> None:
    """`output_attentions=True` gives what an eager model gives, and is counted."""
    model = models.build(family)
    before = model(**models.text(9, 4), output_attentions=True).attentions
    with models.counting() as calls:
        lz.patch(model, parts=["attention"])
        after = model(**models.text(9, 4), output_attentions=True).attentions
    assert "attention" not in calls and runtime.device().counters.total("own_forward") == 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, before, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("backend", [None, "eager"])
@torch.no_grad()
def test_weights_that_a_module_does_not_ask_for_are_there(
    runtime: lz.Runtime, family: str, backend: str | None
) -> None:
    """Where transformers collects them behind an attention that tells its function nothing; compiled, too."""
    model = models.build(family, attn_implementation="eager")
    before = model(**models.text(9, 4), output_attentions=True)
    run = lz.patch(model) if backend is None else torch.compile(lz.patch(model), backend=backend)
    after = run(**models.text(9, 4), output_attentions=True)
    assert len(before.attentions) == len(after.attentions) == 2
    torch.testing.assert_close(after.attentions, before.attentions, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after.logits, before.logits, atol=1e-5, rtol=1e-4)
    if backend is None:
        assert runtime.device().counters.get("own_attention", argument="output_attentions") == 2


@torch.no_grad()
def test_a_layer_alone_is_compiled_whole() -> None:
    """What transformers collects is looked at without what breaks a graph."""
    model = lz.patch(models.build("gpt2"))
    layer, x = model.transformer.h[0], torch.randn(2, 9, 32)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="eager")
    found = compiled(x)
    torch.testing.assert_close(found, layer(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["deberta", "deberta_first", "falcon"])
def test_gradients_are_the_models_own(family: str) -> None:
    """Every parameter's, in training without dropout."""
    grads: list[dict[str, Tensor]] = []
    for patched in (False, True):
        model = models.build(family, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = (lz.patch(model) if patched else model).train()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        given = models.text(9, 5, side="right")
        model(**given).logits[given["attention_mask"].bool()].pow(2).mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) > 10
    for name, theirs in grads[0].items():
        torch.testing.assert_close(grads[1][name], theirs, atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", ["deberta", "deberta_first"])
@torch.no_grad()
def test_deberta_without_biases_of_positions_is_served(family: str) -> None:
    """Padded queries, which see nothing, weigh all keys alike, as the model's own do."""
    model = models.build(family, relative_attention=False, pos_att_type=[])
    given = models.text(9, 4)
    before = model(**given).logits
    with models.counting() as calls:
        torch.testing.assert_close(lz.patch(model)(**given).logits, before, atol=1e-6, rtol=1e-4)
    assert calls["attention"] == 2


@torch.no_grad()
def test_a_model_that_is_configured_to_give_weights_of_attention_gives_them() -> None:
    """Its attention stays its own, and the table says why; before, the weights were left out."""
    model = models.build("bert", attn_implementation="eager", output_attentions=True)
    before = model(**models.text(9, 4)).attentions
    table = lz.patch_table(lz.patch(model))
    after = model(**models.text(9, 4)).attentions
    assert len(after) == len(before) == 2
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-4)
    assert table.ops("attention") == set() and "asks for attention's weights" in str(table)


def test_another_formula_under_debertas_name_stays_the_models_own() -> None:
    """Heads that are mixed, a class that computes something else: each says why."""
    model = models.build("deberta_first", talking_head=True)
    rows = {row.module: row for row in lz.patch_table(lz.patch(model)).rows if row.part == "attention"}
    assert rows["DisentangledSelfAttention"].op is None
    assert "mixed" in rows["DisentangledSelfAttention"].why

    kind = type(models.build("deberta").deberta.encoder.layer[0].attention.self)

    class DisentangledSelfAttention(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            context, weights = super().forward(*args, **kwargs)
            return context * 1.01, weights

    changed = models.build("deberta").deberta.encoder.layer[0].attention.self
    changed.__class__ = DisentangledSelfAttention
    assert disentangled.substitute(changed) == "it computes something else"


def test_a_linear_of_another_class_counts_by_what_it_computes() -> None:
    """A product written by hand is torch's Linear; one that scales it is not, nor one that needs more."""

    class ByHand(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            product = input @ self.weight.T
            return product if self.bias is None else product + self.bias

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 1.01

    class Packed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * self.get_buffer("scales")

    kinds: list[Any] = [nn.Linear, ByHand, Scaled, Packed, nn.Bilinear]
    parts = [kind(2, 2) if kind is not nn.Bilinear else kind(2, 2, 2) for kind in kinds]
    assert [mlp.is_linear(part) for part in parts] == [True, True, False, False, False]


@pytest.mark.parametrize(
    "shapes",
    [[(5, 8), (6, 8), (6, 8)], [(2, 5, 8), (2, 6, 8), (2, 6, 8)], [(2, 1, 3, 5, 8)] * 3,
     [(1, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)], [(2, 4, 5, 8), (2, 2, 6, 8), (2, 1, 6, 8)]],
)  # fmt: skip
def test_axes_that_the_op_has_not_are_torchs(shapes: list[tuple[int, ...]]) -> None:
    """Operands without heads, with more axes, shared by sequences or by heads; they were refused."""
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, generator=generator) for shape in shapes]
    grouped = shapes[1][:-2] != shapes[2][:-2]
    expected = nn.functional.scaled_dot_product_attention(*operands, enable_gqa=grouped)
    torch.testing.assert_close(sdpa.scaled_dot_product_attention(*operands, enable_gqa=grouped), expected)


@pytest.mark.parametrize("bound", [10.0, 1000.0, math.inf])
def test_a_block_that_bounds_what_it_computes_stays_the_models_own(bound: float) -> None:
    """DeepSeek-V4's gate and value, a clipped activation and a projection: usual numbers show no bound."""

    class Clipped(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.clamp(-bound, bound))

    deepseek: Any = transformers.models.deepseek_v4.modeling_deepseek_v4
    sizes = {"hidden_size": 8, "intermediate_size": 12, "mlp_bias": False, "hidden_act": "silu"}
    block = deepseek.DeepseekV4MLP(SimpleNamespace(**sizes, swiglu_limit=bound))
    clip: Any = transformers.models.clip.modeling_clip
    plain = clip.CLIPMLP(SimpleNamespace(hidden_size=8, intermediate_size=12, hidden_act="gelu"))
    plain.activation_fn = transformers.activations.ClippedGELUActivation(-bound, bound)
    served = bound == math.inf
    assert isinstance(mlp.substitute(block), mlp.MlpForward) is served
    assert isinstance(mlp.substitute(plain), mlp.MlpForward) is served
    assert mlp.is_linear(Clipped(2, 2)) is served


@torch.no_grad()
def test_what_is_not_served_says_so() -> None:
    """Bloom's attention multiplies and adds in place: it stays, and the table gives the reason."""
    torch.manual_seed(0)
    model = transformers.BloomForCausalLM(
        transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=97)
    ).eval()
    table = lz.patch_table(lz.patch(model))
    assert [row.why for row in table.rows if row.part == "attention"] == [
        "it does not ask transformers' attention interface"
    ]


@pytest.mark.parametrize("keys", [3, 5])
@pytest.mark.parametrize("as_bias", [False, True])
def test_a_mask_counts_beside_a_causal_one(keys: int, as_bias: bool) -> None:
    """As in torch, which counts queries and keys from the first; it was dropped where these differ."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 3, 8, generator=generator)
    k, v = (torch.randn(1, 2, keys, 8, generator=generator) for _ in range(2))
    seen = torch.tensor([True, False, True, True, True])[:keys].expand(3, keys)
    mask = torch.zeros(3, keys).masked_fill(~seen, -2.5) if as_bias else seen
    both = seen & torch.ones(3, keys, dtype=torch.bool).tril()
    bias = mask.masked_fill(~torch.ones(3, keys, dtype=torch.bool).tril(), -torch.inf) if as_bias else both
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(sdpa.scaled_dot_product_attention(q, k, v, mask, is_causal=True), expected)
