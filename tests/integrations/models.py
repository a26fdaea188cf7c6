"""Small random models of transformers' families, and what goes into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import layerzero as lz

transformers: Any = pytest.importorskip("transformers", reason="the model library is missing: .[hf]")

_SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_SEQ2SEQ = {"vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
            "max_position_embeddings": 64}  # fmt: skip
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
           "image_size": 16, "patch_size": 8}  # fmt: skip
_GEMMA = {**_GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5}
# The class, its configuration's class, and its sizes, of every family that the documents name.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _GEMMA),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "head_dim": 8, "sliding_window": 5}),
    "phi": ("PhiForCausalLM", "PhiConfig", _SIZES),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, "pad_token_id": 0}),
    "glm": ("GlmForCausalLM", "GlmConfig", {**_GROUPED, "head_dim": 8, "pad_token_id": 0}),
    "cohere": ("CohereForCausalLM", "CohereConfig", _GROUPED),
    "granite_swa": ("GraniteSWAForCausalLM", "GraniteSWAConfig", {
        **_GROUPED, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"],
        "bos_token_id": 1, "eos_token_id": 2}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", {
        **_GROUPED, "head_dim": 16, "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
                            for kind in ("full_attention", "sliding_attention")}}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4,
                                               "n_positions": 64}),
    "opt": ("OPTForCausalLM", "OPTConfig", {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("FalconForCausalLM", "FalconConfig", _SIZES),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {
        **_SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1}),
    "bert": ("BertForMaskedLM", "BertConfig", _SIZES),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _SIZES),
    "deberta": ("DebertaV2ForMaskedLM", "DebertaV2Config", {
        **_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}),
    "deberta_first": ("DebertaForMaskedLM", "DebertaConfig", {
        **_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {
        **_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}),
    "vit": ("ViTForImageClassification", "ViTConfig", _VISION),
    "clip": ("CLIPModel", "CLIPConfig", {
        "text_config": {**_SIZES, "eos_token_id": 2}, "vision_config": _VISION, "projection_dim": 16}),
}  # fmt: skip
_OTHERS = ("bert", "roberta", "deberta", "deberta_first", "t5", "bart", "whisper", "vit", "clip")
CAUSAL = FAMILIES.keys() - set(_OTHERS)
SEQ2SEQ = frozenset({"t5", "bart"})


def build(family: str, **more: Any) -> Any:
    """A small random model in evaluation; every norm's weight is off its start."""
    kind, config, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**{**sizes, **more})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def text(*lengths: int, side: str = "left") -> dict[str, Tensor]:
    """Token ids padded to the longest, and their mask."""
    longest = max(lengths)
    ids = torch.randint(3, 97, (len(lengths), longest), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": (mask.flip(1) if side == "left" else mask).long()}


def inputs(family: str, side: str = "left", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A batch that the family's forward takes."""
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    if family == "vit":
        return {"pixel_values": image}
    if family == "whisper":
        sound = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
        return {"input_features": sound, "decoder_input_ids": text(6, 6)["input_ids"]}
    words = text(9, 5, side=side)
    if family == "clip":
        return {**words, "pixel_values": image}
    if family in SEQ2SEQ:
        return {**words, "decoder_input_ids": text(7, 7)["input_ids"]}
    return words


@torch.no_grad()
def answer(model: Any, family: str, side: str = "left", **more: Any) -> Tensor:
    """The numbers that the model gives for real tokens."""
    batch = inputs(family, side, model.dtype)
    output = model(**batch, **more)
    if family == "clip":
        return torch.cat((output.logits_per_text, output.text_embeds.flatten()[None].expand(2, -1)), 1)
    logits: Tensor = output.logits
    return (
        logits[batch["attention_mask"].bool()]
        if family in CAUSAL | {"bert", "roberta", "deberta", "deberta_first"}
        else logits
    )


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count the calls of each op that a patched model makes."""
    calls: dict[str, int] = {}

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return run(*args, **kwargs)

        return call

    names = ("attention", "layer_norm", "rms_norm", "rope", "mlp", "linear_cross_entropy")
    ours: dict[str, Any] = {name: counted(name, getattr(lz.sync, name)) for name in names}
    with mock.patch.multiple(lz.sync, **ours):
        yield calls
