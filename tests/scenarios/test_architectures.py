"""Whole small models of several kinds: encoder-decoder, vision, mixed dtypes, text to drawn token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import layerzero as lz
import layerzero.sync
from layerzero.ops import table
from layerzero.runtime import current
from layerzero.spec.hardware import hypothetical_gpu
from tests import children
from tests.kernels import device, kernel

ATTENTION = table.get("attention")
transformers: Any = pytest.importorskip("transformers", reason="the model library is missing: .[hf]")


@pytest.fixture(autouse=True)
def own_runtime() -> Iterator[None]:
    """A runtime of the test's own, with nothing loading behind it."""
    with lz.start(lz.Settings(warm="off", device="cpu")):
        yield


def bart() -> Any:
    """A small encoder-decoder whose decoder attends to 2,048 tokens of the encoder."""
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=2048,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
        attn_implementation="eager", init_std=0.3,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


def source(length: int) -> dict[str, Tensor]:
    """Two texts for the encoder, the second a third shorter and padded behind."""
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length * 2 // 3 :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


@pytest.mark.parametrize("length", [128, 512, 2048])
@torch.no_grad()
def test_cross_attention_of_an_encoder_decoder(length: int) -> None:
    """E6.13: logits and greedy tokens are transformers' own, with and without a cache, under padding."""
    model, given = bart(), source(length)
    targets = torch.randint(3, 97, (2, 7), generator=torch.Generator().manual_seed(1))
    want = model(**given, decoder_input_ids=targets).logits
    tokens = model.generate(**given, max_new_tokens=6, do_sample=False, use_cache=True)
    lz.patch(model)
    before = current().counters.total("selections")
    got = model(**given, decoder_input_ids=targets).logits
    assert current().counters.total("selections") > before, "it went through the op"
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for cached in (True, False):
        mine = model.generate(**given, max_new_tokens=6, do_sample=False, use_cache=cached)
        assert torch.equal(mine, tokens)
    # What stands behind the padding's mask is not attended to, in the encoder or across.
    moved = dict(given, input_ids=given["input_ids"].clone())
    moved["input_ids"][1, length * 2 // 3 :] = 5
    torch.testing.assert_close(model(**moved, decoder_input_ids=targets).logits, got, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_caches_of_two_texts_do_not_mix() -> None:
    """E6.13: the keys of the encoder and of the decoder are each text's own, decoded alone or in turn."""
    model = lz.patch(bart())
    texts = [{n: t[i : i + 1] for n, t in source(128).items()} for i in (0, 1)]
    alone = [model.generate(**text, max_new_tokens=5, do_sample=False) for text in texts]
    encoded = [model.get_encoder()(**text) for text in texts]
    caches: list[Any] = [None, None]
    rows = [torch.tensor([[2]]), torch.tensor([[2]])]
    for _ in range(5):
        for i in (0, 1):
            out = model(
                encoder_outputs=encoded[i], attention_mask=texts[i]["attention_mask"],
                decoder_input_ids=rows[i][:, -1:], past_key_values=caches[i], use_cache=True,
            )  # fmt: skip
            caches[i] = out.past_key_values
            rows[i] = torch.cat([rows[i], out.logits[:, -1:].argmax(-1)], 1)
    for mine, want in zip(rows, alone, strict=True):
        assert torch.equal(mine[:, : want.shape[1]], want)


def test_cross_attention_is_attention_with_other_lengths() -> None:
    """E6.13, NO-008: its request says Sq and Sk, no causality, and goes to other kernels by them alone."""
    q, k = torch.randn(2, 4, 7, 16), torch.randn(2, 4, 128, 16)
    request = lz.select("attention", q, k, k).request
    assert (request.dim("Sq"), request.dim("Sk")) == (7, 128) and not request.features
    assert "causal" in lz.select("attention", q, q, q, is_causal=True).request.features


def vit() -> Any:
    """A small vision transformer."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, attn_implementation="eager",
    )  # fmt: skip
    return transformers.ViTModel(config, add_pooling_layer=False).eval()


@torch.no_grad()
def test_a_vision_model_in_both_memory_formats() -> None:
    """E6.14: images that lie channels first or last give transformers' own states through our attention."""
    model = vit()
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    last = image.contiguous(memory_format=torch.channels_last)
    assert not last.is_contiguous() and torch.equal(last, image)
    want = model(pixel_values=image).last_hidden_state
    lz.patch(model)
    for form, images in ((torch.contiguous_format, image), (torch.channels_last, last)):
        for weights in (torch.contiguous_format, form):
            placed = model.to(memory_format=weights)
            got = placed(pixel_values=images).last_hidden_state
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def _dense_alone(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    if not all(t.is_contiguous() for t in (q, k, v)):
        raise RuntimeError("strided operands")
    return ATTENTION.reference(q, k, v, *rest)


def test_patches_of_either_format_go_where_their_strides_fit() -> None:
    """E6.14: patch embedding, attention, MLP of our ops; a kernel for dense operands alone gets copies."""
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    weight = torch.randn(32, 3 * 8 * 8, generator=torch.Generator().manual_seed(4)) / 14
    results = []
    dense_only = {k.id: k.capability.contiguous for k in lz.list_kernels("attention")}
    for images in (image, image.contiguous(memory_format=torch.channels_last)):
        patches = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5)
        x = layerzero.sync.linear(patches.reshape(2, 16, -1), weight)
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        record = lz.select("attention", heads, heads, heads)
        assert not record.request.contiguous and record.request.last_stride1
        copied = any(t.kind == "contiguous" for t in record.transforms)
        assert copied == dense_only[record.kernel]
        # A kernel that takes dense operands alone gets them.
        own = device([kernel("dense.attention", _dense_alone, contiguous=True)])
        full = ATTENTION.build(heads, heads, heads)[1]
        torch.testing.assert_close(own.launch(ATTENTION, full), ATTENTION.reference(*full))
        mixed = layerzero.sync.attention(heads, heads, heads).transpose(1, 2).flatten(2)
        results.append(layerzero.sync.mlp(mixed, torch.eye(64, 32), torch.eye(32, 64), activation="gelu"))
    x = (
        functional.conv2d(image.double(), weight.double().view(32, 3, 8, 8), stride=8)
        .flatten(2)
        .transpose(1, 2)
    )
    heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
    for result in results:
        torch.testing.assert_close(result.double(), functional.gelu(mixed), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_embedding_norm_and_mlp_in_mixed_dtypes(
    weights: torch.dtype, rows: torch.dtype, activation: Literal["gelu", "swiglu"]
) -> None:
    """E6.15: rows, norms and matrices of different dtypes; results in the rows' dtype, near float64."""
    generator = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    inner = 128 if activation == "swiglu" else 64
    ids = torch.randint(0, 50, (9,), generator=generator)
    embedding, up, down = (
        rand(50, 32).to(rows),
        (rand(inner, 32) / 6).to(weights),
        (rand(32, 64) / 8).to(weights),
    )
    scale, bias = (1 + rand(32) / 10).to(weights), rand(32).to(torch.float32)
    ran: dict[str, str] = {}

    def note(result: Any) -> Any:
        record = lz.last_selection()
        assert record is not None
        ran[record.op] = record.kernel
        return result

    x = note(layerzero.sync.embedding(ids, embedding))
    normed, total = note(layerzero.sync.add_rms_norm(x, x, scale))
    shifted = note(layerzero.sync.layer_norm(normed, scale, bias))
    out = note(layerzero.sync.mlp(shifted, up, down, activation=activation))
    assert {t.dtype for t in (x, normed, total, shifted, out)} == {rows}
    wide = embedding.double()[ids] * 2
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * scale.double()
    wide = functional.layer_norm(wide, (32,), scale.double(), bias.double())
    hidden = wide @ up.double().T
    gate, value = hidden.chunk(2, -1) if activation == "swiglu" else (hidden, hidden)
    hidden = functional.silu(gate) * value if activation == "swiglu" else functional.gelu(hidden)
    coarse = torch.bfloat16 in (rows, weights)
    torch.testing.assert_close(
        out.double(), hidden @ down.double().T, atol=0.1 if coarse else 0.02, rtol=0.05 if coarse else 0.01
    )
    assert set(ran) == {"embedding", "add_rms_norm", "layer_norm", "mlp"} and all(ran.values())


def test_the_report_lists_ops_other_than_attention() -> None:
    """E6.15: each op's kernels with their verdicts; where a fused kernel takes the call it stands in it."""
    x, weight = torch.randn(4, 64), torch.randn(64)
    calls: dict[str, dict[str, Any]] = {
        "embedding": {"ids": torch.tensor([1]), "weight": x},
        "add_rms_norm": {"x": x, "residual": x, "weight": weight},
        "layer_norm": {"x": x, "weight": weight},
        "mlp": {"x": x, "w_up": torch.randn(128, 64), "w_down": torch.randn(64, 64), "activation": "swiglu"},
    }
    for op, arguments in calls.items():
        record = lz.select(op, **arguments)
        assert f"reference.{op}" in record.order and record.kernel in str(lz.explain(op, **arguments))
        assert {c.kernel for c in record.trace} >= {k.id for k in lz.list_kernels(op)}
    fused = lz.dry_run("add_rms_norm", x, x, weight, hardware=hypothetical_gpu(90))
    assert {"triton.add_rms_norm.fused", "liger.add_rms_norm.triton"} <= set(fused.order)


PIPELINE = """
import json, sys, torch
import layerzero as lz, layerzero.sync
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tests.parity.model import Config, llama, random_llama
from tests.parity.truth import Ours

text = sys.argv[1]
made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
made.train_from_iterator(
    [text] * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
)
tokenizer = lz.Tokenizer(made)
runs = []
with lz.start(lz.Settings(warm="off", device="cpu")), torch.no_grad():
    for _ in range(2):
        tokens = tokenizer.encode([text], offsets=True)[0]
        model = random_llama(Config("pipeline", 64, 4, 2, 2, vocab=300))
        drawn, start, rows = [], 0, tokens.ids
        for step in range(8):
            logits = llama(Ours(), model, rows, lambda *_: None, start)[-1:]
            start += len(rows)
            rows = layerzero.sync.sample(logits, top_k=20, top_p=0.9, temperature=0.8, seed=7, offset=step)
            drawn.append(int(rows))
        everything = torch.tensor([*tokens.ids, *drawn])
        whole = llama(Ours(), random_llama(model.config), everything, lambda *_: None)
        runs.append({
            "ids": tokens.ids.tolist(), "offsets": tokens.offsets.tolist(), "drawn": drawn,
            "text": tokenizer.decode([torch.tensor(drawn)])[0],
            "apart": float((whole[-2] - logits[0]).abs().max()),
            "library": [made.encode(text).ids, made.encode(text).offsets],
        })
assert runs[0] == runs[1], "a second run in one process"
print(json.dumps(runs[0]))
"""
TEXT = "Une naïve petite phrase, 48 €, and a second one: the same words, the same tokens. 👩‍👩‍👧"


def test_text_to_drawn_token_is_the_same_in_every_process(tmp_path: Path) -> None:
    """E6.3: ids, offsets, a block with its cache, top-k and top-p: equal in two runs and two processes."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    # The child has the hash seed that this run drew; a number given to a new interpreter is not that one.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    runs = (
        children.run(PIPELINE, TEXT, folder=tmp_path),
        subprocess.run(
            [sys.executable, "-c", PIPELINE, TEXT],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        ),
    )
    outputs = []
    for run in runs:
        assert run.returncode == 0, run.stderr[-3000:]
        outputs.append(json.loads(run.stdout))
    first = outputs[0]
    assert first == outputs[1]
    assert [first["ids"], [list(pair) for pair in first["library"][1]]] == [
        first["library"][0],
        first["offsets"],
    ]
    assert len(set(first["drawn"])) > 1 and first["apart"] < 1e-4, (
        "decoding with a cache is the whole prefill"
    )
