"""The shipped Llama out of quantized folders, over pages of eight bits: logits, perplexity, served."""

from __future__ import annotations

import asyncio
import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest

for package in ("safetensors", "tokenizers"):
    pytest.importorskip(package, reason=f"the model needs {package}: pip install 'layerzero-runtime[test]'")

import torch  # noqa: E402  the skips come first
from generate import load_tokenizer  # noqa: E402
from models import llama, weights  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.checkpoints.calibration import run_text  # noqa: E402
from layerzero.checkpoints.folder import TensorFolder  # noqa: E402
from layerzero.checkpoints.writing import LAYOUTS, LEFT_ALONE, quantize_folder, weights_to_round  # noqa: E402
from layerzero.formats import QuantizedTensor  # noqa: E402
from layerzero.spec.tolerances import PARITY_LOGITS  # noqa: E402
from tests.bounds import (  # noqa: E402
    PERPLEXITY,
    PERPLEXITY_GPTQ,
    PERPLEXITY_GPTQ_OVER_NEAREST,
    PERPLEXITY_KV,
)

TOKENS = 384
SETTINGS = lz.Settings(device="cpu", inference=True, warm="off")
CODES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.fixture(scope="module")
def prose() -> str:
    """The shipped text."""
    return lzma.decompress((llama.FOLDER / "prose.txt.xz").read_bytes()).decode()


@pytest.fixture(scope="module")
def text(prose: str) -> Tensor:
    """The end of the shipped text, as tokens."""
    return torch.tensor(load_tokenizer(llama.FOLDER).encode(prose[-8000:]).ids[: TOKENS + 1])


def logits_of(model: llama.Llama, text: Tensor) -> Tensor:
    """The logits after each token but the last."""
    with lz.start(SETTINGS, scoped=True), model.sequence(TOKENS) as sequence:
        return model.forward_all_positions_batch(text[:-1], [sequence.extend(TOKENS)])


def perplexity(logits: Tensor, text: Tensor) -> float:
    return math.exp(torch.nn.functional.cross_entropy(logits.float(), text[1:]).item())


@pytest.fixture(scope="module")
def plain(text: Tensor) -> float:
    """The perplexity of the model as it is shipped."""
    return perplexity(logits_of(llama.load(pages=32), text), text)


def with_numbers(folder: Path) -> llama.Llama:
    """The folder's model over its weights' numbers in float32."""
    config, checkpoint = llama.LlamaConfig.read(folder), lz.load_quantized(folder)

    def get(name: str, shape: tuple[int, ...]) -> Tensor:
        return checkpoint.dequantized(name)

    return llama.Llama(config, get, llama.kv_pool(config, "cpu", torch.float32, 32, 16))


def nf4_folder(folder: Path) -> Path:
    """The shipped model as bitsandbytes stores NF4, by its published layout."""
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    chosen = set(weights_to_round(TensorFolder(llama.FOLDER), LEFT_ALONE))
    with safe_open(str(llama.FOLDER / "model.safetensors"), framework="pt") as held:
        for name in TensorFolder(llama.FOLDER).names:
            weight = held.get_tensor(name)
            if name not in chosen:
                tensors[name] = weight
                continue
            made = QuantizedTensor.quantize(weight.float(), "nf4", group_size=64)
            state = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
            packed = (made.codes >> 4 | made.codes << 4).reshape(-1, 1)
            tensors |= {
                name: packed,
                f"{name}.absmax": made.scale.flatten(),
                f"{name}.quant_map": torch.tensor(made.form.element.values),
                f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(
                    list(json.dumps(state).encode()), dtype=torch.uint8
                ),
            }
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((llama.FOLDER / "config.json").read_text(encoding="utf-8"))
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("form", [*LAYOUTS, "nf4"])
def test_a_quantized_model_computes_its_weights_numbers_and_reads_the_text_nearly_as_well(
    form: str, tmp_path: Path, text: Tensor, plain: float
) -> None:
    """Logits within the ladder's bound of the dequantized model's, perplexity within the format's."""
    folder = tmp_path / form
    if form == "nf4":
        nf4_folder(folder)
    else:
        quantize_folder(llama.FOLDER, folder, form)
    model = llama.load(folder, pages=32)
    assert isinstance(model.layers[0].w_qkv, QuantizedTensor | tuple)
    logits = logits_of(model, text)
    assert (logits - logits_of(with_numbers(folder), text)).abs().max() <= PARITY_LOGITS
    assert 0.97 <= perplexity(logits, text) / plain <= PERPLEXITY[form]


PASSAGES = range(6)  # each behind what calibrates, 200,000 characters from the next


@pytest.fixture(scope="module")
def passages(prose: str) -> list[Tensor]:
    """Tokens out of the last 1.2 million characters."""
    tokenizer, begin = load_tokenizer(llama.FOLDER), len(prose) - 200_000 * len(PASSAGES)
    starts = [begin + 200_000 * at for at in PASSAGES]
    return [torch.tensor(tokenizer.encode(prose[s : s + 8000]).ids[: TOKENS + 1]) for s in starts]


@pytest.fixture(scope="module")
def calibration(prose: str) -> tuple[dict[str, Tensor], int]:
    """What the matrices multiply while pieces of all the text before the passages run."""
    pytest.importorskip("transformers", reason="calibration needs transformers")
    names = weights_to_round(TensorFolder(llama.FOLDER), LEFT_ALONE)
    # A few rows of the text run: more than these pieces would be turned into tokens for nothing.
    starts = range(0, len(prose) - 200_000 * len(PASSAGES) - 2500, 100_000)
    return run_text(llama.FOLDER, "".join(prose[start : start + 2500] for start in starts), names)


def perplexity_of_all(folder: Path, passages: list[Tensor]) -> float:
    """Of all passages together."""
    model = llama.load(folder, pages=32)
    logs = [math.log(perplexity(logits_of(model, text), text)) for text in passages]
    return math.exp(sum(logs) / len(logs))


@pytest.fixture(scope="module")
def plain_of_all(passages: list[Tensor]) -> float:
    """Of the model as it is shipped."""
    return perplexity_of_all(llama.FOLDER, passages)


@pytest.mark.long
@pytest.mark.parametrize(
    "form", [f if f == "int4" else pytest.param(f, marks=pytest.mark.slow) for f in LAYOUTS]
)
def test_gptq_reads_text_that_it_was_not_calibrated_by_no_worse_than_the_nearest(
    form: str, tmp_path: Path, passages: list[Tensor], calibration: Any, plain_of_all: float
) -> None:
    """Perplexity within the format's bound of the unquantized model's, and beside rounding to the nearest."""
    grams, tokens = calibration
    found = {}
    for method in ("nearest", "gptq"):
        quantize_folder(llama.FOLDER, tmp_path / method, form, method=method, grams=grams, tokens=tokens)
        found[method] = perplexity_of_all(tmp_path / method, passages)
    assert found["gptq"] / plain_of_all <= PERPLEXITY_GPTQ[form]
    assert found["gptq"] <= PERPLEXITY_GPTQ_OVER_NEAREST * found["nearest"]


@pytest.mark.parametrize("form", CODES)
def test_keys_and_values_in_eight_bits_read_the_text_nearly_as_well(
    form: str, text: Tensor, plain: float
) -> None:
    """Perplexity within the format's bound; a token at a time is what one prefill is, but for codes that a
    last bit of their key turned."""
    model = llama.load(pages=32, kv_dtype=CODES[form])
    logits = logits_of(model, text)
    assert 0.97 <= perplexity(logits, text) / plain <= PERPLEXITY_KV[form]
    with lz.start(SETTINGS, scoped=True), model.sequence(24) as sequence:
        steps = [model.step_batch(text[i : i + 1], [sequence.extend(1)]) for i in range(24)]
    torch.testing.assert_close(torch.cat(steps), logits[:24], atol=0.1, rtol=0.05)


def test_matrices_are_joined_where_their_scales_allow_it() -> None:
    """Joined or one by one: the same product; formats with a scale for the whole are not joined."""
    x, rows = torch.randn(3, 64), [torch.randn(size, 64) for size in (32, 16, 64)]
    for form, granularity in (
        ("int4", "group"), ("int8", "row"), ("fp8_e4m3", "block"), ("fp8_e4m3", "tensor"), ("nvfp4", "group"),
    ):  # fmt: skip
        size = {"block": 16, "group": 16 if form == "nvfp4" else 32}.get(granularity)
        made: list[Any] = [
            QuantizedTensor.quantize(row, form, granularity=granularity, group_size=size) for row in rows
        ]
        weight = weights.joined(made)
        assert isinstance(weight, tuple) == (granularity == "tensor" or form == "nvfp4")
        out = llama.run_sync(weights.project(llama.BLOCKING, x, weight, torch.ones(112)))
        numbers = torch.cat([each.dequantize() for each in made])
        torch.testing.assert_close(out, x @ numbers.T + 1.0, rtol=1e-4, atol=1e-4)


def test_requests_of_the_server_draw_the_same_texts_alone_and_in_company(tmp_path: Path) -> None:
    """The engine over quantized weights and float8 keys and values, as the server's options name them."""
    from server.app import parse
    from server.engine import Engine
    from server.protocol import Sampling
    from server.service import KV_FORMATS

    quantize_folder(llama.FOLDER, tmp_path / "int8", "int8")
    options = parse(["--model", str(tmp_path / "int8"), "--kv-format", "fp8_e4m3"])
    model = llama.load(options.model, pages=64, kv_dtype=KV_FORMATS[options.kv_format])
    engine = Engine(model, frozenset())

    async def drawn(prompt: list[int]) -> list[int]:
        return [one.token async for one in engine.generate(prompt, Sampling(temperature=0), 6)]

    async def alone_and_together() -> tuple[list[list[int]], list[list[int]]]:
        prompts = [[0, 5, 9], [0, 7], [0, 11, 12, 13]]
        alone = [await drawn(prompt) for prompt in prompts]
        return alone, list(await asyncio.gather(*map(drawn, prompts)))

    with lz.start(SETTINGS, scoped=True):
        alone, together = asyncio.run(alone_and_together())
    assert alone == together and all(len(tokens) == 6 for tokens in alone)
    allocator = model.cache.allocator
    assert model.cache.k_cache.dtype == torch.float8_e4m3fn and model.cache.scales[0][1] is not None
    assert allocator.total - allocator.free_pages >= 0


@pytest.mark.long
def test_the_server_answers_from_a_quantized_folder_over_pages_of_eight_bits(tmp_path: Path) -> None:
    """Completions with weights of eight bits and float8 keys and values: the text that the model draws."""
    pytest.importorskip("openai", reason="the client of the server's interface")
    from server.app import parse

    from tests.examples import loopback
    from tests.examples.serving import asked, serving

    quantize_folder(llama.FOLDER, tmp_path / "int8", "int8")
    options = parse(["--model", str(tmp_path / "int8"), "--kv-format", "fp8_e4m3", "--pages", "64"])
    with serving(options) as server:
        request = asked(model="int8", temperature=0, max_tokens=8)
        url = f"{server.url}/v1/completions"
        texts = [loopback.post(url, json=request, timeout=60).json() for _ in range(2)]
        assert texts[0]["choices"][0]["text"] == texts[1]["choices"][0]["text"] != ""
        cache = server.service.model.cache
        assert cache.k_cache.dtype == torch.float8_e4m3fn and cache.scales[0][0] is not None
