"""What torch knows of an op: the schema of its operator, and the way between the arguments of both.

Everything follows from the signature of `op.build`. Where torch's schemas have no word for a parameter:

- a number or a tensor, one for each row, is two parameters: `temperature` and `temperature_rows`;
- a flag that adds an output is an operator of its own: `attention` and `attention_with_lse`;
- a function or a block mask has none: such a call is traced in plain torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from layerzero.operators.choice import mark_of_graph, mark_under_guard
from layerzero.ops import table
from layerzero.ops.op import Op

NAMESPACE = "layerzero"
# The word of torch's schemas for each annotation of an op; sizes and counts may change without another graph.
_TYPES = MappingProxyType(
    {
        "Tensor": "Tensor",
        "Tensor | None": "Tensor?",
        "bool": "bool",
        "float": "float",
        "float | None": "float?",
        "int": "SymInt",
        "int | None": "SymInt?",
        "str": "str",
        "str | None": "str?",
        "tuple[int, ...] | list[int] | None": "int[]?",
        "Sequence[int]": "int[]",
        "Number": "float",
        "Count": "SymInt",
        "Count | None": "SymInt?",
    }
)
_PER_ROW = frozenset({"Number", "Count", "Count | None"})
_NO_SCHEMA_TYPE = frozenset({"ScoreMod | None", "Any"})
# The flags that add an output, and the end of the operator's name that stands for each.
_ADDING_OUTPUT = MappingProxyType({"return_lse": "with_lse"})
# What ops return that give back an argument; their operators return nothing.
_GIVEN_BACK = MappingProxyType({"append_kv": "slot_mapping"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an operator, and the op's argument behind it, empty for the choice of a kernel.

    `per_row` takes that argument where it is a tensor; beside it `number` takes it where it is none.
    """

    name: str
    argument: str
    type: str
    default: Any = inspect.Parameter.empty
    per_row: bool = False
    number: bool = False

    def declared(self) -> str:
        """The parameter in a schema."""
        default = self.default
        if default is inspect.Parameter.empty:
            return f"{self.type} {self.name}"
        text = f'"{default}"' if isinstance(default, str) else repr(default)
        return f"{self.type} {self.name}={text}"

    def written(self) -> str:
        """The parameter in Python."""
        default = self.default
        return self.name if default is inspect.Parameter.empty else f"{self.name}={default!r}"


@dataclass(frozen=True, slots=True, eq=False)
class OperatorSchema:
    """An operator of torch: `name` in the namespace, the op, and the arguments that the name decides."""

    name: str
    op: Op
    fixed: Mapping[str, bool]
    parameters: tuple[Parameter, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(_parameters(self)))

    @property
    def outputs(self) -> int:
        """How many tensors it returns."""
        return _returned(self).count("Tensor")

    @property
    def overload(self) -> Any:
        """torch's operator."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    @property
    def without_type(self) -> tuple[str, ...]:
        """The op's parameters that torch has no word for."""
        named = inspect.signature(self.op.build).parameters.values()
        return tuple(p.name for p in named if str(p.annotation) in _NO_SCHEMA_TYPE)

    def text(self) -> str:
        """The schema; what an op writes is marked."""
        return f"{self.name}({', '.join(p.declared() for p in self.parameters)}) -> {_returned(self)}"

    def gradient_text(self) -> str:
        """The schema of the operator that gives the gradients of the tensors that want one, in order."""
        declared = ", ".join(p.declared().partition("=")[0] for p in self.parameters if p.name != "backend")
        return f"{self.name}_backward(Tensor[] grads, {declared}, bool[] needs_grad) -> Tensor[]"

    def adapter(
        self, run: Callable[..., Any], finish: str = "out", named: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """A function with the operator's parameters that calls `run` with the op's.

        Where there is a backend or a mark, `named` gets it as the keyword `backend`, `run` if there is none.
        `finish` is the text of what is made of `out`.
        """
        positional, by_name = self._as_op()
        call = ", ".join([*positional, *(f"{name}={value}" for name, value in by_name.items())])
        source = [
            f"def {self.name}({', '.join(p.written() for p in self.parameters)}):",
            f"    out = _run({call}) if backend is None else _named({call}, backend=backend)",
            f"    return {finish}",
        ]
        namespace = {"_run": run, "_named": named or run, "_laid_out": laid_out, "_new_layout": new_layout}
        return _made(self.name, source, namespace)

    def in_front(self) -> tuple[Any, ...]:
        """What `native.Operator` takes: names, defaults, and the place of each in the op's arguments."""
        declared = self.overload._schema.arguments
        of_op = tuple(inspect.signature(self.op.build).parameters)
        return (
            tuple(each.name for each in declared),
            tuple(each.default_value if each.has_default_value() else ... for each in declared),
            tuple(of_op.index(p.argument) if p.argument and not p.per_row else -1 for p in self.parameters),
            tuple(self.fixed.get(name, ...) for name in of_op),
            of_op.index("layout") if self.op.name == "attention" else -1,
            self.outputs == 0,
        )

    def packer(self) -> Callable[..., tuple[Any, ...]]:
        """A function with the op's full arguments and a backend that returns the operator's arguments."""
        names = [*inspect.signature(self.op.build).parameters, "backend"]
        packed = ", ".join(_packed(p) for p in self.parameters)
        source = [f"def pack({', '.join(names)}):", f"    return ({packed},)"]
        return _made("pack", source, {"_Tensor": Tensor, "_int64": int64})

    def _as_op(self) -> tuple[list[str], dict[str, str]]:
        """The op's arguments out of the operator's, as text: by position, and by name."""
        positional: list[str] = []
        by_name: dict[str, str] = {}
        declared = {p.name: p for p in self.parameters}
        for parameter in inspect.signature(self.op.build).parameters.values():
            name = parameter.name
            if name not in declared:
                value = repr(self.fixed[name]) if name in self.fixed else None
            else:
                rows = f"{name}_rows"
                value = name if rows not in declared else f"{name} if {rows} is None else {rows}"
            if value is not None and parameter.kind is parameter.KEYWORD_ONLY:
                by_name[name] = value
            elif value is not None:
                positional.append(value)
        return positional, by_name


def schemas_of(op: Op) -> tuple[OperatorSchema, ...]:
    """The operators of an op: one, or one for each value of the flag that adds an output."""
    flag = next((f for f in _ADDING_OUTPUT if f in inspect.signature(op.build).parameters), None)
    if flag is None:
        return (OperatorSchema(op.name, op, {}),)
    return (
        OperatorSchema(op.name, op, {flag: False}),
        OperatorSchema(f"{op.name}_{_ADDING_OUTPUT[flag]}", op, {flag: True}),
    )


def front(op: Op) -> Callable[..., Any]:
    """The op's public signature in a form that torch's compiler reads: a call of its operator.

    A call with what torch has no word for is the op's reference, in plain torch. Before each run of a graph
    torch's compiler looks at the defaults and globals of what it has read: here few globals alone.
    """
    schemas = schemas_of(op)
    parameters = inspect.signature(op.build).parameters
    names = list(parameters)
    optional = [p for p in parameters.values() if p.default is not p.empty]
    by_position = [p for p in optional if p.kind is not p.KEYWORD_ONLY]
    head = [p.replace(annotation=p.empty) for p in parameters.values() if p.default is p.empty]
    head.append(inspect.Parameter("rest", inspect.Parameter.VAR_POSITIONAL))
    head.append(inspect.Parameter("named", inspect.Parameter.VAR_KEYWORD))
    head.sort(key=lambda p: p.kind)
    lines = [f"def {op.name}{inspect.Signature(head)}:"]
    for place, p in enumerate(by_position):
        given = f"rest[{place}] if rest[{place}:] else"
        lines.append(f"    {p.name} = {given} named.pop({p.name!r}, {p.default!r})")
    by_name = {p.name: p.default for p in optional if p not in by_position} | {"backend": None}
    lines += [f"    {name} = named.pop({name!r}, {default!r})" for name, default in by_name.items()]
    lines += [f"    if named or rest[{len(by_position)}:]:"]
    lines += [f"        _refuse({op.name!r}, {len(head) - 2 + len(by_position)}, named)"]
    if schemas[0].without_type:
        is_given = " or ".join(f"{name} is not None" for name in schemas[0].without_type)
        lines += [f"    if {is_given}:", f"        return _plain_{op.name}({', '.join(names)})"]
    for schema in reversed(schemas):
        flags = [name for name, value in schema.fixed.items() if value]
        packed = [_packed(p) for p in schema.parameters[:-1]]
        packed.append("(_under_guard() or _mark()) if backend is None else backend")
        call = f"_ops.{NAMESPACE}.{schema.name}.default({', '.join(packed)})"
        if op.name in _GIVEN_BACK:
            lines += [f"    {call}", f"    return {_GIVEN_BACK[op.name]}"]
        elif flags:
            lines += [f"    if {flags[0]}:", f"        return {call}"]
        else:
            lines.append(f"    return {call}")
    _FRONTS[f"_plain_{op.name}"] = _plain_front(op)
    return _made(op.name, lines, _FRONTS)


def _refuse(name: str, takes: int, unknown: dict[str, Any]) -> None:
    if not unknown:
        raise TypeError(f"{name}() takes {takes} arguments by position, and got more")
    raise TypeError(f"{name}(): got an unexpected keyword argument {next(iter(unknown))!r}")


def run_operator(name: str, named: dict[str, Any]) -> Any:
    """An op's operator with the op's arguments by name."""
    return front(table.get(name))(**named)


def int64(value: Any) -> Any:
    """An int's low 64 bits as torch's schemas hold them; anything else, and what fits, as it is."""
    if value is None or -(1 << 63) <= value < 1 << 63:
        return value
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def laid_out(out: Any, heads: bool) -> Any:
    """Outputs in the memory layout that the operator promises, copied where a kernel chose another.

    Contiguous; of attention in layout BHSD, the first one has heads behind tokens, as most kernels write it.
    """
    if isinstance(out, tuple):
        return (laid_out(out[0], heads), *(part.contiguous() for part in out[1:]))
    if heads:
        tokens_first = out.transpose(1, 2)
        return out if tokens_first.is_contiguous() else tokens_first.contiguous().transpose(1, 2)
    return out.contiguous()


def new_layout(out: Any, heads: bool) -> Any:
    """New tensors without numbers in that layout: nothing is asked of sizes that are symbols."""
    if isinstance(out, tuple):
        return (new_layout(out[0], heads), *out[1:])
    return out.transpose(1, 2).new_empty(out.transpose(1, 2).shape).transpose(1, 2) if heads else out


def _plain_front(op: Op) -> Callable[..., Any]:
    def plain(*args: Any) -> Any:
        return op.reference(*op.build(**dict(zip(names, args, strict=True)))[1])

    names = list(inspect.signature(op.build).parameters)
    return plain


def _parameters(schema: OperatorSchema) -> list[Parameter]:
    declared, rows = [], []
    for position, each in enumerate(inspect.signature(schema.op.build).parameters.values()):
        annotation = str(each.annotation)
        if each.name in schema.fixed or annotation in _NO_SCHEMA_TYPE:
            continue
        kind = _TYPES[annotation]
        if position in schema.op.writes:
            absent = "?" if kind.endswith("?") else ""
            kind = f"Tensor({chr(ord('a') + schema.op.writes.index(position))}!){absent}"
        declared.append(Parameter(each.name, each.name, kind, each.default, number=annotation in _PER_ROW))
        if annotation in _PER_ROW:
            rows.append(Parameter(f"{each.name}_rows", each.name, "Tensor?", None, per_row=True))
    declared.sort(key=lambda each: each.default is not inspect.Parameter.empty)  # torch: required first
    return [*declared, *rows, Parameter("backend", "", "str?", None)]


def _packed(parameter: Parameter) -> str:
    """The value of an operator's parameter, as text over the op's own arguments."""
    name = parameter.argument
    if not name:
        return parameter.name
    if parameter.per_row:
        return f"{name} if isinstance({name}, _Tensor) else None"
    if not parameter.number:
        return name
    absent = 1 if parameter.default is inspect.Parameter.empty else parameter.default
    value = name if parameter.type == "float" else f"_int64({name})"
    return f"{absent!r} if isinstance({name}, _Tensor) else {value}"


def _returned(schema: OperatorSchema) -> str:
    if schema.op.name in _GIVEN_BACK:
        return "()"
    annotation = str(inspect.signature(schema.op.reference).return_annotation)
    alternatives = annotation.split(" | ")
    chosen = alternatives[-1 if any(schema.fixed.values()) else 0]
    inner = chosen.removeprefix("tuple[").removesuffix("]")
    return f"({inner})" if chosen != inner else chosen


# What the functions of all ops read.
_FRONTS: dict[str, Any] = {
    "_ops": torch.ops, "_Tensor": Tensor, "_int64": int64, "_mark": mark_of_graph,
    "_under_guard": mark_under_guard, "_refuse": _refuse,
}  # fmt: skip


def _made(name: str, lines: list[str], namespace: dict[str, Any]) -> Callable[..., Any]:
    source = "\n".join(lines) + "\n"
    file = f"<operator {name}>"
    exec(compile(source, file, "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    return function
