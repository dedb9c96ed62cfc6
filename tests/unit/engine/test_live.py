"""The standing verdict: patience, since when, recovery."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.collect.network_memory import Way
from ncclwatch.engine.case import SOURCES, Known
from ncclwatch.engine.evidence.base import Fact, FactKind, Source
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.patience import Patience
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import VerdictClass
from unit.engine.evidence.said import with_facts
from unit.synthetic import SECOND, Rank, communicator, frozen_ring, looks, moved, recv, silent_link


def rounds(count: int, *, run_state: str = "T") -> list[list[ProcessSample]]:
    """Rounds of samples of a ring in which nothing moves."""
    series = looks(frozen_ring(2, run_state=run_state), count=count)
    return [[samples[index] for samples in series] for index in range(count)]


def test_a_stopped_rank_is_named_on_the_second_round_with_the_time_of_the_last_progress() -> None:
    live = LiveDiagnosis()
    first, second, third = rounds(3)
    assert live.update(first).verdict_class is VerdictClass.UNKNOWN
    verdict = live.update(second)
    assert verdict.verdict_class is VerdictClass.STOPPED
    assert verdict.since == first[0].wall_ns / SECOND
    assert live.update(third).since == verdict.since


def test_recovery_closes_the_verdict_with_its_duration() -> None:
    live = LiveDiagnosis()
    looks_ = rounds(4)
    for samples in looks_[:3]:
        live.update(samples)
    verdict = live.update([replace(moved(sample), run_state="S") for sample in looks_[3]])
    assert verdict.verdict_class is VerdictClass.RUNNING
    [(closed, duration)] = live.closed
    assert closed.verdict_class is VerdictClass.STOPPED
    assert duration == 3.0


def test_a_verdict_stands_while_the_agent_of_its_rank_comes_back() -> None:
    """Forgotten and seen anew: one look says nothing, least of all that the job went on."""
    live = LiveDiagnosis()
    rounds_ = rounds(6)
    for samples in rounds_[:2]:
        before = live.update(samples)
    live.update([sample for sample in rounds_[2] if sample.rank != 2])
    again = live.update(rounds_[3])
    assert (again.id, again.verdict_class, again.since) == (before.id, VerdictClass.STOPPED, before.since)
    assert live.update(rounds_[4]).id == before.id
    assert live.closed == []
    live.update([replace(moved(sample), run_state="S") for sample in rounds_[5]])
    assert [closed.id for closed, _ in live.closed] == [before.id]


def test_a_verdict_stands_when_watchdogs_abort_what_hangs() -> None:
    """What the others had under way is gone then, and that was a call: nothing went on."""
    live = LiveDiagnosis()
    first, second, third = rounds(3)
    live.update(first)
    before = live.update(second)

    def aborted(sample: ProcessSample) -> ProcessSample:
        own = replace(sample.communicators[0], aborted=True)
        return replace(sample, communicators=(own,), operations=(), calls_seen=1)

    after = live.update([sample if sample.rank == 2 else aborted(sample) for sample in third])
    assert (after.verdict_class, after.culprits[0].rank, live.closed) == (VerdictClass.STOPPED, before.culprits[0].rank, [])


def test_waits_alone_need_the_floor() -> None:
    live = LiveDiagnosis(Known(Patience(5)))
    classes = [live.update(samples).verdict_class for samples in rounds(8, run_state="S")]
    assert not any(verdict_class.accuses for verdict_class in classes[:5])


def test_age_of_a_standstill_survives_many_rounds() -> None:
    live = LiveDiagnosis()
    verdict = None
    for samples in rounds(30):
        verdict = live.update(samples)
    assert verdict is not None and any("29.0 s" in line for line in verdict.evidence)


def test_a_process_that_is_no_longer_reported_is_forgotten() -> None:
    live = LiveDiagnosis()
    first, second = rounds(2)
    live.update(first)
    live.update(second[:1])
    assert len(live._series) == 1


def going_on(live: LiveDiagnosis, before: list[ProcessSample], at: int) -> list[ProcessSample]:
    """One round in which everything has moved since ``before``, at the given second."""
    moved_on = [replace(moved(sample), time_ns=at * SECOND, wall_ns=(1_700_000_000 + at) * SECOND) for sample in before]
    assert live.update(moved_on).verdict_class is VerdictClass.RUNNING
    return moved_on


def first_accusation(live: LiveDiagnosis, from_s: int, count: int = 40) -> float | None:
    """Seconds after which a standstill that begins at ``from_s`` is held against somebody."""
    for number, samples in enumerate(rounds(count, run_state="S")):
        later = [replace(s, time_ns=s.time_ns + from_s * SECOND, wall_ns=s.wall_ns + from_s * SECOND) for s in samples]
        if live.update(later).verdict_class.accuses:
            return float(number)
    return None


def test_an_operation_that_stood_still_and_went_on_is_given_twice_that_time() -> None:
    live = LiveDiagnosis(Known(Patience(5)))
    looks_ = rounds(9, run_state="S")
    for samples in looks_:
        live.update(samples)
    going_on(live, looks_[-1], 110)
    waited = first_accusation(live, 120)
    assert waited is not None and 16 <= waited <= 22


def retrying(ranks: list[Rank], link: tuple[int, int], worth_s: float) -> tuple[Source, ...]:
    """Sources by which the sockets of a link try again to send, which is worth waiting for."""
    way = Way(ranks[0].communicators[0].hash, *link)
    return with_facts(Fact(FactKind.RETRYING, way, value=worth_s))


def test_a_standstill_of_a_lossy_link_teaches_no_patience() -> None:
    live, ranks = LiveDiagnosis(Known(Patience(5))), silent_link()
    seen = list(zip(*(rank.looks(60) for rank in ranks), strict=True))
    for number, lossy in enumerate((True, False)):
        live.known.sources = retrying(ranks, (1, 2), 13.5) if lossy else SOURCES
        here = seen[30 * number : 30 * number + 12]
        classes = [str(live.update(samples).verdict_class) for samples in here]
        assert classes[3:5] == ["unknown"] * 2
        assert set(classes[7:]) == {"slow-communication" if lossy else "hardware"}
        live.update([replace(moved(s), time_ns=s.time_ns + SECOND, wall_ns=s.wall_ns + SECOND) for s in here[-1]])


def test_another_kind_of_operation_is_not_given_more_time() -> None:
    live = LiveDiagnosis(Known(Patience(5)))
    looks_ = rounds(9, run_state="S")
    short = [[replace(s, operations=tuple(replace(o, collective="AllGather") for o in s.operations)) for s in r] for r in looks_]
    for samples in short:
        live.update(samples)
    going_on(live, short[-1], 110)
    waited = first_accusation(live, 120)
    assert waited is not None and 5 <= waited <= 7


def test_a_fixed_time_learns_nothing() -> None:
    live = LiveDiagnosis(Known(Patience(7, adaptive=False)))
    looks_ = rounds(7, run_state="S")
    for samples in looks_:
        live.update(samples)
    going_on(live, looks_[-1], 110)
    waited = first_accusation(live, 120)
    assert waited is not None and 7 <= waited <= 8


def test_first_operations_get_a_longer_floor_but_no_immunity() -> None:
    live = LiveDiagnosis(Known(Patience(5)))
    accused = None
    for number, samples in enumerate(rounds(30, run_state="S")):
        young = [replace(s, communicators=tuple(replace(c, op_count=1) for c in s.communicators)) for s in samples]
        if live.update(young).verdict_class.accuses:
            accused = number
            break
    assert accused is not None and 10 <= accused <= 12


def test_operations_that_only_the_counts_by_kind_tell_are_no_first_ones() -> None:
    """NCCL 2.26 and later leave ``opCount`` at 0 where everything goes through shared memory."""
    live, accused = LiveDiagnosis(Known(Patience(5))), None
    for number, samples in enumerate(rounds(30, run_state="S")):
        old = [
            replace(s, communicators=tuple(replace(c, op_count=0, sequence_numbers={"AllReduce": 156}) for c in s.communicators))
            for s in samples
        ]
        if live.update(old).verdict_class.accuses:
            accused = number
            break
    assert accused is not None and 5 <= accused <= 7


@pytest.mark.parametrize("link", [(1, 2), (2, 1), (0, 1), None])
def test_a_link_whose_sockets_try_again_is_given_their_time(link: tuple[int, int] | None) -> None:
    """TCP waits twice as long each time: a link that only loses much stands still for more than five seconds."""
    live, ranks = LiveDiagnosis(Known(Patience(5))), silent_link()
    live.known.sources = retrying(ranks, link, 7.0) if link else SOURCES
    rounds_ = zip(*(rank.looks(30) for rank in ranks), strict=True)
    accused = next((n for n, samples in enumerate(rounds_) if live.update(samples).verdict_class.accuses), None)
    assert accused is not None and (7 <= accused <= 8 if link in ((1, 2), (2, 1)) else 5 <= accused <= 6)


def test_a_link_that_loses_much_is_slow_until_tcp_has_tried_once_more() -> None:
    live, ranks = LiveDiagnosis(Known(Patience(5))), silent_link()
    live.known.sources = retrying(ranks, (1, 2), 13.5)
    said = [live.update(samples) for samples in zip(*(rank.looks(20) for rank in ranks), strict=True)]
    classes = [str(verdict.verdict_class) for verdict in said]
    assert set(classes[:5]) == {"unknown"} and set(classes[6:13]) == {"slow-communication"}, classes
    assert set(classes[15:]) == {"hardware"}, classes
    assert "is slow and holds up the job" in said[8].summary and "no transfer has ended for 8 s" in said[8].summary
    assert said[8].link == said[-1].link is not None


def test_a_port_whose_links_both_lose_much_is_slow_until_tcp_has_tried() -> None:
    live, ranks = LiveDiagnosis(Known(Patience(5))), silent_link(2)
    live.known.sources = retrying(ranks, (2, 3), 13.5)
    said = [live.update(samples) for samples in zip(*(rank.looks(20) for rank in ranks), strict=True)]
    assert {str(verdict.verdict_class) for verdict in said[6:13]} == {"slow-communication"}
    assert {str(verdict.verdict_class) for verdict in said[15:]} == {"hardware"}
    for verdict in (said[8], said[-1]):
        assert [culprit.rank for culprit in verdict.culprits] == [2] and verdict.link is None
    assert "its network port, or the path to it, is slow" in said[8].summary


@pytest.mark.parametrize("base", [0, 960])
def test_connections_through_which_nothing_has_come_are_still_being_made(base: int) -> None:
    live = LiveDiagnosis(Known(Patience(5)))
    old = replace(communicator(0, 2), op_count=500)
    ranks = [
        Rank(0, 2, (old,), (recv(1, posted=8, received=0, delivered=0, consumed=0, base=base),)),
        Rank(1, 2, (replace(old, rank=1),)),
    ]
    rounds_ = zip(*(rank.looks(30) for rank in ranks), strict=True)
    accused = next((n for n, samples in enumerate(rounds_) if live.update(samples).verdict_class.accuses), None)
    assert accused is not None and (5 <= accused <= 7 if base else 15 <= accused <= 17)


def test_a_young_communicator_beside_an_old_one_is_no_reason_to_wait_longer() -> None:
    """Rank 1 is waited for in an operation of a communicator that has run for long, and in the first of another."""
    live = LiveDiagnosis(Known(Patience(5)))
    old, young = replace(communicator(0, 2), op_count=500), replace(communicator(0, 2, comm_hash=0xC1), op_count=1)
    waiting = [recv(1, posted=8, received=0, delivered=0, consumed=0, comm_hash=c.hash) for c in (old, young)]
    ranks = [
        Rank(0, 2, (old, young), tuple(waiting)),
        Rank(1, 2, (replace(communicator(1, 2), op_count=500), replace(communicator(1, 2, comm_hash=0xC1), op_count=0))),
    ]
    rounds_ = zip(*(rank.looks(12) for rank in ranks), strict=True)
    accused = next((n for n, samples in enumerate(rounds_) if live.update(samples).verdict_class.accuses), None)
    assert accused is not None and 5 <= accused <= 7


def test_who_asks_is_answered_at_once_and_what_stands_stays_as_it_is() -> None:
    live = LiveDiagnosis(Known(Patience(300, adaptive=False)))
    looks_ = rounds(4, run_state="S")
    for samples in looks_[:2]:
        assert not live.update(samples).verdict_class.accuses
    live.ask()
    assert not live.update(looks_[2]).verdict_class.accuses
    [answer] = live.answers
    assert answer.verdict_class.accuses
    live.answers.clear()
    live.update(looks_[3])
    assert not live.answers and not live.closed


def test_a_stopped_process_teaches_no_patience() -> None:
    live = LiveDiagnosis(Known(Patience(5)))
    looks_ = rounds(9)
    for samples in looks_:
        live.update(samples)
    going_on(live, [replace(sample, run_state="S") for sample in looks_[-1]], 110)
    waited = first_accusation(live, 120)
    assert waited is not None and 5 <= waited <= 7


def test_who_has_not_come_to_a_creation_is_given_the_time_that_others_needed() -> None:
    """Watched for 40 s before rank 0 came: ranks of one job need about as long, and 15 s later nobody is late."""
    begun = replace(communicator(0, 2), init_state="ncclInProgress")
    live, said = LiveDiagnosis(), dict[int, VerdictClass]()
    ranks = [Rank(0, 2, (begun,)).looks(100), Rank(1, 2, ()).looks(100)]
    for second, both in enumerate(zip(*ranks, strict=True)):
        here = [replace(both[0], communicators=()) if second < 40 else both[0], both[1]]
        said[second] = live.update(here).verdict_class
    assert said[40 + 16] is VerdictClass.UNKNOWN
    assert said[40 + 42] is VerdictClass.INIT_HANG
    # Who comes when they wait already has seen nothing of that.
    late = LiveDiagnosis()
    for both in zip(*ranks, strict=True):
        verdict = late.update(list(both))
        if verdict.verdict_class is VerdictClass.INIT_HANG:
            break
    assert both[0].time_ns < ranks[0][20].time_ns
