"""Say how the source tree reads: sizes, names, prose. `tests/test_tree.py` keeps those that have a limit.

    python -m scripts.house [--json]

Production code is `layerzero`, `actors` and `scheduler`. A vague name is one of `VAGUE`: it says that a line
computed something, not what. A participle is a function named by a bare past participle (`joined`).
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCTION = ("layerzero", "actors", "scheduler")
_VAGUE = """
found own made known kept given held asked wanted taken there here mine told said
left most least fresh more now at
"""
VAGUE = frozenset(_VAGUE.split())
# Not participles, or adjectives of the field.
ADJECTIVES = frozenset(("batched", "seed", "need", "feed", "speed", "embed"))
_IRREGULAR = "told|made|found|kept|held|laid|known|given|taken|begun|sent|built|drawn|bound"
_PARTICIPLE = re.compile(rf"_?(?:[a-z]+ed|{_IRREGULAR})$")
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


parse = functools.cache(ast.parse)


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Every node of a file: to walk a tree takes longer than to parse it, and each rule looks at all."""
    return tuple(ast.walk(tree))


def walk(tree: ast.AST) -> Iterable[ast.AST]:
    """The nodes below `tree`, remembered for a whole file."""
    return nodes(tree) if isinstance(tree, ast.Module) else ast.walk(tree)


@dataclass(frozen=True)
class Module:
    """One production file."""

    path: Path
    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        """Its syntax, parsed once."""
        tree: ast.Module = parse(self.text)
        return tree

    @property
    def package(self) -> str:
        """The room that it belongs to: `layerzero.ops`, `actors.group`."""
        parts = self.path.relative_to(ROOT).parts[:-1]
        return ".".join(parts[:2])


def modules() -> list[Module]:
    """Every production file once; the links inside `layerzero` are left out."""
    result = []
    for folder in PRODUCTION:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.relative_to(ROOT).parts[:2] in (("layerzero", "actors"), ("layerzero", "scheduler")):
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if folder == "layerzero" else ("layerzero", *parts)).removesuffix(
                ".__init__"
            )
            result.append(Module(path, name, path.read_text()))
    return result


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function, methods and nested ones included."""
    return (node for node in walk(tree) if isinstance(node, _FUNCTION))


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Its lines, decorators left out."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def assigned(tree: ast.AST) -> Iterator[ast.Name]:
    """Every name that an assignment, a loop or a `with` stores into."""
    return (node for node in walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def vague(tree: ast.AST) -> list[tuple[str, int]]:
    """The stores and parameters with a vague name, with their lines."""
    stores = [(node.id, node.lineno) for node in assigned(tree) if node.id in VAGUE]
    parameters = [
        (argument.arg, argument.lineno)
        for function in functions(tree)
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if argument.arg in VAGUE
    ]
    return stores + parameters


def is_participle(name: str) -> bool:
    """Whether a name is a bare participle: `joined`, not `join` or `joined_rows`."""
    return _PARTICIPLE.match(name) is not None and name not in ADJECTIVES


def participles(tree: ast.AST) -> list[str]:
    """Functions named by a bare participle."""
    return [function.name for function in functions(tree) if is_participle(function.name)]


def comments(text: str) -> int:
    """Lines that hold a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def undocumented(tree: ast.AST) -> list[str]:
    """Public classes and functions at module level without a docstring; an overload needs none."""
    return [
        node.name
        for node in ast.iter_child_nodes(tree)
        if isinstance(node, (*_FUNCTION, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and not any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)
    ]


def documented(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Each module, class and function of a file that has a docstring, with it."""
    for node in walk(tree):
        if isinstance(node, (*_FUNCTION, ast.ClassDef, ast.Module)) and (text := ast.get_docstring(node)):
            yield node, text


def identifiers(tree: ast.AST) -> set[str]:
    """What prose can refer to: names, attributes, arguments, and words in texts, but not in docstrings."""
    docstrings = {id(node.body[0].value) for node, _ in documented(tree)}  # type: ignore[attr-defined]
    names: set[str] = set()
    for node in walk(tree):
        match node:
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name))
            ):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name):
                names.update(name.split("."))
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                names.update(re.findall(r"\w+", text))
    return names


def definitions(tree: ast.AST) -> set[str]:
    """The names of functions, classes and annotated fields."""
    names: set[str] = set()
    for node in walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def unknown_names(tree: ast.AST, known: Collection[str]) -> list[str]:
    """Names in backticks in docstrings that neither the file nor `known` has: those of what was renamed."""
    there = identifiers(tree)
    return [
        name
        for _, text in documented(tree)
        for name in re.findall(r"`([A-Za-z_]\w*)(?:\(\))?`", text)
        if name not in there and name not in known
    ]


def class_homes(tree: list[Module]) -> dict[str, list[str]]:
    """Class names that more than one module defines."""
    homes: dict[str, list[str]] = {}
    for module in tree:
        for node in walk(module.tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module.name)
    return {name: where for name, where in sorted(homes.items()) if len(where) > 1}


def imports(module: Module, names: frozenset[str], *, inner: bool) -> set[str]:
    """The production modules that it imports; with `inner`, inside functions too; never for types alone."""
    result = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, _FUNCTION) and not inner:
                continue
            if isinstance(child, ast.ImportFrom) and child.module:
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    result.add(full if full in names else child.module)
            elif isinstance(child, ast.Import):
                result.update(alias.name for alias in child.names)
            visit(child)

    visit(module.tree)
    return (result & names) - {module.name}


def cycles(tree: list[Module], *, inner: bool) -> list[list[str]]:
    """Groups of modules that import each other in a circle (strongly connected, two and more)."""
    names = frozenset(module.name for module in tree)
    edges = {module.name: imports(module, names, inner=inner) for module in tree}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result: list[list[str]] = []

    def connect(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                connect(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                result.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in sorted(edges):
        if name not in index:
            connect(name)
    return result


def layered() -> tuple[str, ...]:
    """The packages that the import contract names, from the top down."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = next(c for c in config["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return tuple(name.strip(" ()") for layer in contract["layers"] for name in layer.split("|"))


@dataclass(frozen=True)
class House:
    """The figures."""

    production_lines: int
    lines_by_package: dict[str, int]
    files: int
    longest_file: tuple[str, int]
    functions: int
    function_lines_median: int
    function_lines_p95: int
    longest_function: tuple[str, int]
    loose_modules: list[str]
    duplicate_classes: dict[str, list[str]]
    vague_per_1000_assignments: float
    participles: int
    undocumented_public_names: int
    cycles: list[list[str]]
    cycles_with_inner_imports: list[list[str]]
    comments_per_100_lines: float


def measure() -> House:
    """Read the tree and count."""
    tree = modules()
    lines = Counter[str]()
    for module in tree:
        lines[module.package] += module.text.count("\n")
    sizes = sorted((length(f), f"{m.name}.{f.name}") for m in tree for f in functions(m.tree))
    stores = sum(1 for module in tree for _ in assigned(module.tree))
    total = lines.total()
    file_lines = max((module.text.count("\n"), str(module.path.relative_to(ROOT))) for module in tree)
    return House(
        production_lines=total,
        lines_by_package=dict(sorted(lines.items())),
        files=len(tree),
        longest_file=(file_lines[1], file_lines[0]),
        functions=len(sizes),
        function_lines_median=sizes[len(sizes) // 2][0],
        function_lines_p95=sizes[len(sizes) * 95 // 100][0],
        longest_function=(sizes[-1][1], sizes[-1][0]),
        loose_modules=[m.name for m in tree if m.package == "layerzero" and not m.path.stem.startswith("__")],
        duplicate_classes=class_homes(tree),
        vague_per_1000_assignments=round(1000 * sum(len(vague(m.tree)) for m in tree) / stores, 1),
        participles=sum(len(participles(m.tree)) for m in tree),
        undocumented_public_names=sum(len(undocumented(m.tree)) for m in tree),
        cycles=cycles(tree, inner=False),
        cycles_with_inner_imports=cycles(tree, inner=True),
        comments_per_100_lines=round(100 * sum(comments(m.text) for m in tree) / total, 2),
    )


def main() -> None:
    """Print the figures, one a line."""
    figures = asdict(measure())
    if "--json" in sys.argv[1:]:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            print(label)
            for key, part in value.items():
                print(f"    {key:27} {part}")
        else:
            print(f"{label:31} {value}")


if __name__ == "__main__":
    main()
