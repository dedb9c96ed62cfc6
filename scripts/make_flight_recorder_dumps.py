#!/usr/bin/env python3
"""Make real Flight Recorder dumps: PyTorch over gloo, four ranks, one case after the other; no GPU is needed.

    scripts/make_flight_recorder_dumps.py --torch 2.14.1 --site /opt/torch-2.14.1 --to tests/fixtures/flight-recorder

installs that release into ``--site`` unless it is there (some gigabytes), and writes ``TORCH-CASE.tar.xz`` for each case. What
must be said of them stands in ``tests/unit/ingest/test_real_dumps.py``. Dumps are kept as PyTorch wrote them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

CASES = ("healthy", "skipped", "size", "late", "frozen")
LONGEST_S = 1800
HERE = Path(__file__).resolve().parent


def install(release: str, site: Path) -> None:
    """Install a release of PyTorch beside everything else."""
    if not (site / "torch" / "version.py").is_file():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(site)]
        subprocess.run([*pip, f"torch=={release}", "numpy"], check=True)


def play(cases: Sequence[str], site: Path, folder: Path) -> None:
    """Run one job after the other."""
    sizes = {"TORCH_FR_BUFFER_SIZE": "64", "TORCH_NCCL_TRACE_BUFFER_SIZE": "64", "OMP_NUM_THREADS": "1"}
    # Frames name the file as it was started: without the path of a person's checkout.
    shutil.copy(HERE / "flight_recorder_job.py", folder / "train.py")
    command = [sys.executable, "train.py", ".", *cases]
    subprocess.run(command, env={**os.environ, **sizes, "PYTHONPATH": str(site)}, cwd=folder, check=True, timeout=LONGEST_S)


def pack(folder: Path, to: Path) -> None:
    """The dumps of a case in one compressed file, without names of users and times of now."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(to, "w:xz") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, file.name, filter=plain)


def main() -> None:
    """Play the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, help="release of PyTorch, as PyPI has it")
    parser.add_argument("--site", type=Path, required=True, help="folder that it is, or gets, installed in")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args()
    install(options.torch, options.site)
    options.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        play(options.case or CASES, options.site, Path(folder))
        for case in options.case or CASES:
            pack(Path(folder) / case, options.to / f"{options.torch}-{case}.tar.xz")
            print(f"{options.torch} {case}: {len(list((Path(folder) / case).iterdir()))} files")


if __name__ == "__main__":
    main()
