"""Paths that a real job stands still on, probed by the collector itself between its hosts: dead, or alive."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from ncclwatch.cli.live import LiveSession
from ncclwatch.collect.paths import PathProbes
from ncclwatch.engine.evidence.work_requests import Shows
from ncclwatch.model.network import FlowRecord
from testbed.netns import Network

pytestmark = [pytest.mark.attach]

VICTIM = 1
CASES = {"link-down": (False, Shows.NO_PATH), "silent-receiver": (True, Shows.ALIVE)}


def until_told(session: LiveSession, shows: Shows, seconds: float) -> tuple[list[str], list[str], list[FlowRecord]]:
    """Step until a verdict shows what a probe found: its lines about probes, all notes, connections with answers."""
    notes: list[str] = []
    answered: list[FlowRecord] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        update = session.step(until=deadline)
        notes += update.notes
        answered += [flow for flow in update.flows if flow.path is not None]
        told = [line for line in session.verdict.evidence if "a probe of ours" in line] if session.verdict is not None else []
        if any(str(shows) in line for line in told):
            return told, notes, answered
    return told, notes, answered


@pytest.mark.parametrize("case", CASES)
def test_a_path_that_stands_still_is_probed_and_the_answer_is_in_the_verdict(case: str) -> None:
    alive, shows = CASES[case]
    fault = ("--fault", f"stall_proxy:rank={VICTIM},at=40") if alive else ()
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts=3))
        job = stack.enter_context(network.job("2.27.5", 3, shape="allreduce", count=1 << 18, extra=fault))
        session = LiveSession(every=False, paths=PathProbes())
        stack.callback(session.close)
        session.start(job.pids, calls=False)
        session.step()
        if not alive:
            network.link(VICTIM).down()
        told, notes, answered = until_told(session, shows, 60)
        assert any(str(shows) in line for line in told), (session.verdict, notes, answered)
        assert any("probed, as ordered" in note for note in notes), notes
        path = answered[-1].path
        assert path is not None and path.alive == alive and path.kind == "tcp", answered
        assert session.verdict is not None and VICTIM in {culprit.rank for culprit in session.verdict.culprits}, session.verdict
        assert {plane.name for plane in session.planes if plane.running} >= {"paths"}
