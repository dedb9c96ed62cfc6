"""What a completed send over InfiniBand proves: the data is there, and the receiver's proxy does not take it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.job import assemble
from ncclwatch.model.joined import was_before
from ncclwatch.model.state import Direction, NetStep, ProcessSample, ProxyOperation
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.synthetic import SECOND, Rank, communicator, looks, recv, send

STEPS = 8


def over(net_name: str, *operations: ProxyOperation) -> tuple[ProxyOperation, ...]:
    """Operations over a network of NCCL."""
    return tuple(replace(one, net_name=net_name) for one in operations)


def pair(net_name: str) -> list[Rank]:
    """As read from a real job over InfiniBand while rank 1's proxy slept: rank 0's first half is acknowledged and not received,
    rank 1's is produced and not sent.
    """
    nothing = {"received": 0, "delivered": 0, "consumed": 0, "nsteps": STEPS}
    return [
        Rank(0, 2, (communicator(0, 2),), over(
            net_name, recv(1, posted=8, **nothing), send(1, sent=4, done=4, produced=4, nsteps=STEPS),
        )),
        Rank(1, 2, (communicator(1, 2),), over(
            net_name, recv(0, posted=8, **nothing), send(0, sent=0, done=0, produced=4, nsteps=STEPS),
        )),
    ]  # fmt: skip


def named(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


@pytest.mark.parametrize("net_name", ["IB", "IBext_v8"])
def test_data_that_the_adapter_has_confirmed_and_nobody_takes_names_the_receivers_proxy(net_name: str) -> None:
    verdict = diagnose(looks(pair(net_name)))
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert named(verdict) == [1]
    assert verdict.link is None
    assert "proxy" in verdict.summary
    assert any("received 0, delivered 0, consumed 0 of 8 steps; sender" in line for line in verdict.evidence)


def test_an_unconfirmed_send_is_the_links() -> None:
    ranks = pair("IB")
    receive, sending = ranks[0].operations
    ranks[0] = replace(ranks[0], operations=(receive, replace(sending, subs=(replace(sending.subs[0], done=0),))))
    verdict = diagnose(looks(ranks))
    assert verdict.link is not None
    assert named(verdict) != [1]


def test_a_finished_send_proves_it_as_well() -> None:
    """Rank 0 has ended its transfer, and its connection has come past it; the last steps have not been received."""
    passed = replace(communicator(0, 3), net_steps=(NetStep(0, 1, Direction.SEND, 0, 960 + 96),))
    waits = {"delivered": 90, "consumed": 90}
    ranks = [
        Rank(0, 3, (passed,), over("IB", recv(2, posted=96, received=90, **waits))),
        Rank(1, 3, (communicator(1, 3),), over(
            "IB", recv(0, posted=96, received=90, **waits), send(2, sent=92, done=92, produced=92),
        )),
        Rank(2, 3, (communicator(2, 3),), over(
            "IB", recv(1, posted=96, received=92, delivered=92, consumed=92), send(0, sent=90, done=90, produced=90),
        )),
    ]  # fmt: skip
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [1]
    assert any("its other end has finished" in line for line in verdict.evidence)
    for rank in ranks:
        rank.operations = over("Socket", *rank.operations)
    assert diagnose(looks(ranks)).link is not None


def read_at(samples: list[ProcessSample], *times: float) -> list[ProcessSample]:
    """The samples as read at these seconds."""
    return [replace(one, wall_ns=int(at * SECOND), time_ns=int(at * SECOND)) for one, at in zip(samples, times, strict=True)]


@pytest.mark.parametrize(
    ("host", "begun", "done_before", "proven"),
    [
        ("node", 101.9, 2, True),  # read before the receiver
        ("node", 102.1, 2, False),  # read after it, and had come less far before
        ("node", 102.1, 4, True),  # read after it, and had stood there before
        (None, 101.95, 2, False),  # of another host, whose clock may go wrong by more
        (None, 101.95, 4, True),
    ],
)
def test_the_sender_had_to_be_there_before_the_receiver_was_read(
    host: str | None, begun: float, done_before: int, proven: bool
) -> None:
    sender, receiver = pair("IB")
    sender.host = receiver.host = host
    first, second = read_at(sender.looks(2), begun - 1, begun)
    receive, sending = first.operations
    first = replace(first, operations=(receive, replace(sending, subs=(replace(sending.subs[0], done=done_before),))))
    (job,) = assemble([[first, second], read_at(receiver.looks(2), 101.0, 102.0)])
    (group,) = job.groups.values()
    assert was_before(group, job.members[0], job.members[1]) is proven


def not_completed(net_name: str, *, also: bool = False) -> list[Rank]:
    """As read from a real job over InfiniBand while rank 1's proxy stood still: all it sent has been received, and it does not
    know; then each waits for the other's GPU. ``also``: so it is with rank 0's.
    """
    got = {"posted": 8, "received": 4, "delivered": 4, "consumed": 4, "nsteps": STEPS}
    sent = {"sent": 4, "produced": 4, "nsteps": STEPS}
    return [
        Rank(0, 2, (communicator(0, 2),), over(net_name, recv(1, **got), send(1, done=0 if also else 4, **sent))),
        Rank(1, 2, (communicator(1, 2),), over(net_name, recv(0, **got), send(0, done=0, **sent))),
    ]


def test_who_does_not_learn_that_what_it_sent_was_received_has_a_proxy_that_stands_still() -> None:
    verdict = diagnose(looks(not_completed("IB")))
    assert (verdict.verdict_class, named(verdict), verdict.link) == (VerdictClass.HARDWARE, [1], None)
    assert "proxy" in verdict.summary
    (line,) = [line for line in verdict.evidence if "does not take the completions" in line]
    assert "sent 4, completed 0 of 8 steps; receiver posted 8, received 4" in line


@pytest.mark.parametrize("ranks", [not_completed("IB", also=True), not_completed("Socket")])
def test_a_cycle_stays_one_where_both_wait_alike_and_over_sockets(ranks: list[Rank]) -> None:
    """Acknowledgements that are lost both ways are the network's; a socket acknowledges nothing to NCCL."""
    assert diagnose(looks(ranks)).verdict_class is VerdictClass.UNKNOWN
