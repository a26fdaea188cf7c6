"""A kernel that a real compiler makes when it is first loaded, for processes that all want it at once.

Nothing in its load keeps two from compiling: what does is the library. Each start of the compiler is a line
in `compiled`, `<process> <version>`; the one that makes `<folder>/held` waits until there is `<folder>/go`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.api.warmup import warmup_blocking
from layerzero.measure.calls import call, tensor
from layerzero.runtime import current
from layerzero.spec.kernel import Kernel

KERNEL = "acme.rms_norm.c"
DISTRIBUTION = "acme-norm"
_C = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
static PyObject *norm(PyObject *self, PyObject *args) {
    unsigned long long from, weight, to;
    Py_ssize_t rows, width;
    double eps;
    if (!PyArg_ParseTuple(args, "KKKnnd", &from, &weight, &to, &rows, &width, &eps)) return NULL;
    const float *x = (const float *)from, *w = (const float *)weight;
    float *out = (float *)to;
    for (Py_ssize_t row = 0; row < rows; row++) {
        double squares = 0.0;
        for (Py_ssize_t i = 0; i < width; i++) squares += (double)x[row * width + i] * x[row * width + i];
        double scale = 1.0 / sqrt(squares / width + eps);
        for (Py_ssize_t i = 0; i < width; i++)
            out[row * width + i] = (float)(x[row * width + i] * scale * w[i]);
    }
    Py_RETURN_NONE;
}
static PyMethodDef functions[] = {{"norm", norm, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "acme_norm", NULL, -1, functions};
PyMODINIT_FUNC PyInit_acme_norm(void) {
    PyObject *made = PyModule_Create(&module);
    if (made) PyModule_AddStringConstant(made, "version", VERSION);
    return made;
}
"""
_COMPILER = """#!/bin/sh
echo "$PPID $VERSION" >> {folder}/compiled
if [ -e {folder}/hold ] && mkdir {folder}/held 2> /dev/null; then
    while [ ! -e {folder}/go ]; do sleep 0.02; done
fi
exec gcc "$@"
"""


def prepare(folder: Path, *versions: str) -> None:
    """Put the source, the compiler and an installed distribution of each version into a folder."""
    (folder / "norm.c").write_text(_C)
    compiler = folder / "cc"
    compiler.write_text(_COMPILER.format(folder=folder))
    compiler.chmod(0o755)
    for version in versions:
        installed = folder / version / f"acme_norm-{version}.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\n"
        )


def compiled(folder: Path) -> list[tuple[int, str]]:
    """The process and the version of every start of the compiler, in their order."""
    path = folder / "compiled"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(int(process), version) for process, version in lines]


def _loading(folder: Path, loaded: list[str]) -> Callable[[], Callable[..., Tensor]]:
    def load() -> Callable[..., Tensor]:
        version = importlib.metadata.version(DISTRIBUTION)
        library = folder / version / "acme_norm.so"
        if not library.exists():
            part = folder / version / f"{os.getpid()}.part"
            flags = ("-O2", "-shared", "-fPIC", f'-DVERSION="{version}"')
            paths = (f"-I{sysconfig.get_paths()['include']}", folder / "norm.c", "-o", part, "-lm")
            command = [str(part) for part in (folder / "cc", *flags, *paths)]
            subprocess.run(command, check=True, env={**os.environ, "VERSION": version})
            part.replace(library)
        loader = importlib.machinery.ExtensionFileLoader("acme_norm", str(library))
        spec = importlib.util.spec_from_file_location("acme_norm", str(library), loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        loaded.append(module.version)

        def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            out = torch.empty_like(x)
            width = x.shape[-1]
            module.norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
            return out

        return run

    return load


def answer(folder: Path) -> dict[str, Any]:
    """Warm a norm and call it: who answered, of which version, how right, and how often it chose."""
    runtime, loaded = current(), list[str]()
    kernel = Kernel.of(
        KERNEL, _loading(folder, loaded), (0.5, 0.5, 0.01), "a test", source="a test",
        platforms="cpu", dtypes="float32", contiguous=True, gradient=False, autocast=False,
        tie_break_order=1, slow_import=True, distributions=(f"{DISTRIBUTION}>=1",),
    )  # fmt: skip
    runtime.add_kernel(kernel)
    warmup_blocking([call("rms_norm", x=tensor(4, 32, dtype="float32"), weight=tensor(32, dtype="float32"))])
    x, weight = torch.linspace(-2, 3, 128).view(4, 32), torch.linspace(0.5, 1.5, 32)
    out = lz.sync.rms_norm(x, weight)
    selection = lz.last_selection()
    assert selection is not None
    counts = runtime.counters.snapshot().items()
    own = {s.name: n for s, n in counts if ("op", "rms_norm") in s.labels and "kernel" not in dict(s.labels)}
    return {
        "kernel": selection.kernel,
        "versions": loaded,
        "right": torch.allclose(out, torch.nn.functional.rms_norm(x, (32,), weight, 1e-6)),
        "chosen": own.get("selections", 0) - own.get("choices_shared", 0),
    }


def answer_of(folder: str, version: str) -> dict[str, Any]:
    """`answer` in a process that was started without the distribution."""
    sys.path.insert(0, f"{folder}/{version}")
    return answer(Path(folder))
