"""Links that verdicts call dead or slow: read from their words and records, placed on measured paths, avoided by plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ncclwatch.errors import UsageError
from ncclwatch.model.verdict import CommunicatorRef, Culprit, LinkRef, Verdict, VerdictClass
from ncclwatch.paths.findings import Capacity, dead, degraded
from ncclwatch.paths.measured import where_now
from ncclwatch.paths.measured_plan import plan
from ncclwatch.paths.suspects import Told, suspects, told_by
from unit.paths.test_measured import LEAF, LIVE, OWN, flow, probe, seen

COMM = "00000000000000ff"
UP0, UP1 = (LEAF, "10.8.0.2"), (LEAF, "10.8.1.2")
FLOWS = [flow(n, 500 + n, connection=(COMM, 4, 5)) for n in range(2)]
APART = (LIVE[0], replace(seen(501, 1, 40001), live=True))
EVERY = [probe(*OWN, *APART)]


def verdict(kind: VerdictClass, *evidence: str, confidence: float = 0.9, link: LinkRef | None = None) -> dict[str, Any]:
    culprit = Culprit(4, 4, "a", 1, 0, communicator=CommunicatorRef(COMM, 8), link=link)
    return Verdict(kind, "s", culprits=(culprit,), evidence=evidence, confidence=confidence).to_json()


def test_what_findings_say_of_links_is_read_back() -> None:
    first = dead(UP0, (32, 3, 2), 2, FLOWS, 0.97)
    (told,) = told_by(verdict(VerdictClass.RUNNING, f"{first.text}; costs at most 50% of an iteration, PREDICTED"), "v")
    assert (told.link, told.left, told.confidence) == (UP0, 0.0, 0.97)
    known = {UP0: Capacity(4e9, (2e9, 2e9, 2e9)), UP1: Capacity(4e9)}
    (slow,) = degraded(known, FLOWS, where_now(FLOWS, EVERY), EVERY)
    (told,) = told_by(verdict(VerdictClass.SLOW_COMMUNICATION, slow.text), "v")
    assert (told.link, told.left) == (UP0, 0.5) and told.confidence == pytest.approx(slow.confidence, abs=0.01)


def test_the_link_of_a_hang_is_one_that_no_sound_channel_takes() -> None:
    """Channel 0 stands, channel 1 of the same ranks does not: the fault is where channel 0 goes alone."""
    told = told_by(verdict(VerdictClass.HARDWARE, link=LinkRef(4, 5, "net", (0,))), "v")
    assert told == [Told(0.0, 0.9, told[0].by, None, (COMM, 4, 5), (0,))]
    found, notes = suspects(told, FLOWS, where_now(FLOWS, EVERY), {(FLOWS[0].source, FLOWS[0].destination): {UP0, UP1}})
    assert [(one.link, one.barred) for one in found] == [(UP0, True)] and not notes
    both = [replace(told[0], channels=())]
    found, notes = suspects(both, FLOWS, where_now(FLOWS, EVERY), {(FLOWS[0].source, FLOWS[0].destination): {UP0, UP1}})
    assert not found and "ranks 4 → 5" in notes[0], "two links, and one fault does not explain both channels"


@pytest.mark.parametrize("kind", [VerdictClass.STOPPED, VerdictClass.NOT_ENTERED, VerdictClass.SLOW_COMPUTATION])
def test_other_verdicts_tell_of_no_link(kind: VerdictClass) -> None:
    assert told_by(verdict(kind, link=LinkRef(4, 5, "net", (0,))), "v") == []


def test_where_a_probe_found_the_path_alive_it_is_not_the_link() -> None:
    line = "a probe of ours says ok: 3 of 3 answered: the path is alive, and the process at its end does not receive"
    assert told_by(verdict(VerdictClass.HARDWARE, line, link=LinkRef(4, 5, "net", (0,))), "v") == []


def test_a_plan_does_without_a_dead_link_and_loads_a_slow_one_less() -> None:
    plain = plan(FLOWS, EVERY, floor=0.0)
    assert {choice.hops[1] for choice in plain.chosen if choice} == {"10.8.0.2", "10.8.1.2"} and not plain.avoided
    gone = plan(FLOWS, EVERY, floor=0.0, told=[Told(0.0, 0.9, "v", UP0)])
    assert {choice.hops[1] for choice in gone.chosen if choice} == {"10.8.1.2"} and len(gone.avoided) == 1
    assert "is dead (confidence 90%; v)" in gone.avoided[0].text
    assert gone.gains[0].gain > plain.gains[0].gain, "a flow on a dead link is the slowest there is"
    slow = plan([*FLOWS, flow(2, 502)], EVERY, floor=0.0, told=[Told(0.25, 1.0, "v", UP0)])
    assert [choice.hops[1] for choice in slow.chosen if choice].count("10.8.0.2") == 0
    doubtful = plan(FLOWS, EVERY, floor=0.0, told=[Told(0.0, 0.3, "v", UP0)])
    assert {choice.hops[1] for choice in doubtful.chosen if choice} == {"10.8.0.2", "10.8.1.2"}


def test_where_every_path_is_dead_a_plan_has_what_there_is() -> None:
    told = [Told(0.0, 0.9, "v", link) for link in (UP0, UP1)]
    assert all(plan(FLOWS, EVERY, floor=0.0, told=told).chosen)


@pytest.mark.parametrize("wrong", [{}, {"schema": "x"}, {"confidence": 7}, {"evidence": ["x" * 70_000]}, {"culprits": 1}])
def test_what_is_no_verdict_is_refused(wrong: dict[str, Any]) -> None:
    data = {**verdict(VerdictClass.RUNNING), **wrong} if wrong else {}
    with pytest.raises(UsageError):
        told_by(data, "v")
