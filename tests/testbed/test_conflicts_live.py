"""A rank of a real job calls another size or type than its peers: named, whether or not NCCL goes on."""

from __future__ import annotations

import time

import pytest

from ncclwatch.cli.live import LiveSession
from ncclwatch.model.verdict import Verdict, VerdictClass
from testbed.job import Job

pytestmark = pytest.mark.attach

VICTIM = 1
AT = (150, 600)
"""The iteration of the fault, try by try: attaching takes as long as the machine lets it."""
LOOKED_S, WHOLE_S = 60.0, 200.0
"""How long is looked once the fault is there, and in all: with a machine full of work an iteration takes half a second."""


STARVED_S = 3.0
"""Where the machine does not let the session run for seconds, more is called meanwhile than is kept to be compared, or records
are lost: what is not seen then proves nothing, and the next job is watched. (A session that is stopped for 12 s finds nothing,
one that is for 4 s does.) The same holds where the job was at its fault before the session was.
"""


def watched(version: str, fault: str, at: int, shape: str) -> tuple[list[Verdict], bool, str]:
    """The first verdict on the fault, whether the session was starved, and all that in words with how far the job came."""
    extra = ("--fault", f"{fault},rank={VICTIM},at={at}", "--compute-us", "10000")
    with Job(version, 3, shape, "socket", count=4096, extra=extra) as job:
        session = LiveSession(every=False)
        said: list[Verdict] = []
        longest = 0.0
        try:
            session.start(job.pids)
            if job.progress(0) > at - 50:
                return [], True, f"attached at iteration {job.progress(0)} of {at}"
            stepped = time.monotonic()
            deadline = stepped + WHOLE_S
            there = False
            while not said and not session.lost and stepped < deadline:
                session.step(until=deadline)
                longest, stepped = max(longest, time.monotonic() - stepped), time.monotonic()
                if not there and job.progress(0) > at:
                    there, deadline = True, min(deadline, stepped + LOOKED_S)
                verdict = session.verdict
                # On a machine full of other work iterations do become slow, and that may be said first.
                if verdict is not None and verdict.verdict_class.accuses and not verdict.verdict_class.slow:
                    said.append(verdict)
        finally:
            session.close()
        came = [job.progress(rank) for rank in range(3)]
        starved = session.lost > 0 or longest > STARVED_S or min(came) <= at
        return said, starved, f"{said} at {came}, {session.lost} records lost, a step of {longest:.1f} s"


@pytest.mark.parametrize(
    ("version", "fault", "shape"),
    [
        pytest.param("2.27.5", "other_size:nth=0", "mix", marks=pytest.mark.long),
        pytest.param("2.32.3", "other_type:nth=0", "mix", marks=pytest.mark.long),
        # In every call ever since: it never agrees with the others again.
        ("2.27.5", "other_size:for=1000000", "allreduce"),
    ],
)
def test_a_rank_that_calls_something_else_is_named(version: str, fault: str, shape: str) -> None:
    """Attached to the running job: from 2.26 on NCCL's own counts line the ranks up."""
    for at in AT:
        said, starved, told = watched(version, fault, at, shape)
        if said or not starved:
            break
    assert [verdict.verdict_class for verdict in said] == [VerdictClass.INCONSISTENT], told
    assert [culprit.rank for culprit in said[0].culprits] == [VICTIM], told
