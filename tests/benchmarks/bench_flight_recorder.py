"""How long Flight Recorder dumps take to be read and judged, beside a bare unpickler, and beside PyTorch's own analyser.

    PYTHONPATH=src:tests python tests/benchmarks/bench_flight_recorder.py                       # 16 ranks, and 1,024
    ... --ranks 4096 --torch /opt/torch-2.14.1                                                  # with torchfrtrace, where that is

The dumps are made up: 2,000 entries a rank, 12 frames each, three process groups, one rank a call behind. The bare unpickler
allows no class either, and does nothing with what it has read. Both read the same files, one after the other, in this run, and on
the same cores: where ours reads by several processes so does the bare one (two that run at a time slow each other down, which is
CPU time of both). What one process of the bare unpickler takes is told beside it.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from ncclwatch.gc_pause import collector_at_rest
from ncclwatch.ingest.flight_recorder import CHUNK, MANY_FILES
from ncclwatch.side_by_side import side_by_side

ENTRIES, FRAMES, SITES = 2000, 12, 64
LATE = 5
BUDGET_16_S, BUDGET_FACTOR, BUDGET_BYTES = 0.3, 1.5, 200 << 20


class Bare(pickle.Unpickler):
    """As little as may be done with a pickle of somebody else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(module)


def make(folder: Path, ranks: int) -> None:
    """Dumps of a job in which one rank has not called the last collective."""
    frames = [{"name": f"function_{n}", "filename": f"/job/package/module_{n % 9}.py", "line": n} for n in range(SITES)]
    half = max(2, ranks // 2)
    for rank in range(ranks):
        pair, other = [rank - rank % 2, rank - rank % 2 + 1], [n for n in range(ranks) if n // half == rank // half]
        groups = {"0": list(range(ranks)), f"pair{rank // 2}": pair, f"half{rank // half}": other}
        names, entries, called = list(groups), [], dict.fromkeys(groups, 0)
        for number in range(ENTRIES - (rank == LATE)):
            place = 0 if number >= ENTRIES - 3 else number % 3
            called[names[place]] += 1
            entries.append(_entry(number, place, names[place], called[names[place]], frames))
        config = {name: {"name": name, "desc": f"group {i}", "ranks": str(own)} for i, (name, own) in enumerate(groups.items())}
        dump = {"version": "2.10", "pg_config": config, "pg_status": {}, "comm_lib_version": "2.27.5", "entries": entries}
        (folder / f"fr_{rank}").write_bytes(pickle.dumps(dump, 2))


def _entry(number: int, place: int, group: str, sequence: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    made, ended = 1_700_000_000_000_000_000 + number * 1_000_000, number < ENTRIES - 1
    return {
        "frames": [frames[(number * 7 + i) % SITES] for i in range(FRAMES)],
        "record_id": number, "pg_id": place, "process_group": (group, f"group {place}"), "thread_name": "pt_main_thread",
        "thread_id": "140657450860608", "collective_seq_id": sequence, "p2p_seq_id": 0, "op_id": sequence,
        "profiling_name": ("nccl:all_reduce", "nccl:_all_gather_base", "nccl:_reduce_scatter_base")[place],
        "time_created_ns": made, "duration_ms": 0.5, "input_sizes": [[1024, 16 + place]], "input_dtypes": ["BFloat16"],
        "output_sizes": [[1024, 16 + place]], "output_dtypes": ["BFloat16"], "state": "completed" if ended else "started",
        "time_discovered_started_ns": made + 10_000, "time_discovered_completed_ns": made + 20_000 if ended else None,
        "retired": ended, "timeout_ms": 600_000, "is_p2p": False,
    }  # fmt: skip


def bare(folder: Path) -> None:
    """Unpickle every file, one after the other."""
    for file in sorted(folder.iterdir()):
        unpickle(file)


def beside(folder: Path) -> None:
    """The same by as many processes as ours has."""
    files = sorted(folder.iterdir())
    for _ in side_by_side(unpickle, files, chunk=CHUNK) if len(files) >= MANY_FILES else map(unpickle, files):
        pass


def unpickle(file: Path) -> None:
    """One file."""
    with collector_at_rest(), file.open("rb") as source:
        Bare(source).load()


def ours(folder: Path) -> None:
    """Read and judge."""
    from ncclwatch.cli.foreign import judge_found
    from ncclwatch.ingest.folders import find

    [job], _ = judge_found(find([folder]))
    named = [culprit.rank for culprit in job.verdicts[0].culprits]
    assert named == [LATE], job.verdicts[0].summary


def alone(what: str, folder: Path) -> tuple[float, float, int]:
    """Seconds of the work, seconds of CPU, and the largest memory of a process, in a process of its own and those it begins."""
    code = f"import bench_flight_recorder as b; b.measured({what!r}, {str(folder)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment).stdout
    wall, cpu, memory = out.split()[-3:]
    return float(wall), float(cpu), int(memory)


def measured(what: str, folder: str) -> None:
    """Prints wall time, CPU time and memory of one of the three; imports come before."""
    import ncclwatch.cli.foreign  # noqa: F401

    begun, cpu = time.perf_counter(), sum(os.times()[:4])
    {"bare": bare, "beside": beside, "ours": ours}[what](Path(folder))
    taken = time.perf_counter() - begun, sum(os.times()[:4]) - cpu
    largest = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(*taken, largest << 10)


def analyser(site: Path, folder: Path) -> float:
    """Seconds that ``torchfrtrace`` takes, with its start."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "--prefix", "fr_"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, check=False)
    return time.perf_counter() - begun


def main() -> int:
    """Returns 1 where a budget is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--torch", type=Path, help="folder with PyTorch, for torchfrtrace")
    parser.add_argument("--tries", type=int, default=3)
    options = parser.parse_args()
    missed = False
    for ranks in options.ranks or (16, 1024):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make(folder, ranks)
            size = sum(file.stat().st_size for file in folder.iterdir())
            tries = [(alone("bare", folder), alone("beside", folder), alone("ours", folder)) for _ in range(options.tries)]
            ratios = sorted(own[1] / other[1] for _, other, own in tries)
            middle = median(ratios)
            clock = median([own[0] / other[0] for _, other, own in tries])
            # Of a machine whose speed varies the quickest tries tell most of what the work takes.
            quickest = min(own[0] for *_, own in tries) / min(other[0] for _, other, _ in tries)
            to_one = median([own[1] / one[1] for one, _, own in tries])
            own = median([own[1] for *_, own in tries])
            memory = max(own[2] for *_, own in tries)
            missed |= (own > BUDGET_16_S if ranks <= 16 else max(middle, clock) > BUDGET_FACTOR) or memory > BUDGET_BYTES
            print(
                f"{ranks} ranks, {size / 1e6:.0f} MB: {own:.2f} s of CPU, {middle:.2f} times a bare unpickler "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f} of {len(tries)}), {clock:.2f} times by the clock "
                f"({quickest:.2f} quickest by quickest), "
                f"{to_one:.2f} times the CPU of one process of it, {memory / 2**20:.0f} MB"
            )
            if options.torch is not None:
                print(f"  torchfrtrace on the same files: {analyser(options.torch, folder):.2f} s, with its start")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
