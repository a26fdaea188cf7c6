"""Settings: one immutable record, four sources in order, errors that name where a value came from."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.runtime import Runtime
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.settings import FIELDS, Settings
from tests.profiles import many_examples


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_order_is_program_environment_file_defaults(tmp_path: Path) -> None:
    """Each source overrides the ones below it, field by field."""
    file = write(tmp_path / "lz.yaml", "version: 1\nprobes: 2\nmax_batch_size: 2\nmax_queue_size: 2\n")
    env = {"LAYERZERO_PROBES": "3", "LAYERZERO_MAX_BATCH_SIZE": "3"}
    settings = Settings.load(file, env, probes=4)
    assert (settings.probes, settings.max_batch_size, settings.max_queue_size) == (4, 3, 2)
    assert settings.max_keys == Settings().max_keys


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    """LAYERZERO_CONFIG is the path where none is given; a given path wins."""
    named = write(tmp_path / "a.yaml", "probes: 2\n")
    given_path = write(tmp_path / "b.yaml", "probes: 5\n")
    env = {"LAYERZERO_CONFIG": str(named)}
    assert Settings.load(env=env).probes == 2
    assert Settings.load(given_path, env).probes == 5


def test_an_error_in_the_file_of_the_environment_names_the_variable(tmp_path: Path) -> None:
    """A file that was given by its path is named alone."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("devise: cpu\n")
    for path, says in ((tmp_path / "none.yaml", "cannot be read"), (bad, "unknown setting")):
        with pytest.raises(ConfigurationError, match=f"^LAYERZERO_CONFIG: {path}.*{says}") as caught:
            Settings.load(env={"LAYERZERO_CONFIG": str(path)})
        assert caught.value.context["variable"] == "LAYERZERO_CONFIG"
        with pytest.raises(ConfigurationError, match=f"^{path}.*{says}"):
            Settings.load(path, env={"LAYERZERO_CONFIG": "elsewhere"})


def test_nothing_set_asks_for_no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec compiles the annotation of every field for its first one; a first call would wait for it."""
    defaults = msgspec.convert({}, Settings)
    monkeypatch.setattr(msgspec, "convert", None)
    assert Settings.load(env={}) == defaults == Settings()


def test_only_load_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Settings()` is its defaults, `Settings.load()` and a runtime without settings heed the variable."""
    monkeypatch.setenv("LAYERZERO_PERFDB", "/srv/measured.sqlite")
    assert Settings().perfdb == "auto"
    assert Settings.load().perfdb == "/srv/measured.sqlite"
    monkeypatch.setenv("LAYERZERO_PERFDB", "none")
    assert Settings().perfdb == "auto" and Settings.load().perfdb is None
    assert Runtime().settings.perfdb is None


def test_a_runtime_names_the_variables_that_its_settings_override(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that does not parse; one that says what the field holds, and the policy's, are not named."""
    for variable in [name for name in os.environ if name.startswith("LAYERZERO_")]:
        monkeypatch.delenv(variable)
    for field, text in (("PERFDB", "none"), ("PROBES", "1"), ("TIE_BAND", "wide"), ("DENY", "zentorch.*")):
        monkeypatch.setenv(f"LAYERZERO_{field}", text)
    settings = Settings(probes=1)
    assert settings.overridden() == {"LAYERZERO_PERFDB": "perfdb", "LAYERZERO_TIE_BAND": "tie_band"}
    with caplog.at_level(logging.INFO, "layerzero"):
        Runtime(settings)
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "setting.overridden" in line and "LAYERZERO_PERFDB" in line]
    assert not [line for line in said if "LAYERZERO_PROBES" in line or "LAYERZERO_DENY" in line]


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("LAYERZERO_STRICT", "yes", "strict", True),
        ("LAYERZERO_STRICT", "0", "strict", False),
        ("LAYERZERO_INFERENCE", "true", "inference", True),
        ("LAYERZERO_INFERENCE", "none", "inference", None),
        ("LAYERZERO_TIE_BAND", "0.1", "tie_band", 0.1),
        ("LAYERZERO_WARM", "eager", "warm", "eager"),
        ("LAYERZERO_DEVICE", "cuda:1", "device", "cuda:1"),
        ("LAYERZERO_CLUSTER", "", "cluster", None),
        ("LAYERZERO_POLICY", "/etc/p.yaml", "policy", "/etc/p.yaml"),
    ],
)
def test_variables_are_parsed_by_type(variable: str, text: str, field: str, value: object) -> None:
    """Booleans, numbers, choices, strings and none are read from text."""
    assert getattr(Settings.load(env={variable: text}), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "needs"),
    [
        ("LAYERZERO_PROBES", "two", "whole number"),
        ("LAYERZERO_PROBES", "0", "at least 1"),
        ("LAYERZERO_PROBES", "1.5", "whole number"),
        ("LAYERZERO_STRICT", "maybe", "true or false"),
        ("LAYERZERO_INFERENCE", "maybe", "true or false or none"),
        ("LAYERZERO_TIE_BAND", "nan", "at least 0"),
        ("LAYERZERO_COOLDOWN_S", "0", "above 0"),
        ("LAYERZERO_WARM", "never", "'background' or 'eager' or 'off'"),
        ("LAYERZERO_DEVICE", "", '"auto", "cpu"'),
    ],
)
def test_a_variable_that_does_not_parse_is_named(variable: str, text: str, needs: str) -> None:
    """The error names the variable, what it needs and what it got."""
    with pytest.raises(ConfigurationError, match=needs) as caught:
        Settings.load(env={variable: text})
    assert str(caught.value).startswith(variable)


def test_a_misspelt_variable_lists_near_ones() -> None:
    """A variable close to a known one is a mistake, not somebody else's."""
    with pytest.raises(ConfigurationError, match=r"LAYERZERO_PROBE: .*'PROBES'"):
        Settings.load(env={"LAYERZERO_PROBE": "1"})


def test_a_strange_variable_is_reported_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """A variable close to nothing may belong to another release: it is logged."""
    with caplog.at_level(logging.WARNING, "layerzero"):
        assert Settings.load(env={"LAYERZERO_QQQQQQ": "1"}) == Settings()
    assert "setting.ignored" in caplog.text and "LAYERZERO_QQQQQQ" in caplog.text


@pytest.mark.parametrize("name", ["devise", "probs", "max_item"])
def test_an_unknown_setting_lists_near_ones(name: str) -> None:
    """Program and replace refuse unknown names with a suggestion."""
    with pytest.raises(ConfigurationError, match=f"'{name}': did you mean"):
        Settings.load(None, {}, **{name: 1})
    with pytest.raises(ConfigurationError, match=f"'{name}': did you mean"):
        Settings().replace(**{name: 1})


@pytest.mark.parametrize(
    ("text", "line", "needs"),
    [
        ("version: 1\nprobs: 1\n", 2, "did you mean 'probes'"),
        ("version: 1\n\nprobes: two\n", 3, "whole number"),
        ("probes: -1\n", 1, "at least 1"),
        ("warm: sometimes\n", 1, "'eager'"),
        ("device: 3\n", 1, '"auto", "cpu"'),
        ("strict: 1\n", 1, "true or false"),
        ("probes: 1\nprobes: 2\n", 2, "duplicate"),
        ("a: *b\n", 1, "alias"),
        ("version: one\n", 1, "whole number"),
        ("probes: [\n", 2, "not valid YAML"),
    ],
)
def test_a_bad_file_names_file_and_line(tmp_path: Path, text: str, line: int, needs: str) -> None:
    """Unknown fields, wrong types, ranges and broken YAML are errors at their line."""
    file = write(tmp_path / "lz.yaml", text)
    with pytest.raises(ConfigurationError, match=needs) as caught:
        Settings.load(file, {})
    assert str(caught.value).startswith(f"{file}:{line}:")
    assert caught.value.context["line"] == line


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """A file that was named must be readable."""
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Settings.load(tmp_path / "none.yaml", {})


def test_a_file_of_another_version_is_skipped_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its fields mean nothing here, so the defaults stand and the log says so (FS-021)."""
    file = write(tmp_path / "lz.yaml", "version: 2\nprobes: 9\nfuture: yes\n")
    with caplog.at_level(logging.WARNING, "layerzero"):
        assert Settings.load(file, {}) == Settings()
    assert "settings.skipped" in caplog.text


@pytest.mark.parametrize("how", ["file", "environment", "program"])
def test_a_file_of_another_version_is_refused_under_strict(tmp_path: Path, how: str) -> None:
    """Strict from any source turns the skip into an error."""
    file = write(tmp_path / "lz.yaml", "version: 2\n" + ("strict: true\n" if how == "file" else ""))
    env = {"LAYERZERO_STRICT": "1"} if how == "environment" else {}
    overrides: dict[str, Any] = {"strict": True} if how == "program" else {}
    with pytest.raises(ConfigurationError, match="version needs 1, got 2"):
        Settings.load(file, env, **overrides)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("probes", 0),
        ("probes", True),
        ("probes", 1.5),
        ("tie_band", -0.1),
        ("tie_band", float("inf")),
        ("window_s", 0.0),
        ("window_s", "1"),
        ("warm", "x"),
        ("strict", 1),
        ("inference", "no"),
        ("device", ""),
        ("device", None),
        ("policy", 3),
        ("version", 2),
    ],
)
def test_direct_construction_checks_too(field: str, value: Any) -> None:
    """`Settings(...)` refuses what a file may not hold either, and names the field."""
    with pytest.raises(ConfigurationError, match=field):
        Settings(**{field: value})


def test_settings_are_immutable_and_documented() -> None:
    """No field can be set, every field stands in the docstring, and the JSON round trip is exact."""
    settings = Settings(device="cpu", probes=3)
    with pytest.raises(AttributeError):
        settings.probes = 4  # type: ignore[misc]
    assert [f for f in FIELDS if f not in (Settings.__doc__ or "")] == []
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings
    assert settings.replace(probes=1) == Settings(device="cpu", probes=1)


@many_examples
@given(st.sampled_from([f for f in FIELDS if f != "version"]), st.text(max_size=12))
def test_any_text_in_a_variable_parses_or_is_refused_by_name(field: str, text: str) -> None:
    """No value of a variable leads to another kind of error."""
    variable = "LAYERZERO_" + field.upper()
    try:
        settings = Settings.load(env={variable: text})
    except ConfigurationError as error:
        assert str(error).startswith(variable)
    else:
        assert isinstance(settings, Settings)


@pytest.mark.parametrize("field", [f for f in FIELDS if f != "version"])
def test_bytes_that_are_no_text_are_refused_by_the_name_of_their_variable(field: str) -> None:
    """The system hands such bytes on as half characters, which no number, word or pattern holds."""
    variable = "LAYERZERO_" + field.upper()
    try:
        settings = Settings.load(env={variable: "\udcd0"})
    except ConfigurationError as error:
        assert str(error).startswith(variable) and field in error.context["field"]
    else:
        assert "udcd0" in repr(getattr(settings, field))


def test_the_process_environment_is_read_unless_rights_were_borrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `env` the process's variables count; under another user's rights they are ignored."""
    monkeypatch.setenv("LAYERZERO_PROBES", "7")
    assert Settings.load().probes == 7
    if hasattr(os, "geteuid"):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert Settings.load().probes == Settings().probes
