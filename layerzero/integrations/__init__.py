"""Other people's models on our ops: `patch` and `unpatch`; one file a framework, each over the public ops."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

M = TypeVar("M")


def patch(model: M) -> M:
    """Let a model of transformers compute its attention through `lz.sync.attention`; the model itself.

    Every layer that goes through transformers' attention interface is served, masks, grouped heads and
    generation included. Patching twice changes nothing.

    Raises: TypeError: the model is none of transformers'. ValueError: it does not use the interface.
    """
    return _framework(model).patch(model)  # type: ignore[no-any-return]


def unpatch(model: M) -> M:
    """Give a patched model back the attention it had; the model itself.

    Raises: TypeError: the model is none of transformers'. ValueError: it was not patched.
    """
    return _framework(model).unpatch(model)  # type: ignore[no-any-return]


def _framework(model: object) -> Any:
    # A model of a library cannot exist without its library being imported.
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        raise TypeError(f"model needs a transformers.PreTrainedModel, got {type(model).__name__}")
    from layerzero.integrations import transformers

    return transformers
