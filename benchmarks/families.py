"""Compare the logits of every family of transformers, patched and as it was, on small random models.

Run `OMP_NUM_THREADS=1 python -m benchmarks.families --json benchmarks/results/families_cpu.json`. A family
is one entry of transformers' mapping for causal language models, for masked ones (encoders), for sequences
from sequences (encoder-decoders), or for classes of images (vision); its configuration is made small, its
weights are random, float32. A batch without padding and, of text, a padded one go through the model before
and after `lz.patch`; what is compared is the largest difference of a logit at a real token, beside the
largest logit. `ops` counts the calls of each op, `not_served` says why a module computes by itself.
"""

from __future__ import annotations

import argparse
import inspect
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import layerzero as lz
from benchmarks.harness import environment, write


# Sizes by the names that configurations have for them; what a configuration does not name is left out.
def _sizes(**names: str) -> dict[str, Any]:
    """Every name with its size: `_8="rotary_dim"` is {"rotary_dim": 8}."""
    return {name: int(size[1:]) for size, listed in names.items() for name in listed.split()}


_WIDTH = _sizes(
    _64="hidden_size d_model n_embd dim word_embed_proj_dim embedding_size",
)
_INNER = _sizes(
    _96=(
        "intermediate_size ffn_dim n_inner ffn_hidden_size d_ff encoder_ffn_dim decoder_ffn_dim "
        "dense_intermediate_size block_ff_dim "
    ),
    _32=(
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "expert_ffn_hidden_size "
    ),
)
_LAYERS = _sizes(
    _2=(
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers attn_layer_period "
        "num_decoder_layers "
    ),
    _1="first_k_dense_replace num_dense_layers attn_layer_offset num_mem_blocks",
    _0="num_kv_shared_layers num_nextn_predict_layers",
)
_HEADS = _sizes(
    _4=(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "swa_num_attention_heads "
    ),
    _2="num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads",
    _16=("head_dim kv_channels attention_head_dim swa_head_dim swa_v_head_dim global_head_dim v_head_dim "),
    _8="rotary_dim attention_window",
    _64="attention_hidden_size",
)
_EXPERTS = _sizes(
    _4="num_experts n_routed_experts num_local_experts moe_num_experts",
    _2="num_experts_per_tok moe_topk moe_k top_k_experts num_experts_per_token",
    _1="n_group topk_group n_shared_experts zero_expert_num",
)
_LATENT = _sizes(
    _16="kv_lora_rank q_lora_rank o_lora_rank index_head_dim",
    _8="qk_rope_head_dim qk_nope_head_dim",
    _3="index_topk",
    _2="index_n_heads",
)
_STATE = _sizes(
    _4="mamba_n_heads mamba_num_heads linear_num_value_heads mamba_dt_rank",
    _32="mamba_d_head mamba_head_dim",
    _16="mamba_d_state ssm_state_size state_size linear_key_head_dim linear_value_head_dim",
    _1="mamba_n_groups n_groups",
    _8="mamba_chunk_size chunk_size",
    _2="linear_num_key_heads",
    _64="lru_width",
    _128="mamba_d_ssm",
)
_OTHER = _sizes(
    _97="vocab_size vocab_size_per_layer_input",
    _64="max_position_embeddings n_positions max_seq_len seq_length",
    _5="sliding_window",
    _0="pad_token_id",
    _1="bos_token_id",
    _2="eos_token_id",
    _16="hidden_size_per_layer_input",
    _32="image_size",
    _8="patch_size",
)
_LAYERS["hybrid_layer_ids"] = [1]
_OTHER["is_decoder"] = True
# What is tried in turn until a family builds and runs: fewer and fewer names, and as many key heads as heads.
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {**_WIDTH, **_INNER, **_LAYERS, **_HEADS, **_EXPERTS, **_LATENT, **_STATE, **_OTHER},
    {**_WIDTH, **_INNER, **_LAYERS, **_HEADS, **_EXPERTS, **_LATENT, **_STATE, **_OTHER,
     "num_key_value_heads": 4, "num_kv_heads": 4, "num_hidden_layers": 4},
    {**_WIDTH, **_INNER, **_LAYERS, **_HEADS, **_EXPERTS, **_LATENT, **_OTHER, "head_dim": None},
    {**_WIDTH, **_INNER, **_LAYERS, **_HEADS, **_EXPERTS, **_OTHER, "head_dim": None},
    {**_WIDTH, **_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, **_OTHER},
    {"num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "vocab_size": 97},
)  # fmt: skip
# What some families name differently, or want to fit together.
_LATENT_HEADS = {**_LATENT, "head_dim": None, "num_key_value_heads": 4, "v_head_dim": 8}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "axk1": _LATENT_HEADS,
    "deepseek_v3": _LATENT_HEADS,
    "longcat_flash": _LATENT_HEADS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_hidden_layers": None},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "num_hidden_layers": None},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["mamba", "mamba", "hybrid"]},
    "zamba2": {"num_hidden_layers": 3, "layer_types": ["mamba", "mamba", "hybrid"], "hybrid_layer_ids": [2]},
}
MOST_PARAMETERS = 60_000_000
SECONDS = 60
# Of the largest logit: what other sums of the same numbers differ by.
EQUAL = 2e-4
OPS = ("attention", "layer_norm", "mlp", "rms_norm", "rope")
# Of each kind of model: transformers' mapping of its families.
KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "encoder": "MODEL_FOR_MASKED_LM_MAPPING",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}


def small(kind: Any, sizes: dict[str, Any]) -> Any:
    """A configuration of its kind with the sizes that it names, nested ones too."""
    default = kind()
    own = {name: size for name, size in sizes.items() if size is not None and hasattr(default, name)}
    for name in kind.sub_configs:
        part = type(getattr(default, name, None))
        if hasattr(part, "sub_configs"):
            with suppress(Exception):  # a part that does not fit together small keeps its own sizes
                own[name] = small(part, sizes).to_dict()
    return kind(**own)


def fitting(config: Any, made: Any) -> Any:
    """The configuration that a family's class takes: its own, or its language model's."""
    if issubclass(made.config_class or object, type(config)) or hasattr(config, "vocab_size"):
        return config
    if hasattr(config, "decoder"):
        return config.decoder
    return config.get_text_config()


def build(family: str, kind: str = "causal") -> tuple[Any, str]:
    """A small random model of the family, and why it could not be built where there is none."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    why = ""
    for attempt in ATTEMPTS:
        sizes = {**attempt, **OWN_SIZES.get(family, {})}
        if kind != "causal":
            sizes.pop("is_decoder", None)
        try:
            configuration = CONFIG_MAPPING[family]
            made: Any = getattr(modeling_auto, KINDS[kind])[configuration]
            made = made[0] if isinstance(made, tuple | list) else made
            config = small(configuration, sizes)
            config = config if kind == "vision" else fitting(config, made)
            with torch.device("meta"):
                many = sum(p.numel() for p in made(config).parameters())
            if many > MOST_PARAMETERS:
                raise ValueError(f"{many} parameters")
            torch.manual_seed(0)
            model = made(config).eval().float()
            for name, parameter in model.named_parameters():
                if name.endswith("sinks") or not parameter.isfinite().all():
                    torch.nn.init.normal_(parameter)
            with torch.no_grad():
                for given in batches(model, kind):
                    logits(model, given)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            continue
        return model, ""
    return None, why


def batches(model: Any, kind: str = "causal") -> list[dict[str, Tensor]]:
    """One batch without padding, and one padded on the left; of images one."""
    draw = torch.Generator().manual_seed(1)
    if kind == "vision":
        config = model.config
        size = next((v for n in ("image_size", "input_size") if (v := getattr(config, n, None))), 64)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        return [
            {
                "pixel_values": torch.randn(
                    2, getattr(config, "num_channels", 3), height, width, generator=draw
                )
            }
        ]
    ids = torch.randint(3, 97, (2, 12), generator=draw)
    mask = torch.arange(12).flip(0) < torch.tensor([12, 7])[:, None]
    takes_both = kind == "encoder-decoder" and model.config.is_encoder_decoder
    target = {"decoder_input_ids": ids[:, :6]} if takes_both else {}
    return [{"input_ids": ids, **target}, {"input_ids": ids, "attention_mask": mask.long(), **target}]


def logits(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The logits at real tokens."""
    text = "decoder_input_ids" not in given and "input_ids" in given
    found: Tensor = model(**given, **({"use_cache": False} if text and _caches(model) else {})).logits
    mask = given.get("attention_mask")
    return found if mask is None or not text else found[mask.bool()]


def _caches(model: Any) -> bool:
    return any(name in inspect.signature(model.forward).parameters for name in ("use_cache", "kwargs"))


@contextmanager
def counted(calls: Counter[str]) -> Iterator[None]:
    """Count each call that a patched model makes of the ops."""

    def counting(name: str, run: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return run(*args, **kwargs)

        return call

    ours = {name: counting(name, getattr(lz.sync, name)) for name in OPS}
    with mock.patch.multiple(lz.sync, **ours):
        yield


def compare(family: str, runtime: lz.Runtime, kind: str = "causal") -> dict[str, Any]:
    """What became of a family: its state, the largest difference and logit, the ops, and what fell back."""
    model, why = build(family, kind)
    if model is None:
        return {"state": "not built", "why": why}
    counters = runtime.device().counters
    before = _fallbacks(counters)
    calls: Counter[str] = Counter()
    with torch.no_grad():
        theirs = [logits(model, given) for given in batches(model, kind)]
        own = str(model.config._attn_implementation)
        try:
            table = lz.patch_table(lz.patch(model))
        except ValueError as error:
            return {"state": "nothing to patch", "why": str(error).splitlines()[0]}
        with counted(calls):
            ours = [logits(model, given) for given in batches(model, kind)]
    after = _fallbacks(counters)
    fell = {name: int(n - before.get(name, 0)) for name, n in after.items() if n > before.get(name, 0)}
    apart = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    largest = max(float(t.abs().max()) for t in theirs)
    row: dict[str, Any] = {
        "before": own,
        "ops": dict(sorted(calls.items())),
        "apart": apart,
        "largest": largest,
    }
    row["not_served"] = {
        f"{r.part}: {r.module}": r.why for r in table.rows if r.op is None and r.part != "loss"
    }
    state = "equal" if apart <= EQUAL * largest else "differs"
    if fell:
        return {"state": f"{state}, falls back", "arguments": fell, **row}
    return {"state": state if calls["attention"] else f"{state}, without attention", **row}


def _fallbacks(counters: Any) -> dict[str, float]:
    """Calls that went to a model's own implementation, by what sent them there."""
    names = ("own_attention", "own_forward")
    return {
        " ".join(value for _, value in series.labels): count
        for series, count in counters.snapshot().items()
        if series.name in names
    }


class Slow(Exception):
    """A family took too long."""


def _stop(*_: Any) -> None:
    raise Slow(f"more than {SECONDS} s")


def all_families(kind: str = "causal") -> list[str]:
    """Every family of a kind's mapping."""
    from transformers.models.auto import modeling_auto

    return sorted(getattr(modeling_auto, f"{KINDS[kind]}_NAMES"))


def kinds_table(found: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """How many families of each kind ended in each state, and how many of them call each op."""
    states = (
        "equal",
        "equal, without attention",
        "equal, falls back",
        "differs",
        "nothing to patch",
        "not built",
    )
    rows: list[list[Any]] = []
    for kind, families in found.items():
        counts = Counter(row["state"] for row in families.values())
        calls = Counter(op for row in families.values() for op in row.get("ops", {}))
        rows.append([kind, len(families), *(counts[state] for state in states), *(calls[op] for op in OPS)])
    return {"columns": ["kind", "families", *states, *(f"`{op}`" for op in OPS)], "rows": rows}


def run(kind: str, families: list[str], runtime: lz.Runtime) -> dict[str, dict[str, Any]]:
    """Compare families of one kind, each for at most `SECONDS`."""
    found: dict[str, dict[str, Any]] = {}
    for family in families:
        signal.alarm(SECONDS)
        try:
            found[family] = compare(family, runtime, kind)
        except Exception as error:
            words = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            found[family] = {"state": "failed", "why": words}
        finally:
            signal.alarm(0)
        print(kind, family, found[family], flush=True)
    return found


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--kind", choices=list(KINDS), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _stop)
    with lz.start(lz.Settings.load(warm="off", device="cpu")) as runtime:
        found = {
            kind: run(kind, options.families or all_families(kind), runtime) for kind in options.kind or KINDS
        }
        troubled = [standing.kernel for standing in runtime.device().health.statuses()]
    table = kinds_table(found)
    print(table, troubled)
    if options.json is not None:
        record = {
            "environment": environment(("transformers",)),
            "equal_below": EQUAL,
            "tables": {"kinds": table},
            "kernels_in_trouble": troubled,
            "families": found,
        }
        write(options.json, record)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
