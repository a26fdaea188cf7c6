"""Train the small Llama model that the generation example ships: tokenizer, weights, held-out bits per byte.

    python examples/train.py [--device cuda] [--steps 2600] [--out FOLDER]

It reads `data/generate/prose.txt.xz` (the King James Version, in the public domain), keeps every 20th chapter
out of training, and writes a folder in Hugging Face's Llama shape. Minutes on a GPU, hours on a CPU;
`--steps 20` shows that it runs. The weights kept are those of the best held-out loss.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "data" / "generate"
HOLD_OUT = 20  # chapters 10, 30, 50, ... are never trained on
VOCAB, CHANNELS, INNER, LAYERS, HEADS, KV_HEADS = 1024, 256, 640, 4, 8, 4
HEAD = CHANNELS // HEADS
EPS, BASE, POSITIONS = 1e-5, 10000.0, 4096
# Most steps see short windows; the last fifth sees whole contexts, so that late positions are trained too.
SHORT, TOKENS_A_STEP, LONG_FROM = 512, 32_768, 0.8
STRIDE = 256


def chapters(folder: Path = FOLDER) -> list[str]:
    """The chapters of the prose: a line of book and number, then one verse a line."""
    text = lzma.decompress((folder / "prose.txt.xz").read_bytes()).decode()
    return [chapter for chapter in text.split("== ") if chapter]


def is_held_out(index: int) -> bool:
    """Whether chapter `index` serves measuring only."""
    return index % HOLD_OUT == HOLD_OUT // 2


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB entries; `<s>` opens a text, `</s>` closes it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    return tokenizer


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (CHANNELS,), self.weight, EPS)


class Attention(nn.Module):
    """Causal attention with grouped keys and values and rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(CHANNELS, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(CHANNELS, KV_HEADS * HEAD, bias=False)
        self.v_proj = nn.Linear(CHANNELS, KV_HEADS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, CHANNELS, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self._parts())
        q, k = _turn(q, cos, sin), _turn(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out

    def _parts(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj


class Feedforward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(CHANNELS, INNER, bias=False)
        self.up_proj = nn.Linear(CHANNELS, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, CHANNELS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer; the names are those of Hugging Face's Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self.self_attn = Attention()
        self.post_attention_layernorm = Norm()
        self.mlp = Feedforward()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dropout: float) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(mixed, dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), dropout, self.training)


class Decoder(nn.Module):
    """The model, in training: (B, S) ids to (B, S, V) logits; the embedding is the output matrix as well."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(VOCAB, CHANNELS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()
        speeds = BASE ** -(torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
        angles = torch.outer(torch.arange(POSITIONS, dtype=torch.float64), speeds)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * LAYERS) if deep else 1.0))

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]  # type: ignore[index]
        x = F.dropout(self.embed_tokens(ids), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, cos, sin, self.dropout)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Text:
    """The prose as tokens: one training stream, and the held-out chapters apart."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], device: torch.device) -> None:
        end = tokenizer.token_to_id("</s>")
        tokens = [[*tokenizer.encode(text).ids, end] for text in texts]
        training = [ids for index, ids in enumerate(tokens) if not is_held_out(index)]
        self.stream = torch.tensor([token for ids in training for token in ids], device=device)
        held_out = [index for index in range(len(texts)) if is_held_out(index)]
        self.held_out = [torch.tensor(tokens[index], device=device) for index in held_out]
        self.held_out_bytes = sum(len(texts[index].encode()) for index in held_out)

    def window(self, length: int, generator: torch.Generator) -> Tensor:
        """TOKENS_A_STEP // length windows of length + 1 tokens at random places."""
        count = max(TOKENS_A_STEP // length, 1)
        starts = torch.randint(len(self.stream) - length, (count,), generator=generator)
        index = starts[:, None] + torch.arange(length + 1)
        return self.stream[index.to(self.stream.device)]


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Text) -> float:
    """Bits that the model needs for the held-out chapters, by their bytes; each token has context before it.

    Windows of 2 * STRIDE tokens move by STRIDE; what is predicted once is not counted again.
    """
    model.eval()
    nats = torch.zeros((), dtype=torch.float64)
    for ids in text.held_out:
        for start, counted in _windows(len(ids)):
            piece = ids[start : start + 2 * STRIDE + 1]
            losses = F.cross_entropy(model(piece[None, :-1])[0].float(), piece[1:], reduction="none")
            nats += losses[counted:].double().sum().cpu()
    model.train()
    return float(nats) / math.log(2) / text.held_out_bytes


def _windows(tokens: int) -> Iterator[tuple[int, int]]:
    """(start, predictions that an earlier window has counted)."""
    start = 0
    while True:
        yield start, 0 if start == 0 else STRIDE
        if start + 2 * STRIDE + 1 >= tokens:
            return
        start += STRIDE


def train(model: Decoder, text: Text, options: argparse.Namespace) -> tuple[dict[str, Tensor], list[Any]]:
    """Train, and return the best weights by held-out loss with the log of every measurement."""
    device = text.stream.device
    generator = torch.Generator().manual_seed(options.seed)
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    rest = [weight for weight in model.parameters() if weight.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.decay}, {"params": rest, "weight_decay": 0.0}],
        lr=options.rate,
        betas=(0.9, 0.95),
    )
    best, best_weights, log, began = math.inf, {}, [], time.perf_counter()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * _schedule(step, options.steps)
        ids = text.window(POSITIONS if step >= LONG_FROM * options.steps else SHORT, generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % options.measure == options.measure - 1 or step == options.steps - 1:
            held_out = bits_per_byte(model, text)
            seconds = time.perf_counter() - began
            log.append({"step": step + 1, "loss": round(loss.item(), 4), "bits_per_byte": round(held_out, 4)})
            print(f"{log[-1]} after {seconds:.0f} s", flush=True)
            if held_out < best:
                best = held_out
                best_weights = {
                    name: weight.detach().cpu().clone() for name, weight in model.named_parameters()
                }
    return best_weights, log


def _schedule(step: int, steps: int) -> float:
    """A hundred steps up, then half a cosine down to a twentieth."""
    warm = min(100, max(steps // 10, 1))
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))


def write(folder: Path, weights: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """The folder as Hugging Face's Llama loads it; weights in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {f"model.{name}": weight.half().contiguous() for name, weight in weights.items()}
    save_file(stored, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": CHANNELS, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "hidden_act": "silu",
        "rms_norm_eps": EPS, "rope_theta": BASE, "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "bos_token_id": 0,
        "eos_token_id": 1, "torch_dtype": "float16",
    }  # fmt: skip
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "model_max_length": POSITIONS,
    }  # fmt: skip
    for name, value in (("config.json", config), ("tokenizer_config.json", words)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


class Stored(nn.Module):
    """The weights as they are stored, put back into a decoder: what is measured is what is shipped."""

    def __init__(self, weights: dict[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self.decoder = Decoder(0.0).to(device)
        self.decoder.load_state_dict({name: weight.half().float() for name, weight in weights.items()})

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.decoder(ids)
        return out


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the generation example's model.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--measure", type=int, default=100, help="steps between held-out measurements")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1611)
    parser.add_argument("--out", type=Path, default=FOLDER)
    return parser.parse_args()


def main() -> None:
    """Train, write the folder, and print what the stored weights reach."""
    options = parse()
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    texts = chapters()
    tokenizer = train_tokenizer([text for index, text in enumerate(texts) if not is_held_out(index)])
    text = Text(tokenizer, texts, device)
    print(f"{len(text.stream)} training tokens, {text.held_out_bytes} held-out bytes", flush=True)
    weights, log = train(Decoder(options.dropout).to(device), text, options)
    write(options.out, weights, tokenizer)
    reached = bits_per_byte(Stored(weights, device), text)
    numbers = {
        "held_out_bits_per_byte": round(reached, 4),
        "held_out": f"every {HOLD_OUT}th chapter, {len(text.held_out)} chapters, {text.held_out_bytes} bytes",
        "parameters": sum(weight.numel() for weight in weights.values()),
        "steps": options.steps,
        "seconds": round(time.perf_counter() - began, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "log": log,
    }
    (options.out / "training.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    print(f"held-out bits per byte of the stored weights: {reached:.4f}")


if __name__ == "__main__":
    main()
