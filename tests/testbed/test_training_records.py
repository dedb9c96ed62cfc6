"""A clean training job watched from before it created its first communicator: every call it made was recorded, none was lost."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

from ncclwatch.model.events import Flag, Function, Kind
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.simulate.scenario import parse
from ncclwatch.simulate.testbed import as_testbed_runs, plan
from score.real import Recording, Watcher
from testbed.play import Play

pytestmark = [pytest.mark.attach, pytest.mark.quiet]

OPERATIONS = np.arange(Function.ALL_REDUCE, Function.RECV + 1)
ITERATIONS = 6


def calls_seen(recording: Recording) -> Counter[int]:
    """Collectives, sends and receives by pid."""
    seen: Counter[int] = Counter()
    for batch in recording.batches:
        if batch.events is not None:
            entered = (batch.events["kind"] == Kind.ENTER) & np.isin(batch.events["function"], OPERATIONS)
            assert not (batch.events["flags"][entered] & Flag.UNKNOWN_PROCESS).any()
            seen.update(batch.events["pid"][entered].tolist())
    return seen


@pytest.mark.parametrize("ranks", [8, pytest.param(16, marks=pytest.mark.long)])
def test_no_record_of_a_clean_job_is_lost(ranks: int) -> None:
    data = {
        "name": "clean",
        "title": "clean",
        "seed": 1,
        "layout": {"tp": 2, "pp": 2, "dp": ranks // 4, "ranks_per_node": 4},
        "workload": {"iterations": ITERATIONS, "forward_ms": 4.0, "tp_bytes": 65536, "pp_bytes": 65536, "dp_bytes": 1 << 20},
        "network": {"intra_node": "net", "net": "socket"},
        "expect": {"score_class": "clean"},
    }
    with Play(plan(as_testbed_runs(parse(data))), extra=["--hold"]) as play:
        watcher = Watcher(play.job.pids)
        play.begin()
        made = {}
        for rank in range(ranks):
            play.job.wait_line(rank, f"holding after {ITERATIONS} iterations", timeout=240)
            made[play.job.pid(rank)] = int(play.job.wait_line(rank, "calls").split()[1])
        time.sleep(1.5)  # the collector's next look, and what the probes still held
        recording = watcher.stop()
    assert recording.batches[-1].lost == 0
    assert calls_seen(recording) == made
    assert all(count > ITERATIONS * 20 for count in made.values()), made
    looks = [verdicts for _, verdicts in recording.said()]
    assert len(looks) > 3
    assert not any(verdict.verdict_class.accuses for verdicts in looks for verdict in verdicts)
    assert any(verdict.verdict_class is VerdictClass.RUNNING for verdicts in looks for verdict in verdicts)
