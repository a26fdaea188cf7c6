"""`lz consistency` and the pytest plugin: agreement, each kind of disagreement, wrong manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import click
import msgspec
import pytest
import torch

from layerzero.actors.remote.pool import DevicePool
from layerzero.api.start import start
from layerzero.cli import main
from layerzero.cli.deployment import (
    CallResult,
    Deployment,
    DeploymentCall,
    DeviceResults,
    check,
    compare,
    examine,
    load,
)
from layerzero.cli.pytest_consistency import CHECKS
from layerzero.spec.errors import ConfigurationError, DeviceLostError
from layerzero.spec.settings import Settings
from tests import children
from tests.cli.command import Lz
from tests.kernels import kernel

MANIFEST = """
version: 1
calls:
  - {op: rms_norm, arguments: ["x=4x64:bf16"]}
  - {op: linear, arguments: ["x=8x64:f32", "weight=32x64:f32"]}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(MANIFEST)
    return path


@pytest.fixture(scope="module")
def two() -> tuple[Deployment, dict[str, Any], dict[str, DeviceResults]]:
    """Two devices that agree: this process's, twice."""
    calls = msgspec.convert([{"op": "rms_norm", "arguments": ["x=4x64:f32"]}], tuple[Any, ...])
    wanted = msgspec.convert({"calls": calls}, Deployment)

    async def look() -> Any:
        async with start(Settings(device="cpu"), scoped=True) as runtime:
            (facts,) = runtime.device_pool.facts
            return facts, await runtime.device_pool.run(examine, wanted.calls)

    facts, examined = anyio.run(look)
    named = {name: msgspec.structs.replace(facts, name=name) for name in ("a", "b")}
    return wanted, named, {"a": examined, "b": examined}


def test_a_process_agrees_with_itself(manifest: Path) -> None:
    """Exit status 0, and the report counts what was compared."""
    report = anyio.run(check, load(manifest), Settings(device="cpu"))
    assert report.ok
    assert report.compared["calls"] == 2


def test_two_equal_devices_agree(two: Any) -> None:
    """The negative control of the tests below."""
    assert compare(*two).findings == ()


def found(two: Any, check_: str, **changes: Any) -> Any:
    """The findings when device b differs in `changes` from a."""
    wanted, facts, examined = two
    fields = {name: value for name, value in changes.items() if name in DeviceResults.__struct_fields__}
    of_facts = {name: value for name, value in changes.items() if name not in fields}
    report = compare(
        wanted,
        {**facts, "b": msgspec.structs.replace(facts["b"], **of_facts)},
        {**examined, "b": msgspec.structs.replace(examined["b"], **fields)},
    )
    assert not report.ok
    matching = [finding for finding in report.findings if finding.check == check_]
    assert matching, report.findings
    return matching[0]


def test_each_disagreement_is_found(two: Any) -> None:
    """Versions, kernels, policy, settings, plans, numerics, order: each by its own check."""
    answer = two[2]["b"].answers[0]
    other = found(two, "versions", versions={**two[1]["b"].versions, "torch": "0.0"})
    assert other.about == "torch"
    assert set(other.values) == {"a", "b"}
    found(two, "kernels", kernels="other")
    found(two, "policy", policy="other")
    found(two, "settings", settings="other")
    found(two, "batch order", order=tuple(reversed(range(8))))
    plans = found(two, "plans", answers=(CallResult("other.rms_norm", "", answer.digest, answer.output),))
    assert plans.values["b"] == "other.rms_norm"
    wrong = CallResult(answer.kernel, answer.transforms, "other", answer.output + 1.0)
    assert found(two, "numerics", answers=(wrong,)).values["b"] == "other"
    nan = CallResult(answer.kernel, answer.transforms, answer.digest, answer.output * torch.nan)
    assert found(two, "numerics", answers=(nan,)).values.keys() == {"b"}


def test_a_device_is_ready_before_it_answers() -> None:
    """A kernel that would be loaded behind the first call is loaded before it, and answers."""
    calls = (DeploymentCall("rms_norm", ("x=4x64:f32",)),)

    async def look() -> DeviceResults:
        alone = Settings(device="cpu", perfdb=None, shipped_tables=False)
        async with start(alone, scoped=True) as runtime:
            runtime.add_kernel(kernel("late.rms_norm", cold=True))
            own = runtime.device()
            own.set_costs(lambda kernel, *_: (1.0 if kernel.id == "late.rms_norm" else 9.0, "a test"))
            return await examine(calls)

    said = anyio.run(look)
    assert [answer.kernel for answer in said.answers] == ["late.rms_norm"]
    assert said.rows.kernel.split(" of ")[0] == "late.rms_norm", said.rows.kernel


def test_bits_are_compared_under_one_kernel_alone(two: Any) -> None:
    """Another kernel on an equal device owes the tolerance, and the report says which was asked of it."""
    wanted, facts, examined = two
    (kind,), (about, batched) = compare(*two).numbers, compare(*two).numbers.popitem()[1]
    assert compare(*two).numbers[kind][batched].startswith("bit for bit, under ")
    own = examined["b"].rows
    near = CallResult("other.rms_norm", "", "other bits", own.output * (1 + 1e-6))
    for rows, findings in (
        (near, []),
        (CallResult(own.kernel, "", "other bits", own.output), ["batched rows"]),
        (CallResult("other.rms_norm", "", "other bits", own.output * 1.1), ["numerics"]),
    ):
        other = {**examined, "b": msgspec.structs.replace(examined["b"], rows=rows)}
        report = compare(wanted, facts, other)
        assert [finding.check for finding in report.findings] == findings
        alike = report.numbers[kind][batched].startswith("bit for bit")
        assert alike == (rows.kernel == own.kernel)
        assert report.numbers[kind][about].startswith("bit for bit, under ")
    report = compare(wanted, facts, {**examined, "b": msgspec.structs.replace(examined["b"], rows=near)})
    assert report.numbers[kind][batched] == f"within tolerance: a ran {own.kernel}; b ran other.rms_norm"


@pytest.mark.parametrize(
    ("promise", "version", "holds"),
    [
        ("2.13.0", "2.13.0+cpu", True),
        ("2.13", "2.13.0+cu130", True),
        ("2.13.0+cpu", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13.0+cu130", False),
        ("2.13.0+cpu", "2.13.0", False),
        ("2.13.0", "2.13.1+cpu", False),
        ("2.13.0", "2.13.0rc1", False),
        ("2.13.0rc1", "2.13.0rc1+cpu", True),
        ("2.13.0", "missing", False),
        ("git-4f2a", "git-4f2a", True),
        ("git-4f2a", "git-4f2b", False),
    ],
)
def test_a_promised_version_is_kept_as_pep_440_says(
    two: Any, promise: str, version: str, holds: bool
) -> None:
    """A build of the promised release keeps the promise; another release, or another build, does not."""
    wanted, facts, examined = two
    strict = msgspec.structs.replace(wanted, versions={"torch": promise})
    versions = {"torch": version} if version != "missing" else {}
    have = {name: msgspec.structs.replace(fact, versions=versions) for name, fact in facts.items()}
    assert compare(strict, have, examined).ok == holds


def test_promised_devices_and_versions_are_checked(two: Any) -> None:
    """What the manifest promises is compared as well."""
    wanted, facts, examined = two
    strict = msgspec.structs.replace(wanted, devices=3, versions={"torch": "9.9"})
    checks = {finding.check for finding in compare(strict, facts, examined).findings}
    assert checks == {"devices", "versions"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("calls: [{op: nothing}]", "nothing"),
        ("calls: [{op: rms_norm, arguments: ['x=oops']}]", "oops"),
        ("calls: []\nversion: 9", "version"),
        ("call: []", "call"),
        ("a: [", "deployment.yaml:"),
    ],
)
def test_a_wrong_manifest_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    """The file and what is wrong in it."""
    path = tmp_path / "deployment.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        load(path)


def test_the_command(lz: Lz, manifest: Path) -> None:
    """0 where all agree, 2 where the command line is wrong."""
    assert "consistency" in main.list_commands(click.Context(main))
    done = lz("consistency", "--deployment", str(manifest))
    assert done.exit_code == 0, done.output
    assert "all agree" in done.output
    manifest.write_text("calls: [{op: nothing}]")
    assert lz("consistency", "--deployment", str(manifest)).exit_code == 2


def test_a_device_that_is_lost_meanwhile_is_named(
    lz: Lz, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 1 and the error of the library, not a group of errors that nobody catches."""

    async def lost(*_: Any, **__: Any) -> Any:
        raise DeviceLostError("device 'gpu-1' was lost", retryable=False)

    monkeypatch.setattr(DevicePool, "run", lost)
    done = lz("consistency", "--deployment", str(manifest))
    assert (done.exit_code, done.exception.__class__) == (1, SystemExit), done.exception
    assert "DeviceLostError: device 'gpu-1' was lost" in done.output


def test_the_plugin_makes_a_test_of_each_check(manifest: Path, tmp_path: Path) -> None:
    """`pytest -p layerzero.cli.pytest_consistency` runs one test a check."""
    here = str(manifest.parent)
    words = ["-q", "-p", "layerzero.cli.pytest_consistency", "-p", "no:cacheprovider"]
    words += ["--lz-deployment", str(manifest), "-c", "/dev/null", "--rootdir", here, here]
    done = children.run(f"import pytest; raise SystemExit(pytest.main({words}))", folder=tmp_path)
    assert f"{len(CHECKS)} passed" in done.stdout, done.stdout + done.stderr
