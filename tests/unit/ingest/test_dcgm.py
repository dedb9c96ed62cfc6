"""DCGM's metrics: context, and never a culprit."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.ingest.base import IngestError
from ncclwatch.ingest.dcgm import Dcgm
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.ingest.made_dcgm import TEXT, metrics

FORMAT = Dcgm()


def test_what_is_out_of_the_ordinary_is_told_and_nobody_is_accused(tmp_path: Path) -> None:
    path = tmp_path / "node7.prom"
    path.write_text(TEXT)
    assert FORMAT.recognises(TEXT.encode()[:4096], path)
    assert FORMAT.recognises(TEXT.replace("\n", "\n    ").encode()[100:4096], path)
    job = FORMAT.read([path])[0]
    told = " | ".join(job.notes)
    for wanted in (
        "GPU 3 of node7: SM clock 1110 MHz, others of its model up to 1980 MHz",
        "GPU 3 of node7: its clock is held down: hardware slowdown, hardware thermal slowdown",
        "GPU 3 of node7: its clock has been held down by heat",
        "GPU 2 of node7: 1 uncorrectable ECC errors",
        "GPU 0 of node7: 17 NVLink data CRC errors",
        "GPU 2 of node7: last XID 94",
    ):
        assert wanted in told
    assert "GPU 1 of" not in told
    verdict = job.amend(Verdict(VerdictClass.UNKNOWN, "nothing"))
    assert not verdict.verdict_class.accuses
    assert not verdict.culprits
    assert not job.batches


def test_a_slow_clock_of_an_idle_gpu_is_no_news(tmp_path: Path) -> None:
    path = tmp_path / "x.prom"
    clocks = [("DCGM_FI_DEV_SM_CLOCK", 0, 1980.0), ("DCGM_FI_DEV_SM_CLOCK", 1, 345.0)]
    path.write_text(metrics(*clocks, ("DCGM_FI_DEV_GPU_UTIL", 0, 99), ("DCGM_FI_DEV_GPU_UTIL", 1, 0)))
    assert FORMAT.read([path])[0].notes == ("DCGM: no throttling, no errors, clocks alike on all GPUs",)


def test_lines_that_are_no_samples_are_told_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "x.prom"
    path.write_text('# HELP x\nDCGM_FI_DEV_SM_CLOCK{gpu=} nope\nDCGM_FI_DEV_XID_ERRORS{gpu="1"} NaN\n' + TEXT)
    job = FORMAT.read([path])[0]
    assert any("x.prom: 1 lines are no samples and were left out, the first is line 2" in problem for problem in job.problems)
    empty = tmp_path / "y.prom"
    empty.write_bytes(b"DCGM_FI_X" * 10_000)
    with pytest.raises(IngestError, match=r"y\.prom: \d+ lines are no samples"):
        FORMAT.read([empty])
