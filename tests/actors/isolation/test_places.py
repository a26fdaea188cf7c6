"""Where kernels run: as the policy says, with what of this process's environment, beside which other work."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.actors.isolation.isolated_worker import IsolatedWorker
from layerzero.actors.isolation.worker_errors import WorkerError
from layerzero.actors.isolation.worker_process import WorkerProcess
from layerzero.spec.reasons import Reason
from tests.actors.isolation import plugged
from tests.actors.isolation.test_isolation import X, right, until, worker_of


@pytest.mark.parametrize(
    "changes",
    [
        {"isolated": "process"},
        {"isolated": "nowhere"},
        {"id": "reference.rms_norm.mine", "backend": "reference"},
        {"descriptor": True},
    ],
)
def test_what_a_kernel_says_of_itself_does_not_keep_it_here(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The policy says where it runs: not the kernel's own word, nor the name of this library's reference."""
    kernel_id = changes.get("id", "made.rms_norm")
    (tmp_path / "sayer.py").write_text(f"""
import dataclasses, os, wild_kernels
def run(x, weight, eps):
    print("ran in", os.getpid(), file=open({str(tmp_path / "ran")!r}, "a"))
    return wild_kernels.rms_norm(x, weight, eps)
made = lambda: dataclasses.replace(
    wild_kernels.kernels()[0], load=lambda: run, origin="sayer:made",
    **{{"id": "made.rms_norm", "backend": "made", **{changes!r}}}
)
""")
    settings = lz.Settings(isolate={"*": "process"}, warm="off")
    with pytest.MonkeyPatch.context() as patch, lz.start(settings, scoped=True) as runtime:
        patch.syspath_prepend(tmp_path)
        patch.delitem(sys.modules, "sayer", raising=False)
        runtime.add_kernel(importlib.import_module("sayer").made())
        registry = runtime.device().registry
        assert registry.get("reference.rms_norm").isolated == ""  # type: ignore[union-attr]
        torch.testing.assert_close(registry.callable_of(kernel_id)(X, None, 1e-6), right(X))
        worker = worker_of(runtime, kernel_id.partition(".")[0])
        assert (tmp_path / "ran").read_text() == f"ran in {worker.pid}\n"


def test_a_call_waits_for_a_load_no_longer_than_for_an_answer(tmp_path: Path) -> None:
    """A kernel whose loading takes minutes: a call of another one of its backend ends in time."""
    (tmp_path / "slow.py").write_text(f"""
import dataclasses, time, wild_kernels
from pathlib import Path
folder = Path({str(tmp_path)!r})
def load():
    (folder / "loading").touch()
    for _ in range(2000):
        if (folder / "go").exists():
            break
        time.sleep(0.01)
    return wild_kernels.rms_norm
kernel = wild_kernels.kernels()[0]
fast = lambda: dataclasses.replace(kernel, id="made.rms_norm", backend="made", origin="slow:fast")
made = lambda: dataclasses.replace(
    kernel, id="made.rms_norm.slow", backend="made", load=load, origin="slow:made"
)
""")
    settings = lz.Settings(isolate={"made": "process"}, isolate_timeout_s=0.5, warm="off")
    with pytest.MonkeyPatch.context() as patch, lz.start(settings, scoped=True) as runtime:
        patch.syspath_prepend(tmp_path)
        module = importlib.import_module("slow")
        runtime.add_kernel(module.fast())
        runtime.add_kernel(module.made())
        runtime.device().warm(["made.rms_norm"])
        registry = runtime.device().registry
        call = registry.callable_of("made.rms_norm")
        loading = threading.Thread(target=registry.callable_of, args=("made.rms_norm.slow",))
        loading.start()
        until((tmp_path / "loading").exists)
        try:
            with pytest.raises(WorkerError, match=r"had other work for 0\.5 s") as raised:
                call(X, None, 1e-6)
            assert raised.value.reason is Reason.WORKER_HUNG
        finally:
            (tmp_path / "go").touch()
            loading.join()
        torch.testing.assert_close(call(X, None, 1e-6), right(X))
        assert worker_of(runtime, "made").starts == 1


SECRETS = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "APIKEY", "DB_PASSWORD", "SSH_AUTH_SOCK",
           "GOOGLE_APPLICATION_CREDENTIALS", "github_token", "SIGNING_KEYS_FILE")  # fmt: skip
PLAIN = ("TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "KEYBOARD")


def variables_of(pid: int | None) -> set[bytes]:
    """What a process was started with; empty for a moment in which the system has not laid it out."""
    place = Path(f"/proc/{pid}/environ")
    until(lambda: bool(place.read_bytes()))
    return set(place.read_bytes().split(b"\0"))


def variables_at_start(worker: IsolatedWorker) -> set[bytes]:
    """What a worker's process is started with; it need not get further."""
    life = WorkerProcess(worker.python, worker._path)
    try:
        return variables_of(life.process.pid)
    finally:
        life.end()
        life.drain()


def test_another_interpreter_gets_neither_secrets_nor_the_places_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """It starts where this one's home would end it; a process of this interpreter has what this one has."""
    python = plugged.environment(tmp_path / "env", plugged.installed(1))
    for name in (*SECRETS, *PLAIN):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONUSERBASE", sys.prefix)
    here = IsolatedWorker("wild", None, 5.0, lambda *what: None, lambda *what: None)
    there = IsolatedWorker("wild", python, 5.0, lambda *what: None, lambda *what: None)
    try:
        of_here = variables_at_start(here)
        monkeypatch.setenv("PYTHONHOME", "/nowhere")
        there.start()
        names = [
            {entry.partition(b"=")[0].decode() for entry in variables}
            for variables in (of_here, variables_of(there.pid))
        ]
    finally:
        there.close()
    assert names[0] > {*SECRETS, *PLAIN, "PYTHONUSERBASE", "PYTHONPATH"}
    assert names[1] > set(PLAIN) and not names[1] & {*SECRETS, "PYTHONUSERBASE", "PYTHONPATH", "PYTHONHOME"}


def test_where_memory_runs_out_the_worker_ends_before_its_caller() -> None:
    """The system takes the process that says so first, not the one that holds most."""
    worker = IsolatedWorker("wild", None, 5.0, lambda *what: None, lambda *what: None)
    try:
        worker.start()
        scores = [int(Path(f"/proc/{pid}/oom_score").read_text()) for pid in (worker.pid, "self")]
        assert Path(f"/proc/{worker.pid}/oom_score_adj").read_text() == "1000\n" and scores[0] > scores[1]
    finally:
        worker.close()


@pytest.mark.parametrize("chosen", [None, "ACTIVE"])
def test_threads_of_a_worker_sleep_while_they_wait(
    monkeypatch: pytest.MonkeyPatch, fresh: None, chosen: str | None
) -> None:
    """OpenMP's would spin on the cores of the caller, which waits for them; what the user says stays said."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    seen = variables_at_start(IsolatedWorker("torch", None, 5.0, lambda *what: None, lambda *what: None))
    assert f"OMP_WAIT_POLICY={chosen or 'PASSIVE'}".encode() in seen
