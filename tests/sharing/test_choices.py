"""What processes share of choices, compilations and measurements, and by which circumstances it is named."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.measure.calls import Call, call, tensor
from layerzero.measure.tuning import TuningJob
from layerzero.ops import table
from layerzero.selection.plan import signature_of
from layerzero.selection.policy.policy import Policy
from layerzero.selection.policy.rules import Layer, make_rule
from layerzero.sharing.work import SHARED
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import probe
from layerzero.spec.kernel import Kernel
from layerzero.warmup.apart import compilation_of
from tests.kernels import kernel
from tests.warmup.test_warmup import keep_what_is_compiled

SHARING = lz.Settings(device="cpu", warm="off", perfdb=None, shared_choices_s=300.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    keep_what_is_compiled(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def two() -> Iterator[tuple[lz.Runtime, lz.Runtime]]:
    """Two runtimes, which know nothing of each other, as two processes of one user."""
    opened = lz.Runtime(SHARING), lz.Runtime(SHARING)
    yield opened
    for runtime in opened:
        runtime.close()


def count(runtime: lz.Runtime, name: str) -> float:
    """A counter over all its labels."""
    return sum(value for series, value in runtime.counters.snapshot().items() if series.name == name)


def choose(runtime: lz.Runtime, rows: int = 4) -> Any:
    """The selection of a norm."""
    op, device = table.get("rms_norm"), runtime.device()
    args = call("rms_norm", x=tensor(rows, 32, dtype="float32"), weight=tensor(32, dtype="float32")).make(
        device.device, 0
    )
    return device.plan(op, signature_of(op, args), args, device.mode()).selection


def test_a_choice_is_taken_with_its_whole_record(two: tuple[lz.Runtime, lz.Runtime]) -> None:
    """The second has every verdict of the first, its own request, and says who chose; nothing was judged."""
    one, other = two
    first, second = choose(one), choose(other)
    assert (count(one, "choices_shared"), count(other, "choices_shared")) == (0, 1)
    assert second.trace == first.trace and second.order == first.order and second.kernel == first.kernel
    assert second.why.startswith(f"{first.why} (chosen by process ")
    assert choose(other, 5).request.dims != second.request.dims


def test_a_lone_process_shares_nothing_by_default(folder: Path) -> None:
    """Without the setting no file is read or written for a choice."""
    with lz.start(SHARING.replace(shared_choices_s=None), scoped=True):
        lz.sync.rms_norm(torch.ones(2, 8))
    assert not (folder / "layerzero" / "shared").exists()


@pytest.mark.parametrize("change", ["kernel", "policy", "blocked", "settings", "capability", "price"])
def test_other_circumstances_are_another_choice(two: tuple[lz.Runtime, lz.Runtime], change: str) -> None:
    """A kernel more, a rule, a quarantine, another band, capability or price: chosen anew."""
    one, other = two
    mine = kernel("mine.rms_norm", launch_us=9.0)
    if change in ("capability", "price"):
        one.add_kernel(mine)
    choose(one)
    if change == "kernel":
        other.add_kernel(mine)
    elif change == "policy":
        rule = make_rule("boost", ("torch.*",), layer=Layer.PROGRAM, factor=3.0)
        other.device().set_policy(Policy((rule,)))
    elif change == "blocked":
        other.quarantine(choose(one).kernel, "a test says so")
    elif change == "settings":
        other.device().set_settings(SHARING.replace(tie_band=0.2))
    elif change == "capability":
        other.add_kernel(kernel("mine.rms_norm", launch_us=9.0, limits=("C <= 999",)))
    else:
        other.add_kernel(kernel("mine.rms_norm", launch_us=8.0))
    choose(other)
    assert count(other, "choices_shared") == 0


def test_another_version_or_environment_has_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch, CUDA, driver, GPU, a library's version, the code, the unit and the caches name a compilation."""
    hardware = probe("cpu")
    base = dataclasses.replace(kernel("made.rms_norm"), distributions=("torch>=2",), compile_key=_unit)
    request = CallSpec(op="rms_norm", dims={"N": 4})

    def named(changed: Kernel = base, asked: CallSpec = request, **fields: Any) -> str:
        return compilation_of(changed, asked, msgspec.structs.replace(hardware, **fields))

    names = [
        named(),
        named(torch="2.99.0"),
        named(cuda="13.9"),
        named(driver="999.1"),
        named(name="another CPU"),
        named(sm=90),
        named(dataclasses.replace(base, distributions=("msgspec>=0.1",))),
        named(dataclasses.replace(base, load=lambda: torch.add)),
        named(asked=request.replace(dims={"N": 5})),
    ]
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    names.append(named())
    assert len(set(names)) == len(names)
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert named() == names[0]


def _unit(request: CallSpec) -> str:
    return str(request.dim("N"))


def test_two_that_tune_the_same_at_once_measure_once(two: tuple[lz.Runtime, lz.Runtime]) -> None:
    """The second waits for the first, takes its rows into its own file, and prices by them."""
    one, other = two
    calls = [_norm(4)]
    measuring, go = threading.Event(), threading.Event()

    def hold(*progress: Any) -> None:
        measuring.set()
        assert go.wait(60)

    asking = threading.Event()
    reports: dict[str, Any] = {}
    acquire = SHARED._acquire

    def acquired(*args: Any) -> Any:
        asking.set()
        return acquire(*args)

    def tune(name: str, runtime: lz.Runtime, **options: Any) -> None:
        job = _job(runtime, calls, **options)
        reports[name] = job.run()

    first = threading.Thread(target=tune, args=("one", one), kwargs={"progress": hold})
    first.start()
    assert measuring.wait(60)
    SHARED._acquire = acquired  # type: ignore[method-assign,assignment]
    try:
        second = threading.Thread(target=tune, args=("other", other))
        second.start()
        assert asking.wait(60)
        go.set()
        first.join()
        second.join()
    finally:
        SHARED._acquire = acquire  # type: ignore[method-assign]
    assert reports["one"].rows == reports["other"].rows != ()
    assert other.device().measured == reports["one"].rows
    assert "measured" in str(choose(other).candidate(choose(other).kernel).accepted.source)
    assert _job(other, calls).run().rows != reports["one"].rows  # who asks afterwards measures anew


def _norm(rows: int) -> Call:
    return call("rms_norm", x=tensor(rows, 32, dtype="float32"), weight=tensor(32, dtype="float32"))


def _job(runtime: lz.Runtime, calls: list[Call], progress: Any = None) -> Any:
    return TuningJob(
        runtime.device(), calls, ops=None, launches=("eager",), quick=True, budget_s=None, repeat=1,
        missing=False, progress=progress,
    )  # fmt: skip
