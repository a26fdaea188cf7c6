"""The last word of a public class's name is one that the field knows, or one that the glossary explains."""

import re
import tomllib
from pathlib import Path

import pytest

from scripts import house

ROOT = Path(__file__).resolve().parents[1]
HEAD_NOUN_LIMIT = 280  # a reader's vocabulary: it may shrink
_WORDS = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z][a-z0-9]*")


def singular(word: str) -> str:
    """`copies` and `copy` are one word; `series`, `status` and `loss` have no end to lose."""
    if word.endswith(("ss", "us", "is", "series")):
        return word
    for end, stem in (("ies", "y"), ("sses", "ss"), ("xes", "x"), ("ches", "ch"), ("s", "")):
        if word.endswith(end):
            return word.removesuffix(end) + stem
    return word


def head_nouns(name: str) -> set[str]:
    """What may name a class: its last word or its last two as one, in the singular (`RoundRobin`)."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return {singular("".join(words[-count:])) for count in (1, 2)}


def public_classes(text: str) -> list[str]:
    """Classes at the top of a module; one in small letters is called like a function (`apply_modes`)."""
    return re.findall(r"^class ([A-Z]\w*)", text, re.M)


def glossary_nouns() -> set[str]:
    """The last word of each term of the glossary, without what stands in parentheses."""
    rows = re.findall(r"^\| ([^|(]+?) (?:\([^|]*)?\|", (ROOT / "docs/design/glossary.md").read_text(), re.M)
    return {singular(term.split()[-1].lower()) for term in rows if not term.startswith(("word", "---"))}


def field_nouns() -> dict[str, list[str]]:
    """The committed list, by where the field has a word."""
    groups = tomllib.loads((ROOT / "tests/data/field_nouns.toml").read_text())
    return {where: words.split() for where, words in groups.items()}


def unknown_classes(names: list[str], known: set[str]) -> list[str]:
    """The classes of `names` that end with no word of `known`."""
    return [name for name in names if not head_nouns(name) & known]


def test_a_class_is_a_noun_of_the_glossary_or_of_the_field() -> None:
    """`JoinedWeights` says what it is; `Joined` does not. Each word of the list is in use, and once."""
    field = [word for words in field_nouns().values() for word in words]
    names = [name for module in house.modules() for name in public_classes(module.text)]
    assert unknown_classes(names, glossary_nouns() | set(field)) == []
    assert sorted(field) == sorted(set(field) - glossary_nouns()), "once is enough"
    used = set().union(*(head_nouns(name) for name in names))
    assert set(field) - used == set(), "no class ends with these: strike them off the list"
    assert len(used & (set(field) | glossary_nouns())) <= HEAD_NOUN_LIMIT


@pytest.mark.parametrize(
    ("name", "nouns"),
    [
        ("BlockTables", {"table", "blocktable"}),
        ("RoundRobin", {"robin", "roundrobin"}),
        ("PerfDB", {"db", "perfdb"}),
        ("MeasuredCosts", {"cost", "measuredcost"}),
        ("WorkerLoss", {"loss", "workerloss"}),
        ("MeasurementSeries", {"series", "measurementseries"}),
        ("Copies", {"copy"}),
    ],
)
def test_the_rule_about_class_names_sees_what_it_should(name: str, nouns: set[str]) -> None:
    """The check itself finds the last word, and refuses a class that only says what happened."""
    assert head_nouns(name) == nouns
    assert unknown_classes([name, "Joined"], nouns) == ["Joined"]
