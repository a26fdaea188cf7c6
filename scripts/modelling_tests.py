"""Run transformers' own common modelling tests for Llama and BERT over our ops, and over none beside it.

Run `python -m scripts.modelling_tests [--sdist transformers-X.tar.gz]`; without the file the source
distribution of the installed release is fetched by pip, and so is `parameterized`, which the tests need: both
into a folder that goes away. The distribution has the common tests (ModelTesterMixin), without those of
export, generation and single models; the testers of both models are in tests/integrations/modelling.py.
Exit status 1: a test fails over our ops, passes without, and is none of `BY_NAME`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TESTERS = ROOT / "tests" / "integrations" / "modelling.py"
PACKAGE = "transformers_tests"
# Classes that the common tests inherit from files that the distribution has not.
MISSING = {
    "exporters/test_export.py": "class ExportTesterMixin: ...",
    "generation/test_utils.py": "class GenerationTesterMixin: ...",
}
# Tests that say what the implementation of attention is called, which a patch changes.
BY_NAME = {
    "test_attention_outputs": "sets output_attentions on a patched configuration, which only 'eager' may",
    "test_can_set_attention_dynamically": "compares the name of the implementation with 'eager'",
    "test_sdpa_can_dispatch_non_composite_models": "compares the name of the implementation with 'eager'",
}


def pip(*words: str) -> None:
    """Run pip, quietly."""
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *words], check=True)


def prepare(folder: Path, sdist: Path | None) -> None:
    """The tests of transformers as a package in `folder`, and what they import."""
    version = importlib.metadata.version("transformers")
    pip("install", "--no-deps", "--target", str(folder), "parameterized")
    if sdist is None:
        pip("download", f"transformers=={version}", "--no-binary", ":all:", "--no-deps", "-d", str(folder))
        (sdist,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = [m for m in archive.getmembers() if m.name.split("/")[1:2] == ["tests"]]
        archive.extractall(folder, inside, filter="data")
        (folder / inside[0].name.split("/")[0] / "tests").rename(folder / PACKAGE)
    (folder / PACKAGE / "__init__.py").touch()
    for name, text in MISSING.items():
        path = folder / PACKAGE / name
        path.parent.mkdir()
        (path.parent / "__init__.py").touch()
        path.write_text(text + "\n")


def outcomes(folder: Path, how: str) -> dict[str, str]:
    """Every test of both models with "passed", "skipped" or "failed"; models are patched or "plain"."""
    report = folder / f"{how}.xml"
    path = os.pathsep.join((str(ROOT), str(folder)))
    environment = os.environ | {"PYTHONPATH": path, "LAYERZERO_MODELLING": how, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", str(TESTERS), "-c", os.devnull, "--rootdir", str(ROOT)]
    options = ["-q", "--no-header", "--tb=line", "-W", "ignore", "-p", "no:cacheprovider"]
    subprocess.run([*command, *options, f"--junitxml={report}"], env=environment, cwd=folder, check=False)
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = state
    return found


def main() -> None:
    """Run both ways, compare, and say it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sdist", type=Path, help="transformers' source distribution, as a file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), options.sdist)
        plain, patched = (outcomes(Path(name), how) for how in ("plain", "patched"))
    ours_alone = [
        test for test, state in patched.items() if state == "failed" and plain.get(test) == "passed"
    ]
    unknown = [test for test in ours_alone if test.rpartition("::")[2] not in BY_NAME]
    for test in ours_alone:
        print(f"{test}: {BY_NAME.get(test.rpartition('::')[2], 'FAILS OVER OUR OPS ALONE')}")
    counts = {how: sum(state == "passed" for state in found.values()) for how, found in
              (("without", plain), ("over our ops", patched))}  # fmt: skip
    print(f"passed: {counts}; {len(ours_alone) - len(unknown)} look at names, {len(unknown)} fail")
    sys.exit(1 if unknown or not counts["over our ops"] or plain.keys() != patched.keys() else 0)


if __name__ == "__main__":
    main()
