"""Write the parts of the documents that the code itself knows: settings, codes, commands, events, packages.

A document marks the place:

    <!-- code: reasons -->
    (generated text)
    <!-- /code -->

To write them: `python -m scripts.reference`. `scripts/check_docs.py` fails where a document differs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

from scripts.tables import ROOT, rewrite, table

PLACE = re.compile(r"(<!-- code: (?P<name>\S+) -->\n).*?(<!-- /code -->)", re.DOTALL)
FOLDERS = ("layerzero", "actors", "scheduler")
EVENT = re.compile(r"[a-z_]+\.[a-z_]+")
LEVELS = ("debug", "info", "warning", "error")
CONTRACT = "a module imports only what stands below it"


def plain(text: str) -> str:
    """One line of Markdown: white space joined, double backquotes as single ones, no tag outside code."""
    line = re.sub(r"\s+", " ", text.replace("``", "`")).strip()
    return "".join(
        part if i % 2 else part.replace("<", "\\<") for i, part in enumerate(re.split(r"(`[^`]*`)", line))
    )


def sentence(docstring: str | None) -> str:
    """The first sentence of a docstring, without its full stop."""
    first = plain((docstring or "").partition("\n\n")[0])
    return re.split(r"(?<=[^.])\.(?=\s|$)", first, maxsplit=1)[0]


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package, parsed, by its path from the root; links are not followed."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    inside = (path for path in paths if path.relative_to(ROOT).parts[:2] not in LINKS)
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in inside}


LINKS = (("layerzero", "actors"), ("layerzero", "scheduler"))


# Settings, reasons, ops, errors: from the objects.


def settings() -> str:
    """One table for each group of fields: field, type, default, meaning."""
    from layerzero.spec.settings import Settings

    defaults = inspect.signature(Settings).parameters
    types = get_type_hints(Settings)
    parts = []
    for group, fields in settings_groups(inspect.getdoc(Settings) or ""):
        rows: list[list[object]] = [
            [f"`{name}`", f"`{type_name(types[name])}`", f"`{defaults[name].default!r}`", text]
            for names, text in fields
            for name in names
        ]
        parts.append(f"### {group}\n\n" + table(["field", "type", "default", "meaning"], rows))
    return "\n" + "\n".join(parts) + "\n"


def settings_groups(docstring: str) -> Iterator[tuple[str, list[tuple[list[str], str]]]]:
    """The groups of the docstring of `Settings`, each with its fields and what they mean."""
    for group in re.finditer(r"^([A-Z][\w ]+):\n((?:    .*\n)+)", docstring + "\n", re.MULTILINE):
        if group[1] in ("Raises", "Example"):
            continue
        entries = re.split(r"^    (?=\w)", group[2], flags=re.MULTILINE)[1:]
        pairs = (entry.partition(": ") for entry in entries)
        yield (
            group[1],
            [([name.strip() for name in names.split(",")], plain(text)) for names, _, text in pairs],
        )


def type_name(kind: Any) -> str:
    """A type as the source spells it, without the constraints that msgspec reads."""
    if isinstance(kind, type) and not hasattr(kind, "__args__"):
        return kind.__name__
    return re.sub(r"\btyping\.", "", str(kind)).replace("NoneType", "None")


def variables() -> str:
    """The environment variables that are no field of `Settings`."""
    from layerzero.spec.settings import OTHER_VARIABLES

    return ", ".join(f"`{name}`" for name in sorted(OTHER_VARIABLES)) + "\n"


def reasons() -> str:
    """Every reason code with its category and its one line."""
    from layerzero import Reason

    return table(
        ["code", "category", "the kernel ..."],
        [[f"`{code.value}`", code.category.value, code.summary] for code in Reason],
    )


def ops() -> str:
    """Every op with the first sentence of its docstring."""
    import layerzero as lz
    from layerzero.ops import table as op_table

    rows: list[list[object]] = [
        [f"`{name}`", sentence(inspect.getdoc(getattr(lz.sync, name)))] for name in sorted(op_table.names())
    ]
    return table(["op", "what it does"], rows)


def errors() -> str:
    """Every exception with its bases and the first sentence of its docstring."""
    import layerzero as lz

    rows: list[list[object]] = [
        [
            f"`{name}`",
            ", ".join(f"`{base.__name__}`" for base in kind.__bases__),
            sentence(kind.__doc__) if name == kind.__name__ else f"Another name of `{kind.__name__}`",
        ]
        for name in vars(lz)["__all__"]
        if isinstance(kind := getattr(lz, name), type) and issubclass(kind, BaseException)
    ]
    return table(["exception", "is a", "when"], rows)


def metrics() -> str:
    """Every family that the Prometheus collector of an idle runtime has."""
    import layerzero as lz

    runtime = lz.Runtime(lz.Settings(device="cpu", perfdb=None))
    try:
        runtime.device("cpu")
        families = list(lz.metrics.collector(runtime).collect())
        rows: list[list[object]] = [
            [f"`{scraped_name(family)}`", family.type, ", ".join(labels(family)), family.documentation]
            for family in families
        ]
    finally:
        runtime.close()
    return table(["metric", "type", "labels", "meaning"], rows)


def scraped_name(family: Any) -> str:
    """A family's name as a scrape has it."""
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


def labels(family: Any) -> list[str]:
    """The names of a family's labels, without those that its samples add (`le`)."""
    return [f"`{name}`" for name in family._labelnames]


# Commands: from click.


def commands() -> str:
    """What `lz COMMAND --help` prints, for every command and its own commands."""
    import click

    from layerzero.cli import main

    def pages(command: click.Command, context: click.Context) -> Iterator[str]:
        context.terminal_width = context.max_content_width = 100
        yield f"### {context.command_path}\n\n```text\n{command.get_help(context).rstrip()}\n```\n"
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                if child is not None:
                    yield from pages(child, click.Context(child, info_name=name, parent=context))

    top = click.Context(main, info_name="lz", **main.context_settings)
    return "\n" + "\n".join(pages(main, top)) + "\n"


# Events, counters, file formats, packages: from the source.


def events() -> str:
    """Every event that the package logs: its levels, its keys and the modules that log it."""
    own = {path: dict(constants(tree)) for path, tree in modules().items()}
    imported = {name: value for texts in own.values() for name, value in texts.items()}
    logged: dict[str, tuple[set[str], set[str], set[str]]] = {}
    for path, tree in modules().items():
        for call in calls_of(tree, LEVELS, "log"):
            event = text_of(call.args[0], imported | own[path]) if call.args else None
            if event is None or not EVENT.fullmatch(event):
                continue
            entry = logged.setdefault(event, (set(), set(), set()))
            entry[0].add(call.func.attr)  # type: ignore[attr-defined]
            entry[1].update(f"`{keyword.arg}`" for keyword in call.keywords if keyword.arg)
            entry[2].add(f"`{path}`")
    rows: list[list[object]] = [
        [f"`{event}`", *(", ".join(sorted(part)) for part in entry)]
        for event, entry in sorted(logged.items())
    ]
    return table(["event", "level", "keys", "logged by"], rows)


def counters() -> str:
    """Every counter that the package adds to: its labels and the modules that count."""
    counted: dict[str, tuple[set[str], set[str]]] = {}
    for path, tree in modules().items():
        for call in (*calls_of(tree, ("add",), "counters"), *calls_of(tree, ("add",), "_counters")):
            name = text_of(call.args[0], {}) if call.args else None
            if name is None:
                continue
            entry = counted.setdefault(name, (set(), set()))
            entry[0].update(f"`{keyword.arg}`" for keyword in call.keywords if keyword.arg)
            entry[1].add(f"`{path}`")
    rows: list[list[object]] = [
        [f"`{name}`", *(", ".join(sorted(part)) for part in entry)] for name, entry in sorted(counted.items())
    ]
    return table(["counter", "labels", "counted by"], rows)


def calls_of(tree: ast.Module, methods: tuple[str, ...], owner: str) -> Iterator[ast.Call]:
    """Every call `owner.method(...)`, where `owner` is a name or the last attribute of a chain."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
            value = node.func.value
            if owner in (getattr(value, "id", None), getattr(value, "attr", None)):
                yield node


def text_of(node: ast.expr, constants: dict[str, str]) -> str | None:
    """The text of a literal, or of a constant of that name in any module."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return constants.get(getattr(node, "id", getattr(node, "attr", "")))


def constants(tree: ast.Module, kind: type = str) -> Iterator[tuple[str, Any]]:
    """The constants of a module that are of one kind, by name."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and type(node.value.value) is kind:
                yield target.id, node.value.value


def formats() -> str:
    """The version of every file format, from the constants that the readers compare with."""
    rows: list[list[object]] = [
        [f"`{path}`", f"`{name}`", value, sentence(ast.get_docstring(tree))]
        for path, tree in modules().items()
        for name, value in constants(tree, int)
        if re.fullmatch(r"_?(\w+_)?(FORMAT|VERSION|SCHEMA)", name)
    ]
    return table(["module", "constant", "version", "module's purpose"], rows)


def number_formats() -> str:
    """Every number format with its scales, from the table that the ops read."""
    from layerzero.formats import FORMATS

    rows: list[list[object]] = []
    for form in FORMATS.values():
        sizes = ", ".join(map(str, form.group_sizes)) + (" or any that divides" if form.open_groups else "")
        more = ["zero point"] * form.zero_points + ["a second scale for the tensor"] * form.two_level
        scale = ", ".join(str(dtype).removeprefix("torch.") for dtype in form.scales)
        shared = ", ".join(form.granularities)
        rows.append([f"`{form.name}`", form.element.bits, scale, shared, sizes, ", ".join(more), form.source])
    return table(["format", "bits", "scales", "shared by", "groups of", "beside them", "source"], rows)


def format_kernels() -> str:
    """The kernels that take each format, by op and device, from the kernels' capabilities.

    Codes of weights and rows have a feature by the format's name, those of keys and values by their dtype;
    an op has a row where a kernel beside its reference takes the format.
    """
    from layerzero.backends import load_builtin
    from layerzero.formats import FORMATS
    from layerzero.formats.table import format_of
    from layerzero.ops.kv_formats import CODE_FEATURES

    pages = {format_of(dtype).name: feature for feature, dtype in CODE_FEATURES.items()}
    kernels = [kernel for kernel in load_builtin() if kernel.backend != "reference"]
    rows: list[list[object]] = []
    for name in FORMATS:
        taking: dict[str, list[Any]] = {}
        for kernel in kernels:
            if {f"quant_{name}", pages.get(name, "")} & kernel.capability.features:
                taking.setdefault(kernel.op, []).append(kernel)
        for op, of_op in sorted(taking.items()):
            by_device = [
                ", ".join(f"`{k.id}`" for k in of_op if device in k.capability.platforms) or "reference"
                for device in ("cpu", "cuda")
            ]
            rows.append([f"`{name}`", f"`{op}`", *by_device])
    return table(["format", "op", "CPU", "CUDA"], rows)


def packages() -> str:
    """Every package by import-linter's layers, from the top down, with its docstring's first sentence.

    A package inside another has its parent's layer where the contract does not list it by itself.
    """
    listed = {name for layer in layers() for name in layer}
    rows: list[list[object]] = []
    for number, layer in enumerate(layers(), 1):
        for name in layer:
            inside = [child for child in subpackages(name) if child not in listed]
            for module in [name, *inside]:
                path = source(module)
                shown = path.parent if path.name == "__init__.py" else path
                label = shown.relative_to(ROOT).as_posix() + ("/" if shown.is_dir() else "")
                rows.append([number, f"`{label}`", sentence(ast.get_docstring(ast.parse(path.read_text())))])
    return table(["layer", "package or module", "purpose"], rows)


def layers() -> list[list[str]]:
    """The dotted modules of each layer, from the top down, as pyproject.toml lists them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (c for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [re.findall(r"[\w.]+", layer) for layer in contract["layers"]]


def source(module: str) -> Path:
    """The file with a module's docstring: `layerzero.actors` and `layerzero.scheduler` are root folders."""
    parts = module.split(".")[1:]
    folder = ROOT.joinpath(*parts) if parts[0] in FOLDERS else ROOT.joinpath("layerzero", *parts)
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def subpackages(module: str) -> list[str]:
    """The packages anywhere below a package, by dotted name."""
    path = source(module)
    if path.name != "__init__.py":
        return []
    folders = sorted(child.parent.relative_to(path.parent) for child in path.parent.glob("*/**/__init__.py"))
    return [".".join([module, *folder.parts]) for folder in folders]


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "counters": counters,
    "errors": errors,
    "events": events,
    "format_kernels": format_kernels,
    "formats": formats,
    "metrics": metrics,
    "number_formats": number_formats,
    "ops": ops,
    "packages": packages,
    "reasons": reasons,
    "settings": settings,
    "variables": variables,
}


@functools.cache
def part(name: str) -> str:
    """One generated text, computed once a process; an unknown name is a ValueError."""
    if name not in PARTS:
        raise ValueError(f"<!-- code: {name} --> needs one of {', '.join(PARTS)}")
    return PARTS[name]()


def rendered(text: str) -> str:
    """Return a document's text with every part that the code knows written anew."""
    return PLACE.sub(lambda mark: mark.group(1) + part(mark["name"]) + mark.group(3), text)


if __name__ == "__main__":
    sys.exit(rewrite("parts of the documents", rendered))
