"""How long it takes to read and judge the snapshots of a cluster without agents: one file a node, eight ranks each.

`python tests/benchmarks/bench_snapshots.py [--nodes 512]`. Files are copies of recorded pages of two real jobs of four ranks,
under other host names: what is timed is unpacking and decoding, as `ncclwatch diagnose DIR` does it. Of the nodes five have no
file, two a truncated one, and one that of another job. The judgement is timed apart, on a SIMULATED ring of as many ranks, since
no real job here has so many.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_engine import hung_ring
from ncclwatch.cli.sampling import load_files
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.target.image import read_image, write_image

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
MISSING, CUT = 5, 2
CUT_TO = 3000
"""Bytes that are left of a truncated file."""
STRANGER = "hung-2.21.5-socket-rank2.ncclwatch"
NAMES = ("hung-2.27.5-socket-rank2.ncclwatch", "hung-2.27.5-hosts-3-1-rank1.ncclwatch")


def write_nodes(folder: Path, nodes: int) -> list[Path]:
    """A file for each node that has one."""
    ranks = [process for name in NAMES for process in read_image(FIXTURES / name)]
    paths = [folder / f"node{number:04d}" for number in range(nodes)]
    other = read_image(FIXTURES / STRANGER)
    for path in paths[MISSING:]:
        content = other if path == paths[-1] else ranks
        write_image([replace(one, info=replace(one.info, host=path.name)) for one in content], path)
    for path in paths[MISSING : MISSING + CUT]:
        os.truncate(path, CUT_TO)
    return paths[MISSING:]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=512)
    nodes = parser.parse_args().nodes
    with tempfile.TemporaryDirectory() as folder:
        paths = write_nodes(Path(folder), nodes)
        size = sum(path.stat().st_size for path in paths)
        began, before = time.perf_counter(), os.times()
        series, problems = load_files(paths)
        read, after = time.perf_counter() - began, os.times()
    whole = len(paths) - CUT
    assert len(series) == 8 * (whole - 1) + 4
    assert len(problems) == CUT
    cpu = sum(after[:4]) - sum(before[:4])
    ring = hung_ring(8 * nodes)
    began = time.perf_counter()
    verdict = diagnose(ring)
    judged = time.perf_counter() - began
    print(f"{nodes} nodes, {MISSING} without a file, {CUT} truncated, 1 of another job")
    print(
        f"{len(paths)} files, {size / 2**20:.0f} MiB, {len(series)} ranks, two samples each; {len(os.sched_getaffinity(0))} CPUs"
    )
    print(f"read: {read:.1f} s, {cpu:.1f} s of CPU ({1e3 * cpu / len(paths):.1f} ms a file)")
    print(f"said: {problems[0].line}" if problems else "")
    print(f"judged (SIMULATED ring): {judged:.2f} s, {verdict.verdict_class}")


if __name__ == "__main__":
    main()
