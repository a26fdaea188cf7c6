"""vLLM as a peer, driven by lines of JSON: offline greedy decoding of random prompts by random weights.

    python benchmarks/vllm_offline.py < requests    # {"context": 128, "requests": 64, "few": 8, "many": 104}

Run by benchmarks/engines.py under an environment of its own that has vLLM. The answer to a line is what one
step took: the difference between generating `many` and `few` tokens for all requests, so that prompts, queues
and start-up stand on neither side; and the tokens of the longer run. CUDA graphs, FlashAttention-3,
asynchronous scheduling and the prefix cache are vLLM's defaults and stay on; the cache is emptied before each
run, so that prompts cost both runs the same.

A line with `fewest`, `most` and `seconds` instead of `few` and `many` asks for requests that come and go:
each ends after `fewest` to `most` tokens, and another one with the same prompt takes its place at once. Their
prompts are in the prefix cache but for one token, so that a new request costs a row of a step and no more.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from generating.folder import LLAMA_8B

for name, value in {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}.items():  # fmt: skip
    os.environ.setdefault(name, value)

PAGE = 16  # tokens of one page of vLLM's prefix cache


def coming(engine: Any, wanted: dict[str, Any]) -> float:
    """Milliseconds that one token of each of so many requests takes, where requests end and begin anew."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    draw, requests = random.Random(wanted["seed"]), wanted["requests"]
    length = wanted["context"] // PAGE * PAGE + 1  # whole pages that the cache has, and one token
    seats: dict[str, int] = {}

    def begin(seat: int, name: str, tokens: int) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        prompt = tokens_input([(7 * seat + j) % 120_000 + 10 for j in range(length)])
        engine.add_request(name, prompt, params)
        seats[name] = seat

    for seat in range(requests):
        begin(seat, f"{seat}-0", draw.randint(1, wanted["most"]))
    ended, tokens, started, now = 0, 0, 0.0, 0.0
    while ended < 6 * requests or now - started < wanted["seconds"]:
        outs = [out for out in engine.step() if out.finished]
        now = time.perf_counter()
        for out in outs:
            ended += 1
            seat = seats.pop(out.request_id)
            begin(seat, f"{seat}-{ended}", draw.randint(wanted["fewest"], wanted["most"]))
            if started:
                tokens += len(out.outputs[0].token_ids)
        if not started and ended >= 2 * requests:  # every prompt is cached, and nobody is in step any more
            started = now
    while engine.has_unfinished_requests():
        engine.step()
    return (now - started) / tokens * requests * 1e3


def main() -> None:
    """Start the engine, then answer each line."""
    import vllm
    from vllm import LLM, SamplingParams

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is no answer
    begin = time.perf_counter()
    backend = os.environ.get("LZ_PEER_BACKEND")  # None: what vLLM chooses
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B | {"max_position_embeddings": 8192}))
        engine = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
            max_num_seqs=int(os.environ.get("LZ_PEER_REQUESTS", "64")), gpu_memory_utilization=0.4,
            enable_prefix_caching=True, dtype="bfloat16", attention_backend=backend,
        )  # fmt: skip

    def generated(prompts: list[Any], tokens: int) -> tuple[float, list[list[int]]]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.reset_prefix_cache()
        start = time.perf_counter()
        outs = engine.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - start
        texts = [list(out.outputs[0].token_ids) for out in outs]
        if any(len(text) != tokens for text in texts):
            raise ValueError(f"every request needs {tokens} tokens")
        return took, texts

    print(
        json.dumps(
            {
                "ready_s": time.perf_counter() - begin,
                "version": vllm.__version__,
                "pages": engine.llm_engine.vllm_config.cache_config.num_gpu_blocks,
            }
        ),
        file=answers,
        flush=True,
    )
    for line in sys.stdin:
        wanted = json.loads(line)
        if "seconds" in wanted:
            print(json.dumps({"step_ms": coming(engine.llm_engine, wanted)}), file=answers, flush=True)
            continue
        few, many = wanted["few"], wanted["many"]
        length = wanted["context"] - (many - few) // 2 - few  # so that the mean context is the one asked for
        prompts = [
            {"prompt_token_ids": [(7 * i + j) % 120_000 + 10 for j in range(max(length, 1))]}
            for i in range(wanted["requests"])
        ]
        (long_s, texts), (short_s, _) = generated(prompts, many), generated(prompts, few)
        step_s = (long_s - short_s) / (many - few)
        print(json.dumps({"step_ms": step_s * 1e3, "texts": texts}), file=answers, flush=True)


if __name__ == "__main__":
    main()
