"""The optional libraries: which are installed, what to install, and whether each imports here.

An import runs in a child process with a time limit, because a library built against another torch can end
the process that imports it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from layerzero._util.version import installed_version

State = Literal["works", "missing", "broken", "installed", "ended"]
DISTRIBUTION = "layerzero-runtime"
_CHILD = "import importlib, sys; importlib.import_module(sys.argv[1])"
_SAID = 300


class Library(msgspec.Struct, frozen=True):
    """One library: its `backend` name, the distribution, the module to import, and the extra that brings it.

    `ended` says why it is not used any more; such a library is reported and never imported.
    """

    backend: str
    distribution: str
    module: str
    extra: str = ""
    ended: str = ""

    @property
    def install(self) -> str:
        """The command that installs it."""
        return (
            f"pip install '{DISTRIBUTION}[{self.extra}]'"
            if self.extra
            else f"pip install {self.distribution}"
        )


class LibraryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one library: `state`, the installed version, one sentence, and what would change it."""

    backend: str
    state: State
    version: str | None = None
    detail: str = ""
    install: str = ""


IPEX_ENDED = (
    "its development has ended: 2.8.0 was the last release and the repository was archived in March 2026; "
    "torch itself carries the oneDNN kernels"
)
LIBRARIES: tuple[Library, ...] = (
    Library("flashinfer", "flashinfer-python", "flashinfer", "flashinfer"),
    Library("flash_attn_2", "flash-attn", "flash_attn.flash_attn_interface", "flash-attn"),
    Library("flash_attn_3", "flash-attn-3", "flash_attn_interface"),
    Library("vllm_flash_attn_3", "vllm", "vllm.vllm_flash_attn"),
    Library("flash_attn_4", "flash-attn-4", "flash_attn.cute", "flash-attn-4"),
    Library("liger", "liger-kernel", "liger_kernel.transformers", "liger"),
    Library("zentorch", "zentorch", "zentorch", "zentorch"),
    Library("xformers", "xformers", "xformers.ops", "xformers"),
    Library("triton", "triton", "triton"),
    Library("transformers", "transformers", "transformers", "hf"),
    Library("safetensors", "safetensors", "safetensors.torch", "hf"),
    Library("tokenizers", "tokenizers", "tokenizers", "tokenizers"),
    Library("tiktoken", "tiktoken", "tiktoken", "tokenizers"),
    Library("sentencepiece", "sentencepiece", "sentencepiece", "tokenizers"),
    Library("mistral-common", "mistral-common", "mistral_common", "mistral"),
    Library("ray", "ray", "ray", "ray"),
    Library("prometheus", "prometheus_client", "prometheus_client", "serve"),
    Library("ipex", "intel-extension-for-pytorch", "intel_extension_for_pytorch", "", IPEX_ENDED),
)


def examine(
    libraries: Iterable[Library] = LIBRARIES, *, imports: bool = True, timeout_s: float = 60.0
) -> tuple[LibraryStatus, ...]:
    """The state of each library, in order; with `imports` every installed one is imported in a child."""
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="layerzero-doctor") as pool:
        return tuple(pool.map(lambda library: _one(library, imports, timeout_s), libraries))


def _one(library: Library, imports: bool, timeout_s: float) -> LibraryStatus:
    version = installed_version(library.distribution)
    status = partial(LibraryStatus, backend=library.backend, version=version)
    if library.ended:
        use = "not installed" if version is None else "installed and not used"
        return status(state="ended", detail=f"{use}; {library.ended}")
    if version is None:
        return status(state="missing", install=library.install)
    if not imports:
        return status(state="installed")
    failure = import_failure(library.module, timeout_s)
    if failure is None:
        return status(state="works")
    return status(state="broken", detail=failure, install=library.install)


def import_failure(module: str, timeout_s: float) -> str | None:
    """Why `module` does not import in a fresh interpreter, in one sentence; None where it does."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, module],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return f"importing {module} did not end within {timeout_s:g} s"
    if child.returncode == 0:
        return None
    if child.returncode < 0:
        return f"importing {module} ended the process by {signal_name(-child.returncode)}"
    lines = [line for line in child.stderr.splitlines() if line.strip()]
    return (lines[-1] if lines else f"exit status {child.returncode}")[:_SAID]


def signal_name(number: int) -> str:
    """SIGSEGV and the like, or the number of one that this system does not know."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def extension_of(package: str, pattern: str) -> Path:
    """The compiled file in an installed package, below its folder; nothing of the package is imported.

    Raises: ImportError: the package is not installed, or was built without it.
    """
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        for path in sorted(Path(folder).glob(pattern)):
            return path
    raise ImportError(f"no {pattern} in {package}: {folders or 'it is not installed'}")
