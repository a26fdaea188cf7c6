"""Models of transformers on our attention: same outputs, same tokens, and really through the op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz

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
    during = model(**given)[0]
    seen = lz.last_selection()
    assert seen is not None and seen.op == "attention"
    real = given["attention_mask"].bool()
    torch.testing.assert_close(during[real], before[real], atol=2e-6, rtol=1e-4)
    lz.unpatch(model)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(**given)[0], before, atol=0, rtol=0)


def test_every_layer_goes_through_the_op() -> None:
    """With every kernel denied the model cannot answer: its attention is ours."""
    model = lz.patch(llama())
    with torch.no_grad(), lz.disabled("*"), pytest.raises(lz.NoKernelFoundError):
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


def test_what_cannot_be_patched_is_named() -> None:
    """Other modules, and models that were not patched."""
    with pytest.raises(TypeError, match=r"needs a transformers\.PreTrainedModel, got Linear"):
        lz.patch(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="this LlamaForCausalLM is not"):
        lz.unpatch(llama())
