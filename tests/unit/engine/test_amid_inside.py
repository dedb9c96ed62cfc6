"""What steps in shared memory say of a rank where waits end: it is amid another operation there, or may wait for a message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.state import Communicator, Direction, HostConnection, Transport
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.synthetic import Rank, communicator, looks, recv, send

TENSOR, PIPELINE, DATA = 0x100, 0x200, 0x300


def ranks(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


def pair(rank: int, comm_hash: int, calls: int, received: tuple[int, int], sent: tuple[int, int]) -> Communicator:
    """A ring of two in shared memory; head and tail of both connections."""
    own = communicator(rank, 2, comm_hash=comm_hash, transport=Transport.SHM)
    ends = [HostConnection(0, 1 - rank, way, 0, *steps) for way, steps in ((Direction.RECV, received), (Direction.SEND, sent))]
    return replace(own, host_connections=tuple(ends), sequence_numbers={"AllReduce": calls})


def ahead(comm_hash: int, calls: int) -> Communicator:
    """Of who has written its part of the next operation, and waits."""
    return pair(1, comm_hash, calls, (520, 520), (520, 524))


def behind(comm_hash: int, calls: int) -> Communicator:
    """Of who has not read it."""
    return pair(0, comm_hash, calls, (520, 524), (520, 520))


def stages(rank: int, comm_hash: int, unread: int = 0) -> Communicator:
    """Both directions between two stages, each with messages that have all arrived."""
    own = communicator(rank, 2, comm_hash=comm_hash, transport=Transport.SHM)
    ends = [
        HostConnection(0, 1 - rank, Direction.RECV, 1, 65, 65 + unread),
        HostConnection(0, 1 - rank, Direction.SEND, 1, 65, 65),
    ]
    return replace(own, host_connections=tuple(ends))


def pipeline(called: tuple[int, int, int, int], unread: int = 0) -> Verdict:
    """Two stages of two ranks on one host: ranks 1 and 3 wait for 0 and 2, which have begun nothing and exchange messages."""
    made = [
        Rank(0, 4, (behind(TENSOR, called[0]), stages(0, PIPELINE)), host="node"),
        Rank(1, 4, (ahead(TENSOR, called[1]), stages(0, PIPELINE + 1)), host="node"),
        Rank(2, 4, (behind(TENSOR + 1, called[2]), stages(1, PIPELINE, unread)), host="node"),
        Rank(3, 4, (ahead(TENSOR + 1, called[3]), stages(1, PIPELINE + 1)), host="node"),
    ]
    return diagnose(looks(made, 8))


def test_who_has_called_as_often_may_wait_for_a_message_of_who_has_called_less() -> None:
    verdict = pipeline((13, 14, 14, 14))
    assert (verdict.verdict_class, ranks(verdict)) == (VerdictClass.NOT_ENTERED, [0])
    assert "message-possible" in verdict.rules


@pytest.mark.parametrize("called", [(14, 14, 14, 14), (13, 14, 13, 14)], ids=["nobody has called less", "both have"])
def test_else_both_hold_the_job_up(called: tuple[int, int, int, int]) -> None:
    assert ranks(pipeline(called)) == [0, 2]


def test_whose_message_has_arrived_does_not_wait_for_it() -> None:
    assert ranks(pipeline((13, 14, 14, 14), unread=2)) == [2]


@pytest.mark.parametrize(
    ("read", "verdict_class"), [(518, VerdictClass.HARDWARE), (520, VerdictClass.NOT_ENTERED)], ids=["amid", "between two"]
)
def test_a_gpu_that_stops_amid_another_operation_is_not_one_that_has_not_begun(read: int, verdict_class: VerdictClass) -> None:
    """Rank 0 has written its part of an AllReduce in shared memory and read nothing of it, or neither; rank 2 waits for it."""

    def data(rank: int) -> Communicator:
        return communicator(rank, 2, comm_hash=DATA)

    opened = {"comm_hash": DATA, "op_count": 12, "base": 0, "nsteps": 8}
    made = [
        Rank(
            0, 3, (pair(0, TENSOR, 14, (read, 524), (520, 520)), data(0)),
            (send(1, sent=0, done=0, produced=0, **opened), recv(1, posted=8, received=0, delivered=0, consumed=0, **opened)),
        ),
        Rank(1, 3, (pair(1, TENSOR, 14, (520, 520), (read, 524)),), host="node0"),
        Rank(2, 3, (data(1),), (recv(0, posted=8, received=0, delivered=0, consumed=0, **opened),)),
    ]  # fmt: skip
    verdict = diagnose(looks(made, 8))
    assert (verdict.verdict_class, ranks(verdict)) == (verdict_class, [0]), verdict.summary
