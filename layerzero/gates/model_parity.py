"""One model of transformers on our ops beside the same model in float64: layers, outputs, tokens, gradients.

A row is one comparison. What it allows is a fixed bound, or twice what the model errs by itself in float32
where that is more: the sizes of hidden states are the model's. Red flags are what a table of rows shows that
no single one does.
"""

from __future__ import annotations

import copy
import importlib
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from layerzero.integrations import patch, patch_table, unpatch
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.tolerances import PARITY_EMBEDDING_GRADIENT, PARITY_LATER_GRADIENT, PARITY_LOGITS

# A difference above this is no rounding, whatever a row allows.
FAR = 1.0
# So many layers or checkpoints in a row, each so many times as far off as the one before it.
GROWING, GROWTH = 3, 4.0
# So many times as far off as the median of the other layers.
WORSE = 50.0
# Differences below this are rounding, whatever they do.
NOISE = 1e-6
_LAYER = re.compile(r"layer (\d+) output")


@dataclass(frozen=True)
class Row:
    """One comparison: what, where from, the largest absolute difference, and what is allowed."""

    what: str
    where: str
    difference: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.difference < self.allowed  # a NaN does not


def largest(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference of two tensors; infinite where their shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    return (got.detach().double() - want.detach().double()).abs().max().item()


def red_flags(rows: Sequence[Row]) -> list[str]:
    """What is wrong beyond single bounds, in words; empty where nothing is.

    A difference above 1 or that is no number; differences that grow from layer to layer; and one layer that
    is far worse than the others of its model.
    """
    flags = [
        f"{row.what} ({row.where}) is {row.difference:.3g} apart" for row in rows if not row.difference <= FAR
    ]
    for where, series in _by_layer(rows):
        flags += [f"{words} ({where})" for words in (*_growth(series), *_outliers(series))]
    return flags


def _by_layer(rows: Sequence[Row]) -> Iterator[tuple[str, list[float]]]:
    """The differences of a model's layers, in their order."""
    places: dict[str, dict[int, float]] = {}
    for row in rows:
        layer = _LAYER.fullmatch(row.what)
        if layer:
            places.setdefault(row.where, {})[int(layer[1])] = row.difference
    for where, layers in places.items():
        yield where, [layers[index] for index in sorted(layers)]


def _growth(series: list[float]) -> Iterator[str]:
    grown = 0
    for index in range(1, len(series)):
        before = max(series[index - 1], NOISE)
        grown = grown + 1 if series[index] > GROWTH * before else 0
        if grown == GROWING:
            first = index - GROWING
            yield f"differences grow {GROWTH:g} times a layer or more from layer {first} on"


def _outliers(series: list[float]) -> Iterator[str]:
    for index, value in enumerate(series):
        # What comes behind a bad layer is bad as well: it is worse than those before it.
        before = series[:index]
        usual = max(statistics.median(before), NOISE) if before else NOISE
        if len(before) >= 2 and value > WORSE * usual and series[index - 1] <= WORSE * usual:
            yield f"layer {index} is {value / usual:.0f} times as far off as the layers before it"
            return


# -- a whole model ----------------------------------------------------------------------------------------

# Rows of a batch and tokens of a row; the last row ends with padding. (In front of it, rows see nothing, and
# what those hold is no one's to say.)
BATCH, TOKENS, PADDED = 2, 24, 5
NEW_TOKENS = 8
SEED: Final = 11


class ChecklistItem(msgspec.Struct, frozen=True):
    """One line of the checklist: what has to hold, whether it does (None: it says nothing here), and why."""

    what: str
    holds: bool | None
    evidence: str


class ModelParity(msgspec.Struct, frozen=True, kw_only=True):
    """A model's checklist, and the comparisons that it rests on."""

    model: str
    checklist: tuple[ChecklistItem, ...]
    rows: tuple[Row, ...]
    flags: tuple[str, ...]
    parts: str

    @property
    def passed(self) -> bool:
        """Whether everything that has a meaning for the model holds."""
        return all(item.holds is not False for item in self.checklist)


def compare_model(source: str | Mapping[str, Any], device: torch.device | str = "cpu") -> ModelParity:
    """Compare a patched model with itself in float64, and say what of the checklist for new models holds.

    `source` is a folder or a name of the hub, or the fields of a configuration with its `model_type`, for
    random weights.

    Raises: ConfigurationError: there is no such model, or its inputs are no token ids.
    """
    model, weights = _load(source)
    name = source if isinstance(source, str) else str(source.get("model_type"))
    judge = copy.deepcopy(model).double()
    # Eager attention takes its softmax in float32, whatever the model is in.
    judge.set_attn_implementation("sdpa" if judge._supports_sdpa else "eager")
    ours = model.to(device)
    plain = [observe(ours, device), observe(judge, "cpu")]
    try:
        patch(ours)
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}", model=name) from error
    table = patch_table(ours)
    patched = observe(ours, device)
    unpatch(ours)
    back = observe(ours, device)
    rows = tuple(_rows(name, patched, plain[1], plain[0]))
    flags = tuple(red_flags(rows))
    remaining = [f"{row.count} {row.module} ({row.why})" for row in table.rows if row.op is None]
    replaced = sum(row.count for row in table.rows if row.op is not None)
    count = sum(parameter.numel() for parameter in ours.parameters())
    checklist = (
        ChecklistItem("it loads", True, f"{type(ours).__name__}, {count:,} parameters, {weights}"),
        ChecklistItem(
            "its parts run on our ops",
            replaced > 0,
            f"{replaced} modules do" + (f"; its own stay {'; '.join(remaining)}" if remaining else ""),
        ),
        *(_item(rows, what, prefix) for what, prefix in _CHECKED.items()),
        ChecklistItem("no red flag", not flags, "; ".join(flags) or "none"),
        ChecklistItem(
            "`unpatch` gives the model back",
            all(torch.equal(back[key], plain[0][key]) for key in back),
            "its outputs, tokens and gradients are compared bit by bit",
        ),
    )
    return ModelParity(model=name, checklist=checklist, rows=rows, flags=flags, parts=str(table))


# What the checklist says of rows whose name begins so.
_CHECKED: Final[Mapping[str, str]] = {
    "hidden states of every layer hold": "layer ",
    "outputs hold, padding among them": "outputs",
    "the most likely tokens are the same": "top-1",
    "tokens generated with a cache are the same": "generated",
    "gradients hold": "gradient",
}


def _item(rows: Sequence[Row], what: str, prefix: str) -> ChecklistItem:
    compared = [row for row in rows if row.what.startswith(prefix)]
    if not compared:
        return ChecklistItem(what, None, "the model has none")
    worst = max(compared, key=lambda row: (not row.holds, row.difference / row.allowed))
    nearest = f"{worst.what}, {worst.difference:.3g} of {worst.allowed:.3g}"
    text = f"{len(compared)} compared; nearest the limit: {nearest}"
    return ChecklistItem(what, all(row.holds for row in compared), text)


def _rows(where: str, patched: _Values, truth: _Values, plain: _Values) -> Iterator[Row]:
    """Each value beside the truth; how far the model is off by itself widens the bound."""
    for name, exact in truth.items():
        if name.startswith(("generated", "top-1")):
            differing = float("inf")
            if patched[name].shape == exact.shape:
                differing = float((patched[name] != exact).sum())
            yield Row(name, where, differing, 0.5)
            continue
        allowed = next(bound for prefix, bound in _BOUNDS.items() if name.startswith(prefix))
        allowed = max(allowed, 2 * largest(plain[name], exact))
        yield Row(name, where, largest(patched[name], exact), allowed)


_Values = dict[str, Tensor]
_BOUNDS: Final[Mapping[str, float]] = {
    "layer ": PARITY_LOGITS,
    "outputs": PARITY_LOGITS,
    "gradient of embeddings": PARITY_EMBEDDING_GRADIENT,
    "gradient": PARITY_LATER_GRADIENT,
}


def observe(model: Any, device: torch.device | str) -> _Values:
    """What a model computes of seeded token ids: layers, outputs, tokens and gradients, on the CPU."""
    generator = torch.Generator().manual_seed(SEED)
    config = model.config
    pad = config.get_text_config().pad_token_id or 0
    ids = torch.randint(0, config.get_text_config().vocab_size - 1, (BATCH, TOKENS), generator=generator)
    ids = torch.where(ids >= pad, ids + 1, ids).to(device)  # no token is the padding
    mask = torch.ones_like(ids)
    mask[-1, -PADDED:] = 0
    decoder = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
    values: _Values = {}
    with torch.no_grad():
        whole = model(input_ids=ids, output_hidden_states=True, **decoder)
        names = ("encoder_hidden_states", "decoder_hidden_states", "hidden_states")
        states = [state for name in names for state in getattr(whole, name, None) or ()]
        for number, state in enumerate(states[1:]):
            values[f"layer {number} output"] = state
        values["outputs"] = whole[0]
        padded = model(input_ids=ids, attention_mask=mask, **decoder)[0]
        values["outputs of a padded batch"] = padded[mask.bool()] if not decoder else padded
        if hasattr(whole, "logits"):
            values["top-1 tokens"] = whole.logits.argmax(-1)
        if model.can_generate():
            values["generated tokens"] = model.generate(
                ids[:1], max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
                pad_token_id=pad,
            )  # fmt: skip
    values |= _gradients(model, ids, decoder)
    return {name: value.detach().cpu() for name, value in values.items()}


def _gradients(model: Any, ids: Tensor, decoder: Mapping[str, Tensor]) -> _Values:
    """The gradient of every weight in one step: of the model's own loss where it has one."""
    labels = {"labels": ids} if model.can_generate() else {}
    result = model(input_ids=ids, **decoder, **labels)
    (result.loss if labels else result[0].pow(2).mean()).backward()
    inputs = model.get_input_embeddings().weight
    gradients: _Values = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            gradients[f"gradient of {'embeddings' if weight is inputs else name}"] = weight.grad
            weight.grad = None
    return gradients


def _load(source: str | Mapping[str, Any]) -> tuple[Any, str]:
    """The model in float32 with eager attention, and where its weights are from.

    Raises: ConfigurationError: there is none, or its inputs are no token ids.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigurationError(f"comparing models needs transformers: {error}") from error
    torch.manual_seed(SEED)
    try:
        if isinstance(source, str):
            config = transformers.AutoConfig.from_pretrained(source)
        else:
            config = transformers.AutoConfig.for_model(**source)
        kind = next((getattr(transformers, each, None) for each in config.architectures or ()), None)
        if kind is None:
            words = "SEQ_TO_SEQ_CAUSAL_LM" if config.is_encoder_decoder else "CAUSAL_LM"
            has_head = type(config) in getattr(transformers, f"MODEL_FOR_{words}_MAPPING")
            head = "ForSeq2SeqLM" if config.is_encoder_decoder else "ForCausalLM"
            kind = getattr(transformers, f"AutoModel{head if has_head else ''}")
        folder = Path(source) if isinstance(source, str) else None
        if folder is None or (folder.is_dir() and not any(folder.glob("*.safetensors"))):
            build = getattr(kind, "from_config", None) or kind._from_config
            model, weights = build(config, attn_implementation="eager"), "random weights"
        else:
            model = kind.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
            weights = f"weights of {source}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        first_line = str(error).strip().partition("\n")[0][:300]
        raise ConfigurationError(
            f"model needs a folder or name of a transformers model, got {source!r}: {first_line}",
            model=str(source),
        ) from error
    if model.main_input_name != "input_ids":
        raise ConfigurationError(
            f"model needs token ids as its input, {type(model).__name__} takes {model.main_input_name}",
            model=str(source),
        )
    return model.float().eval(), weights
