"""Write `layerzero/__init__.pyi` and `layerzero/sync.pyi` from the ops' signatures.

Run it from the root of the checkout after a change of a signature: `python -m scripts.make_stubs`.

The two surfaces are made by wrappers at run time, which no type checker can follow.  Parameters come from
`op.build`; the result comes from what `op.reference` is annotated to return.  Where that is a union, one
flag decides between its members: `DECIDING` lists such flags, and the stub gets one overload for each value.
"""

import ast
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import layerzero
from layerzero.ops import table
from layerzero.ops.op import Op

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "layerzero"

# The flags that add a second output: False returns the first member of the union, True the other.
DECIDING = ("return_lse",)

WAITING = (
    "backend: str | None = None", "priority: int = 1", "timeout: float | None = None",
    'batching: Literal["off", "rows", "all"] | None = None',
)  # fmt: skip
BLOCKING = ("backend: str | None = None",)
HEADER = '"""{}\n\nWritten by scripts/make_stubs.py; do not edit.\n"""\n'
# A call's `timeout` is its deadline in the batcher; a cancel scope around the await could not keep it queued.
NO_LINT = "# ruff: noqa: ASYNC109, E501\n# fmt: off\n"
LONG_LINES = "# ruff: noqa: E501\n# fmt: off\n"
SYNC_DOC = "The ops, blocking: same names and signatures as the awaitable ones in `layerzero`."


def decider(op: Op) -> str | None:
    """The flag of this op that adds a second output, if it has one."""
    return next((flag for flag in DECIDING if flag in inspect.signature(op.build).parameters), None)


def alternatives(op: Op) -> list[str]:
    """The members of what the op's reference returns, as source text.

    Raises: ValueError: the reference has no annotation, or a union that no flag in DECIDING explains.
    """
    annotation = inspect.signature(op.reference).return_annotation
    if not isinstance(annotation, str):
        raise ValueError(f"{op.name}: the reference needs a written return annotation, got {annotation!r}")
    members: list[str] = []
    node = ast.parse(annotation, mode="eval").body
    while isinstance(node, ast.BinOp):
        members.insert(0, ast.unparse(node.right))
        node = node.left
    members.insert(0, ast.unparse(node))
    if len(members) > 1 and (len(members) != 2 or decider(op) is None):
        raise ValueError(f"{op.name}: a flag in DECIDING needs to decide between {annotation}")
    return members


def written(op: Op, annotation: str) -> str:
    """An annotation of `op.build` with its module's aliases spelled out, as an editor should show it."""
    names = vars(sys.modules[op.build.__module__])

    class Spelled(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            alias = names.get(node.id)
            if isinstance(alias, types.UnionType | types.GenericAlias):
                text = str(alias).replace("torch.Tensor", "Tensor").replace("NoneType", "None")
                text = text.replace("collections.abc.", "")
                return ast.parse(text, mode="eval").body
            return node

    return ast.unparse(Spelled().visit(ast.parse(annotation, mode="eval")))


def choices(op: Op, name: str) -> list[str] | None:
    """The words that a parameter takes, as the op's check has them; None for every other parameter."""
    module = sys.modules[op.check.__module__]
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("need_choice"):
            word, _, words = node.args
            if isinstance(word, ast.Constant) and word.value == name:
                return list(eval(ast.unparse(words), vars(module)))
    return None


def parameters(op: Op, more: tuple[str, ...], literal: str | None = None) -> Iterator[str]:
    """The lines between the parentheses; `literal` is the value that the deciding flag has."""
    flag = decider(op)
    starred = False
    for parameter in inspect.signature(op.build).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        annotation = written(op, str(parameter.annotation))
        words = choices(op, parameter.name)
        if words is not None:
            annotation = annotation.replace("str", f"Literal[{', '.join(map(repr, words))}]")
        text = f"{parameter.name}: {annotation}"
        default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
        if parameter.name == flag and literal is not None:
            text = f"{parameter.name}: {literal}"
            default = default if literal in ("bool", f"Literal[{parameter.default}]") else ""
        yield (text + default).replace("'", '"')
    if not starred:
        yield "*"
    yield from more


def indented(doc: str) -> str:
    """A docstring's lines as they stand in a function's body."""
    lines = [f"    {line}" if line else "" for line in doc.splitlines()]
    return "\n".join(lines).strip() + ("\n    " if len(lines) > 1 else "")


def function(op: Op, head: str, more: tuple[str, ...], documented: Callable[..., object]) -> str:
    """The op as one function, or as one overload for each value of its deciding flag."""
    results = alternatives(op)
    cases: list[tuple[str | None, str]] = [(None, results[0])]
    if len(results) == 2:
        cases = [
            ("Literal[False]", results[0]),
            ("Literal[True]", results[1]),
            ("bool", " | ".join(results)),
        ]
    doc = inspect.cleandoc(documented.__doc__ or "")
    text = ""
    for index, (literal, result) in enumerate(cases):
        decorator = "@overload\n" if len(cases) > 1 else ""
        lines = "".join(f"    {line},\n" for line in parameters(op, more, literal))
        body = f':\n    """{indented(doc)}"""\n\n' if index == 0 else ": ...\n"
        text += f"{decorator}{head} {op.name}(\n{lines}) -> {result}{body}"
    return text


def typing_imports(text: str) -> str:
    """The import lines for what `text` uses of collections, typing and torch."""
    abstract = [name for name in ("Callable", "Sequence") if f"{name}[" in text]
    head = f"from collections.abc import {', '.join(abstract)}\n" if abstract else ""
    used = [name for name in ("Any", "Literal", "overload") if re.search(rf"\b{name}\b", text)]
    if used:
        head += f"from typing import {', '.join(used)}\n"
    return f"{head}\nfrom torch import Tensor\n\n"


def blocking_stub() -> str:
    """The text of `layerzero/sync.pyi`."""
    ops = sorted(table.FILES)
    functions = "".join(
        function(table.get(name), "def", BLOCKING, getattr(layerzero.sync, name)) for name in ops
    )
    names = "".join(f'    "{name}",\n' for name in ops)
    head = f"{HEADER.format(SYNC_DOC)}{LONG_LINES}\n{typing_imports(functions)}"
    return f"{head}{functions}__all__ = [\n{names}]\n"


def bind_stub() -> str:
    """`layerzero.bind` with what each op's bound callable returns."""
    by_result: dict[str, list[str]] = {}
    for name in sorted(table.FILES):
        by_result.setdefault(" | ".join(alternatives(table.get(name))), []).append(name)
    doc = indented(inspect.cleandoc(layerzero.bind.__doc__ or ""))
    text = ""
    for index, (result, names) in enumerate([*by_result.items(), ("Any", [])]):
        op = f"Literal[{', '.join(map(repr, names))}]".replace("'", '"') if names else "str"
        head = (
            f"op: {op}, /, *example: object, guard: bool = True, backend: str | None = None, **fixed: object"
        )
        body = f':\n    """{doc}"""\n\n' if index == 0 else ": ...\n"
        text += f"@overload\ndef bind({head}) -> BoundOp[{result}]{body}"
    return text


def awaitable_stub() -> str:
    """The text of `layerzero/__init__.pyi`: the public names from where they are defined, then the ops."""
    homes = {module: names.split() for module, names in layerzero._HOMES.items()}  # type: ignore[attr-defined]
    for module in layerzero._MODULES.values():  # type: ignore[attr-defined]
        package, _, name = module.rpartition(".")
        homes.setdefault(package, []).append(name)
    homes["layerzero.calls.bound"] = ["BoundOp"]  # what `bind` returns, and no name of the package
    imports = ""
    for module, names in sorted(homes.items()):
        shown = sorted((name for name in names if name != "bind"), key=_as_ruff)
        imports += "".join(
            f"from {module} import {name}{'' if name == 'BoundOp' else f' as {name}'}\n" for name in shown
        )
    functions = "".join(
        function(table.get(name), "async def", WAITING, getattr(layerzero, name))
        for name in sorted(table.FILES)
    )
    header = HEADER.format((layerzero.__doc__ or "").partition("\n")[0]) + NO_LINT
    functions = bind_stub() + functions
    text = f"{header}\n{typing_imports(functions)}{imports}\n__version__: str\n\n{functions}"
    return text.rstrip("\n") + "\n"


def _as_ruff(name: str) -> tuple[bool, bool, str]:
    """The order of ruff's isort rule: constants, classes, the rest."""
    return (not name.isupper(), not name[0].isupper(), name)


def stubs() -> dict[Path, str]:
    """Each committed stub and the text it has to have."""
    return {PACKAGE / "__init__.pyi": awaitable_stub(), PACKAGE / "sync.pyi": blocking_stub()}


def main() -> int:
    """Write the stubs and print which of them changed."""
    for path, text in stubs().items():
        changed = not path.exists() or path.read_text() != text
        path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {'rewritten' if changed else 'unchanged'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
