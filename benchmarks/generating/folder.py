"""A folder of a Llama without weights: its shape, and a tokenizer whose tokens are words of four letters.

Two servers that fill such a model with random weights give texts by which a client counts tokens, and both
do the work of turning tokens into text.
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    "max_position_embeddings": 2048, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY = LLAMA_8B | {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "torch_dtype": "float32",
}  # fmt: skip


def write_folder(folder: Path, config: dict[str, Any]) -> None:
    """Write config and tokenizer of a model of this shape."""
    letters = itertools.product(string.ascii_lowercase, repeat=4)
    words = {
        "".join(word): number for number, word in enumerate(itertools.islice(letters, config["vocab_size"]))
    }
    spaces = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **spaces}, "post_processor": None,
        "decoder": {"type": "ByteLevel", **spaces},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": words, "merges": [],
        },
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    own = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
