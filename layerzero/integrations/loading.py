"""Patching models while a library makes them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from layerzero._util import log
from layerzero.integrations import FRAMEWORKS, patch
from layerzero.integrations.patches.modules import need_parts
from layerzero.integrations.patches.substitute import PARTS

# Of each library, the class methods that make a model.
MAKERS = {"transformers": ("from_pretrained", "_from_config"), "diffusers": ("from_pretrained",)}
# A model is patched when the outermost call that makes it ends, with its parts.
_INSIDE: ContextVar[bool] = ContextVar("layerzero_inside_load", default=False)


@contextmanager
def patch_on_load(parts: Iterable[str] = PARTS) -> Iterator[None]:
    """Patch every model that transformers or diffusers makes inside, in this process, as it is loaded.

    A model that no op serves stays as it is, with a warning (`integrations.not_patched`).
    Raises: ValueError: `parts` names none that there is. ModuleNotFoundError: neither library is installed.
    """
    chosen = need_parts(parts)
    replaced: list[tuple[type, str, Any]] = []
    for library, name in _libraries():
        kind: type = getattr(library, FRAMEWORKS[name])
        for maker in MAKERS[name]:
            before = kind.__dict__[maker]
            replaced.append((kind, maker, before))
            setattr(kind, maker, classmethod(_patching(before.__func__, chosen)))
    try:
        yield
    finally:
        for kind, maker, before in reversed(replaced):
            setattr(kind, maker, before)


def _libraries() -> list[tuple[Any, str]]:
    libraries = [
        (importlib.import_module(n), n) for n in FRAMEWORKS if importlib.util.find_spec(n) is not None
    ]
    if not libraries:
        raise ModuleNotFoundError(f"patch_on_load() needs one of {', '.join(FRAMEWORKS)}")
    return libraries


def _patching(make: Any, parts: Iterable[str]) -> Any:
    """A class method that makes a model, and the patch after it."""

    @functools.wraps(make)
    def load(kind: type, *args: Any, **kwargs: Any) -> Any:
        if _INSIDE.get():
            return make(kind, *args, **kwargs)
        token = _INSIDE.set(True)
        try:
            result = make(kind, *args, **kwargs)
        finally:
            _INSIDE.reset(token)
        # With `output_loading_info` it is the first of two.
        model = result[0] if isinstance(result, tuple) else result
        try:
            patch(model, parts)
        except ValueError as error:
            log.warning("integrations.not_patched", model=type(model).__name__, why=str(error))
        return result

    return load
