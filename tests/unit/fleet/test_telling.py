"""What a judge tells: each accusation once, nothing poorer just after a takeover, and no recovery that nobody saw."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from ncclwatch.engine.live import Recovery
from ncclwatch.engine.session import DiagnosisSession, Node, Update
from ncclwatch.fleet.telling import HOLD_S, QUIET_LOOKS, SETTLE_S, SLOW_S, Teller
from ncclwatch.fleet.verdict_log import Record, State, VerdictLog, accusation
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from unit.batches import ring_looks


class Direct:
    """A connection that runs what it is given; ``away``: nothing can be appended."""

    away = False

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self.away:
            work.close()
            raise TimeoutError
        return asyncio.run(work)


class Log(VerdictLog):
    """A log in memory."""

    def __init__(self, state: State = State(), standing: dict[str, Any] | None = None) -> None:  # noqa: B008 - frozen
        super().__init__(None, "j", "me")  # type: ignore[arg-type]
        self.epoch, self.state, self.standing, self.records = 1, state, standing, list[Record]()

    async def _append(self, record: Record) -> None:
        self.records.append(record)
        self._now(self.sequence + 1, record)


def accuse(rank: int, kind: VerdictClass = VerdictClass.STOPPED) -> Verdict:
    return Verdict(kind, f"rank {rank}", (Culprit(rank, rank, f"node{rank}", 100 + rank, 0),))


RUNNING = Verdict(VerdictClass.RUNNING, "all is well")


def judged(*verdicts: Verdict, recovered: Verdict | None = None) -> Update:
    update = Update(0, windows=[], verdicts=list(verdicts))
    update.recoveries = [Recovery(recovered, 5.0)] if recovered else []
    return update


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def teller(log: Log) -> tuple[Teller, Clock, Direct]:
    clock, direct = Clock(), Direct()
    return Teller(direct, log, lambda verdict: verdict.to_json(), clock), clock, direct  # type: ignore[arg-type]


def kinds(log: Log) -> list[str]:
    return [record.type for record in log.records]


SECONDS = itertools.count(1000)


def show(session: DiagnosisSession, *steps: int) -> None:
    """What nodes show next, a second later: how far the process of each has come."""
    [look] = ring_looks(1, world=4)
    wall_ns = next(SECONDS) * 10**9
    for sample, step in zip(look, steps, strict=False):
        operations = tuple(replace(o, op_count=o.op_count + 2 * step) for o in sample.operations)
        node = session.nodes[sample.process.host] = Node(sample.process.host, 0)
        node.samples = {sample.process.key: replace(sample, operations=operations, wall_ns=wall_ns)}


def took_over(verdict: Verdict) -> Log:
    shown = verdict.to_json()
    return Log(State(3, (accusation(shown),), time.time_ns() - 60 * 10**9), shown)


def test_a_verdict_that_stands_is_told_once_and_its_end_too() -> None:
    log = Log()
    one, _, _ = teller(log)
    session = DiagnosisSession()
    assert [v.summary for v in one.update(session, judged(accuse(3))).verdicts] == ["rank 3"]
    assert one.update(session, judged(replace(accuse(3), summary="more is known now"))).verdicts == []
    assert [v.summary for v in one.update(session, judged(accuse(4))).verdicts] == ["rank 4"]
    assert one.update(session, judged(accuse(3))).verdicts == []
    one.update(session, judged(RUNNING, recovered=accuse(3)))
    one.update(session, judged(RUNNING))
    one.update(session, judged(accuse(3)))
    assert kinds(log) == ["verdict", "verdict", "recovery", "verdict"]
    assert len({record.id for record in log.records}) == 4


def test_what_another_judge_told_is_neither_told_again_nor_ended_without_being_seen() -> None:
    log = took_over(accuse(3))
    one, _, _ = teller(log)
    session = DiagnosisSession()
    # It knows little yet: what it would accuse instead is held back, and that it runs is believed when all have moved.
    one.update(session, judged(accuse(4, VerdictClass.HARDWARE)))
    for look in range(2 * QUIET_LOOKS):
        show(session, 0, 1, 2)
        one.update(session, judged(RUNNING))
        # The host that is named is not heard yet, or its process stands.
        show(session, look, look, look)
        one.update(session, judged(RUNNING))
    for _ in range(2 * QUIET_LOOKS):
        show(session, 50, 50, 50, 7)
        one.update(session, judged(RUNNING))
        one.update(session, judged(Verdict(VerdictClass.UNKNOWN, "?")))
    assert kinds(log) == []
    for look in range(QUIET_LOOKS + 1):
        show(session, *[60 + look] * 4)
        one.update(session, judged(RUNNING))
    assert kinds(log) == ["recovery"]


def test_a_judge_that_took_over_says_something_else_once_it_knows_enough() -> None:
    log = took_over(accuse(3))
    one, clock, _ = teller(log)
    one.update(DiagnosisSession(), judged(accuse(4)))
    clock.now += SETTLE_S + 1
    one.update(DiagnosisSession(), judged(accuse(4)))
    assert kinds(log) == ["verdict"]


def test_a_slow_job_is_not_over_before_it_could_have_been_seen_to_be_slow() -> None:
    log = took_over(accuse(3, VerdictClass.SLOW_COMPUTATION))
    one, clock, _ = teller(log)
    session = DiagnosisSession()
    for look in range(3 * QUIET_LOOKS):
        show(session, *[look] * 4)
        one.update(session, judged(RUNNING))
    assert kinds(log) == []
    clock.now += SLOW_S + 1
    show(session, *[100] * 4)
    one.update(session, judged(RUNNING))
    assert kinds(log) == ["recovery"]


def test_nothing_is_over_while_a_node_is_silent() -> None:
    log = took_over(accuse(3))
    one, _, _ = teller(log)
    session = DiagnosisSession()
    for look in range(3 * QUIET_LOOKS):
        show(session, *[look] * 4)
        session.nodes["node9"] = Node("node9", 0, silent=True)
        one.update(session, judged(RUNNING))
    assert kinds(log) == []


def test_what_cannot_be_appended_is_appended_later() -> None:
    log = Log()
    one, _, direct = teller(log)
    session = DiagnosisSession()
    direct.away = True
    assert one.update(session, judged(accuse(3))).verdicts == []
    direct.away = False
    assert len(one.update(session, judged(accuse(3))).verdicts) == 1
    direct.away = True
    one.update(session, judged(RUNNING, recovered=accuse(3)))
    direct.away = False
    one.update(session, judged(RUNNING))
    assert kinds(log) == ["verdict", "recovery"]


def test_an_update_without_a_judgement_tells_nothing() -> None:
    log = took_over(accuse(3))
    one, _, _ = teller(log)
    assert one.update(DiagnosisSession(), Update(0)).records == []


@pytest.mark.parametrize("field", ["evidence", "summary", "confidence"])
def test_an_accusation_is_its_class_and_culprits(field: str) -> None:
    shown = accuse(3).to_json()
    assert accusation(shown) == accusation(shown | {field: "other"})
    assert accusation(shown) != accusation(accuse(4).to_json())
    assert accusation(shown) != accusation(accuse(3, VerdictClass.DEAD).to_json())


def seen(session: DiagnosisSession, host: str, wall_ns: int) -> None:
    [look] = ring_looks(1, world=1)
    node = session.nodes[host] = Node(host, 0)
    node.samples = {look[0].process.key: replace(look[0], wall_ns=wall_ns)}


def test_nothing_new_is_said_while_nodes_were_heard_up_to_different_moments() -> None:
    log = Log()
    one, clock, _ = teller(log)
    session = DiagnosisSession()
    seen(session, "node0", 100 * 10**9)
    seen(session, "node1", 90 * 10**9)
    assert one.update(session, judged(accuse(3))).records == []
    # Level now, but what one shows may be from before the other's look.
    seen(session, "node1", 101 * 10**9)
    assert one.update(session, judged(accuse(4))).records == []
    seen(session, "node0", 102 * 10**9)
    assert one.update(session, judged(accuse(4))).records == []
    seen(session, "node1", 102 * 10**9)
    assert [r.verdict["summary"] for r in one.update(session, judged(accuse(3))).records if r.verdict] == ["rank 3"]
    # Not for ever: clocks of nodes may be apart.
    seen(session, "node1", 0)
    assert one.update(session, judged(RUNNING, recovered=accuse(3))).records == []
    clock.now += HOLD_S + 1
    assert one.update(session, judged(RUNNING)).records != []


def test_what_waits_to_be_heard_holds_back_what_is_new_until_every_node_has_shown_more() -> None:
    log = Log()
    one, clock, _ = teller(log)
    session = DiagnosisSession()
    for second in (100, 101, 102):
        seen(session, "node0", second * 10**9)
        seen(session, "node1", second * 10**9)
        one.update(session, judged(RUNNING), unheard=second == 100)
    assert one.update(session, judged(accuse(3))).records != []
    # However long nobody was heard before there was something to say.
    one.update(session, judged(RUNNING), unheard=True)
    clock.now += HOLD_S + 1
    assert one.update(session, judged(accuse(4)), unheard=True).records == []
    assert one.update(session, judged(accuse(4))).records == []
    seen(session, "node0", 130 * 10**9)
    seen(session, "node1", 130 * 10**9)
    assert one.update(session, judged(accuse(4))).records != []
