"""Whether Triton's interpreter runs here, and how it looks at its own language less often."""

from __future__ import annotations

import functools
import inspect
from importlib import metadata
from typing import Any

from layerzero.spec.kernel import version


@functools.cache
def why_not() -> str:
    """What is wrong with the interpreter of this installation; empty where it works."""
    try:
        triton, numpy = metadata.version("triton"), metadata.version("numpy")
    except metadata.PackageNotFoundError as missing:
        return f"{missing.name} is not installed"
    if version(triton) < (3, 7) and version(numpy) >= (2, 4):
        return f"the interpreter of Triton {triton} does not know numpy {numpy}; Triton 3.7 or numpy 2.3 do"
    return ""


def remember() -> None:
    """Let the interpreter of this process look once at what does not change: its language and its types."""
    remember_builtins()
    remember_types()


def remember_types() -> None:
    """Let types of the same shape and elements share what follows from these.

    Every number of a program has one, and half of a program's time is spent on making them.
    """
    from triton.language import core
    from triton.runtime import interpreter

    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    numpy_types: dict[str, Any] = {}
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_type = interpreter._get_np_dtype

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *core._unwrap_shape(shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def remembered(type: Any) -> Any:
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    interpreter._get_np_dtype = remembered


def remember_builtins() -> None:
    """Let the interpreter of this process put its own functions into Triton's language once a launch.

    It does so whenever one kernel's function calls another, and looks for them among all that a module or a
    class has: more than half of a small program's time. Which they are does not change.
    """
    from triton.runtime import interpreter

    named: dict[Any, list[str]] = {}
    patched: set[int] = set()
    patch_language = interpreter._patch_lang

    def patch(package: Any, builder: Any, *scope: Any) -> None:
        is_builtin = interpreter.tl.core.is_builtin
        if package not in named:
            named[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in named[package]:
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, *scope)

    def patch_once(function: Any) -> Any:
        seen_from = id(function.__globals__)
        if seen_from in patched:
            return None  # called by a kernel: only who launches one restores
        scope = patch_language(function)
        if restore := getattr(scope, "restore", None):
            patched.add(seen_from)
            scope.restore = functools.partial(forget_and, restore)
        return scope

    def forget_and(restore: Any) -> None:
        patched.clear()
        restore()

    interpreter._patch_builtin, interpreter._patch_lang = patch, patch_once
