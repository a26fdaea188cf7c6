"""Other people's models on our ops: `patch` and `unpatch`; one file a framework, each over the public ops."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from layerzero.integrations.patches.substitute import PARTS, PatchTable

M = TypeVar("M")


def patch(model: M, parts: Iterable[str] = PARTS) -> M:
    """Let a model of transformers compute by our ops, until `unpatch`; the model itself.

    Args: model is a transformers.PreTrainedModel, or a module that has one inside (PEFT, DDP, accelerate);
        parts are some of "attention", "norm", "rope", "mlp" and "loss". What a module of the model computes
        is compared with our references first, on a few random numbers: another formula stays the model's.
        `patch_table` says what was replaced, and why the rest was not. Patching twice changes nothing.

    Raises: TypeError: there is no model of transformers. ValueError: no part of it fits an op, or `parts`
        names none that there is.
    """
    inside = _inside(model)
    _framework(inside).patch(inside, parts)
    return model


def unpatch(model: M) -> M:
    """Give a patched model back all that it had; the model itself.

    Weights keep their numbers, bit for bit, and every parameter is the one it was.

    Raises: TypeError: there is no model of transformers. ValueError: it was not patched.
    """
    inside = _inside(model)
    _framework(inside).unpatch(inside)
    return model


def patch_table(model: object) -> PatchTable:
    """What serves each part of a patched model: a row for each class of module, with the reason where no op does.

    Raises: TypeError: there is no model of transformers. ValueError: it was not patched.
    """
    from layerzero.integrations.patches.modules import record_of

    inside = _inside(model)
    record = record_of(inside)
    if record is None:
        raise ValueError(f"model needs to be patched first, this {type(inside).__name__} is not")
    return record.table


def _inside(model: object) -> Any:
    """The outermost model of a framework: itself, or the first inside a wrapper."""
    # A model of a library cannot exist without its library being imported.
    library = sys.modules.get("transformers")
    if library is not None:
        modules = model.modules() if hasattr(model, "modules") else ()
        for module in modules:
            if isinstance(module, library.PreTrainedModel):
                return module
    raise TypeError(f"model needs a transformers.PreTrainedModel, got {type(model).__name__}")


def _framework(model: object) -> Any:
    from layerzero.integrations import transformers

    return transformers
