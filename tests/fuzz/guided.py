"""Fuzzes one target in this process, guided by the coverage of our own code where atheris is installed (``make fuzz``).

Run by ``python -m fuzz``: ``python -m fuzz.guided TARGET INPUTS SEED FOLDER``. Nothing of ncclwatch may be imported before its
code is instrumented, so imports come late here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STUCK_S = 120
"""An input that waits for so long by the clock ends the run: then its bytes are in the folder."""

REPORT_S = 1.0


def _atheris() -> Any:
    sys.path.append(str(ROOT / ".cache" / "fuzz"))
    try:
        return importlib.import_module("atheris")
    except ImportError:
        return None


def main() -> None:
    """Fuzz."""
    name, count, seed, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    atheris = _atheris()
    if atheris is not None:
        with atheris.instrument_imports(include=["ncclwatch"]):
            harness, targets = importlib.import_module("fuzz.harness"), importlib.import_module("fuzz.targets")
            target = targets.every()[name]
            seeds = target.seeds()
            for data in seeds:  # late imports, too, are instrumented
                _quietly(target.run, data)
    else:
        harness, targets = importlib.import_module("fuzz.harness"), importlib.import_module("fuzz.targets")
        target = targets.every()[name]
        seeds = target.seeds()
    found: dict[tuple[str, str], Any] = {}
    guard = harness.Guard()
    guard.__enter__()
    begin, told, done = time.monotonic(), 0.0, 0
    cpu = time.process_time()

    def report(*, last: bool = False) -> None:
        data = {
            "inputs": done,
            "seconds": round(time.monotonic() - begin, 1),
            "cpu_s": round(time.process_time() - cpu, 1),
            "guided": atheris is not None,
            "slowest_s": round(guard.slowest_s, 3),
            "findings": [[kind, where, finding.file_name] for (kind, where), finding in found.items()],
            "whole": last,
        }
        # At once: whoever ends this process at its time may do so in the middle of a word.
        (folder / "result.new").write_text(json.dumps(data))
        (folder / "result.new").replace(folder / "result.json")

    def one(data: bytes) -> None:
        nonlocal done, told
        done += 1
        finding = guard.check(target, data)
        if finding is not None:
            known = found.get(finding.signature)
            if known is None or len(data) < len(known.data):
                found[finding.signature] = finding
                (folder / "findings").mkdir(exist_ok=True)
                if known is not None:
                    for file in (folder / "findings").glob(f"{Path(known.file_name).stem}.*"):
                        file.unlink()
                (folder / "findings" / finding.file_name).write_bytes(data)
                (folder / "findings" / finding.file_name).with_suffix(".txt").write_text(finding.trace)
                report()
        if time.monotonic() - told > REPORT_S:
            told = time.monotonic()
            report()
        if done >= count:
            report(last=True)
            sys.stdout.flush()
            os._exit(0)

    report()  # ready
    if atheris is None:
        for data in harness.inputs(target, count, seed):
            one(data)
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, data in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(data)

    def mutate(data: bytes, max_size: int, number: int) -> bytes:
        source = random.Random(number)
        if source.random() < 0.2:
            return bytes(atheris.Mutate(data, max_size))
        return bytes(target.mutate(data, source)[:max_size])

    options = [
        f"-seed={seed}",
        f"-max_len={target.max_len}",
        "-rss_limit_mb=4096",
        "-malloc_limit_mb=4096",
        "-len_control=0",
        f"-timeout={STUCK_S}",
        f"-artifact_prefix={folder}/",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=mutate)
    atheris.Fuzz()


def _quietly(run: Any, data: bytes) -> None:
    with contextlib.suppress(Exception):  # the fuzzing proper says what is wrong
        run(data)


if __name__ == "__main__":
    main()
