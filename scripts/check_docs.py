"""Check what the documents promise: links, names, commands, requirements, generated parts, the version.

Run it from the root of the checkout: `python -m scripts.check_docs`.
"""

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts import ledger as of_ledger
from scripts import outputs, plots, reference
from scripts.tables import rendered

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```[^\n]*\n.*?^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
GENERATED = re.compile(r"<!-- (table|code|output|value): .*?<!-- /\1 -->", re.DOTALL)
PUBLIC = re.compile(r"(?<![\w.])lz\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
SETTINGS = re.compile(r"\bSettings\(([^()]*)\)|\bSettings\.(\w+)")
FILE = re.compile(r"`((?:layerzero|actors|scheduler|tests|scripts|benchmarks|examples|docs)/[^`\s*<>{}]*)`")
UNITS = (
    "us", "µs", "microseconds", "tokens/s", "tokens (?:a|per) second", "[GT]B/s", "times (?:as fast|faster)",
    "% (?:faster|slower)",
)  # fmt: skip
SPEED = re.compile(rf"\d(?:[\d.,]*\d)?\s?(?:{'|'.join(UNITS)})\b")
SENTENCE = re.compile(r"(?<=[\w`)\]\"%][.!?])\s+(?=[A-Z`\"(\[*])")
MARKER = re.compile(r"\s*(?:[-*] |\d+\. )?")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|al|etc)\.$")
README_WORDS = 800
IGNORED = {".venv", ".git", "build", "dist", "node_modules"}


def documents() -> list[Path]:
    """Every Markdown file of the project."""
    return sorted(
        p
        for p in ROOT.rglob("*.md")
        if not any(part in IGNORED or part.startswith(".venv") for part in p.relative_to(ROOT).parts)
    )


def anchors(path: Path) -> set[str]:
    """Return the anchors of a file's headings, made as GitHub makes them."""
    text = FENCE.sub("", path.read_text())
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in HEADING.findall(text)}


def links() -> Iterator[str]:
    """Yield relative links, and anchors, that lead nowhere."""
    for path in documents():
        for first, second in LINK.findall(FENCE.sub("", path.read_text())):
            target, _, anchor = (first or second).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            place = (path.parent / target).resolve() if target else path
            if not place.exists():
                yield f"{path.relative_to(ROOT)}: the link {first or second} leads nowhere"
            elif anchor and place.suffix == ".md" and anchor not in anchors(place):
                yield f"{path.relative_to(ROOT)}: {place.name} has no heading #{anchor}"


def ledger() -> Iterator[str]:
    """Yield rows that are done without a test that proves it, and evidence that does not exist."""
    path = ROOT / "REQUIREMENTS.md"
    if not path.exists():
        yield "REQUIREMENTS.md is missing"
        return
    for row in of_ledger.rows(path):
        said = list(unproved(row)) if row.done else []
        evidence = [*row.where, *row.paths, *(q for q in of_ledger.QUOTED.findall(row.state) if "/" in q)]
        said += [fault for name in dict.fromkeys(evidence) if "/" in name and (fault := absent(name))]
        yield from (f"REQUIREMENTS.md:{row.line}: {row.name} {fault}" for fault in said)


def unproved(row: of_ledger.Row) -> Iterator[str]:
    """Yield why the proof of a row that is done proves nothing."""
    if row.bare in ("", "-"):
        yield f"is done and its proof is {row.bare!r}"
    elif row.paths and set(row.paths) <= set(row.where):
        yield f"is done and its proof is its own source: {', '.join(row.paths)}"
    elif not row.tests:
        yield f"is done and its proof is no test: {row.bare}"


def absent(evidence: str) -> str:
    """Why a path or a pytest node does not exist; empty where it does."""
    name, *inner = evidence.partition("[")[0].split("::")
    place = ROOT / name
    if not place.exists():
        return f"names {name}, which does not exist"
    if inner and not (place.suffix == ".py" and "::".join(inner) in defined(place, place.stat().st_mtime_ns)):
        return f"names {evidence}, which {name} does not define"
    return ""


@functools.cache
def defined(place: Path, changed_ns: int) -> frozenset[str]:
    """The classes and functions of a file as it was last changed, by the names that pytest gives them."""

    def below(body: list[ast.stmt], before: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield before + node.name
                yield from below(node.body, f"{before}{node.name}::")

    return frozenset(below(ast.parse(place.read_text()).body, ""))


def commands() -> Iterator[str]:
    """Yield commands in the documents' shell blocks that the project does not have."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    tools = command_names()
    for path in documents():
        for block in SHELL.findall(path.read_text()):
            for line in block.splitlines():
                words = line.partition("#")[0].removeprefix("$ ").split()
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    words = words[1:]
                yield from (f"{path.relative_to(ROOT)}: {m}" for m in missing(words, targets, tools))


def missing(words: list[str], targets: set[str], tools: set[str]) -> Iterator[str]:
    """Yield what one command line names and the project lacks."""
    if not words:
        return
    program, *rest = words
    if program == "make":
        named = [w for w in rest if re.fullmatch(r"[a-z]+", w)]
        yield from (f"make has no target {w}" for w in named if w not in targets)
    elif program == "lz" and rest and re.fullmatch(r"[a-z]+", rest[0]) and rest[0] not in tools:
        yield f"lz has no command {rest[0]}"
    elif program.endswith(("python", "python3")) and rest and rest[0].endswith(".py"):
        if not (ROOT / rest[0]).exists():
            yield f"{rest[0]} does not exist"
    elif program.endswith(("python", "python3")) and rest[:1] == ["-m"] and len(rest) > 1:
        if not is_module(rest[1]):
            yield f"python has no module {rest[1]}"
    elif program.startswith(".ci/") and not (ROOT / program).exists():
        yield f"{program} does not exist"


def command_names() -> set[str]:
    """Return the subcommands of `lz`."""
    from layerzero.cli import COMMANDS  # here, so that the other checks need no torch

    return set(COMMANDS)


def is_module(name: str) -> bool:
    """Whether `python -m name` finds one; a library that is missing counts, a part of ours is looked up."""
    top = name.partition(".")[0]
    if top not in ("layerzero", "scripts", "benchmarks", "tests"):
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def names() -> Iterator[str]:
    """Yield public names, settings and files that the documents mention and the project does not have."""
    import layerzero as lz

    fields = {*lz.Settings.__struct_fields__, *(n for n in vars(lz.Settings) if not n.startswith("_"))}
    for path in documents():
        text, place = path.read_text(), path.relative_to(ROOT)
        for name in dict.fromkeys(PUBLIC.findall(text)):
            if not has(lz, name):
                yield f"{place}: layerzero has no {name}"
        for arguments, attribute in SETTINGS.findall(text):
            for field in [*re.findall(r"(\w+)=", arguments), *([attribute] if attribute else [])]:
                if field not in fields:
                    yield f"{place}: Settings has no {field}"
        for file in dict.fromkeys(FILE.findall(text)):
            if not (ROOT / file.partition("::")[0].partition("#")[0]).exists():
                yield f"{place}: {file} does not exist"


def has(owner: Any, name: str) -> bool:
    """Whether a chain of attributes exists, as far as modules and classes lead."""
    for word in name.split("."):
        if not (isinstance(owner, type) or hasattr(owner, "__path__") or hasattr(owner, "__spec__")):
            return True
        if not hasattr(owner, word):
            return False
        owner = getattr(owner, word)
    return True


def figures() -> Iterator[str]:
    """Yield speeds in prose that no record fills in, and a README that has grown too long."""
    for path in documents():
        if path.name in ("CHANGELOG.md", "REQUIREMENTS.md"):
            continue
        prose = FENCE.sub("", GENERATED.sub("", path.read_text()))
        for speed in SPEED.findall(prose):
            yield f"{path.relative_to(ROOT)}: {speed!r} needs to come from a record (scripts/tables.py)"
    words = len((ROOT / "README.md").read_text().split())
    if words > README_WORDS:
        yield f"README.md has {words} words, it may have {README_WORDS}"


def sentences() -> Iterator[str]:
    """Yield lines of prose that hold more than one sentence: one a line makes changes easy to read."""
    for path in documents():
        if path.name in ("CHANGELOG.md", "REQUIREMENTS.md"):
            continue
        for number, line in prose_lines(path.read_text()):
            if len(list(in_one_line(line))) > 1:
                yield f"{path.relative_to(ROOT)}:{number}: needs one sentence a line"


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines that are neither code, generated, a table, a heading nor markup."""
    blank = re.compile(r"[^\n]")
    for block in (GENERATED, FENCE):
        text = block.sub(lambda match: blank.sub("", match[0]), text)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith(("|", "#", "<", ":::")):
            yield number, line


def in_one_line(line: str) -> Iterator[str]:
    """The sentences of a line; a stop inside code, brackets or an abbreviation ends none."""
    start = marker.end() if (marker := MARKER.match(line)) else 0
    for stop in SENTENCE.finditer(line, start):
        part = line[start : stop.start()]
        whole = part.count("`") % 2 == 0 and part.count("(") == part.count(")")
        if whole and part.count("[") == part.count("]") and not ABBREVIATION.search(part):
            yield part
            start = stop.end()
    yield line[start:]


def tables() -> Iterator[str]:
    """Yield documents whose tables differ from the measurements they are generated from."""
    for path in documents():
        text = path.read_text()
        try:
            expected = rendered(text)
        except (OSError, KeyError, ValueError) as error:
            yield f"{path.relative_to(ROOT)}: a table cannot be generated: {error!r}"
            continue
        if expected != text:
            yield f"{path.relative_to(ROOT)}: a table differs from its JSON; run python -m scripts.tables"


def code() -> Iterator[str]:
    """Yield documents whose settings, codes, commands or packages are not those of the code."""
    for path in documents():
        text = path.read_text()
        try:
            expected = reference.rendered(text)
        except ValueError as error:
            yield f"{path.relative_to(ROOT)}: {error}"
            continue
        if expected != text:
            yield f"{path.relative_to(ROOT)}: differs from the code; run python -m scripts.reference"


def pictures() -> Iterator[str]:
    """Yield pictures that differ from their records, are missing, or that nothing draws."""
    files = plots.drawn()
    present = {path.name: path.read_text() for path in plots.IMAGES.glob("*.svg")}
    for name in sorted({*files, *present}):
        if files.get(name) != present.get(name):
            yield f"docs/images/{name}: differs from its record; run python -m scripts.plots"


def shown() -> Iterator[str]:
    """Yield documents whose terminal output is not what the command prints now."""
    for path in documents():
        text = path.read_text()
        try:
            expected = outputs.rendered(text)
        except RuntimeError as error:
            yield f"{path.relative_to(ROOT)}: {error}"
            continue
        if expected != text:
            yield f"{path.relative_to(ROOT)}: terminal output has changed; run python -m scripts.outputs"


def changelog() -> Iterator[str]:
    """Yield a complaint if the changelog does not begin with this version or with what is unreleased."""
    package = (ROOT / "layerzero" / "_util" / "version.py").read_text()
    version = re.findall(r'^VERSION = "(.+)"$', package, re.MULTILINE)
    newest = re.search(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if newest is None or newest[1] not in (*version, "Unreleased"):
        yield f"CHANGELOG.md begins with {newest and newest[1]}, layerzero/_util/version.py says {version}"


CHECKS: tuple[Callable[[], Iterator[str]], ...] = (
    links, ledger, commands, names, figures, sentences, tables, code, pictures, shown, changelog,
)  # fmt: skip


def main() -> int:
    """Run every check, print each complaint, and return how many there are."""
    found = 0
    for check in CHECKS:
        complaints = list(check())
        found += len(complaints)
        print(f"{check.__name__:<10} {'ok' if not complaints else f'{len(complaints)} wrong'}")
        for complaint in complaints:
            print(f"  {complaint}")
    return min(found, 100)


if __name__ == "__main__":
    sys.exit(main())
