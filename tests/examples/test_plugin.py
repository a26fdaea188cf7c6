"""The plugin template as a stranger takes it: copied, renamed, built, installed, and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.actors.isolation import plugged

ROOT = Path(__file__).parents[2]
# What is listed before anything is allowed, then the plugin's own tests.
PROGRAM = """
import json, sys
from click.testing import CliRunner
from layerzero.cli import main
said = CliRunner().invoke(main, ["kernels", "--op", "rms_norm"])
print(json.dumps([said.output, sorted(name for name in sys.modules if name.startswith("orbit"))]), flush=True)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.long
def test_the_template_is_copied_renamed_built_installed_and_runs(tmp_path: Path) -> None:
    """Listed and not imported before it is allowed; then its own tests pass, also in a process of its own."""
    plugged.compiler()
    source = tmp_path / "orbit"
    shutil.copytree(ROOT / "examples" / "plugin", source)
    (source / "src" / "acme_layerzero").rename(source / "src" / "orbit_layerzero")
    for path in source.rglob("*"):
        if path.is_file():
            path.write_text(path.read_text().replace("acme", "orbit"))
    python = plugged.environment(tmp_path / "env")
    pip = [sys.executable, "-m", "pip", "--python", python, "--no-cache-dir", "install", "--quiet"]
    built = subprocess.run(
        [*pip, "--no-index", "--no-deps", "--no-build-isolation", str(source)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if "No module named pip" in built.stderr or "setuptools.build_meta" in built.stderr:
        pytest.skip(f"nothing to install with: {built.stderr.strip().splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    proved = subprocess.run(
        [python, "-c", PROGRAM, "-q", "-p", "no:cacheprovider", str(source / "tests")],
        capture_output=True, text=True, timeout=600, env=variables, cwd=tmp_path,
    )  # fmt: skip
    assert proved.returncode == 0 and "3 passed" in proved.stdout, proved.stdout + proved.stderr
    output, imported = json.loads(proved.stdout.splitlines()[0])
    assert "installed, not allowed: orbit (orbit-layerzero 1.0.0)" in output
    assert imported == []
