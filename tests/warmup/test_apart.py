"""Compiling in processes of their own: side by side, within a bound, once each, and never in the way."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.backends.flashinfer import attention, common, mla, norm_rope
from layerzero.ops import table as ops_table
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import host_free_bytes
from layerzero.warmup import apart, watching
from layerzero.warmup.apart import CHILD_BYTES, COMPILER_BYTES, ApartCompiler
from tests.kernels import kernel
from tests.popen import Forking

REQUEST = CallSpec(op="rms_norm", dtype="float32", dims={"N": 4, "C": 32})
_PATIENCE_S = 200.0
ROOM = 64 * (CHILD_BYTES + COMPILER_BYTES)

# A backend whose kernels compile by a file each: "began" when a child starts, and it ends when it may.
PLUGIN = """
import os, time
from pathlib import Path
from layerzero.ops import table
from layerzero.spec.kernel import Kernel

FOLDER = Path(os.environ["SLOW_FOLDER"])
REFERENCE = table.get("rms_norm").reference

def load(name):
    made = FOLDER / f"{name}.made"
    if not made.exists():
        (FOLDER / f"{name}.{os.getpid()}.began").write_text(os.environ.get("MAX_JOBS", ""))
        if name == "broken":
            raise RuntimeError("the template does not compile")
        deadline = time.monotonic() + 100
        while not (FOLDER / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        made.write_text("code")
    return REFERENCE

def slow(name, launch_us=0.01):
    return Kernel.of(
        f"{name}.rms_norm", lambda: load(name), (0.5, 0.5, launch_us), "a test", platforms="cpu",
        dtypes="float32", source="a test", slow_import=True,
        on_disk=lambda _: (FOLDER / f"{name}.made").exists(),
    )

KERNELS = [slow("slow_a"), slow("slow_b", 0.02), slow("slow_c", 0.03), slow("broken")]

def kernels():
    return KERNELS
"""


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> Forking:
    """Children find torch imported."""
    forking = Forking()
    monkeypatch.setattr(apart, "subprocess", forking)
    return forking


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with the plug-in installed, and where its kernels leave what they did."""
    site = tmp_path / "site"
    info = site / "slow_backend-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[layerzero.backends]\nslow = slow_backend:kernels\n")
    (site / "slow_backend.py").write_text(textwrap.dedent(PLUGIN))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "slow_backend", raising=False)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("SLOW_FOLDER", str(work))
    monkeypatch.delenv("MAX_JOBS", raising=False)
    return work


@pytest.fixture
def compiling() -> Iterator[Callable[..., ApartCompiler]]:
    """Makes compilers that end with the test."""
    made: list[ApartCompiler] = []

    def make(limit: int | None = None, free: Callable[[], int] = lambda: ROOM) -> ApartCompiler:
        made.append(ApartCompiler(lambda: limit, free))
        return made[-1]

    yield make
    for each in made:
        each.close()


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether it comes true in a time that no machine needs."""
    end = time.monotonic() + _PATIENCE_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def slow(name: str) -> Any:
    """A kernel of the plug-in's."""
    from slow_backend import KERNELS  # type: ignore[import-not-found]

    return next(k for k in KERNELS if k.backend == name)


def began(folder: Path) -> dict[str, str]:
    """The kernels that somebody began to compile, and how many compilers each was given."""
    return {path.name.partition(".")[0]: path.read_text() for path in folder.glob("*.began")}


def test_units_compile_side_by_side_and_once_each(
    folder: Path, compiling: Callable[..., ApartCompiler]
) -> None:
    """Both children are at work before either ends; who asks again gets the same answer."""
    apart_ = compiling(limit=4)
    first, second = (apart_.start(slow(name), REQUEST, ("slow",)) for name in ("slow_a", "slow_b"))
    assert apart_.start(slow("slow_a"), REQUEST, ("slow",)) is first
    assert wait_until(lambda: began(folder).keys() == {"slow_a", "slow_b"})
    assert not first.done() and not second.done()
    (folder / "go").touch()
    assert first.result(100) and second.result(100)
    assert len(list(folder.glob("*.began"))) == 2
    assert not apart_.takes(slow("slow_a"), REQUEST), "what lies there needs no child"


@pytest.mark.parametrize(
    ("limit", "free"),
    [(1, ROOM), (None, 0)],
    ids=["number", "memory"],
)
def test_no_more_children_than_the_bound(
    folder: Path, compiling: Callable[..., ApartCompiler], limit: int | None, free: int
) -> None:
    """By number, or by the memory that is measured: one may always run, the others wait for it."""
    apart_ = compiling(limit=limit, free=lambda: free)
    futures = [apart_.start(slow(name), REQUEST, ("slow",)) for name in ("slow_a", "slow_b")]
    assert wait_until(lambda: len(began(folder)) == 1)
    assert len(apart_._running) == 1 and len(apart_._waiting) == 1
    (folder / "go").touch()
    assert all(future.result(100) for future in futures)
    assert len(began(folder)) == 2


def test_memory_bounds_the_compilers_of_a_child(
    folder: Path, compiling: Callable[..., ApartCompiler], forks: Forking
) -> None:
    """A child's build tool starts as many as fit beside the other children's; here, a new interpreter."""
    forks.fresh = True
    (folder / "go").touch()
    apart_ = compiling(limit=1, free=lambda: CHILD_BYTES + 1)
    assert apart_.start(slow("slow_a"), REQUEST, ("slow",)).result(100)
    assert began(folder) == {"slow_a": "1"}


@pytest.mark.parametrize(("asked", "started"), [("", 3), ("2", 2), ("9", 3), ("0", 3), ("many", 3)])
def test_a_child_starts_no_more_compilers_than_cores_or_than_it_was_asked_to(
    compiling: Callable[..., ApartCompiler], monkeypatch: pytest.MonkeyPatch, asked: str, started: int
) -> None:
    """Memory may have room for many; MAX_JOBS of this process counts where it is a number above 0."""
    jobs: list[str] = []

    def child(command: list[str], **options: Any) -> Any:
        jobs.append(options["env"]["MAX_JOBS"])
        return SimpleNamespace(communicate=lambda order, timeout: (b"", b""), returncode=0)

    names = ("PIPE", "DEVNULL", "TimeoutExpired")
    ours = {name: getattr(subprocess, name) for name in names}
    monkeypatch.setattr(apart, "subprocess", SimpleNamespace(Popen=child, **ours))
    monkeypatch.setattr(apart, "_kill", lambda child: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setenv("MAX_JOBS", asked)
    apart_ = compiling(limit=1, free=lambda: 1 << 50)
    assert apart_.start(kernel("a.rms_norm"), REQUEST).result(100)
    assert jobs == [str(started)]


def test_a_child_that_fails_or_dies_leaves_it_to_this_process(
    folder: Path, compiling: Callable[..., ApartCompiler], caplog: pytest.LogCaptureFixture
) -> None:
    """An error, a signal and a kernel that no backend has: told, and not an answer."""
    apart_ = compiling(limit=2)
    assert apart_.start(slow("broken"), REQUEST, ("slow",)).result(100) is False
    stranger = dataclasses.replace(kernel("stranger.rms_norm"), on_disk=lambda _: False)
    assert apart_.start(stranger, REQUEST).result(100) is False
    dying = apart_.start(slow("slow_a"), REQUEST, ("slow",))
    assert wait_until(lambda: "slow_a" in began(folder))
    (pid,) = (int(path.name.split(".")[1]) for path in folder.glob("slow_a.*"))
    os.kill(pid, signal.SIGKILL)
    assert dying.result(100) is False
    told = " ".join(caplog.messages)
    for what in ("the template does not compile", "no backend has the kernel", "status -9"):
        assert what in told


def test_closing_ends_the_children(folder: Path, compiling: Callable[..., ApartCompiler]) -> None:
    """Nothing goes on behind a closed device, and nobody waits for ever."""
    apart_ = compiling(limit=1)
    running, waiting = (apart_.start(slow(name), REQUEST, ("slow",)) for name in ("slow_a", "slow_b"))
    assert wait_until(lambda: "slow_a" in began(folder))
    (pid,) = (int(path.name.split(".")[1]) for path in folder.glob("slow_a.*"))
    apart_.close()
    assert running.result(100) is False and waiting.result(100) is False
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert apart_.start(slow("slow_c"), REQUEST, ("slow",)).result(1) is False
    assert began(folder).keys() == {"slow_a"}


@pytest.fixture
def runtime(folder: Path) -> Iterator[lz.Runtime]:
    """One that loads better kernels behind its calls."""
    settings = lz.Settings(
        device="cpu", warm="background", perfdb=None, shipped_tables=False, plugins=("slow",),
        compile_processes=4,
    )  # fmt: skip
    with lz.start(settings, scoped=True) as opened:
        with lz.disable("zentorch.*"), lz.disable("native.*"), lz.disable("broken.*"):
            yield opened
        opened.device().loader.stop()


def test_calls_are_served_by_what_is_ready_while_children_compile(runtime: lz.Runtime, folder: Path) -> None:
    """The call that wants a slow kernel returns at once; once a child is done, the kernel is taken."""
    x, weight = torch.randn(4, 32), torch.ones(32)
    lz.sync.rms_norm(x, weight)
    assert wait_until(lambda: "slow_a" in began(folder))
    ours = {int(path.name.split(".")[1]) for path in folder.glob("*.began")}
    assert os.getpid() not in ours, "no thread of this process waits for a compiler"
    torch.testing.assert_close(
        lz.sync.rms_norm(x, weight), ops_table.get("rms_norm").reference(x, weight, 1e-6)
    )
    selection = lz.last_selection()
    assert selection is not None and not selection.kernel.startswith("slow")
    (folder / "go").touch()
    assert wait_until(lambda: lz.which("rms_norm", x, weight) == "slow_a.rms_norm")
    assert len(list(folder.glob("slow_a.*.began"))) == 1


def test_loading_waits_for_the_child_and_tells_the_monitor(runtime: lz.Runtime, folder: Path) -> None:
    """Who loads what a child compiles does not compile it again, and a warm-up counts it."""
    device, done = runtime.device(), threading.Event()
    assert device.loader.compile_ahead("slow_b.rms_norm", REQUEST) is not None
    assert wait_until(lambda: "slow_b" in began(folder))
    seen: list[Any] = []

    def load() -> None:
        with watching() as monitor:
            device.warm(["slow_b.rms_norm"], REQUEST)
        seen.extend(monitor.compiled)
        done.set()

    threading.Thread(target=load, daemon=True).start()
    time.sleep(0.05)
    assert not done.is_set()
    (folder / "go").touch()
    assert done.wait(100)
    assert [event.what for event in seen] == ["slow_b.rms_norm in a process of its own"]
    assert len(list(folder.glob("slow_b.*.began"))) == 1
    assert "slow_b.rms_norm" not in device.registry.unready()


def test_no_process_is_started_where_the_settings_want_none(folder: Path) -> None:
    """0 compiles in this process, as before."""
    settings = lz.Settings(device="cpu", warm="off", perfdb=None, plugins=("slow",), compile_processes=0)
    with lz.start(settings, scoped=True) as runtime:
        device = runtime.device()
        assert device.loader.compile_ahead("slow_a.rms_norm", REQUEST) is None
        (folder / "go").touch()
        device.warm(["slow_a.rms_norm"], REQUEST)
    (path,) = folder.glob("*.began")
    assert path.name.split(".")[1] == str(os.getpid())


def test_a_containers_share_of_the_memory_counts(tmp_path: Path) -> None:
    """What the machine has free is not what a container may take."""
    (tmp_path / "memory.max").write_text(str(3 << 20))
    (tmp_path / "memory.current").write_text(str(1 << 20))
    assert host_free_bytes(tmp_path) == 2 << 20
    (tmp_path / "memory.max").write_text(str(1 << 60))
    assert 2 << 20 < host_free_bytes(tmp_path) < 1 << 50
    (tmp_path / "memory.max").write_text("max")
    assert host_free_bytes(tmp_path) > 2 << 20


def test_flashinfers_modules_are_found_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own cache or out of a bundle, for the installed release alone."""
    info = tmp_path / "site" / "flashinfer_python-0.7.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.2\n")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    paged = CallSpec(op="paged_attention", dtype="bfloat16", dims={"D": 128})
    of = {k.id: k for k in (*norm_rope.KERNELS, *attention.KERNELS, *mla.KERNELS)}
    assert all(k.on_disk is not None for k in of.values())

    def there(kernel_id: str) -> bool:
        check = of[kernel_id].on_disk
        assert check is not None
        return check(paged)

    def compile_module(name: str, folder: Path) -> None:
        (folder / name).mkdir(parents=True)
        (folder / name / f"{name}.so").touch()

    cached = tmp_path / ".cache" / "flashinfer" / "0.7.2" / "90a" / "cached_ops"
    compile_module("norm", cached)
    assert not there("flashinfer.rms_norm.rmsnorm"), "no release is installed"
    monkeypatch.syspath_prepend(str(info.parent))
    assert there("flashinfer.rms_norm.rmsnorm") and not there("flashinfer.rope.cos_sin_cache")
    # Its build compiles again what is older than its sources: not in the thread that loads kernels.
    sources = info.parent / "flashinfer" / "__init__.py"
    sources.parent.mkdir()
    sources.touch()
    os.utime(cached / "norm" / "norm.so", (1, 1))
    assert not there("flashinfer.rms_norm.rmsnorm"), "compiled before the release was installed"
    os.utime(cached / "norm" / "norm.so")
    assert there("flashinfer.rms_norm.rmsnorm")
    # A copy is young, but ninja goes by what it noted when it built.
    log, head = cached / "norm" / ".ninja_log", "# ninja log v7\n0\t9\t1000000000\t/a/norm.o\tab\n"
    log.write_text(f"{head}9\t10\t1000000000\t/a/norm.so\tcd\n")
    assert not there("flashinfer.rms_norm.rmsnorm"), "copied from another machine"
    log.write_text(f"{log.read_text()}9\t10\t{time.time_ns() + 10**9}\t/a/norm.so\tcd\n")
    assert there("flashinfer.rms_norm.rmsnorm"), "built again here"
    carried = common.carried_folder("0.7.2") / "90a"
    compile_module("rope", carried)
    os.utime(carried / "rope" / "rope.so", (1, 1))  # a bundle's are taken as they are
    assert there("flashinfer.rope.cos_sin_cache")
    assert not there("flashinfer.append_kv.page")
    compile_module("page", sources.parent / "data" / "aot")  # machine code in FlashInfer's own wheel
    assert there("flashinfer.append_kv.page")
    of_wheel: Any = ModuleType("flashinfer_jit_cache")
    provider = SimpleNamespace(jit_cache_dir=str(tmp_path / "jit_cache"))
    of_wheel.get_jit_cache_providers = lambda: (provider,)
    monkeypatch.setitem(sys.modules, of_wheel.__name__, of_wheel)
    compile_module("silu_and_mul", tmp_path / "jit_cache")
    compile_module("gelu_and_mul", tmp_path / "jit_cache")
    assert not there("flashinfer.mlp.act_and_mul"), "its wheel of modules is not installed"
    wheel = info.with_name("flashinfer_jit_cache-0.7.2+cu130.dist-info")
    wheel.mkdir()
    (wheel / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: flashinfer-jit-cache\nVersion: 0.7.2+cu130\n"
    )
    assert there("flashinfer.mlp.act_and_mul")
    name = (
        "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_"
        "head_dim_vo_128_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"
    )
    compile_module(name, cached)
    assert not there("flashinfer.paged_attention.fa2"), "the merge of partial results is missing"
    compile_module("cascade", cached)
    assert there("flashinfer.paged_attention.fa2") and not there("flashinfer.paged_attention.fa3")
    compile_module(f"{name}_sm90", cached)
    assert there("flashinfer.paged_attention.fa3") and not there("flashinfer.mla_attention.fa2")
    assert apart.unit_of(of["flashinfer.paged_attention.fa2"], paged)[1] == "bfloat16 128"
