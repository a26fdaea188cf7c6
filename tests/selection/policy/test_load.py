"""Policy files and variables: every mistake has its line, nothing defaults silently, names are checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero._util.strict_yaml import MAX_BYTES
from layerzero.selection.policy import EMPTY, Layer, environment_policy, load_policy, merge, parse_policy
from layerzero.selection.policy.load import MAX_RULES
from layerzero.selection.policy.rules import AVOIDED, PREFERRED
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import ConfigurationError, PolicyLoadError, PolicyValidationError
from tests.profiles import many_examples

FULL = b"""\
version: 1
rules:
  - lock: flashinfer
    op: attention/causal
    when: Sq > 1024
  - deny: [flash_attn.*, xformers]
    note: wrong results on this driver
  - boost: triton_kernels.*
    factor: 0.8
    add_us: 5
  - prefer: liger
    op: rms_norm
    until: 2026-12-01T00:00:00Z
  - avoid: onednn
  - allow: torch*
    op: linear
    when: ["head_dim == 64", "dtype in [float16, bfloat16]"]
"""
KERNELS = {"flashinfer.attention", "flash_attn.attention", "torch_sdpa.attention.math"}


def test_a_full_file_is_read(tmp_path: Path) -> None:
    """Every kind of rule, with op, kind, conditions, numbers, note and source."""
    path = tmp_path / "policy.yaml"
    path.write_bytes(FULL)
    rules = load_policy(path).policy.rules
    assert [r.action for r in rules] == ["lock", "deny", "boost", "boost", "boost", "allow"]
    assert {r.layer for r in rules} == {Layer.FILE}
    assert [r.source for r in rules] == [f"{path}:{line}" for line in (3, 6, 8, 11, 14, 15)]
    assert (rules[0].op, rules[0].kind) == ("attention", "causal") and rules[1].note.startswith(
        "wrong results"
    )
    assert (rules[2].boost.factor, rules[2].boost.add_us) == (0.8, 5.0)
    assert (rules[3].boost.factor, rules[4].boost.factor) == (PREFERRED, AVOIDED)
    assert [str(c) for c in rules[5].when] == ["D == 64", "dtype in [float16, bfloat16]"]


def test_wall_clock_ends_become_monotonic() -> None:
    """`until` is a moment with a time zone, put on the clock that `at` reads."""
    data = b"rules:\n  - deny: a\n    until: 1970-01-01T00:01:40+00:00\n"
    policy = parse_policy(data, "p.yaml", clock=lambda: 1000.0, wall=lambda: 90.0).policy
    assert policy.rules[0].until == 1010.0
    assert policy.active_at(1010.0).policy == EMPTY


@pytest.mark.parametrize("data", [b"", b"version: 1\n", b"rules: []\n", b"# nothing\n"])
def test_a_file_without_rules_allows_all(data: bytes) -> None:
    """A file may hold no rules; that is what it says."""
    assert parse_policy(data, "p.yaml").policy is EMPTY


@pytest.mark.parametrize(
    ("text", "line", "needs"),
    [
        ("rules:\n- deny: X\n", 2, "glob over kernel ids"),
        ("rules:\n- deny: x\n  op: A\n", 3, "op needs a name"),
        ("rules:\n- deny: x\n  wen: a\n", 3, "did you mean 'when'"),
        ("rles: []\n", 1, "did you mean 'rules'"),
        ("rules:\n\n- deny: x\n  when: Sq >> 2\n", 4, "field > number"),
        ("rules:\n- deny: x\n  when: sq > 2\n", 3, "did you mean 'Sq'"),
        ("rules: 3\n", 1, "array"),
        ("rules: [3]\n", 1, "object"),
        ("rules:\n- deny: {a: 1}\n", 2, "object"),
        ("rules:\n- deny: [a, 1]\n", 2, "str"),
        ("rules:\n- deny: []\n", 2, "at least one pattern"),
        ("rules:\n- {}\n", 2, "exactly one of lock, deny, allow, boost, prefer, avoid, got none"),
        ("rules:\n- lock: a\n  deny: b\n", 2, "got lock and deny"),
        ("rules:\n- lock: a\n", 2, "lock needs an op"),
        ("rules:\n- boost: a\n", 2, "boost needs factor or add_us"),
        ("rules:\n- boost: a\n  factor: fast\n", 3, "float"),
        ("rules:\n- boost: a\n  factor: 0\n", 3, "factor needs"),
        ("rules:\n- prefer: a\n  factor: 0.5\n", 3, "factor belongs to boost"),
        ("rules:\n- deny: a\n  until: tomorrow\n", 3, "until needs a time"),
        ("rules:\n- deny: a\n  until: 2026-01-01T00:00:00\n", 3, "time zone"),
        ("rules:\n- deny: a\n  op: attention/casual\n", 3, "did you mean 'causal'"),
        ("version: 2\nrules: []\n", 1, "version needs 1, got 2"),
        ("version: yes\n", 1, "version needs 1, got 'yes'"),
        ("version: true\n", 1, "version needs 1, got True"),
        ("rules:\n- deny: a\n  deny: b\n", 3, "duplicate key"),
        ("rules:\n- deny: &x a\n", 2, "anchor"),
        ("rules:\n- deny: *x\n", 2, "alias"),
        ("rules:\n- deny: !!python/name:os.system a\n", 2, "tag"),
        ("rules:\n- deny: [a\n", 3, "not valid YAML"),
        ("rules:\n" + "- deny: a\n" * (MAX_RULES + 1), MAX_RULES + 2, f"at most {MAX_RULES}"),
        ("rules: " + "[" * 40 + "\n", 1, "levels of nesting"),
    ],
)
def test_every_mistake_has_its_line(text: str, line: int, needs: str) -> None:
    """A broken policy is an error with file and line, never an empty policy (FS-018)."""
    with pytest.raises(PolicyLoadError, match=needs) as caught:
        parse_policy(text.encode(), "p.yaml")
    assert (caught.value.path, caught.value.line) == ("p.yaml", line)
    assert str(caught.value).startswith(f"p.yaml:{line}: ")
    assert isinstance(caught.value, PolicyValidationError) and isinstance(caught.value, ConfigurationError)


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    """Missing, a directory, too large: each is refused, with no line where none applies."""
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (MAX_BYTES + 1))
    for path, needs in (
        (tmp_path / "none.yaml", "cannot be read"),
        (tmp_path, "cannot be read"),
        (big, "at most"),
    ):
        with pytest.raises(PolicyLoadError, match=needs) as caught:
            load_policy(path)
        assert caught.value.line is None and caught.value.path == str(path)


def test_unknown_names_are_findings_and_errors_under_strict() -> None:
    """A rule for a kernel that is not here is kept and reported; strict refuses it at its line (K19)."""
    data = b"rules:\n- lock: flashnifer\n  op: attention\n- deny: flash_attn.*\n- deny: x*\n  op: atention\n"
    loaded = parse_policy(data, "p.yaml", known_ops={"attention"}, known_kernels=KERNELS)
    assert len(loaded.policy.rules) == 3
    messages = [finding.message for finding in loaded.findings]
    assert len(messages) == 3
    assert "'flashnifer'; did you mean 'flashinfer'" in messages[0]
    assert "unknown op 'atention'" in messages[1] and "did you mean 'attention'" in messages[1]
    assert "'x*'" in messages[2]
    with pytest.raises(PolicyLoadError, match="flashnifer") as caught:
        parse_policy(data, "p.yaml", known_ops={"attention"}, known_kernels=KERNELS, strict=True)
    assert caught.value.line == 2


def test_a_lock_on_an_absent_kernel_refuses_the_others() -> None:
    """The file's lock is not dropped: selection finds no kernel and can say why (K19)."""
    loaded = parse_policy(b"rules:\n  - lock: absent\n    op: attention\n", "p.yaml", known_kernels=KERNELS)
    verdict = loaded.policy.verdict("flashinfer.attention", "flashinfer", CallSpec(op="attention"))
    assert not verdict.allowed and verdict.lock is not None and "p.yaml:2" in str(verdict.reasons[0])


def test_the_environment_overrides_the_file() -> None:
    """A variable's lock wins over the file's for the same op (T38)."""
    file = parse_policy(b"rules:\n  - lock: flash_attn\n    op: attention\n", "p.yaml").policy
    env = environment_policy({"LAYERZERO_LOCK": "attention=flashinfer"})
    value = merge(file, env)
    request = CallSpec(op="attention")
    assert value.verdict("flashinfer.attention", "flashinfer", request).allowed
    assert not value.verdict("flash_attn.attention", "flash_attn", request).allowed


def test_variables_are_read() -> None:
    """Lists, op prefixes and all five variables."""
    policy = environment_policy(
        {
            "LAYERZERO_LOCK": "attention/causal=flashinfer; rms_norm=liger",
            "LAYERZERO_DENY": "flash_attn.*,linear=onednn",
            "LAYERZERO_ALLOW": "*",
            "LAYERZERO_PREFER": "torch_sdpa",
            "LAYERZERO_AVOID": "xformers,",
        }
    )
    assert [(r.action, r.target, r.patterns[0], r.source) for r in policy.rules] == [
        ("lock", "attention/causal", "flashinfer", "LAYERZERO_LOCK"),
        ("lock", "rms_norm", "liger", "LAYERZERO_LOCK"),
        ("deny", "*", "flash_attn.*", "LAYERZERO_DENY"),
        ("deny", "linear", "onednn", "LAYERZERO_DENY"),
        ("allow", "*", "*", "LAYERZERO_ALLOW"),
        ("boost", "*", "torch_sdpa", "LAYERZERO_PREFER"),
        ("boost", "*", "xformers", "LAYERZERO_AVOID"),
    ]
    assert {r.layer for r in policy.rules} == {Layer.ENVIRONMENT}
    assert environment_policy({}) is EMPTY and environment_policy({"LAYERZERO_DENY": " , "}) is EMPTY


@pytest.mark.parametrize(
    ("variable", "text", "needs"),
    [
        ("LAYERZERO_LOCK", "flashinfer", "op=kernel"),
        ("LAYERZERO_LOCK", "attention=", "glob"),
        ("LAYERZERO_LOCK", "Attention=a", "op needs"),
        ("LAYERZERO_DENY", "Flash Attn", "glob"),
        ("LAYERZERO_ALLOW", "a/b", "glob"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str, needs: str) -> None:
    """The error names the variable that holds the mistake."""
    with pytest.raises(PolicyValidationError, match=needs) as caught:
        environment_policy({variable: text})
    assert str(caught.value).startswith(f"{variable}: ")


@many_examples
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_policy_or_an_error(data: bytes) -> None:
    """No file content raises anything but PolicyLoadError."""
    try:
        parse_policy(data, "p.yaml", known_ops={"attention"}, known_kernels=KERNELS)
    except PolicyLoadError as error:
        assert str(error).startswith("p.yaml")


_pieces = ["version", "rules", "lock", "deny", "op", "when", "factor", "1", "attention", "Sq > 1", "~"]
_pieces += [": ", "\n", "\n- ", "\n  ", "[", "]", "{", "}", ", ", "*", "&a "]
_tokens = st.lists(st.sampled_from(_pieces), max_size=25)


@given(_tokens)
def test_near_policies_are_a_policy_or_an_error(tokens: list[str]) -> None:
    """Text made of a policy's own pieces raises nothing but PolicyLoadError either."""
    try:
        parse_policy("".join(tokens).encode(), "p.yaml")
    except PolicyLoadError as error:
        assert str(error).startswith("p.yaml")
