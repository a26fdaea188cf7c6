"""The site: Sphinx over docs/ and the pages of the root, with autodoc for the public names of `layerzero`.

`make docs` builds it into `build/site` with warnings as errors.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

import layerzero  # noqa: E402  # from this checkout, whatever is installed

project = "LayerZero"
author = "LayerZero maintainers"
project_copyright = author
version = release = layerzero.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
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
autodoc_preserve_defaults = True
napoleon_custom_sections = [("Source", "notes_style"), ("Example", "example_style")]
napoleon_use_rtype = False

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
    """Docstrings here are plain text with Markdown's backquotes: nothing in them is reStructuredText's markup."""
    lines[:] = [plain_line(line) for line in lines]


def plain_line(line: str) -> str:
    """One line with `code` as literals and every other sign as itself; field lists of napoleon stay."""
    if re.match(r"\s*(:\w[^:]*:|\.\. )", line):
        head, _, rest = re.match(r"(\s*(?::\w[^:]*:|\.\. \w+::))(\s?)(.*)", line).groups()  # type: ignore[union-attr]
        return f"{head} {plain_line(rest)}" if rest else line
    parts = re.split(r"(``[^`]+``|`[^`\n]+`)", line)
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"``{part.strip('`')}``"
        else:
            parts[index] = re.sub(r"([*_|\\])", r"\\\1", part)
    # A literal has to stand apart from the letters beside it.
    return re.sub(r"(``[^`]+``)(?=\w)", r"\1\\ ", re.sub(r"(?<=\w)(``[^`]+``)", r"\\ \1", "".join(parts)))


def setup(app: Any) -> None:
    """Connect both, docstrings after napoleon has read its sections."""
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring, priority=900)
