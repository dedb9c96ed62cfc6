"""Connections inside a node as facts: who leaves data unread, and who waits for that."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.engine.case import Case
from ncclwatch.engine.evidence.base import AbsentNode, Fact, FactKind, RankNode
from ncclwatch.engine.evidence.ends import SharedMemory
from ncclwatch.model.rings import CONNECTION_SLOTS
from ncclwatch.model.state import Direction, Transport
from unit.engine.evidence.said import case_of
from unit.synthetic import WORLD, Rank, communicator, looks, shared


def joined(unread: int, observed: int = 2) -> Case:
    """Rank 0 has written so many steps more than rank 1 has read."""
    head, tail = 40, 40 + unread
    own = [communicator(rank, 2, transport=Transport.SHM) for rank in range(2)]
    ends = (shared(Direction.SEND, 1, head, tail), shared(Direction.RECV, 0, head, tail))
    ranks = [Rank(rank, 2, (replace(own[rank], host_connections=(ends[rank],)),)) for rank in range(2)]
    return case_of(looks(ranks)[:observed])


def said(case: Case) -> list[Fact]:
    return list(SharedMemory().facts(case))


def test_a_full_connection_is_a_wait_and_unread_data_a_stall() -> None:
    full, unread = said(joined(CONNECTION_SLOTS))
    assert (full.kind, full.subject, full.object) == (FactKind.WAITS_FOR, RankNode(0), RankNode(1))
    assert "8 steps lie unread" in full.text and "shared memory" in full.text
    assert (unread.kind, unread.subject) == (FactKind.STANDS, RankNode(1))


def test_who_has_room_left_waits_for_nobody_and_what_is_read_says_nothing() -> None:
    assert [fact.kind for fact in said(joined(1))] == [FactKind.STANDS]
    assert said(joined(0)) == []


def test_a_reader_that_was_not_sampled_is_waited_for_as_such() -> None:
    (wait,) = said(joined(CONNECTION_SLOTS, observed=1))
    assert wait.object == AbsentNode(WORLD, 1)


def test_connections_that_cannot_be_read_are_told() -> None:
    coverage = SharedMemory().coverage(joined(1))
    assert [line.partition(":")[0] for line in coverage] == ["shared-memory connections"]
