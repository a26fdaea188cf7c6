"""transformers on the same shapes: `generate` over a batch that starts and ends together, and its continuous
batching.

`generate` begins behind a cache of `context` tokens, as the others do. Continuous batching takes prompts
only, so that its prefill is measured apart, by a run of one token each, and taken off.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import torch
from models import llama

from generating import models

TOKENS, FEW = 32, 8
PAGE = 64
# A continuous run over a long context is mostly prefill; beyond this many prompt tokens it is left out.
MOST_PROMPT_TOKENS = 20_000


def missing() -> str | None:
    """Why it cannot be measured here; None where it can."""
    return None if importlib.util.find_spec("transformers") else "transformers is not installed"


def build(name: str) -> Any:
    """transformers' Llama of the shape `name`: the shipped weights, or random ones."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if name == "shipped":
        return transformers.LlamaForCausalLM.from_pretrained(str(llama.FOLDER), dtype=torch.float32).eval()
    shape = models.SHAPES[name]
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings, rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=shape.tie_word_embeddings,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@torch.inference_mode()
def generate(model: Any, requests: int, context: int) -> dict[str, Any]:
    """Tokens a second of `generate`, greedy, every sequence of one length, once it is warm."""
    from transformers import DynamicCache

    config = model.config
    count = TOKENS if requests * context <= MOST_PROMPT_TOKENS else FEW
    shape = (requests, config.num_key_value_heads, context, config.head_dim)
    for tokens in (2, count):
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        ids = torch.randint(2, config.vocab_size, (requests, context + 1))
        begin = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=tokens,
            min_new_tokens=tokens, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        seconds = time.perf_counter() - begin
    return {"tokens_per_s": round(requests * count / seconds, 1), "mean_batch": float(requests)}


def continuous(model: Any, requests: int, context: int) -> dict[str, Any]:
    """Tokens a second of its continuous batching, less the prefill; or why there is no number."""
    if requests * context > MOST_PROMPT_TOKENS:
        return {"refused": f"{requests} prompts of {context} tokens are mostly prefill on this CPU"}
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    # Room for every request, so that it does not size its cache by the machine's memory.
    each = -(-(context + TOKENS + 1) // PAGE)
    room = ContinuousBatchingConfig(page_size=PAGE, num_blocks=(requests + 1) * each, max_batch_tokens=2048)
    prompts = [torch.randint(2, model.config.vocab_size, (context,)).tolist() for _ in range(requests)]
    taken = []
    try:
        for count in (1, TOKENS + 1):
            how = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
            answers = model.generate_batch(
                inputs=prompts, generation_config=how, continuous_batching_config=room, progress_bar=False
            )
            given = list(answers.values())
            if len(given) != requests or any(len(one.generated_tokens) != count for one in given):
                return {"refused": f"gave {sorted({len(one.generated_tokens) for one in given})} tokens each"}
            # Building the cache and its shutdown are not in a request's own time.
            taken.append(max(t.lifespan[1] for t in given) - min(t.lifespan[0] for t in given))
    except Exception as error:  # whatever it lacks on a CPU is its result here
        return {"refused": repr(error)[:300]}
    beyond = taken[1] - taken[0]
    if beyond <= 0:
        return {"refused": f"{TOKENS} tokens took no longer than one: {taken}"}
    return {"tokens_per_s": round(requests * TOKENS / beyond, 1), "mean_batch": float(requests)}
