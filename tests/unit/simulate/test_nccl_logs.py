"""SIMULATED debug logs have the form of real ones, and are read as those are."""

from __future__ import annotations

import lzma
import re
from pathlib import Path

import pytest

from ncclwatch.ingest.nccl_log import NcclLog
from ncclwatch.ingest.nccl_log_lines import LogReader
from ncclwatch.simulate.nccl_logs import nccl_logs
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import load_all
from ncclwatch.simulate.timeline import Timeline

TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stopped() -> Timeline:
    """Rank 3 of 4 is stopped at 2 s."""
    [scenario] = [one for one in load_all(TESTS / "scenarios", "") if one.name == "quick-stop"]
    return simulate(scenario)


def form(line: str) -> str:
    """A line with its numbers and names taken out."""
    return re.sub(r"0x[0-9a-f]+|\b[0-9a-f]*\d[0-9a-f]*\b", "N", line.partition(" NCCL INFO ")[2])


def test_lines_have_the_form_of_real_ones(stopped: Timeline) -> None:
    real = lzma.decompress((TESTS / "fixtures" / "nccl" / "2.27.5-stuck.log.xz").read_bytes()).decode()
    wanted = {form(line) for line in real.splitlines() if " - Init " in line or ": opCount " in line}
    made = {form(line) for line in nccl_logs(stopped, 1.5)[0].splitlines() if " - Init " in line or "AllReduce: opCount" in line}
    assert made and made <= wanted


def test_calls_are_those_that_were_made_by_then(stopped: Timeline) -> None:
    calls = [nccl_logs(stopped, at_s)[0].count(": opCount ") for at_s in (0.0, 1.5, 1.9)]
    assert calls[0] == 0 < calls[1] < calls[2]


def test_they_are_read_as_real_ones_are(stopped: Timeline, tmp_path: Path) -> None:
    reader = LogReader()
    for rank, log in nccl_logs(stopped, 1.9).items():
        file = tmp_path / f"{rank}.log"
        file.write_text(log)
        assert NcclLog().recognises(file.read_bytes()[:4096], file)
        reader.take(log.encode().splitlines(keepends=True))
    assert len(reader.processes) == 4 and not reader.left_out
    assert all(any(own.ready and own.counts for own in process.alive.values()) for process in reader.processes.values())
