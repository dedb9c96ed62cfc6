"""Traces of other tools: rank logs and the like, read and made into records."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from fuzz.harness import Target
from fuzz.mutate import of_bytes, of_lines
from ncclwatch.ingest.base import Format
from ncclwatch.ingest.dcgm import Dcgm
from ncclwatch.ingest.kineto import Kineto
from ncclwatch.ingest.nsys import Nsys
from ncclwatch.ingest.rank_log import RankLogs
from ncclwatch.ingest.straggler_analysis import StragglerAnalysis
from unit.ingest import made_kineto, made_nsys
from unit.ingest.made_dcgm import TEXT
from unit.ingest.made_rank_logs import bare, tensor_job

FIXTURES = Path(__file__).parents[2] / "fixtures"


def targets() -> list[Target]:
    """All of this module."""
    found = [
        Target("kineto", "a trace of PyTorch's profiler", _kineto, _read(Kineto(), "rank0.json"), of_lines, 1 << 14, quick=3000),
        Target("nsys", "an export of Nsight Systems", _nsys, _read(Nsys(), "rank0.sqlite"), of_bytes, 1 << 16, quick=2000),
        Target("dcgm", "what DCGM's exporter answers", _dcgm, _read(Dcgm(), "node0.txt"), of_lines, 1 << 13, quick=3000),
        Target("rank-log", "two rank logs of one job", _rank_logs, _read(RankLogs(), "rank_0.log"), of_lines, 1 << 15, quick=450),
    ]
    if find_spec("pyarrow") is not None:
        name = "trace-x.parquet"
        parquet = Target(
            "straggler-analysis", "a parquet trace", _parquet, _read(StragglerAnalysis(), name), of_bytes, 1 << 16, 450
        )
        found.append(parquet)
    return found


def _parquet() -> list[bytes]:
    return [(FIXTURES / "straggler-analysis" / "trace-ST.parquet").read_bytes()]


def _read(form: Format, name: str) -> Callable[[bytes], object]:
    def run(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            if form.recognises(data[:4096], path):
                return [list(job.batches) for job in form.read([path])]
        return None

    return run


def _rank_logs() -> list[bytes]:
    seeds = []
    for group in (False, True):
        lines = tensor_job(ranks=4, iterations=2, calls=6, group=group)
        seeds.append("".join(line for rank in lines for line in lines[rank]).encode())
        seeds.append("".join(line for own in bare(lines).values() for line in own).encode())
    return seeds


def _kineto() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        made = [made_kineto.events(rank, 2, rounds=3) for rank in range(2)]
        return [made_kineto.write(Path(folder), rank, 2, made[rank], packed=bool(rank)).read_bytes() for rank in range(2)]


def _nsys() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        kernels = made_nsys.rounds(0, number=4) + made_nsys.rounds(1, number=4)
        files = [made_nsys.export(Path(folder) / f"{number}.sqlite", kernels, launches=number > 0) for number in range(3)]
        made_nsys.add_calls(files[2], (0, 2), [1, 2])
        return [file.read_bytes() for file in files]


def _dcgm() -> list[bytes]:
    return [TEXT.encode()]
