"""Write the terminal output that the documents show, by running the command they name.

A document marks the place:

    <!-- output: lz which rms_norm --shape 8x64 --sm 90 -->
    (generated block)
    <!-- /output -->

Only commands whose text is the same on every machine belong there. To write them:
`python -m scripts.outputs README.md`.
"""

import re
import shlex
import subprocess
import sys

from scripts.tables import ROOT, rewrite

PLACE = re.compile(r"(<!-- output: lz (?P<words>.+?) -->\n).*?(<!-- /output -->)", re.DOTALL)
TIMEOUT_S = 120


def output(words: str) -> str:
    """Return what `lz <words>` prints; a command that fails is a RuntimeError with what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "layerzero", *shlex.split(words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"lz {words} exits with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def rendered(text: str) -> str:
    """Return a document's text with every generated block written anew."""

    def fill(place: re.Match[str]) -> str:
        words = place["words"]
        return f"{place.group(1)}```text\n$ lz {words}\n{output(words)}```\n{place.group(3)}"

    return PLACE.sub(fill, text)


if __name__ == "__main__":
    sys.exit(rewrite("terminal output", rendered))
