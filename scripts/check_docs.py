"""Check what the documents promise: links, commands, ledger rows, generated tables, the version.

Run it from the root of the checkout: `python -m scripts.check_docs`.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts import ledger as of_ledger
from scripts import outputs
from scripts.tables import rendered

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```[^\n]*\n.*?^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
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
    path = ROOT / "docs" / "ledger.md"
    if not path.exists():
        yield "docs/ledger.md is missing"
        return
    for row in of_ledger.rows(path):
        said = list(unproved(row)) if row.done else []
        evidence = [*row.where, *row.paths, *(q for q in of_ledger.QUOTED.findall(row.state) if "/" in q)]
        said += [fault for name in dict.fromkeys(evidence) if "/" in name and (fault := absent(name))]
        yield from (f"docs/ledger.md:{row.line}: {row.name} {fault}" for fault in said)


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
    if inner and not (place.suffix == ".py" and defines(ast.parse(place.read_text()), inner)):
        return f"names {evidence}, which {name} does not define"
    return ""


def defines(tree: ast.AST, inner: list[str]) -> bool:
    """Whether a file holds the classes and, inside the last, the function that a node names."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    first, *rest = inner
    bodies = [node for node in getattr(tree, "body", []) if isinstance(node, kinds) and node.name == first]
    return any(not rest or defines(node, rest) for node in bodies)


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
    elif program.startswith(".ci/") and not (ROOT / program).exists():
        yield f"{program} does not exist"


def command_names() -> set[str]:
    """Return the subcommands of `lz`."""
    from layerzero.cli import COMMANDS  # here, so that the other checks need no torch

    return set(COMMANDS)


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
    package = (ROOT / "layerzero" / "__init__.py").read_text()
    version = re.findall(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    newest = re.search(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if newest is None or newest[1] not in (*version, "Unreleased"):
        yield f"CHANGELOG.md begins with {newest and newest[1]}, layerzero/__init__.py says {version}"


CHECKS: tuple[Callable[[], Iterator[str]], ...] = (links, ledger, commands, tables, shown, changelog)


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
