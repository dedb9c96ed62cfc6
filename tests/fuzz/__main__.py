"""``python -m fuzz [TARGET …] [--inputs N] [--seed S]``: hostile input for every way in, one process at a time, and a table.

New findings are tried again without instrumentation, kept in ``tests/fuzz/findings``, and fail the unit tests from then on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
READY_S = 900.0
"""So long a target's code may take to be instrumented (10 s of CPU, of which an idle priority gets little), in seconds."""


def main() -> int:
    """Fuzz the targets that are named, else all."""
    from fuzz.targets import every

    targets = every()
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*targets, []], metavar="TARGET", help=", ".join(targets))
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of each target (default: a million)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=None, help="of each target at most, from its first input on")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz", help="corpora and results")
    options = parser.parse_args()
    rows, bad = [], 0
    for name in options.targets or targets:
        row = fuzz(name, options.inputs, options.seed, options.seconds, options.out / name)
        rows.append(row)
        bad += row["confirmed"]
        print(line(name, row), flush=True)
    return 1 if bad else 0


def fuzz(name: str, count: int, seed: int, seconds: float | None, folder: Path) -> dict[str, Any]:
    """One target in a process of its own; what it found is confirmed in another."""
    shutil.rmtree(folder / "findings", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "fuzz.guided", name, str(count), str(seed), str(folder)]
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        try:
            if seconds is not None:
                _wait_until_ready(child, folder / "result.json")
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    row: dict[str, Any] = {"inputs": 0, "findings": []}
    if (folder / "result.json").exists():
        row |= json.loads((folder / "result.json").read_text())
    elif child.returncode:
        print((folder / "log").read_text("utf-8", "replace")[-2000:], file=sys.stderr)
    covered = re.findall(r"cov: (\d+)", (folder / "log").read_text("utf-8", "replace"))
    row["edges"] = int(covered[-1]) if covered else None
    row["ended"] = child.returncode
    row["confirmed"] = confirm(name, folder)
    return row


def _wait_until_ready(child: subprocess.Popen[bytes], result: Path) -> None:
    """Until the first input: the time of a target is for inputs. Raises ``TimeoutExpired`` after ``READY_S``."""
    until = time.monotonic() + READY_S
    while child.poll() is None and not result.exists():
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired(child.args, READY_S)
        time.sleep(0.1)


def confirm(name: str, folder: Path) -> int:
    """How many findings show without instrumentation; those are kept."""
    from fuzz.harness import FINDINGS

    kept = 0
    for file in sorted((folder / "findings").glob("*.bin")):
        again = subprocess.run(
            [sys.executable, "-m", "fuzz.replay", name, str(file)], capture_output=True, cwd=ROOT, check=False, env=os.environ
        )
        if again.returncode:
            shutil.copy(file, FINDINGS / file.name)
            print(f"{name}: {file.name}: {again.stdout.decode('utf-8', 'replace').strip().splitlines()[-1:]}", file=sys.stderr)
            kept += 1
    return kept


def line(name: str, row: dict[str, Any]) -> str:
    """A row of the table, in Markdown."""
    edges, guided = row["edges"], "" if row.get("guided", True) else ", not guided"
    rate = row["inputs"] / row["cpu_s"] if row.get("cpu_s") else 0
    taken = f"{row['inputs']:,}{guided} | {edges or '–'} | {rate:,.0f}/s | {row.get('slowest_s', 0):.2f} s"
    return f"| {name} | {taken} | {row['confirmed']}{'' if row.get('whole') else ' (cut short)'} |"


if __name__ == "__main__":
    sys.exit(main())
