"""The strict YAML reader: plain values with lines, and a refusal for everything that is not plain."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from layerzero._util.strict_yaml import MAX_BYTES, MAX_DEPTH, YamlError, parse, path_in, quote, suggestion
from tests.profiles import many_examples


def test_values_and_lines_are_read() -> None:
    """Every path knows the line on which it begins."""
    document = parse(b"a: 1\nb:\n  - x: true\n    y: 1.5\n  - text\nc: {d: null}\n")
    assert document.value == {"a": 1, "b": [{"x": True, "y": 1.5}, "text"], "c": {"d": None}}
    assert document.lines[("b", 0, "y")] == 4
    assert document.line_of(("b", 1, "missing")) == 5


@pytest.mark.parametrize(
    "text", ["no", "on", "Off", "1:30", "0777", "0x10", "2026-01-01", "1_000", ".inf", "=", "NaN"]
)
def test_surprising_scalars_stay_strings(text: str) -> None:
    """YAML 1.1's readings of plain words are not applied."""
    assert parse(f"a: {text}\n".encode()).value == {"a": text}


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("a: 1\nb: *x\n", 2, "alias"),
        ("a: 1\nb: &x 2\n", 2, "anchor"),
        ("a: &x [1, 2]\n", 1, "anchor"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "tag"),
        ("a: !!str 1\n", 1, "tag"),
        ("a: ! 1\n", 1, "tag"),
        ("a: 1\n<<: {b: 2}\n", 2, "merge key"),
        ("a: 1\nb: 2\na: 3\n", 3, "first on line 1"),
        ("? [1]\n: 2\n", 1, "key needs to be a string"),
        ("a: 1\n---\nb: 2\n", 2, "one document"),
        ("- a\n", 1, "mapping"),
        ("word\n", 1, "mapping"),
        ("a: [1\n", 2, "not valid YAML"),
        ("\ta: 1\n", 1, "not valid YAML"),
        ("a: 1\nb: 1e999\n", 2, "out of range"),
        ("a: " + "[" * 1000, 1, f"{MAX_DEPTH} levels"),
    ],
)
def test_everything_but_plain_data_is_refused_with_its_line(text: str, line: int, word: str) -> None:
    """Aliases, anchors, tags, merges, duplicates, depth and broken syntax name the line they stand on."""
    with pytest.raises(YamlError, match=word) as caught:
        parse(text.encode())
    assert caught.value.line == line


def test_depth_limit_is_exact() -> None:
    """As many levels as the limit says are read; one more is not."""
    inner = MAX_DEPTH - 1
    assert "a" in parse(("a: " + "[" * inner + "]" * inner).encode()).value
    with pytest.raises(YamlError):
        parse(("a: " + "[" * (inner + 1) + "]" * (inner + 1)).encode())


def test_size_limit_is_exact() -> None:
    """A text of the largest size is read; one byte more is refused before it is decoded."""
    head = b"a: 1\n#"
    assert parse(head + b"x" * (MAX_BYTES - len(head))).value == {"a": 1}
    with pytest.raises(YamlError, match=str(MAX_BYTES)):
        parse(head + b"x" * (MAX_BYTES - len(head) + 1))


def test_bytes_that_are_not_utf8_name_their_line() -> None:
    """A wrong byte is reported with its value and line."""
    with pytest.raises(YamlError, match="0xff") as caught:
        parse(b"a: 1\nb: \xff\n")
    assert caught.value.line == 2


def test_an_empty_text_is_an_empty_mapping() -> None:
    """Nothing, or comments only, is a file without fields."""
    assert parse(b"").value == parse(b"# only this\n").value == {}


def test_path_of_a_schema_error_is_found() -> None:
    """The path at the end of a msgspec message is turned into keys and indices."""
    assert path_in("Expected `int`, got `str` - at `$.rules[2].op`") == ("rules", 2, "op")
    assert path_in("no path here") == ()


def test_hints_name_near_words_or_the_known_ones() -> None:
    """A close word is suggested; with none close, the known words are listed."""
    assert suggestion("devise", ["device", "strict"]) == "did you mean 'device'?"
    assert suggestion("zzz", ["device", "strict"]) == "known: device, strict"
    assert suggestion("zzz", []) == "none is known here"
    assert len(quote("x" * 1000)) <= 80


_text = st.text(st.characters(codec="utf-8"), max_size=12)
_leaf = st.none() | st.booleans() | st.integers(-(10**17), 10**17) | _text
_tree = st.recursive(
    _leaf, lambda c: st.lists(c, max_size=4) | st.dictionaries(_text, c, max_size=4), max_leaves=12
)


@given(st.dictionaries(_text, _tree, max_size=5))
def test_what_a_safe_dumper_writes_is_read_back(value: dict[str, object]) -> None:
    """Plain data written by PyYAML, aliases off, comes back unchanged; only merge keys are refused."""

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    # Quoted, because PyYAML writes for YAML 1.1, where `0E0` needs no quotes to be a string.
    Plain.add_representer(
        str, lambda dumper, word: dumper.represent_scalar("tag:yaml.org,2002:str", word, '"')
    )
    text = yaml.dump(value, Dumper=Plain, default_flow_style=False, allow_unicode=False)
    try:
        assert parse(text.encode()).value == value
    except YamlError as error:
        assert "merge key" in str(error)


@many_examples
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_read_or_refused(data: bytes) -> None:
    """No input raises anything but the reader's own error."""
    try:
        assert isinstance(parse(data).value, dict)
    except YamlError as error:
        assert error.line is None or error.line >= 1
