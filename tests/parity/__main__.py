"""`python -m tests.parity --level N`: the table of a level; exit status 1 where something differs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from layerzero.api.doctor import align_rows
from layerzero.api.start import start
from layerzero.gates.model_parity import Row, red_flags
from layerzero.spec.settings import Settings
from tests.parity.levels import run, suspect
from tests.parity.model import CONFIGS
from tests.parity.truth import planted
from tests.precision import need_full_float32


def main(argv: list[str] | None = None) -> int:
    """Run one level and say where it first differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--level", type=int, required=True, choices=(1, 2, 3, 4, 5))
    parser.add_argument("--config", choices=sorted(CONFIGS), help="levels 1, 2 and 5: only this model")
    parser.add_argument("--steps", type=int, default=20, help="level 5: how many steps, 20 or 100")
    parser.add_argument("--plant", default="", help="a known bug to be found")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args(argv)
    try:
        ours = planted(asked.plant)
    except ValueError as error:
        parser.error(str(error))
    need_full_float32()
    # What is chosen must not change while it is being compared.
    with start(Settings.load(warm="off"), scoped=True):
        rows = run(asked.level, ours, asked.config, asked.steps)
        wrong = [row for row in rows if not row.holds]
        below = (
            asked.level in (2, 3, 4)
            and wrong
            and all(r.holds for r in run(asked.level - 1, ours, asked.config))
        )
    flags = red_flags(rows)
    verdict = "; ".join([_verdict(asked.level, rows, wrong, bool(below)), *(f"red flag: {f}" for f in flags)])
    if asked.json:
        report = {"level": asked.level, "rows": [asdict(r) for r in rows], "flags": flags, "verdict": verdict}
        print(json.dumps(report))
    else:
        cells = [(r.where, r.what, f"{r.difference:.3g}", f"{r.allowed:g}", "" if r.holds else "differs")
                 for r in rows]  # fmt: skip
        print(align_rows([("model", "what", "largest difference", "allowed", ""), *cells]))
        print(verdict)
    return 1 if wrong or flags else 0


def _verdict(level: int, rows: list[Row], wrong: list[Row], below: bool) -> str:
    if not wrong:
        worst = max(rows, key=lambda r: r.difference / r.allowed)
        nearest = f"{worst.what}, {worst.difference:.3g}"
        return f"level {level}: {len(rows)} comparisons hold; nearest the limit: {nearest}"
    first = wrong[0]
    text = f"level {level}: {len(wrong)} of {len(rows)} differ, first {first.what} ({first.where})"
    if level in (2, 3):
        text += f"; look at {suspect(first)}"
    if below:
        text += f"; level {level - 1} holds, so look at how its parts are put together"
    return text


if __name__ == "__main__":
    sys.exit(main())
