"""`doctor` reports what is here and what is broken, and raises for neither."""

import importlib
import sqlite3
from pathlib import Path

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero import warmup as warmup_function
from layerzero.api.doctor import DoctorReport, TorchInfo, onednn_version
from layerzero.ops import table
from layerzero.perfdb.rows import wal_is_safe
from layerzero.spec.hardware import hypothetical_gpu


@pytest.fixture(scope="module")
def report() -> DoctorReport:
    """What doctor says of this process, without importing the optional libraries."""
    return lz.doctor(imports=False)


def test_the_public_name_is_the_function() -> None:
    """`layerzero.warmup` is called, although a package of that name exists."""
    importlib.import_module("layerzero.warmup.run")
    assert warmup_function is lz.warmup and callable(lz.warmup)


def test_a_working_installation_has_no_problem(report: DoctorReport) -> None:
    """Optional libraries may be absent."""
    assert report.ok and report.problems == ()


def test_the_facts_are_torchs_own(report: DoctorReport) -> None:
    """Versions are those of the parts, not of something near them."""
    assert report.torch.version == torch.__version__
    assert report.sqlite.version == sqlite3.sqlite_version
    assert report.host.cpu.threads >= 1 and report.host.cpus >= 1
    assert len(report.torch.devices) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.parametrize(
    ("config", "version"),
    [
        ("  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71)", "3.12.0"),
        ("  - oneDNN v4.0 (Git Hash 1)", "4.0"),
        ("built with nothing", "present, version not reported"),
    ],
)
def test_onednn_is_reported_with_its_own_version(config: str, version: str) -> None:
    """Torch's version says nothing about the oneDNN inside it."""
    assert onednn_version(config) == version


@pytest.mark.parametrize(
    ("release", "affected"),
    [
        ("3.6.23", False),
        ("3.7.0", True),
        ("3.40.1", True),
        ("3.44.5", True),
        ("3.44.6", False),
        ("3.45.0", True),
        ("3.50.6", True),
        ("3.50.7", False),
        ("3.51.0", True),
        ("3.51.2", True),
        ("3.51.3", False),
        ("3.52.0", False),
    ],
)
def test_the_wal_reset_bug_is_known_by_version(release: str, affected: bool) -> None:
    """Both repaired series and both ends of the range."""
    assert wal_is_safe(release) is not affected


def test_every_op_has_a_ready_kernel_and_every_kernel_one_state(report: DoctorReport) -> None:
    """The four groups of an op add up to what is registered for it."""
    assert [k.op for k in report.kernels] == list(table.names())
    for kernels in report.kernels:
        assert kernels.ready
        parts = [*kernels.ready, *kernels.cold, *kernels.blocked, *kernels.elsewhere]
        assert sorted(parts) == sorted(k.id for k in lz.list_kernels(kernels.op))


def test_the_text_and_the_json_hold_the_report(report: DoctorReport) -> None:
    """Both forms can be sent to whoever helps."""
    text = str(report)
    assert torch.__version__ in text and sqlite3.sqlite_version in text
    assert text.endswith("every required part works")
    decoded = msgspec.json.decode(msgspec.json.encode(report))
    assert decoded["torch"]["version"] == torch.__version__


def test_policy_health_and_settings_in_force_are_shown() -> None:
    """A lock, a quarantine and a changed setting are all visible."""
    with lz.start(lz.Settings(tie_band=0.25, warm="off", device="cpu"), scoped=True) as rt:
        lz.lock("rms_norm", "reference")
        rt.device().health.quarantine("torch.linear.native", "gave NaN")
        report = lz.doctor(imports=False)
    assert report.settings == {"tie_band": 0.25, "warm": "off", "device": "cpu"}
    assert [rule["action"] for rule in report.policy] == ["lock"]
    assert [(s.kernel, s.why) for s in report.health] == [("torch.linear.native", "gave NaN")]
    (linear,) = [k for k in report.kernels if k.op == "linear"]
    assert "torch.linear.native" in linear.blocked
    assert "lock reference for rms_norm" in str(report) and "gave NaN" in str(report)


def test_a_policy_that_leaves_nothing_is_a_problem() -> None:
    """Denying every kernel breaks the first call, and doctor says so instead of raising."""
    with lz.start(lz.Settings(warm="off", device="cpu"), scoped=True):
        lz.add_policy(deny="*", op="rms_norm")
        report = lz.doctor(imports=False)
    assert not report.ok
    assert any("POLICY_DENIED" in problem for problem in report.problems)
    assert "problem: " in str(report)


def test_settings_that_cannot_be_read_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad variable stops the runtime from opening; the rest of the report is there."""
    from layerzero.runtime import process
    from layerzero.runtime.active import ActiveRuntime

    monkeypatch.setattr(process, "ACTIVE", ActiveRuntime())
    monkeypatch.setenv("LAYERZERO_TIE_BAND", "wide")
    report = lz.doctor(imports=False)
    assert [p for p in report.problems if "LAYERZERO_TIE_BAND" in p]
    assert report.kernels == () and report.torch.version == torch.__version__


def test_the_last_selection_stays_the_callers() -> None:
    """Doctor's own call does not pass for one of the program's."""
    lz.sync.layer_norm(torch.ones(2, 8))
    lz.doctor(imports=False)
    last = lz.last_selection()
    assert last is not None and last.op == "layer_norm"


def test_a_gpu_is_shown_with_its_generation_driver_and_cuda(report: DoctorReport) -> None:
    """What a support question needs first; the GPU is imagined, so that this runs anywhere."""
    gpu = hypothetical_gpu(90, cuda="13.0", driver="580.1")
    found = TorchInfo(
        version="2.13.0+cu130",
        onednn="3.12.0",
        cuda="13.0",
        hip=None,
        cudnn=91900,
        mps=False,
        driver=gpu.driver,
        devices=(gpu,),
    )
    text = str(msgspec.structs.replace(report, torch=found))
    assert "sm 9.0 HOPPER, 80 GiB" in text
    assert "CUDA 13.0, driver 580.1, cuDNN 91900" in text


@pytest.mark.parametrize("sm", [0, 9, 131, 9.0, True, "90"])
def test_an_imagined_gpu_needs_a_compute_capability(sm: object) -> None:
    """9 is not 9.0: the message says how it is written."""
    with pytest.raises(ValueError, match=r"such as 90 for 9\.0"):
        hypothetical_gpu(sm)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [0, -1.0, "1", True])
def test_a_timeout_needs_to_be_a_time(timeout_s: object) -> None:
    """The message names the argument."""
    with pytest.raises(ValueError, match="timeout_s needs a number of seconds above 0"):
        lz.doctor(timeout_s=timeout_s)  # type: ignore[arg-type]
