"""Texts that coroutines await one by one, beside the same library called by hand with all of them in a batch.

    python benchmarks/tokenizing.py [--seconds 2] [--json benchmarks/results/tokenizing_cpu.json]

Each side ends with one int64 tensor a text. `by hand` is each library's own call for a batch, `grouped` the
same call for coroutines that wait for one future: the least that awaits of single texts cost. `blocking` is
`Tokenizer.encode`, `awaited` is one `lz.tokenize` a coroutine under asyncio, `cached` the same where every
text is known. The sides take turns; a figure is the median of rounds, and `of_by_hand` the ratio of speeds.
The vocabularies are those that mistral-common and the checkout ship: no network is used.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mistral_common
import torch
from harness import environment, show, write
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tokenizers import Tokenizer as HuggingFace

import layerzero as lz

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(mistral_common.__file__).parent / "data"
SENTENCES = [
    line
    for line in (ROOT / "examples" / "data" / "sentences.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
# How many texts, of how many sentences each.
CROWDS = {"64 sentences": (64, 1), "512 sentences": (512, 1), "16 texts of 16 sentences": (16, 16)}
Batch = Callable[[list[str]], list[list[int]]]


def libraries() -> dict[str, tuple[Any, Batch]]:
    """A source of each library, and what its own call for a batch gives."""
    hugging_face = HuggingFace.from_file(str(ROOT / "examples" / "data" / "generate" / "tokenizer.json"))
    tekken = MistralTokenizer.from_file(str(DATA / "tekken_240911.json"))
    by_name: Any = tekken.instruct_tokenizer.tokenizer
    encoding = by_name._model
    pieces = MistralTokenizer.from_file(str(DATA / "mistral_instruct_tokenizer_240323.model.v3"))
    by_pieces: Any = pieces.instruct_tokenizer.tokenizer
    processor = by_pieces._model
    return {
        "tokenizers": (hugging_face, lambda texts: [e.ids for e in hugging_face.encode_batch_fast(texts)]),
        "tiktoken": (encoding, encoding.encode_ordinary_batch),
        "sentencepiece": (processor, processor.encode),
        "mistral-common": (tekken, lambda texts: [by_name.encode(text, True, False) for text in texts]),
    }


def sides(source: Any, batch: Batch, texts: list[str]) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """What takes turns; all give the same ids."""
    plain = lz.Tokenizer(source)
    cached = lz.Tokenizer(source, cache=lz.PromptCache())
    loop = asyncio.new_event_loop()  # a Runner would write its result out, to no use

    async def each(tokenizer: lz.Tokenizer) -> list[torch.Tensor]:
        found = await asyncio.gather(*(lz.tokenize(text, tokenizer) for text in texts))
        return [tokens.ids for tokens in found]

    async def grouped() -> list[torch.Tensor]:
        waiting: list[str] = []
        rows: asyncio.Future[list[list[int]]] = loop.create_future()

        async def one(text: str) -> torch.Tensor:
            if not waiting:
                loop.call_soon(lambda: rows.set_result(batch(waiting)))
            index = len(waiting)
            waiting.append(text)
            return torch.tensor((await rows)[index])

        return await asyncio.gather(*map(one, texts))

    return {
        "by hand": lambda: [torch.tensor(ids) for ids in batch(texts)],
        "grouped": lambda: loop.run_until_complete(grouped()),
        "blocking": lambda: [tokens.ids for tokens in plain.encode(texts)],
        "awaited": lambda: loop.run_until_complete(each(plain)),
        "cached": lambda: loop.run_until_complete(each(cached)),
    }


def compare(source: Any, batch: Batch, texts: list[str], seconds: float) -> dict[str, Any]:
    """Median milliseconds of a crowd by side, and how fast each is beside the library by hand."""
    runs = sides(source, batch, texts)
    expected = [ids.tolist() for ids in runs["by hand"]()]
    for name, run in runs.items():
        assert [ids.tolist() for ids in run()] == expected, name
    took: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(took["cached"]) < 5:
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            took[name].append((time.perf_counter() - began) * 1e3)
    median = {name: statistics.median(values) for name, values in took.items()}
    return {
        "texts": len(texts),
        "tokens": sum(map(len, expected)),
        "ms": {name: round(value, 3) for name, value in median.items()},
        "of_by_hand": {name: round(median["by hand"] / value, 3) for name, value in median.items()},
        "awaited_of_grouped": round(
            statistics.median(a / b for a, b in zip(took["grouped"], took["awaited"], strict=True)), 3
        ),
    }


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each library and crowd")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {
        "environment": environment(["tokenizers", "tiktoken", "sentencepiece", "mistral-common"]),
        "rows": {},
    }
    with lz.start(lz.Settings(device="cpu", inference=True, perfdb=None)):
        for name, (source, batch) in libraries().items():
            for crowd, (count, sentences) in CROWDS.items():
                texts = [
                    " ".join(SENTENCES[(at * sentences + one) % len(SENTENCES)] for one in range(sentences))
                    for at in range(count)
                ]
                record["rows"][f"{name}, {crowd}"] = compare(source, batch, texts, options.seconds)
    names = ("by hand", "grouped", "blocking", "awaited", "cached")
    rows = [
        [
            name,
            *(f"{row['ms'][side]:.2f} ms, {row['of_by_hand'][side]:.2f}" for side in names),
            f"{row['awaited_of_grouped']:.2f}",
        ]
        for name, row in record["rows"].items()
    ]
    show(
        "Milliseconds of a crowd, and speed beside the library by hand",
        ["crowd", *names, "awaited of grouped"],
        rows,
    )
    if options.json:
        write(options.json, record)


if __name__ == "__main__":
    main()
