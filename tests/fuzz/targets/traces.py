"""Traces of other tools: rank logs and the like, read and made into records."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from fuzz.harness import Target
from fuzz.mutate import of_lines
from ncclwatch.ingest.base import Format
from ncclwatch.ingest.rank_log import RankLogs
from unit.ingest.made_rank_logs import tensor_job


def targets() -> list[Target]:
    """All of this module."""
    return [
        Target("rank-log", "two rank logs of one job", _rank_logs, _read(RankLogs(), "rank_0.log"), of_lines, 1 << 15, quick=40),
    ]


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
    return seeds
