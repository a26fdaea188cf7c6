"""Models of transformers on our ops: attention by its attention interface, other parts module by module.

An argument that the op has no meaning for sends the call to the model's own implementation, with a warning
that names it and a count; none is dropped.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

import layerzero.sync as sync
from layerzero._util import log
from layerzero.calls.blocking import context_device
from layerzero.integrations.patches import loss
from layerzero.integrations.patches.modules import (
    TAKEN,
    Patch,
    apply,
    has_own_attention,
    has_record,
    need_parts,
    substitutes,
)
from layerzero.integrations.patches.substitute import PARTS, PatchTable, Verdicts, is_taken
from layerzero.operators.choice import as_constant

NAME = "layerzero"
# For models that do not know SDPA: only their masks say that they are causal, so none is left out.
MASKED = "layerzero_masked"
# For models parts of which compute attention by themselves: those add the mask to their scores.
ADDED = "layerzero_added"
FELL_BACK = "transformers.own_attention"

# What says nothing beside the mask, or speaks to other parts of the model.
_ELSEWHERE = frozenset(
    {
        "cache_position", "ignore_index", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
        "output_router_logits", "position_ids", "shift_labels", "sliding_window", "use_cache",
    }
)  # fmt: skip
_TAKEN = _ELSEWHERE | {"position_bias", "s_aux", "softcap"}
# False asks for nothing.
_SWITCHES = frozenset({"deterministic", "output_attentions"})
# What a model puts into the mask instead where it believes to run on SDPA, as a patched one does.
_IN_THE_MASK = frozenset({"block_indices", "indices"})
_WARNED: set[tuple[str, str]] = set()
# Where transformers keeps what a model's caller asked to see of its modules.
_KEPT: Any = None


class PatchedName(str):
    """The name of our implementation in a patched model's configuration; `original` is the one before it.

    Equal to "sdpa", too: our masks and conventions are SDPA's, and models compare this name to learn them.
    """

    __slots__ = ("original",)  # without a dictionary, torch's compiler looks into none

    original: str

    def __new__(cls, original: str, name: str = NAME) -> PatchedName:
        patched = super().__new__(cls, name)
        patched.original = original
        return patched

    def __deepcopy__(self, memo: Any) -> PatchedName:
        return self  # models copy their configurations while torch's compiler looks on

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.original, str.__str__(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and _equals_ours(str.__str__(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        value: int = _hash(self)
        return value


@as_constant
def _hash(name: str) -> int:
    return str.__hash__(name)


@as_constant
def _equals_ours(name: str) -> bool:
    return name in (NAME, MASKED, ADDED, "sdpa")


def patch(model: Any, parts: Iterable[str] = PARTS) -> Any:
    """Have `model` use our ops, until `unpatch`; patched already, it stays as it is."""
    chosen = need_parts(parts)
    if has_record(model, chosen):
        return model
    verdicts = Verdicts()
    patch = Patch(PatchTable(type(model).__name__, ()), chosen)
    if "attention" in chosen:
        _patch_attention(model, patch, verdicts)
    patch.substitutes += substitutes(model, chosen, verdicts)
    if "loss" in chosen and any(hasattr(model, name) for name in ("lm_head", "loss_function")):
        causal = TAKEN if is_taken(model) else loss.substitute(model)
        if isinstance(causal, str):
            verdicts.add("loss", model, None, causal)
        else:
            verdicts.add("loss", model, causal.op)
            patch.substitutes.append(causal)
    patch.table = PatchTable(type(model).__name__, verdicts.rows())
    apply(model, patch)
    return model


def _patch_attention(model: Any, patch: Patch, verdicts: Verdicts) -> None:
    """Have every configuration of the model name our implementation, where its code asks for one."""
    _register()
    before = [(config, config._attn_implementation) for config in _configs(model)]
    if any(getattr(config, "output_attentions", False) for config, _ in before):
        for module in model.modules():
            if _asks(module):
                verdicts.add("attention", module, None, "its configuration asks for attention's weights")
        return
    if any(_asks(module) for module in model.modules()):
        model.set_attn_implementation(NAME)
    for config, original in before:
        if config._attn_implementation == NAME and type(config._attn_implementation) is str:
            # A model that shares its configuration with a patched one gets the name from before both.
            original = getattr(original, "original", original)
            with_config = [part for part in model.modules() if getattr(part, "config", None) is config]
            ours = PatchedName(original or "eager", _name_for(with_config))
            patch.set(config, "_attn_implementation_internal", original, ours)
    for module in model.modules():
        if not type(module).__name__.endswith("Attention"):
            continue
        config = getattr(module, "config", model.config)
        if _asks(module) and isinstance(getattr(config, "_attn_implementation", None), PatchedName):
            verdicts.add("attention", module, "attention")
        elif not any(_asks(part) or has_own_attention(part) for part in module.modules()):
            verdicts.add("attention", module, None, "it does not ask transformers' attention interface")


def _asks(module: Any) -> bool:
    """Whether a module's forward asks the attention interface for a function."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _name_for(models: Iterable[Any]) -> str:
    """The name of ours whose masks models, or classes of them, take: by what all of them say."""
    models = tuple(models)
    if all(getattr(model, "_supports_sdpa", True) for model in models):
        return NAME
    return MASKED if all(getattr(model, "_supports_attention_backend", True) for model in models) else ADDED


@as_constant
def _name_of_configuration(kind: type) -> str:
    """The same for the models that have been imported and have configurations of this class."""
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    classes, waiting = [], [modeling.PreTrainedModel]
    while waiting:
        waiting += (one := waiting.pop()).__subclasses__()
        if one.config_class is kind:
            classes.append(one)
    return _name_for(classes)


def _configs(model: Any) -> list[Any]:
    """Every configuration that the model's modules read, each once."""
    configs: dict[int, Any] = {}

    def add(config: Any) -> None:
        if hasattr(config, "_attn_implementation_internal") and id(config) not in configs:
            configs[id(config)] = config
            for name in config.sub_configs:
                add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(configs.values())


def _register() -> None:
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    masking: Any = importlib.import_module("transformers.masking_utils")
    if NAME not in modeling.ALL_ATTENTION_FUNCTIONS:
        modeling.ALL_ATTENTION_FUNCTIONS.register(NAME, forward)
        modeling.ALL_ATTENTION_FUNCTIONS.register(MASKED, masked_forward)
        modeling.ALL_ATTENTION_FUNCTIONS.register(ADDED, masked_forward)
        # Boolean masks, left out where causal alone says it all.
        boolean = masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

        def by_name(*args: Any, config: Any = None, **kwargs: Any) -> Any:
            name = NAME
            if config is not None and type(config._attn_implementation) is str:  # no patch has looked at it
                name = _name_of_configuration(type(config))
                if name == NAME and getattr(config, "num_kv_shared_layers", 0):
                    name = MASKED  # such models drop queries before their last layers
            make = boolean if name == NAME else masking.ALL_MASK_ATTENTION_FUNCTIONS[name]
            return make(*args, config=config, **kwargs)

        masking.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, by_name)
        masking.ALL_MASK_ATTENTION_FUNCTIONS.register(
            MASKED, lambda *args, **kwargs: boolean(*args, **{**kwargs, "allow_is_causal_skip": False})
        )
        masking.ALL_MASK_ATTENTION_FUNCTIONS.register(ADDED, masking.ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention as transformers calls it: (B, H, S, D) in, (B, S, H, D) out.

    What the op has no meaning for goes to the model's own implementation.
    """
    queries = query.shape[2]
    causal_by_model = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = bool(causal_by_model) and attention_mask is None and queries > 1
    if query.device.type == "meta":
        return _original_attention(
            module, query, key, value, attention_mask, causal, dropout, scaling, kwargs
        )
    pages: Any = kwargs.get("cache")
    if pages is not None:
        # Continuous batching: the pages of all requests, gathered; its mask keeps them apart.
        key, value = pages.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
        )
        kwargs = {name: value for name, value in kwargs.items() if name in _TAKEN | _SWITCHES}
    passed = tuple(name for name, value in kwargs.items() if value is not None)
    strange = [name for name in _strange(passed) if name not in _SWITCHES or kwargs[name]]
    if not strange and _weights_are_kept():
        strange = ["output_attentions"]
    if strange:
        if not torch.compiler.is_compiling():
            _warn_fallback(module, query, strange)
        return _original_attention(
            module, query, key, value, attention_mask, causal, dropout, scaling, kwargs
        )
    if causal and key.shape[2] > queries:
        # An empty static cache: what follows the prompt is not there yet.
        key, value = key[:, :, :queries], value[:, :, :queries]
    elif causal and key.shape[2] < queries and kwargs.get("position_bias") is None:
        # Counted from the first query and key, as SDPA does; the op counts from the last.
        attention_mask, causal = query.new_ones((queries, key.shape[2]), dtype=torch.bool).tril(), False
    bias = kwargs.get("position_bias")
    if bias is not None:
        attention_mask, causal = _with_bias(bias, attention_mask, causal, query, key), False
    out = sync.attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=causal,
        scale=scaling,
        dropout_p=dropout,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    return out.transpose(1, 2).contiguous(), None


def masked_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The same for a model whose masks say all: a call without one sees everything."""
    return forward(module, query, key, value, mask, **{**kwargs, "is_causal": False})


def _weights_are_kept() -> bool:
    """Whether a model's caller gets attention's weights, of which some modules tell the function nothing."""
    if _KEPT is None:
        return False
    collectors: Any = _KEPT.global_var if torch.compiler.is_compiling() else _KEPT.get()
    return collectors is not None and any(key.endswith("attentions") for key in collectors)


@as_constant
def _strange(names: tuple[str, ...]) -> tuple[str, ...]:
    """Of the names of what is given, those that the op has no meaning for."""
    return tuple(name for name in names if name not in _TAKEN)


def _with_bias(bias: Tensor, mask: Tensor | None, causal: bool, query: Tensor, key: Tensor) -> Tensor:
    """A bias on every score and the mask as one additive mask."""
    from transformers.integrations.sdpa_attention import create_position_bias_mask

    joined: Tensor = create_position_bias_mask(bias[..., : key.shape[2]], mask, causal, query, key)
    return joined


def _warn_fallback(module: Any, query: Tensor, names: list[str]) -> None:
    """Count the call, and warn of each argument once for each kind of module."""
    model = type(module).__name__
    counters = context_device((query,)).counters
    for name in names:
        counters.add("own_attention", argument=name)
        if (model, name) not in _WARNED:
            _WARNED.add((model, name))
            log.warning(FELL_BACK, argument=name, module=model, why="the attention op has no such argument")


def _original_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float,
    scaling: float | None, kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The model's own implementation: SDPA where that was in use, else what its file calls eager.

    Raises: ValueError: an argument stands for a part of the mask that only `patch` has the model make, or
        the model's file has no implementation.
    """
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    original = name.original if isinstance(name, PatchedName) else "eager"
    passed = tuple(name for name, value in kwargs.items() if value is not None)
    inside = sorted(_IN_THE_MASK & set(passed))
    if inside and not isinstance(name, PatchedName):
        raise ValueError(f"{inside[0]} of {type(module).__name__} needs a model given to layerzero.patch")
    if original == "sdpa" and kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options = {"dropout": dropout, "scaling": scaling, "is_causal": causal, **kwargs}
        result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, mask, **options
        )
        return result
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        names = ", ".join(_strange(passed))
        raise ValueError(f"{type(module).__name__} has no attention of its own that takes {names}")
    if causal and key.shape[2] > query.shape[2]:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    mask = _additive(query, key, mask, causal)
    result = eager(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    return result


def _additive(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """The mask as eager implementations add it to the scores."""
    if mask is None and causal:
        mask = query.new_ones((1, 1, query.shape[2], key.shape[2]), dtype=torch.bool).tril()
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)


if importlib.util.find_spec("transformers") is not None:
    with suppress(ImportError, AttributeError):  # its own name, which a version may not have
        _KEPT = importlib.import_module("transformers.utils.output_capturing")._active_collector
    _register()  # `from_config(attn_implementation="layerzero")` asks for no patch before it
