"""The cheap first step of every call: its arguments in a row, and the signature that decides its kernel.

Each awaited or blocking call takes this step, so `op_signature` writes it out for every op as one flat tuple,
which is several times faster than a loop over the parameters.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from layerzero.ops.op import OPS
from layerzero.ops.op import SignedCall as SignedCall

# An operand of integers: it never needs a gradient.
IndexTensor = Tensor

# What asking an operand for its shape raises where it is no tensor, or a nested one without a jagged layout.
NO_SHAPE = (AttributeError, RuntimeError)

Build = TypeVar("Build", bound=Callable[..., SignedCall])


def signature_of(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """What a signature holds of an operand that may be absent."""
    if tensor is None:
        return None
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def value_key(value: Any) -> Hashable:
    """What a signature holds of a number or tensor: a tensor's facts, a number by type and value."""
    return signature_of(value) if isinstance(value, Tensor) else (value.__class__, value)


def type_key(value: Any) -> Hashable:
    """The same of a number whose value decides nothing, as a seed's, which changes with every step."""
    return signature_of(value) if isinstance(value, Tensor) else value.__class__


def op_signature(
    *,
    default: Mapping[str, Callable[..., Any] | str] | None = None,
    convert: Mapping[str, Callable[[Any], Any]] | None = None,
    key: Mapping[str | tuple[str, ...], Callable[..., Any]] | None = None,
    state: Callable[[], Hashable] | None = None,
) -> Callable[[Build], Build]:
    """Give a function whose parameters are an op's arguments its body: `(signature, args)`, unvalidated.

    The signature holds the op's name, of each `Tensor` shape, strides, dtype, device and requires_grad (an
    `IndexTensor` without the last), and every other argument by value. Where an operand has no shape the op's
    `check` names it.
    `default` fills arguments that are None: a function of other arguments, by their names, or another
    argument's name. `convert` changes arguments that are not None. `key` gives what the signature holds
    instead of a value: of one argument, or of several together, of which None stands for all None. `state`
    gives what decides beside the arguments.
    """

    def write(declared: Build) -> Build:
        namespace: dict[str, Any] = {"_ops": OPS, "_no_shape": NO_SHAPE}
        source = _source(declared, namespace, default or {}, convert or {}, key or {}, state)
        file = f"<signature of {declared.__name__}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        exec(compile(source, file, "exec"), namespace)
        build: Any = namespace[declared.__name__]
        for name in ("__module__", "__qualname__", "__doc__", "__defaults__", "__kwdefaults__"):
            setattr(build, name, getattr(declared, name))
        build.__annotations__ = {
            name: str(kind).replace("IndexTensor", "Tensor")
            for name, kind in declared.__annotations__.items()
        }
        return build  # type: ignore[no-any-return]

    return write


def _source(
    declared: Callable[..., Any],
    namespace: dict[str, Any],
    default: Mapping[str, Callable[..., Any] | str],
    convert: Mapping[str, Callable[[Any], Any]],
    key: Mapping[str | tuple[str, ...], Callable[..., Any]],
    state: Callable[[], Hashable] | None,
) -> str:
    """The text of the function; the functions that it calls are put into `namespace`."""
    parameters = inspect.signature(declared).parameters
    head = [p.replace(annotation=p.empty, default=p.empty) for p in parameters.values()]
    lines = [f"def {declared.__name__}{inspect.Signature(head)}:"]
    for name, fill in default.items():
        value = fill if isinstance(fill, str) else _call(namespace, fill, *inspect.signature(fill).parameters)
        lines.append(f"    if {name} is None: {name} = {value}")
    for name, change in convert.items():
        lines.append(f"    if {name} is not None: {name} = {_call(namespace, change, name)}")
    grouped = {name: names for names in key if isinstance(names, tuple) for name in names}
    entries = [repr(declared.__name__)]
    for name, parameter in parameters.items():
        if name in key:
            entries.append(_call(namespace, key[name], name))
        elif name not in grouped:
            entries.append(_entry(name, str(parameter.annotation)))
        elif name == grouped[name][-1]:
            absent = " and ".join(f"{each} is None" for each in grouped[name])
            entries.append(f"None if {absent} else {_call(namespace, key[grouped[name]], *grouped[name])}")
    if state is not None:
        entries.append(_call(namespace, state))
    lines += [
        f"    args = ({', '.join(parameters)},)",
        "    try:",
        f"        return ({', '.join(entries)},), args",
        "    except _no_shape:",
        f"        _ops[{declared.__name__!r}].check(args)  # names the operand that is no tensor",
        "        raise",
    ]
    return "\n".join(lines) + "\n"


def _call(namespace: dict[str, Any], function: Callable[..., Any], *arguments: str) -> str:
    namespace[f"_{function.__name__}"] = function
    return f"_{function.__name__}({', '.join(arguments)})"


def _entry(name: str, annotation: str) -> str:
    """What the signature holds of one argument: a tensor's facts, flat where it is always there."""
    kind, _, absent = annotation.partition(" | ")
    if kind not in ("Tensor", "IndexTensor") or absent not in ("", "None"):
        return name
    facts = f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device"
    facts += "" if kind == "IndexTensor" else f", {name}.requires_grad"
    return f"None if {name} is None else ({facts})" if absent else facts
