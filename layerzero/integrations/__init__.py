"""Other people's models on our ops: `patch` and `unpatch`; one file a framework, each over the public ops."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from layerzero._util.fork_safety import ProcessLock
from layerzero.integrations.patches.substitute import PARTS, PatchTable

M = TypeVar("M")
# The libraries whose models are patched, and the class that all of them have.
FRAMEWORKS = {"transformers": "PreTrainedModel", "diffusers": "ModelMixin"}


_PATCHING = ProcessLock()  # models may share modules and configurations


def patch(model: M, parts: Iterable[str] = PARTS) -> M:
    """Let a model of transformers or diffusers compute by our ops, until `unpatch`; the model itself.

    Args: model is one of a library's, a module that has one inside (PEFT, DDP, accelerate), or a pipeline of
        diffusers; parts are some of "attention", "norm", "rope", "mlp" and "loss". What a module of the model
        computes is compared with our references first, on a few random numbers: another formula stays the
        model's. `patch_table` says what was replaced, and why the rest was not. Patching twice changes
        nothing.

    Raises: TypeError: there is no model of these libraries. ValueError: no part of it fits an op, or `parts`
        names none that there is.
    """
    inside = list(_models(model))
    with _PATCHING.lock:
        for framework, part in inside:
            _framework(framework).patch(part, parts)
        table = patch_table(model)
        served = any(row.op for row in table.rows)
        if not served:
            unpatch(model)
    if not served:
        raise ValueError(f"model needs a part that an op serves, there is none:\n{table}")
    return model


def unpatch(model: M) -> M:
    """Give a patched model back all that it had; the model itself.

    Weights keep their numbers, bit for bit, and every parameter is the one it was.

    Raises: TypeError: there is no model of these libraries. ValueError: it was not patched.
    """
    from layerzero.integrations.patches.modules import record_of, restore

    with _PATCHING.lock:
        patches = [(part, record_of(part)) for _, part in _models(model)]
        if not any(record for _, record in patches):
            raise ValueError(f"model needs to be patched first, this {type(model).__name__} is not")
        for part, record in patches:
            if record is not None:
                restore(part, record)
    return model


def patch_table(model: object) -> PatchTable:
    """What serves each part of a patched model: a row for each class of module, and why where no op does.

    Raises: TypeError: there is no model of these libraries. ValueError: it was not patched.
    """
    from layerzero.integrations.patches.modules import record_of

    tables = [record.table for _, part in _models(model) if (record := record_of(part)) is not None]
    if not tables:
        raise ValueError(f"model needs to be patched first, this {type(model).__name__} is not")
    return PatchTable(", ".join(t.model for t in tables), tuple(row for t in tables for row in t.rows))


def _framework(name: str) -> Any:
    if name == "transformers":
        from layerzero.integrations import transformers

        return transformers
    from layerzero.integrations import diffusers

    return diffusers


def _models(model: Any) -> Iterator[tuple[str, Any]]:
    """Each model of a framework in `model`, the outermost ones, with its framework.

    Raises: TypeError: there is none.
    """
    # A model of a library cannot exist without its library being imported.
    libraries = {name: sys.modules[name] for name in FRAMEWORKS if name in sys.modules}
    kinds = {name: getattr(library, FRAMEWORKS[name], ()) for name, library in libraries.items()}
    roots: list[Any] = [model]
    if "diffusers" in libraries and isinstance(model, libraries["diffusers"].DiffusionPipeline):
        roots = list(model.components.values())
    count = 0
    for root in roots:
        for module in root.modules() if hasattr(root, "modules") and not isinstance(root, type) else ():
            framework = next((name for name, kind in kinds.items() if isinstance(module, kind)), None)
            if framework is not None:
                count += 1
                yield framework, module
                break
    if not count:
        needs = " or a ".join(f"{name}.{kind}" for name, kind in FRAMEWORKS.items())
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model needs a {needs}, got {kind}")
