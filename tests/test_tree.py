"""Rules about the source tree itself, each checked on the syntax trees of the files."""

import ast
import builtins
import functools
import gc
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import house

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ("layerzero", "actors", "scheduler")
FILE_LIMIT = 400
# Longer ones, each with its bound: it may shrink, and leaves the list when it is short enough.
LONG_FILES: dict[str, int] = {}
MODULE_LIMIT = 12
# What is smaller: the folder that holds the rooms of `layerzero.actors`, all of them linked into the package.
SMALL_ROOMS = {"actors"}
FUNCTION_LIMIT = 80
ASSERTING_CALLS = ("raises", "warns", "deprecated_call", "fail")

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


modules = functools.cache(house.modules)
figures = functools.cache(house.measure)
functions = house.functions


def parsed(path: Path) -> ast.Module:
    """A file, parsed once for all of these tests."""
    tree: ast.Module = house.parse(path.read_text())
    return tree


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    """What the tests of other modules have the collector look through holds no syntax trees.

    Nor does it look while they are read: millions of nodes, none of which is garbage.
    """
    gc.disable()
    yield
    gc.enable()
    for cached in (modules, figures, house.parse, house.nodes):
        cached.cache_clear()


def sources(*folders: str) -> list[Path]:
    """Every Python file below `folders`, each once: the two links inside `layerzero` are left out."""
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if path.relative_to(ROOT).parts[:2] not in (("layerzero", "actors"), ("layerzero", "scheduler"))
    )


def where(path: Path, node: ast.AST) -> str:
    """Name a place the way an editor opens it."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def called_name(call: ast.Call) -> str:
    """Return the last name of what is called: `fail` for `pytest.fail(...)`."""
    target = call.func
    return target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")


def claims(function: ast.AST) -> tuple[bool, frozenset[str]]:
    """Whether a function holds an assert or an expected exception, and the names of what it calls."""
    names, asserts = set[str](), False
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            names.add(called_name(node))
        asserts = asserts or isinstance(node, ast.Assert)
    named = any(n in ASSERTING_CALLS or n.startswith(("assert_", "check_", "expect_")) for n in names)
    return asserts or named, frozenset(names)


def proofless_tests(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The tests of a file that neither assert nor call a function of it that does, however far down."""
    read = [(function, *claims(function)) for function in functions(tree)]
    proving: set[str] = set()
    while grown := {f.name for f, asserts, called in read if asserts or called & proving} - proving:
        proving |= grown
    return [
        f for f, asserts, called in read if f.name.startswith("test_") and not (asserts or called & proving)
    ]


def test_every_test_proves_something() -> None:
    """A test without an assert passes whatever the code does."""
    assert [where(path, f) for path in sources("tests") for f in proofless_tests(parsed(path))] == []


def test_every_test_says_what_it_states() -> None:
    """The first line of a test's docstring is the fact it proves."""
    silent = [
        f"{where(path, f)} {f.name}"
        for path in sources("tests")
        for f in functions(parsed(path))
        if f.name.startswith("test_") and not ast.get_docstring(f)
    ]
    assert silent == []


def test_files_stay_short() -> None:
    """A module longer than the limit is two modules."""
    lengths = {
        str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources(*PACKAGE, "examples")
    }
    long = {name: n for name, n in lengths.items() if n > FILE_LIMIT}
    assert {name: n for name, n in long.items() if n > LONG_FILES.get(name, 0)} == {}
    assert LONG_FILES.keys() - long.keys() == set(), "these are short now: strike them off the list"


def test_functions_stay_short() -> None:
    """A function longer than the limit hides a name that its reader needs."""
    long = [
        f"{where(path, f)} {f.name}"
        for path in sources(*PACKAGE)
        for f in functions(parsed(path))
        if (f.end_lineno or f.lineno) - f.lineno + 1 > FUNCTION_LIMIT
    ]
    assert long == []


def test_modules_have_a_docstring() -> None:
    """Whoever opens a file reads first what it is for."""
    bare = [str(p.relative_to(ROOT)) for p in sources(*PACKAGE) if not ast.get_docstring(parsed(p))]
    assert bare == []


def test_nothing_is_swallowed() -> None:
    """No handler in the package consists of `pass` for every exception there is."""
    swallowed = []
    for path in sources(*PACKAGE):
        for node in house.walk(parsed(path)):
            if isinstance(node, ast.ExceptHandler) and catches_everything(node) and does_nothing(node.body):
                swallowed.append(where(path, node))
    assert swallowed == []


def catches_everything(handler: ast.ExceptHandler) -> bool:
    """Tell `except:`, `except Exception:` and `except BaseException:` from a named error."""
    return handler.type is None or (
        isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    )


def does_nothing(body: list[ast.stmt]) -> bool:
    """Tell a body of `pass`, `continue` and bare constants from one that acts."""
    idle = (ast.Pass, ast.Continue)
    return all(
        isinstance(s, idle) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in body
    )


def test_every_skip_says_why() -> None:
    """A skipped test names what is missing."""
    unexplained = []
    for path in sources("tests"):
        for node in house.walk(parsed(path)):
            if isinstance(node, ast.Call) and called_name(node) in ("skip", "skipif", "xfail"):
                given = bool(node.args) if called_name(node) == "skip" else False
                if not given and not any(k.arg in ("reason", "msg") for k in node.keywords):
                    unexplained.append(where(path, node))
    assert unexplained == []


def test_no_module_state_is_rebound() -> None:
    """`global` hides who owns a value."""
    rebound = [
        where(path, node)
        for path in sources(*PACKAGE)
        for node in house.walk(parsed(path))
        if isinstance(node, ast.Global)
    ]
    assert rebound == []


@pytest.mark.parametrize(
    ("code", "holds"),
    [
        ("def test_a():\n    f()", False),
        ("def test_a():\n    return f() == 1", False),
        ("def test_a():\n    assert f()", True),
        ("def test_a():\n    with pytest.raises(ValueError):\n        f()", True),
        ("def same(a):\n    assert a\ndef test_a():\n    same(f())", True),
        ("def same(a):\n    return a\ndef test_a():\n    same(f())", False),
    ],
)
def test_the_rule_about_asserts_sees_what_it_should(code: str, holds: bool) -> None:
    """The check itself accepts a test that proves something and refuses one that does not."""
    assert [f.name for f in proofless_tests(ast.parse(code))] == ([] if holds else ["test_a"])


@pytest.mark.parametrize(
    ("code", "swallows"),
    [
        ("try:\n    f()\nexcept Exception:\n    pass", True),
        ("try:\n    f()\nexcept:\n    ...", True),
        ("try:\n    f()\nexcept OSError:\n    pass", False),
        ("try:\n    f()\nexcept Exception:\n    raise", False),
    ],
)
def test_the_rule_about_handlers_sees_what_it_should(code: str, swallows: bool) -> None:
    """The check itself tells a swallowed exception from a handled one."""
    (handler,) = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.ExceptHandler)]
    assert (catches_everything(handler) and does_nothing(handler.body)) is swallows


# Where a name is looked up in a table and its module imported when it is first used.
LAZY_TABLES = {
    "layerzero/__init__.py",
    "layerzero/backends/__init__.py",
    "layerzero/backends/cuda_kernels/__init__.py",
    "layerzero/backends/torch_kernels/flex.py",
    "layerzero/backends/triton_kernels/__init__.py",
    "layerzero/cli/__init__.py",
    "layerzero/ops/table.py",
}


def test_names_say_what_they_hold() -> None:
    """Fewer than three of a thousand assignments go to a name that could hold anything (`found`, `own`)."""
    assert figures().vague_per_1000_assignments < 3


def test_one_class_name_is_one_class() -> None:
    """A reader who looks a class up finds one."""
    assert house.class_homes(modules()) == {}


def test_public_functions_are_verbs_or_nouns() -> None:
    """No public function at module level is named by a bare participle (`joined`)."""
    bare = [
        f"{module.name}.{node.name}"
        for module in modules()
        for node in module.tree.body
        if isinstance(node, FUNCTION)
        and not node.name.startswith("_")
        and house.participles(node)[:1] == [node.name]
    ]
    assert bare == []


def test_every_package_has_its_layer() -> None:
    """The import contract names every package, and no name in it is one of a package that is gone."""
    names = {module.name for module in modules()}
    layers = house.layered()
    uncovered = [
        name
        for name in sorted(names - {"layerzero", "layerzero.actors", "layerzero.scheduler"})
        if not any(name == layer or name.startswith(f"{layer}.") for layer in layers)
    ]
    assert uncovered == []
    assert [layer for layer in layers if not any(f"{name}.".startswith(f"{layer}.") for name in names)] == []


def test_few_modules_stand_loose() -> None:
    """A module belongs to a room; three at most stand beside the rooms."""
    assert len(figures().loose_modules) <= 3


def test_a_folder_is_a_room_neither_a_hall_nor_a_cupboard() -> None:
    """A package holds at most 12 modules beside its `__init__`, and at least 3 files with it."""
    sizes = Counter(str(module.path.parent.relative_to(ROOT)) for module in modules())
    inits = Counter(
        str(module.path.parent.relative_to(ROOT)) for module in modules() if module.path.name == "__init__.py"
    )
    assert {name: n for name, n in sizes.items() if n - inits[name] > MODULE_LIMIT} == {}
    files = {name: sum(path.is_file() for path in (ROOT / name).iterdir()) for name in sizes}
    assert {name for name, n in files.items() if n < 3} == SMALL_ROOMS


def test_the_figures_of_the_house_hold() -> None:
    """What `python -m scripts.house` prints stays as good as it is."""
    measured = figures()
    assert measured.function_lines_median <= 8
    assert measured.function_lines_p95 <= 30
    assert measured.longest_function[1] <= FUNCTION_LIMIT
    assert measured.undocumented_public_names == 0
    assert measured.duplicate_classes == {}
    assert measured.cycles == measured.cycles_with_inner_imports == []


def test_a_public_name_without_a_docstring_is_counted() -> None:
    """The count sees a bare function and a bare class, and takes an overload for its implementation's."""
    tree = ast.parse("@overload\ndef f(): ...\ndef g(): ...\nclass C: ...\ndef _h(): ...\n")
    assert house.undocumented(tree) == ["g", "C"]


def test_the_compiled_path_finds_python_slots_by_their_members() -> None:
    """By PyMember_GetOne and PyMember_SetOne: an offset would be trusted where a class has changed."""
    texts = {path.name: path.read_text() for path in (ROOT / "layerzero" / "native").glob("*.[hc]*")}
    assert texts and [name for name, text in texts.items() if "->offset" in text] == []


def test_no_module_of_ours_is_imported_by_a_string() -> None:
    """But in the tables of what is imported when it is first used: no checker sees such an import."""
    hidden = [
        where(path, node)
        for path in sources(*PACKAGE)
        if str(path.relative_to(ROOT)) not in LAZY_TABLES
        for node in house.walk(parsed(path))
        if isinstance(node, ast.Call)
        and called_name(node) == "import_module"
        and "'layerzero" in ast.unparse(node)
    ]
    assert hidden == []


def test_pickled_bytes_are_read_from_a_pools_own_processes_alone() -> None:
    """Ray brings those; what files, sockets and other interpreters bring is never unpickled."""
    unpickles = re.compile(r"(\w*pickle|marshal|shelve|dill|joblib|torch)\.(loads?|open|Unpickler)")
    found = {
        path.relative_to(ROOT).as_posix()
        for path in sources("layerzero", "actors", "scheduler", "examples")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and unpickles.fullmatch(ast.unparse(node.func))
    }
    assert found == {"actors/remote/ray_actor.py", "actors/remote/sending.py"}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Not at the top, and not from inside a function."""
    assert house.cycles(modules(), inner=True) == []


# The outcome of a call is whatever the called function returns.
UNTYPED_BY_NATURE = {"value"}


def untyped_attributes(tree: ast.AST) -> Iterator[str]:
    """Attributes that a class declares as `Any`, in its body or on `self`."""
    for owner in house.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        for node in ast.walk(owner):
            if not isinstance(node, ast.AnnAssign) or "Any" not in ast.unparse(node.annotation).split(" | "):
                continue
            if isinstance(node.target, ast.Name) and node in owner.body:
                yield node.target.id
            elif isinstance(node.target, ast.Attribute):
                yield node.target.attr


def attributes_set_from_outside(tree: ast.AST) -> Iterator[tuple[str, ast.Attribute]]:
    """Attributes that are assigned on another object than `self`."""
    for node in house.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "cls"):
            yield node.attr, node


def test_no_untyped_attribute_is_set_from_outside() -> None:
    """What one object gives another has a type: a protocol, a class or a callable, never `Any`."""
    every = modules()
    untyped = {name for module in every for name in untyped_attributes(module.tree)} - UNTYPED_BY_NATURE
    injected = [
        f"{where(module.path, node)} .{name}"
        for module in every
        for name, node in attributes_set_from_outside(module.tree)
        if name in untyped
    ]
    assert injected == []


def test_the_rule_about_untyped_attributes_sees_what_it_should() -> None:
    """The check itself finds an attribute that is declared as `Any` and set by somebody else."""
    tree = ast.parse(
        "class Device:\n    size: Any\n    def __init__(self):\n        self.drivers: Any = None\n"
        "def attach(device):\n    device.drivers = 1\n"
    )
    assert list(untyped_attributes(tree)) == ["size", "drivers"]
    assert [name for name, _ in attributes_set_from_outside(tree)] == ["drivers"]


# Names of others that docstrings speak of: modules, commands, functions, metrics, examples of values.
NAMES_OF_OTHERS = {
    "CUlaunchAttribute", "CUlaunchConfig", "DIFFUSERS_ATTN_BACKEND", "FileStore", "HashStore", "L",
    "LAYERZERO_CONFIG", "LAYERZERO_DENY", "acme", "aot_compile", "attention_with_lse",
    "batcher_batch_size", "batcher_batches", "batcher_calls", "batcher_hold_seconds",
    "batcher_in_flight", "batcher_queue_wait_seconds", "batcher_queued", "bos_token",
    "decode_with_offsets", "ideal", "ks1", "ks15", "le", "lz", "memory_efficient_attention",
    "mistral_common", "model_type", "no", "num_gpus", "old", "own_attention", "packaging", "pax",
    "prometheus_client", "retryable", "role", "scoped", "sdpa_kernel", "sentencepiece",
    "set_attention_backend", "sin", "sqrt", "tarfile", "temperature_rows", "terminate", "tiktoken",
    "tokenizers", "wait_for_previous",
}  # fmt: skip


def test_docstrings_name_what_is_there() -> None:
    """A name in backticks is one of the code: what was renamed is renamed in the prose, too."""
    every = modules()
    known = {name for module in every for name in house.definitions(module.tree)} | set(dir(builtins))
    known |= {part for module in every for part in module.name.split(".")} | NAMES_OF_OTHERS
    gone = {
        str(m.path.relative_to(ROOT)): names for m in every if (names := house.unknown_names(m.tree, known))
    }
    assert gone == {}


def test_the_rule_about_names_sees_what_it_should() -> None:
    """A docstring's own words are no names of the code, an attribute and a word in a message are."""
    tree = ast.parse(
        'def f(given):\n    """`given`, `size` and `needs` are there, `lane` and `Ticket` are gone."""\n'
        '    raise ValueError(f"{given.size} needs more")\n'
    )
    assert house.unknown_names(tree, ()) == ["lane", "Ticket"]


# Words that this project once used in a meaning of its own, or that say less than the field's word.
PRIVATE_WORDS = {
    r"lanes?": "batcher, queue",
    r"tickets?": "pending call",
    r"crowds?": "callers, batch",
    r"gangs?": "rank group",
    r"reaper": "event thread",
    r"signs? of life": "heartbeat",
    r"(next|earlier|later|one) li(fe|ves)": "incarnation",
    r"told": "notified, given, reported",
    r"(no|some)body": "no caller, another process",
    r"who(so|y)?ever": "the caller that",
    r"for ever": "forever",
    r"go(es)? on": "continue",
    r"stands?(?! (for|out)\b)": "is, is stored",
}
PRIVATE = re.compile(rf"\b({'|'.join(PRIVATE_WORDS)})\b", re.IGNORECASE)
CODE_SPAN = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->")


def private_words(text: str) -> list[str]:
    """The private words of a sentence; names in backticks, links and generated marks are no prose."""
    return [match[0] for match in PRIVATE.finditer(CODE_SPAN.sub("", text))]


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """The prose of a Python file or a document, with line numbers; code in a document is left out."""
    text = path.read_text()
    if path.suffix == ".md":
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            fenced ^= line.startswith("```")
            if not fenced:
                yield number, line
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or token.type == getattr(
            tokenize, "FSTRING_MIDDLE", -1
        ):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def test_prose_has_the_words_of_the_field() -> None:
    """Docstrings, comments, messages and documents use none of `PRIVATE_WORDS`."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    others = {ROOT / "REQUIREMENTS.md", ROOT / "CHANGELOG.md"}
    paths = {*sources(*PACKAGE, "examples"), *documents} - others
    uses = [
        f"{path.relative_to(ROOT)}:{number} {words}"
        for path in sorted(paths)
        for number, line in prose_of(path)
        if (words := private_words(line))
    ]
    assert uses == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a call waits in its lane", ["lane"]),
        ("Whoever comes next is told.", ["Whoever", "told"]),
        ("a crowd of callers goes on", ["crowd", "goes on"]),
        ("`gang` in backticks and [a record](gang.json) are names", []),
        ("-1 stands for no bound", []),
    ],
)
def test_the_rule_about_words_sees_what_it_should(line: str, words: list[str]) -> None:
    """The check itself finds the words and leaves names alone."""
    assert private_words(line) == words
