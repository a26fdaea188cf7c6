"""The site: Sphinx over docs/ and the pages of the root, with autodoc for the public names of `layerzero`.

`make docs` builds it into `build/site` with warnings as errors.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import layerzero  # noqa: E402  # from this checkout, whatever is installed
from layerzero.ops import table  # noqa: E402

OPS = frozenset(table.names())

project = "LayerZero"
author = "LayerZero maintainers"
project_copyright = author
version = release = layerzero.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"LayerZero {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
suppress_warnings = ["myst.header"]  # a page of the root begins with its own levels

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"

# The pages of the root, and the page of the site that holds each.
ROOT_PAGES = {
    "design/architecture": "ARCHITECTURE.md",
    "project/changelog": "CHANGELOG.md",
    "project/contributing": "CONTRIBUTING.md",
    "project/requirements": "REQUIREMENTS.md",
    "project/security": "SECURITY.md",
}
SITE_PAGES = {"README.md": "index", **{file: docname for docname, file in ROOT_PAGES.items()}}

FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
SECTION = re.compile(r"([A-Z][A-Za-z ]{2,40}):(?=\s|$)")
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*'
    r'<img (?:alt="(?P<alt>[^"]*)" )src="(?P<light>[^"]+)"[^>]*>\s*</picture>'
)


def read_page(app: Any, docname: str, source: list[str]) -> None:
    """Turn a page as GitHub shows it into one for the site: its pictures, and links that leave docs/."""
    path = ROOT / ROOT_PAGES[docname] if docname in ROOT_PAGES else HERE / f"{docname}.md"
    text = path.read_text() if docname in ROOT_PAGES else source[0]
    folder = path.parent
    text = PICTURE.sub(lambda match: picture(match, folder, docname), text)
    source[0] = outside_fences(text, lambda part: LINK.sub(lambda m: link(m, folder, docname), part))


def outside_fences(text: str, change: Any) -> str:
    """Apply `change` to everything but fenced blocks."""
    parts, end = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def link(match: re.Match[str], folder: Path, docname: str) -> str:
    """A link as the site needs it: to a page, to a file that is copied, or its text alone for a folder."""
    image, words, target = match.groups()
    file, _, anchor = target.partition("#")
    if not file or re.match(r"[a-z]+:", target):
        return match[0]
    place = (folder / file).resolve()
    anchor = f"#{anchor}" if anchor else ""
    if place.is_dir():
        return words
    if place.parent == ROOT and place.name in SITE_PAGES:
        return f"{image}[{words}](/{SITE_PAGES[place.name]}.md{anchor})"
    if place.suffix == ".md" and place.is_relative_to(HERE):
        return f"{image}[{words}](/{place.relative_to(HERE).as_posix()}{anchor})"
    return f"{image}[{words}]({relative(place, docname)}{anchor})"


def picture(match: re.Match[str], folder: Path, docname: str) -> str:
    """Two images instead of a <picture>: furo shows the one of the page's theme."""
    return "\n".join(
        f":::{{image}} {relative((folder / match[theme]).resolve(), docname)}\n"
        f":class: only-{theme}\n:alt: {match['alt']}\n:::\n"
        for theme in ("light", "dark")
    )


def relative(place: Path, docname: str) -> str:
    """A file's path from the folder of a page."""
    return Path(os.path.relpath(place, (HERE / docname).parent)).as_posix()


def read_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings here are plain text: sections, entries and `code`; nothing else in them is markup."""
    lines[:] = [line for block in blocks(lines) for line in (*rendered(block), "")]


def blocks(lines: list[str]) -> Iterator[list[str]]:
    """A docstring's blocks: a blank line or the name of a section ends the one before."""
    block: list[str] = []
    for line in lines:
        if block and (not line.strip() or SECTION.match(line)):
            yield block
            block = []
        if line.strip():
            block.append(line)
    if block:
        yield block


def rendered(block: list[str]) -> list[str]:
    """One block as reStructuredText: a labelled paragraph, a list of entries, code, or a paragraph."""
    section = SECTION.match(block[0])
    if section is None:
        indented = all(line.startswith("    ") for line in block)
        return ["::", "", *block] if indented else items(block)
    label, first = f"**{section[1]}**", block[0][section.end() :].strip()
    if first:
        return [f"{label}: {literal(' '.join([first, *(line.strip() for line in block[1:])]))}"]
    if section[1].startswith("Example"):
        return [f"{label}::", "", *block[1:]]
    margin = min(len(line) - len(line.lstrip()) for line in block[1:]) if block[1:] else 0
    entries: list[str] = []
    for line in (line[margin:] for line in block[1:]):
        if entries and line.startswith(" "):
            entries[-1] += " " + line.strip()
        else:
            entries.append(line.strip())
    return [label, "", *(f"- {literal(entry)}" for entry in entries)]


def items(block: list[str]) -> list[str]:
    """A paragraph, or a list where its lines begin with a dash."""
    if not block[0].startswith("- "):
        return [literal(" ".join(line.strip() for line in block))]
    entries: list[str] = []
    for line in block:
        if line.startswith("- "):
            entries.append(line[2:].strip())
        else:
            entries[-1] += " " + line.strip()
    return [f"- {literal(entry)}" for entry in entries]


def literal(text: str) -> str:
    """Text with `code` as literals and every other sign as itself."""
    parts = re.split(r"(`+[^`]+`+)", text)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"\\ ``{part.strip('`').strip()}``\\ "
        else:
            parts[index] = re.sub(r"([*_|`\\])", r"\\\1", part)
    return "".join(parts)


class PublicNames(SphinxDirective):
    """`.. layerzero-names:: KIND`: the public names of one kind, each rendered by autodoc."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Let autodoc render each name as a member of `layerzero`."""
        lines = [line for name in public_names(self.arguments[0]) for line in directive(name)]
        container = nodes.container()
        self.state.nested_parse(StringList(lines, source="layerzero"), self.content_offset, container)
        return container.children


def public_names(kind: str) -> list[str]:
    """The names in `layerzero.__all__` that are ops, functions, classes, exceptions or modules."""
    return [name for name in layerzero.__all__ if kind_of(name) == kind]


def kind_of(name: str) -> str:
    """Which part of the page a public name belongs to."""
    value = getattr(layerzero, name)
    if inspect.ismodule(value):
        return "modules"
    if isinstance(value, type):
        return "exceptions" if issubclass(value, BaseException) else "classes"
    return "ops" if name in OPS else "functions"


def directive(name: str) -> list[str]:
    """What autodoc is asked for one name."""
    value = getattr(layerzero, name)
    if inspect.ismodule(value):
        lines = [f".. automodule:: {value.__name__}", "   :no-index:"]
        return lines if name == "sync" else [*lines, "   :members:", "   :imported-members:", ""]
    if isinstance(value, type):
        members = (
            [] if issubclass(value, BaseException) else ["   :members:", "   :exclude-members: __init__"]
        )
        return [f".. autoclass:: layerzero.{name}", "   :no-undoc-members:", *members, ""]
    return [f".. autofunction:: layerzero.{name}", ""]


def setup(app: Any) -> None:
    """Connect the pages, the docstrings and the list of public names."""
    app.add_directive("layerzero-names", PublicNames)
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring)
