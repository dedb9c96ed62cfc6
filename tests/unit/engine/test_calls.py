"""Verdicts that the calls plane alone can give: who has not called (H1), who called something else (H2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.state import ProcessSample, ProxyOperation, Transport
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.synthetic import WORLD, Rank, address_of, communicator, recv


def calls(rank: int, counts: list[int], *, function: Function = Function.ALL_REDUCE, comm: int = WORLD) -> NDArray[Any]:
    """Calls of one rank after it was seen to create the communicator, all before the first look."""
    events = np.zeros(len(counts) + 1, EVENT_DTYPE)
    events["time_ns"] = 1000 + np.arange(len(counts) + 1)
    events["kind"], events["flags"] = Kind.ENTER, Flag.COMM_READ
    events["function"], events["comm"], events["rank"], events["nranks"] = function, address_of(comm), rank, 4
    events["count"][1:], events["datatype"], events["peer"], events["pid"] = counts, 7, -1, 1000 + rank
    events["kind"][0], events["function"][0] = Kind.LEAVE, Function.COMM_INIT_RANK
    return events


def rounds(count: int) -> list[list[ProcessSample]]:
    """Four ranks of one node joined by NVLink: the state plane sees nothing of what they do."""
    ranks = [Rank(r, 4, (communicator(r, 4, transport=Transport.P2P),), host="node") for r in range(4)]
    series = [rank.looks(count) for rank in ranks]
    return [[samples[index] for samples in series] for index in range(count)]


def final(live: LiveDiagnosis, count: int = 8) -> Verdict:
    verdict = None
    for samples in rounds(count):
        verdict = live.update(samples)
    assert verdict is not None
    return verdict


def test_a_rank_that_has_not_called_is_named_where_memory_shows_nothing() -> None:
    live = LiveDiagnosis()
    for rank in range(4):
        live.add_calls(calls(rank, [64, 64] if rank == 3 else [64, 64, 64]))
    verdict = final(live)
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert [culprit.rank for culprit in verdict.culprits] == [3]
    assert verdict.victims == (0, 1, 2)
    assert verdict.planes == ("state", "calls")
    assert any("has not called #2" in line for line in verdict.evidence)


def test_not_before_the_floor_and_not_while_calls_go_on() -> None:
    live = LiveDiagnosis()
    for rank in range(4):
        live.add_calls(calls(rank, [64, 64] if rank == 3 else [64, 64, 64]))
    assert not final(live, count=4).verdict_class.accuses
    for samples in rounds(8):
        more = calls(0, [64])[1:]
        more["time_ns"] = samples[0].time_ns
        live.add_calls(more)
        assert not live.update(samples).verdict_class.accuses


def test_what_was_recorded_before_a_loss_proves_nothing() -> None:
    live = LiveDiagnosis()
    for rank in range(4):
        live.add_calls(calls(rank, [64, 64] if rank == 3 else [64, 64, 64]), lost=1 if rank == 3 else 0)
    assert not final(live).verdict_class.accuses


def test_a_loss_on_another_node_takes_nothing_away() -> None:
    live = LiveDiagnosis()
    for rank in range(4):
        live.add_calls(calls(rank, [64, 64] if rank == 3 else [64, 64, 64]), source="node")
    live.add_calls(calls(0, []), lost=5, source="elsewhere")
    assert [culprit.rank for culprit in final(live).culprits] == [3]


def test_an_odd_call_long_ago_is_found_although_the_job_went_on() -> None:
    """NCCL compares nothing: a smaller AllGather can leave the ranks one transfer apart, to hang much later."""
    live = LiveDiagnosis()
    for rank in range(4):
        live.add_calls(calls(rank, [64] * 10 + [32 if rank == 2 else 64] + [64] * 300))
    verdict = final(live)
    assert verdict.verdict_class is VerdictClass.INCONSISTENT
    assert [culprit.rank for culprit in verdict.culprits] == [2]
    assert any("300 operations since" in line for line in verdict.evidence)


def test_an_odd_call_is_outvoted() -> None:
    live = LiveDiagnosis()
    for rank in range(4):
        live.add_calls(calls(rank, [64, 128] if rank == 1 else [64, 64]))
    verdict = final(live)
    assert verdict.verdict_class is VerdictClass.INCONSISTENT
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert "128 x" in verdict.culprits[0].reason


@pytest.mark.parametrize("before", ["nobody", "a process that has ended"])
def test_of_two_ranks_the_one_that_called_what_nobody_ever_calls_here_is_named(before: str) -> None:
    """What a row of the ledger holds of the process that had it before makes nothing familiar."""
    pair = 0xBB
    live = LiveDiagnosis()
    if before != "nobody":
        live.add_calls(calls(5, [7] * 20, comm=pair))
        live.ledger.forget(set(live.ledger.records))
    live.add_calls(calls(1, [8, 9, 8, 7, 8], comm=pair))
    live.add_calls(calls(0, [8, 9, 8, 9, 8], comm=pair))
    both = [Rank(r, 2, (communicator(r, 2, comm_hash=pair, transport=Transport.P2P),)).looks(8) for r in (0, 1)]
    verdict = None
    for index in range(8):
        verdict = live.update([looks[index] for looks in both])
    assert verdict is not None and verdict.verdict_class is VerdictClass.INCONSISTENT
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert 0.5 < verdict.confidence < 0.9


def test_two_ranks_that_call_familiar_things_in_different_orders_are_a_tie() -> None:
    pair = 0xBB
    live = LiveDiagnosis()
    live.add_calls(calls(0, [8, 9, 9, 8, 7, 8], comm=pair))
    live.add_calls(calls(1, [8, 9, 9, 8, 7, 9], comm=pair))
    both = [Rank(r, 2, (communicator(r, 2, comm_hash=pair, transport=Transport.P2P),)).looks(8) for r in (0, 1)]
    verdict = None
    for index in range(8):
        verdict = live.update([looks[index] for looks in both])
    assert verdict is not None and [culprit.rank for culprit in verdict.culprits] == [0, 1]
    assert verdict.confidence == 0.5


def test_of_two_ranks_the_one_that_broke_its_pattern_is_named() -> None:
    pair = 0xBB
    live = LiveDiagnosis()
    live.add_calls(calls(0, [8, 9, 7] * 8 + [8, 7], comm=pair))
    live.add_calls(calls(1, [8, 9, 7] * 8 + [8, 9], comm=pair))
    both = [Rank(r, 2, (communicator(r, 2, comm_hash=pair, transport=Transport.P2P),)).looks(8) for r in (0, 1)]
    verdict = None
    for index in range(8):
        verdict = live.update([looks[index] for looks in both])
    assert verdict is not None and [culprit.rank for culprit in verdict.culprits] == [0]
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert any("left out" in line for line in verdict.evidence)


def test_behind_on_one_communicator_because_it_waits_in_another_is_a_victim() -> None:
    """Rank 1 has not called the third AllReduce of the world: it waits in the pair for rank 0, which has not called there."""
    pair = 0xBB
    live = LiveDiagnosis()
    for rank in range(4):
        live.add_calls(calls(rank, [64, 64] if rank in (0, 1) else [64, 64, 64]))
    live.add_calls(calls(0, [8], comm=pair))
    live.add_calls(calls(1, [8, 8], comm=pair))
    verdict = None
    for samples in rounds(8):
        both = [
            replace(s, communicators=(*s.communicators, communicator(s.process.rank, 2, comm_hash=pair)))
            if s.process.rank in (0, 1)
            else s
            for s in samples
        ]
        verdict = live.update(both)
    assert verdict is not None
    assert {culprit.rank for culprit in verdict.culprits} == {0}


def test_a_rank_that_may_wait_in_a_receive_is_not_accused_of_being_behind() -> None:
    """Rank 3 has not called the third AllReduce: it sits in a Recv that nobody has answered."""
    live = LiveDiagnosis()
    for rank in range(4):
        live.add_calls(calls(rank, [64, 64] if rank == 3 else [64, 64, 64]))
    receive = calls(3, [8], function=Function.RECV)[1:]
    receive["peer"] = 0
    live.add_calls(receive)
    assert not final(live).verdict_class.accuses
    answer = calls(0, [8], function=Function.SEND)[1:]
    answer["peer"] = 3
    live.add_calls(answer)
    assert [culprit.rank for culprit in final(live, count=20).culprits] == [3]


def test_a_rank_with_hidden_transports_waits_for_whom_its_call_waits_for() -> None:
    """Rank 1 has called an AllReduce of the NVLink pair (0, 1) that rank 0 has not; rank 2 waits for both over the network.

    Memory shows nothing of rank 1, so that it would be accused along with rank 0.
    """
    pair, first, second = 0xBB, 0xC0, 0xC1
    live = LiveDiagnosis()
    live.add_calls(calls(0, [8], comm=pair))
    live.add_calls(calls(1, [8, 8], comm=pair))
    nvlink = [communicator(r, 2, comm_hash=pair, transport=Transport.P2P) for r in (0, 1)]
    ranks = [
        Rank(0, 3, (nvlink[0], communicator(0, 2, comm_hash=first))),
        Rank(1, 3, (nvlink[1], communicator(0, 2, comm_hash=second))),
        Rank(
            2,
            3,
            (communicator(1, 2, comm_hash=first), communicator(1, 2, comm_hash=second)),
            tuple(recv(0, posted=8, received=0, delivered=0, consumed=0, comm_hash=comm) for comm in (first, second)),
        ),
    ]
    verdict = None
    for index in range(8):
        verdict = live.update([rank.looks(8)[index] for rank in ranks])
    assert verdict is not None and verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert [culprit.rank for culprit in verdict.culprits] == [0]
    assert verdict.victims == (1, 2)


def test_an_odd_call_is_not_told_before_the_floor() -> None:
    """Nothing is open in memory, and no call is missing: only patience keeps it from being told at once."""
    live = LiveDiagnosis()
    for rank in range(4):
        live.add_calls(calls(rank, [64, 32] if rank == 2 else [64, 64]))
    assert not final(live, count=4).verdict_class.accuses
    assert final(live).verdict_class is VerdictClass.INCONSISTENT


def messages(rank: int, function: Function, peer: int) -> NDArray[Any]:
    """One Send or Recv of a rank."""
    made = calls(rank, [8], function=function)[1:]
    made["peer"], made["time_ns"] = peer, 5000
    return made


def test_who_has_not_called_the_other_half_of_a_message_is_where_the_waits_end() -> None:
    """A pipeline of four over NVLink: 0 has sent to 1, which has it; 2 waits in a Recv from 1, and 3 in one from 2."""
    live = LiveDiagnosis()
    for rank in range(4):
        live.add_calls(calls(rank, [64]))
    halves = ((0, Function.SEND, 1), (1, Function.RECV, 0), (2, Function.RECV, 1), (3, Function.RECV, 2))
    for rank, function, peer in halves:
        live.add_calls(messages(rank, function, peer))
    verdict = final(live, count=20)
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert verdict.victims == (2, 3)


def behind_a_message(births: bool) -> Verdict:
    """Rank 2 waits over the network for rank 1, which has called a Recv from rank 0 over NVLink that rank 0 has not answered.

    ``births``: whether the making of the pair's communicator was recorded, so that counts of messages mean the same.
    """
    pair, net = 0xBB, 0xC1
    live = LiveDiagnosis()
    for rank in (0, 1):
        made = calls(rank, [8], comm=pair)
        live.add_calls(made if births else made[1:])
    receive = calls(1, [8], function=Function.RECV, comm=pair)[1:]
    receive["peer"], receive["time_ns"] = 0, 5000
    live.add_calls(receive)
    nvlink = [communicator(rank, 2, comm_hash=pair, transport=Transport.P2P) for rank in (0, 1)]
    ranks = [
        Rank(0, 3, (nvlink[0],)),
        Rank(1, 3, (nvlink[1], communicator(0, 2, comm_hash=net))),
        Rank(2, 3, (communicator(1, 2, comm_hash=net),), (waits_for(0, net),)),
    ]
    return last(live, ranks)


def waits_for(peer: int, comm: int = WORLD) -> ProxyOperation:
    """A receive of which nothing has come."""
    return recv(peer, posted=8, received=0, delivered=0, consumed=0, comm_hash=comm)


def last(live: LiveDiagnosis, ranks: list[Rank], count: int = 20) -> Verdict:
    verdict = None
    for index in range(count):
        verdict = live.update([rank.looks(count)[index] for rank in ranks])
    assert verdict is not None
    return verdict


def test_who_has_not_called_is_named_although_the_waits_end_unseen() -> None:
    """A ring of four; nobody looked at rank 3, from which rank 0 receives. Rank 2 has not called what 0 and 1 have."""
    open_there = {0: (waits_for(3),), 1: (waits_for(0),), 2: ()}
    ranks = [Rank(r, 4, (communicator(r, 4),), own) for r, own in open_there.items()]
    assert not last(LiveDiagnosis(), ranks).verdict_class.accuses
    live = LiveDiagnosis()
    for rank in range(3):
        live.add_calls(calls(rank, [64, 64] if rank == 2 else [64, 64, 64]))
    verdict = last(live, ranks)
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED and verdict.rules == ("not-called",)
    assert [culprit.rank for culprit in verdict.culprits] == [2]


def test_the_wait_of_an_idle_rank_for_a_message_is_followed() -> None:
    verdict = behind_a_message(births=True)
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert [culprit.rank for culprit in verdict.culprits] == [0]
    assert "message-owed" in verdict.rules


def test_an_idle_rank_that_may_wait_for_a_message_is_not_accused() -> None:
    verdict = behind_a_message(births=False)
    assert not verdict.verdict_class.accuses
    assert "message-possible" in verdict.rules
