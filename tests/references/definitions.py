"""Published definitions of ops: read from a folder that `LZ_DEFINITIONS` names, never kept here.

The format is flashinfer-bench's: axes (const, var or expr), inputs and outputs by shape and dtype,
constraints, and the source of a reference `run`. Any folder of that schema will do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "LZ_DEFINITIONS"
UNSET = f"{VARIABLE} names no folder of definitions"


class DefinitionError(ValueError):
    """A definition does not follow the schema; the message names file and field."""


@dataclass(frozen=True)
class Port:
    """One input or output: axis names or sizes (None: a scalar), and torch's name of the dtype."""

    shape: tuple[str | int, ...] | None
    dtype: str


@dataclass(frozen=True)
class Definition:
    """One op at fixed sizes: `const` axes are given, `var` axes free, `expr` axes follow from the others."""

    name: str
    op_type: str
    const: Mapping[str, int]
    var: tuple[str, ...]
    expr: Mapping[str, str]
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    constraints: tuple[str, ...]
    tags: tuple[str, ...]
    reference: str

    def compiled(self) -> Callable[..., tuple[Any, ...]]:
        """The reference as a function of its inputs by name that always returns a tuple.

        Raises: DefinitionError: the source does not compile or defines no `run`.
        """
        scope: dict[str, Any] = {}
        try:
            exec(compile(self.reference, f"<{self.name}>", "exec"), scope)
        except Exception as error:
            raise DefinitionError(f"{self.name}: reference does not compile: {error}") from error
        run = scope.get("run")
        if not callable(run):
            raise DefinitionError(f"{self.name}: reference needs a function run")

        def called(**inputs: Any) -> tuple[Any, ...]:
            result = run(**inputs)
            if isinstance(result, dict):
                return tuple(result[name] for name in self.outputs)
            return result if isinstance(result, tuple) else (result,)

        return called


def folder() -> Path | None:
    """The folder with `definitions/<op_type>/*.json`, or None where the variable is unset."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    path = Path(named)
    if not path.is_dir():
        raise DefinitionError(f"{VARIABLE} needs a folder, got {named}")
    return path


def parse(text: str, where: str = "definition") -> Definition:
    """A definition out of its JSON.

    Raises: DefinitionError: no JSON, a field is missing, or a shape names an axis that is not there.
    """
    try:
        given = json.loads(text)
        axes = given["axes"]
        kinds = {name: axis["type"] for name, axis in axes.items()}
        made = Definition(
            name=given["name"],
            op_type=given["op_type"],
            const={n: axes[n]["value"] for n, kind in kinds.items() if kind == "const"},
            var=tuple(n for n, kind in kinds.items() if kind == "var"),
            expr={n: axes[n]["expression"] for n, kind in kinds.items() if kind == "expr"},
            inputs={n: _port(p) for n, p in given["inputs"].items()},
            outputs={n: _port(p) for n, p in given["outputs"].items()},
            constraints=tuple(given.get("constraints") or ()),
            tags=tuple(given.get("tags") or ()),
            reference=given["reference"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DefinitionError(f"{where}: {type(error).__name__}: {error}") from error
    unknown = {kind for kind in kinds.values()} - {"const", "var", "expr"}
    if unknown:
        raise DefinitionError(f"{where}: axes need const, var or expr, got {', '.join(sorted(unknown))}")
    for name, port in {**made.inputs, **made.outputs}.items():
        lost = [a for a in port.shape or () if isinstance(a, str) and a not in axes]
        if lost:
            raise DefinitionError(f"{where}: {name} has a shape over unknown axes {', '.join(lost)}")
    return made


def _port(given: Mapping[str, Any]) -> Port:
    shape = given["shape"]
    return Port(None if shape is None else tuple(shape), given["dtype"])


def files() -> list[Path]:
    """Every definition file, in order; none where the variable is unset."""
    root = folder()
    return [] if root is None else sorted(root.glob("definitions/*/*.json"))


def workloads(definition: Definition) -> list[dict[str, int]]:
    """The axis values of a definition's recorded workloads, smallest first; empty where there are none."""
    root = folder()
    path = None if root is None else root / "workloads" / definition.op_type / f"{definition.name}.jsonl"
    if path is None or not path.exists():
        return []
    axes = [json.loads(line)["workload"]["axes"] for line in path.read_text().splitlines() if line.strip()]
    return sorted(axes, key=lambda each: sum(each.values()))
