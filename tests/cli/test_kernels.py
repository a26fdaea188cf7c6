"""`lz kernels` and `lz doctor` show what is here, as a table and as JSON."""

import json
from typing import Any

import pytest

import layerzero
from layerzero.api.doctor import DoctorReport
from layerzero.cli import doctor
from tests.cli.command import Lz


def test_kernels_lists_what_the_library_lists(lz: Lz) -> None:
    """The same kernels in the same order, with their state."""
    found = json.loads(lz("kernels", "--device", "cpu", "--json").stdout)
    assert [(k["id"], k["op"]) for k in found] == [(k.id, k.op) for k in layerzero.list_kernels()]
    assert {k["state"] for k in found} <= {"ready", "cold", "blocked"}


def test_kernels_can_be_narrowed(lz: Lz) -> None:
    """`--op` and `--backend` keep what matches both."""
    result = lz("kernels", "--op", "rms_norm", "--backend", "reference", "--device", "cpu")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["1", "kernel", "reference.rms_norm"]


def test_a_kernel_for_other_hardware_says_so(lz: Lz) -> None:
    """A CUDA kernel on a CPU is listed with the reason that it is not for this device."""
    lines = lz("kernels", "--op", "attention", "--device", "cpu").stdout.splitlines()
    (flash,) = [line for line in lines if line.split()[0] == "torch.attention.sdpa_flash"]
    assert "PLATFORM_MISMATCH: platform needs cuda, got cpu" in flash


def test_the_same_question_gives_the_same_text(lz: Lz) -> None:
    """What is piped or printed as JSON does not change from run to run."""
    for words in (("kernels",), ("kernels", "--json"), ("explain", "rms_norm", "--shape", "4x8", "--json")):
        assert lz(*words, "--device", "cpu").stdout == lz(*words, "--device", "cpu").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--op", "atention"), "ops: add_layer_norm"),
        (("--backend", "nope"), "--backend needs one of "),
    ],
)
def test_an_unknown_name_lists_the_known_ones(words: tuple[str, ...], message: str, lz: Lz) -> None:
    """Exit status 2 with the names there are."""
    result = lz("kernels", *words, "--device", "cpu")
    assert result.exit_code == 2 and message in result.output


def test_doctor_prints_every_section(lz: Lz) -> None:
    """Status 0 with whatever optional libraries are absent."""
    result = lz("doctor", "--quick")
    assert result.exit_code == 0, result.output
    for title in ("system", "sqlite", "optional libraries", "kernels on", "health", "policy in force"):
        assert any(line.startswith(title) for line in result.stdout.splitlines()), title
    assert result.stdout.rstrip().endswith("every required part works")


def test_doctor_in_json(lz: Lz) -> None:
    """The report's fields, and whether it is well."""
    plain = json.loads(lz("doctor", "--quick", "--json").stdout)
    assert plain["ok"] is True and plain["problems"] == []
    assert {"host", "torch", "libraries", "sqlite", "kernels", "health", "policy"} <= set(plain)


def test_a_broken_required_part_is_status_1(lz: Lz, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of the report say so."""

    def broken(**asked: Any) -> DoctorReport:
        report = layerzero.doctor(**asked)
        return DoctorReport(
            host=report.host,
            torch=report.torch,
            libraries=report.libraries,
            sqlite=report.sqlite,
            problems=("torch needs at least 99",),
        )

    monkeypatch.setattr(doctor, "examine", broken)
    text, plain = lz("doctor", "--quick"), lz("doctor", "--quick", "--json")
    assert (text.exit_code, plain.exit_code) == (1, 1)
    assert "problem: torch needs at least 99" in text.stdout
    assert json.loads(plain.stdout)["ok"] is False


def test_doctor_refuses_a_timeout_of_nothing(lz: Lz) -> None:
    """Zero seconds would call every library broken."""
    assert lz("doctor", "--timeout", "0").exit_code == 2
