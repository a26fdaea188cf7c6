"""A distribution with a compiled kernel that crashes, hangs or lies as its operand says; installed.

What the first element of `x` asks for is done in C, in the midst of the kernel.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

SEGV, ABORT, KILL, HANG, RAISE, SHORT, SCRIBBLE, FORK, LEAVE, START, ENDED = (1001.0 + n for n in range(11))
SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static pid_t copied;
static PyObject *rms(PyObject *self, PyObject *args) {
  unsigned long long from, to; Py_ssize_t rows, width; double eps;
  if (!PyArg_ParseTuple(args, "KKnnd", &from, &to, &rows, &width, &eps)) return NULL;
  const float *x = (const float *)from; float *y = (float *)to;
  if (rows && width) {
    if (x[0] == 1001.0f) *(volatile int *)0 = 1;
    if (x[0] == 1002.0f) abort();
    if (x[0] == 1003.0f) raise(SIGKILL);
    if (x[0] == 1004.0f) for (;;) sleep(1);  /* with the lock held: nothing else of the process runs */
    if (x[0] == 1009.0f) {  /* a copy in its own session keeps what is open; the process crashes */
      const pid_t copy = fork();
      if (!copy) { setsid(); sleep(30); _exit(0); }
      while (getsid(copy) != copy) usleep(1000);
      *(volatile int *)0 = 1;
    }
  }
  for (Py_ssize_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (Py_ssize_t c = 0; c < width; ++c) sum += (double)x[r * width + c] * x[r * width + c];
    const double scale = SCALE / sqrt(sum / width + eps);
    for (Py_ssize_t c = 0; c < width; ++c) y[r * width + c] = (float)(x[r * width + c] * scale);
  }
  if (rows && width && x[0] == 1007.0f)  /* what it was only given to read */
    for (Py_ssize_t i = 0; i < rows * width; ++i) ((float *)x)[i] = 0;
  /* a copy of the process that returns as well, later; it has not the memory that operands are in */
  const float first = rows && width ? x[0] : 0;
  if (first == 1008.0f && !(copied = fork())) usleep(50000);
  if (first == 1011.0f) {  /* how that one ended */
    int status = -1;
    waitpid(copied, &status, 0);
    y[0] = (float)status;
  }
  Py_RETURN_NONE;
}
static PyMethodDef methods[] = {{"rms", rms, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_wild", "", -1, methods};
PyMODINIT_FUNC PyInit__wild(void) { return PyModule_Create(&module); }
"""
MODULE = """
import subprocess
import torch
from layerzero.spec.kernel import Kernel
import wild_library

def rms_norm(x, weight, eps):
    from wild_kernels import _wild
    x = x.contiguous()
    first = float(x.flatten()[0]) if x.numel() else 0.0  # read now: a copy of the process has no operands
    if first == 1005.0:
        raise ValueError("the operand asked for an error")
    out = torch.empty_like(x)
    if first == 1010.0:  # a process that it starts
        return out.fill_(subprocess.Popen(["sleep", "600"]).pid)
    width = x.shape[-1]
    _wild.rms(x.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
    out = out if weight is None else out * weight
    return out[..., :-1] if first == 1006.0 else out

def kernels():
    return [Kernel.of(
        "wild.rms_norm", lambda: rms_norm, (0.9, 0.9, 0.1), "a test's",
        source="a test's", dtypes="float32", features=frozenset({"no_weight"}), platforms="cpu",
    )]
"""
ENTRY_POINTS = "[layerzero.backends]\nwild = wild_kernels:kernels\n"


def compiler() -> str:
    """The C compiler, or a skip that says why."""
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")
    if not found:
        pytest.skip("no C compiler is here")
    return found


def compiled(source: str, target: Path, *flags: str, language: str = "c") -> Path:
    """A shared object of a source."""
    command = [
        compiler(), "-shared", "-fPIC", "-O1", f"-x{language}", "-", "-xnone", "-o", str(target),
        f"-I{sysconfig.get_paths()['include']}", *flags,
    ]  # fmt: skip
    done = subprocess.run(command, input=source, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


@cache
def installed(version: int) -> Path:
    """A folder with the distribution `wild-kernels` of a version, beside the version of a library it needs.

    Version n multiplies by n, and so says that it ran.
    """
    folder = Path(mkdtemp(prefix=f"wild-{version}-"))
    package, info = folder / "wild_kernels", folder / f"wild_kernels-{version}.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(MODULE)
    (folder / "wild_library.py").write_text(f"VERSION = {version}\n")
    compiled(
        SOURCE, package / f"_wild{sysconfig.get_config_var('EXT_SUFFIX')}", f"-DSCALE={version}.0", "-lm"
    )
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: wild-kernels\nVersion: {version}.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    return folder


def environment(folder: Path, *paths: Path, start: str = "") -> str:
    """The interpreter of a new environment that has what this one has, and `paths` before it.

    `start` is run at the start of each of its processes.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python*")) / "site-packages"
    root = Path(__file__).parents[3]
    shared = [entry for entry in sys.path if entry.endswith("-packages")]
    (site / "shared.pth").write_text("\n".join(map(str, [*paths, root, *shared])))
    if start:
        (site / "usercustomize.py").write_text(textwrap.dedent(start))
        (site / "start.pth").write_text("import usercustomize\n")
    return str(python)
