"""A rank of a real job calls another size or type than its peers: named, whether or not NCCL goes on."""

from __future__ import annotations

import time

import pytest

from ncclwatch.cli.live import LiveSession
from ncclwatch.model.verdict import VerdictClass
from testbed.job import Job

pytestmark = pytest.mark.attach

VICTIM = 1
AT = 100
LOOKED_S = 90.0


@pytest.mark.parametrize(("version", "fault"), [("2.27.5", "other_size"), ("2.32.3", "other_type")])
def test_a_rank_that_calls_something_else_is_named(version: str, fault: str) -> None:
    """Attached to the running job: from 2.26 on NCCL's own counts line the ranks up."""
    extra = ("--fault", f"{fault}:rank={VICTIM},at={AT}", "--compute-us", "10000")
    with Job(version, 3, "mix", "socket", count=4096, extra=extra) as job:
        session = LiveSession(every=False)
        try:
            session.start(job.pids)
            assert job.progress(0) < AT - 5, "the machine was too slow to be there before the fault"
            deadline, said = time.monotonic() + LOOKED_S, []
            while time.monotonic() < deadline:
                session.step(until=deadline)
                if session.verdict is not None and session.verdict.verdict_class.accuses:
                    said.append(session.verdict)
                    break
        finally:
            session.close()
        told = f"{said} at {[job.progress(rank) for rank in range(3)]}"
    assert [verdict.verdict_class for verdict in said] == [VerdictClass.INCONSISTENT], told
    assert [culprit.rank for culprit in said[0].culprits] == [VICTIM], told
