"""The list of backends: what it loads, what it imports, how plugins are let in, what is missing."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import layerzero as lz
from layerzero import backends
from layerzero.ops import table
from layerzero.spec.errors import BackendNotAvailableError, ConfigurationError
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason
from tests import children

KERNELS = backends.load_builtin()


def with_distributions(*requirements: str) -> Kernel:
    return dataclasses.replace(KERNELS[0], distributions=requirements)


def test_every_op_has_a_reference_and_at_most_one_default_a_platform() -> None:
    """No op is left without a kernel of last resort; the library default is one."""
    assert {k.op for k in KERNELS if k.backend == "reference"} == set(table.names())
    for op in table.names():
        for platform in ("cpu", "cuda", "rocm"):
            defaults = [
                k.id for k in KERNELS if k.op == op and k.default and platform in k.capability.platforms
            ]
            assert len(defaults) <= 1, defaults


def test_every_fact_has_a_source() -> None:
    """Limits and speeds say where they come from."""
    assert all(k.capability.source and k.efficiency.source for k in KERNELS)
    assert all(0 < k.efficiency.flops <= 1 and 0 < k.efficiency.bandwidth <= 1 for k in KERNELS)


def test_the_list_of_backends_says_which_ops_each_serves() -> None:
    """A call imports the files that name its op: one that is not named would never be asked."""
    for name, ops in backends.BUILTIN.items():
        if name != "layerzero.backends.reference":  # it has one kernel for every op, made when asked
            assert set(ops) == {kernel.op for kernel in importlib.import_module(name).KERNELS}, name
    assert set(backends.BUILTIN["layerzero.backends.reference"]) == set(table.names())
    for op in table.names():
        assert backends.load_builtin(op=op) == [kernel for kernel in KERNELS if kernel.op == op]


def test_backends_for_gpus_alone_have_no_other_kernel() -> None:
    """What a CPU's first call passes over could not have served it."""
    for name in backends.CUDA_ALONE:
        platforms = {frozenset(k.capability.platforms) for k in importlib.import_module(name).KERNELS}
        assert platforms == {frozenset({"cuda"})}, name


def test_what_a_first_call_passed_over_is_explained_all_the_same(tmp_path: Path) -> None:
    """After a plain call on a CPU, `explain` and `select` name every kernel with its reason."""
    code = (
        "import torch, layerzero as lz; q = torch.ones(1, 2, 4, 8); lz.sync.attention(q, q, q)\n"
        "for asked in (lz.select('attention', q, q, q), lz.explain('attention', q, q, q).selection):\n"
        "    known = {k.id for k in lz.list_kernels('attention')}\n"
        "    print({c.kernel for c in asked.trace} == known, len(asked.trace))"
    )
    run = children.run(code, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(set(lines)) == 1 and lines[0].startswith("True ")


def test_a_call_imports_only_the_backends_of_its_op(tmp_path: Path) -> None:
    """The first call of a process waits for no file that could not serve it."""
    code = (
        "import sys, torch, layerzero as lz; lz.sync.rms_norm(torch.ones(2, 8))\n"
        "files = ('native.products', 'torch_kernels.sdpa', 'torch_kernels.native')\n"
        "print([name for name in files if f'layerzero.backends.{name}' in sys.modules])\n"
        "print('layerzero.ops.paged.attention' in sys.modules, 'layerzero.api.doctor' in sys.modules)"
    )
    run = children.run(code, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:2] == ["['torch_kernels.native']", "False False"]


def test_describing_kernels_imports_no_vendor(tmp_path: Path) -> None:
    """Only `load` imports a vendor's library."""
    code = (
        "import sys; from layerzero.backends import load_builtin, availability\n"
        "[availability(k) for k in load_builtin()]\n"
        "print([m for m in ('zentorch', 'flashinfer', 'triton', 'ray') if m in sys.modules])"
    )
    run = children.run(code, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_a_missing_library_is_a_reason_with_its_remedy() -> None:
    """What is not installed says so, and what to install."""
    (reason,) = backends.availability(with_distributions("layerzero-no-such-thing>=1"))
    assert reason.reason is Reason.BACKEND_MISSING
    assert reason.counterfactual == "pip install 'layerzero-no-such-thing>=1'"


def test_another_version_is_a_reason() -> None:
    """An installed library of the wrong version names both versions."""
    (reason,) = backends.availability(with_distributions("torch<1.0"))
    assert reason.reason is Reason.BACKEND_VERSION_MISMATCH
    assert (reason.needs, reason.got) == ("<1.0", importlib.metadata.version("torch"))
    assert backends.availability(with_distributions("torch>=2.11")) == []


def test_a_requirement_that_does_not_parse_is_an_error() -> None:
    """A broken requirement string is the author's mistake, and named."""
    with pytest.raises(ConfigurationError, match="requirement strings"):
        backends.availability(with_distributions("torch >>> 2"))


class Announced:
    """An entry point that gives `value`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def load(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def announce(monkeypatch: pytest.MonkeyPatch, value: Any) -> list[str]:
    asked: list[str] = []

    def entry_points(*, group: str, name: str) -> list[Announced]:
        asked.append(f"{group}:{name}")
        return [Announced(value)] if name == "acme" and group == backends.ENTRY_POINT_GROUP else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    return asked


def test_plugins_stay_out_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed plugins are not even looked for until they are allowed by name."""
    own = dataclasses.replace(KERNELS[0], id="acme.attention", backend="acme")
    asked = announce(monkeypatch, lambda: [own])
    assert "acme.attention" not in {k.id for k in backends.load_builtin()}
    assert asked == []
    assert "acme.attention" in {k.id for k in backends.load_builtin(["acme"])}
    assert "layerzero.backends:acme" in asked and {name.partition(":")[2] for name in asked} == {"acme"}


def test_a_plugin_that_is_not_there_or_broken_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that was asked for and cannot be had is an error, not a silence."""
    announce(monkeypatch, ImportError("no acme_kernels"))
    with pytest.raises(BackendNotAvailableError, match="nobody"):
        backends.load_builtin(["nobody"])
    with pytest.raises(BackendNotAvailableError, match="no acme_kernels"):
        backends.load_builtin(["acme"])
    announce(monkeypatch, lambda: ["no kernel"])
    with pytest.raises(ConfigurationError, match="sequence of Kernel"):
        backends.load_builtin(["acme"])
    announce(monkeypatch, lambda: [KERNELS[0]])
    with pytest.raises(ConfigurationError, match="ids need to be unique"):
        backends.load_builtin(["acme"])


def test_every_kernel_takes_the_arguments_of_its_op() -> None:
    """As many as the op passes, on machines that are not here too: an op that grew leaves none behind.

    What runs on CPUs is called by the contract's tests.
    """
    looked_at = set()
    for kernel in KERNELS:
        if "cpu" in kernel.capability.platforms:
            continue
        count = len(inspect.signature(getattr(lz.sync, kernel.op)).parameters.keys() - {"backend"})
        try:
            run = kernel.load()
        except ImportError:  # a library that is not here
            continue
        with suppress(ValueError):  # torch's own functions say nothing
            inspect.signature(run, follow_wrapped=False).bind(*range(count))
            looked_at.add(kernel.id)
    assert {"torch.ragged_attention.flash", "torch.ragged_attention.efficient"} <= looked_at
