"""The Llama of the examples against transformers', alone and in company, awaited per op, layer and step."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import Tensor

import layerzero as lz

llama = pytest.importorskip("models.llama", reason="the example needs safetensors")
transformers = pytest.importorskip(
    "transformers", reason="the judge is not installed: pip install transformers"
)

EVERY = ("op", "layer", "step")
CLOSE = 1e-4


@pytest_asyncio.fixture
async def runtime() -> AsyncIterator[lz.Runtime]:
    """A runtime on the CPU."""
    async with lz.start(lz.Settings(device="cpu", inference=True)) as opened:
        yield opened


def judge(folder: Path) -> Any:
    """What transformers loads from `folder`, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def judged(model: Any, ids: list[int]) -> Tensor:
    """transformers' logits after every token, (S, V)."""
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


async def taught(model: Any, ids: list[int], prompt: int, piece: int = 256) -> Tensor:
    """Logits after the prompt and after each later token, (S - prompt + 1, V); the prompt goes in pieces."""
    rows: list[Tensor] = []
    with model.sequence(len(ids)) as sequence:
        for start in range(0, prompt, piece):
            part = torch.tensor(ids[start : min(start + piece, prompt)])
            rows = [await model.step(part, sequence.extend(len(part)))]
        for token in ids[prompt:]:
            rows.append(await model.step(torch.tensor([token]), sequence.extend(1)))
    return torch.cat(rows)


@pytest.fixture(scope="module")
def reference() -> Any:
    """The shipped weights in transformers."""
    return judge(llama.FOLDER)


@pytest.mark.asyncio
@pytest.mark.parametrize("per", EVERY)
async def test_logits_equal_transformers(runtime: lz.Runtime, reference: Any, per: str) -> None:
    """Whole prompts, prompts in pieces that cross pages, and decoded tokens, alone and all at once."""
    model = llama.load(per=per, pages=64)
    ids = [0, *range(300, 380)]
    wanted = judged(reference, ids)
    alone = [(67, 256), (67, 16), (33, 7)]
    for prompt, piece in alone:
        got = await taught(model, ids, prompt, piece)
        torch.testing.assert_close(got, wanted[prompt - 1 :], atol=CLOSE, rtol=0)
    together = await asyncio.gather(*(taught(model, ids, prompt, piece) for prompt, piece in alone))
    for (prompt, _), got in zip(alone, together, strict=True):
        torch.testing.assert_close(got, wanted[prompt - 1 :], atol=CLOSE, rtol=0)
    assert model.cache.allocator.free_pages == 64


@pytest.mark.asyncio
@pytest.mark.parametrize("per", EVERY)
async def test_requests_meet(runtime: lz.Runtime, per: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight sequences of different lengths decode in batches of eight, whatever one await covers.

    Batches wait for their callers by the loop's clock, which shows this thread's own time here: a machine
    with other work makes nobody late.
    """
    monkeypatch.setattr(asyncio.get_running_loop(), "time", time.thread_time)
    model = llama.load(per=per, pages=64)
    before = dict(runtime.device("cpu").loop_drivers.stats().sizes)
    await asyncio.gather(*(taught(model, list(range(5, 25 + count)), 10 + count) for count in range(8)))
    sizes = runtime.device("cpu").loop_drivers.stats().sizes
    met = {size: count - before.get(size, 0) for size, count in sizes.items()}
    assert met.get(8, 0) > sum(met.values()) / 2, met


def small(**changes: Any) -> Any:
    """The configuration of a tiny Llama for transformers."""
    shape: dict[str, Any] = {
        "vocab_size": 60, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    return transformers.LlamaConfig(**(shape | changes))


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 16},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
    ],
    ids=["plain", "tied", "biased", "llama3", "linear"],
)
async def test_other_folders_load(runtime: lz.Runtime, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Any Llama folder: one file or several, tied or not, with biases, with scaled rotary angles."""
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(small(**changes))
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(std=0.3)
    made.save_pretrained(tmp_path, max_shard_size="12KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    ids = list(range(1, 51))
    got = await taught(llama.load(tmp_path, pages=8, page_size=8), ids, 40)
    torch.testing.assert_close(got, judged(judge(tmp_path), ids)[39:], atol=CLOSE, rtol=0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "folder needs a Llama"),
        ({"hidden_act": "gelu"}, "folder needs a Llama"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling needs"),
    ],
)
def test_what_is_no_llama_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    """The message says what the folder needs and what it has."""
    config = json.loads((llama.FOLDER / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    with pytest.raises(ValueError, match=named):
        llama.load(tmp_path)


@pytest.mark.asyncio
async def test_a_random_model_of_any_shape_runs(runtime: lz.Runtime) -> None:
    """Measurements take a shape and no file; the logits are finite and of the vocabulary's width."""
    config = llama.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=8, rms_norm_eps=1e-5, rope_theta=1e4,
        max_position_embeddings=64,
    )  # fmt: skip
    model = llama.random(config, pages=4)
    logits = await taught(model, [1, 2, 3, 4], 2)
    assert logits.shape == (3, 50)
    assert bool(logits.isfinite().all())


def test_a_coroutine_that_suspends_is_not_finished() -> None:
    """A step over blocking ops that would wait is an error, not a wrong result."""
    with pytest.raises(RuntimeError, match="suspended"):
        llama.run_sync(asyncio.sleep(0))


@pytest.mark.asyncio
async def test_pages_are_bounded_and_come_back(runtime: lz.Runtime) -> None:
    """A pool that cannot hold a sequence says whether it ever could; leaving the block frees the pages."""
    from layerzero.kvcache import PagesExhaustedError

    model = llama.load(pages=8)
    pages = model.cache.allocator
    with pytest.raises(ValueError, match="tokens needs 1 to 128"):
        model.sequence(129)
    with pytest.raises(ValueError, match=f"tokens needs at most {model.config.max_position_embeddings}"):
        model.sequence(model.config.max_position_embeddings + 1)
    with model.sequence(100) as sequence:
        assert pages.free_pages == 1
        with pytest.raises(PagesExhaustedError):
            model.sequence(17)
        sequence.extend(100)
    assert pages.free_pages == 8


def test_the_shipped_files_are_small() -> None:
    """The model with its tokenizer is at most 6 MiB, the prose at most 3 MiB."""
    sizes = {file.name: file.stat().st_size for file in llama.FOLDER.iterdir()}
    prose = sizes.pop("prose.txt.xz")
    assert sum(sizes.values()) <= 6 << 20
    assert prose <= 3 << 20
