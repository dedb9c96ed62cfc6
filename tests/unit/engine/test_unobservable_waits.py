"""Ranks with nothing open that are joined to others by NVLink: whom they wait for, and when nothing can be said of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from ncclwatch.collect.call_order import RECORD, CallOrder, PerProcess
from ncclwatch.engine.case import Known
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.events import Function
from ncclwatch.model.state import Communicator, Direction, OpPhase, PeerInfo, ProxyOperation, Transport
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.synthetic import WORLD, Rank, address_of, communicator, looks, recv, send

TENSOR, DATA, PIPE = 0xB0, 0xD0, 0xE0


def tensor(rank: int, called: int | None) -> Communicator:
    """A rank's place in a tensor group of two, joined by NVLink, with so many AllReduces counted."""
    own = communicator(rank, 2, comm_hash=TENSOR, transport=Transport.P2P)
    return replace(own, sequence_numbers={} if called is None else {"AllReduce": called})


def job(called: tuple[int | None, int | None], *, cut: bool) -> list[Rank]:
    """Ranks 0 and 1 are a tensor group. Rank 2 waits for rank 1, which has nothing open; with ``cut`` rank 0 waits for data that
    rank 3 has sent and that does not arrive.
    """
    data = [communicator(rank, 2, comm_hash=DATA) for rank in (0, 1)]
    pipe = [communicator(rank, 2, comm_hash=PIPE) for rank in (0, 1)]
    held = (recv(1, posted=8, received=4, delivered=4, consumed=4, comm_hash=DATA),)
    other = (send(0, sent=8, done=4, produced=8, comm_hash=DATA),)
    waits = (recv(0, posted=8, received=0, delivered=0, consumed=0, comm_hash=PIPE),)
    return [
        Rank(0, 4, (tensor(0, called[0]), data[0]), held if cut else ()),
        Rank(1, 4, (tensor(1, called[1]), pipe[0])),
        Rank(2, 4, (pipe[1],), waits),
        Rank(3, 4, (data[1],), other if cut else ()),
    ]


def said(called: tuple[int | None, int | None], *, cut: bool) -> Verdict:
    return diagnose(looks(job(called, cut=cut), 8))


def test_a_rank_that_has_called_what_its_peer_has_not_waits_for_the_peer() -> None:
    """Rank 0 stands idle elsewhere: it has called less, so it is named and not rank 1."""
    verdict = said((5, 6), cut=False)
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED and [c.rank for c in verdict.culprits] == [0]
    assert set(verdict.victims) == {1, 2}
    assert any("6 calls there, 5 by that one" in line for line in verdict.evidence)


@pytest.mark.parametrize("called", [(5, 6), (5, 5), (None, None)], ids=["behind", "level", "not counted"])
def test_a_rank_whose_peer_is_held_up_by_a_link_is_not_accused(called: tuple[int | None, int | None]) -> None:
    verdict = said(called, cut=True)
    assert verdict.verdict_class is VerdictClass.HARDWARE, verdict.summary
    assert verdict.link is not None and {c.rank for c in verdict.culprits} == {0, 3}


@pytest.mark.parametrize("called", [(5, 5), (6, 5), (None, None)])
def test_a_rank_whose_peer_does_not_wait_is_named(called: tuple[int | None, int | None]) -> None:
    verdict = said(called, cut=False)
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED and [c.rank for c in verdict.culprits] == [1]


def test_a_rank_that_is_behind_its_peer_is_named_although_the_peer_waits_too() -> None:
    """The cut link explains rank 0's wait, not that rank 1 has not called what rank 0 has."""
    verdict = said((6, 5), cut=True)
    assert 1 in {c.rank for c in verdict.culprits}


@pytest.mark.parametrize(("called", "held_up"), [((5, 6), True), ((6, 6), False)], ids=["less", "as much"])
def test_a_gpu_that_has_begun_nothing_may_wait_for_who_has_called_less_and_waits_for_another(
    called: tuple[int, int], held_up: bool
) -> None:
    """Rank 1's GPU has not begun what it has called across the network. Rank 0, which NVLink joins to it, waits for a link."""
    ranks = job(called, cut=True)
    arrived = recv(1, posted=8, received=8, delivered=8, consumed=0, comm_hash=PIPE)
    ranks[1].operations = (arrived, send(1, sent=0, done=0, produced=0, comm_hash=PIPE))
    verdict = diagnose(looks(ranks, 8))
    assert (1 not in {culprit.rank for culprit in verdict.culprits}) is held_up, verdict.summary
    assert (verdict.link is not None) is held_up


def two_nodes(called: tuple[int, int]) -> list[Rank]:
    """Two nodes of two ranks. Rank 0 waits for rank 2 across the network; ranks 1 and 3, beside them by NVLink, have called an
    operation across it too that neither GPU has begun. ``called``: AllReduces that ranks 2 and 3 have called on one of their
    communicators inside the node; on another they have called as many.
    """
    open_ = {"posted": 8, "received": 0, "delivered": 0, "consumed": 0}
    data = [communicator(rank, 2, comm_hash=DATA) for rank in (0, 1)]
    other = [communicator(rank, 2, comm_hash=PIPE) for rank in (0, 1)]
    inside = [replace(tensor(rank, count), hash=TENSOR + 1) for rank, count in zip((0, 1), called, strict=True)]
    level = [replace(tensor(rank, 9), hash=TENSOR + 2, address=TENSOR + 2) for rank in (0, 1)]
    unbegun = [(send(peer, sent=0, done=0, produced=0, comm_hash=PIPE), recv(peer, comm_hash=PIPE, **open_)) for peer in (1, 0)]
    begun = (send(1, sent=4, done=4, produced=4, comm_hash=DATA), recv(1, comm_hash=DATA, **open_))
    return [
        Rank(0, 4, (tensor(0, 6), data[0]), begun),
        Rank(1, 4, (tensor(1, 6), other[0]), unbegun[0]),
        Rank(2, 4, (level[0], inside[0], data[1])),
        Rank(3, 4, (level[1], inside[1], other[1]), unbegun[1]),
    ]


def test_an_operation_that_nobody_has_begun_is_no_cycle() -> None:
    """Ranks 1 and 3 wait for each other in it, and for others before it: rank 3 for rank 2, which has called less than it."""
    verdict = diagnose(looks(two_nodes((5, 6)), 8))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [2]


def test_an_operation_called_ahead_hides_no_gpu_that_stands_in_another() -> None:
    """Nothing tells whom ranks 1 and 3 wait for; rank 2's GPU has stopped amid what rank 0 waits for."""
    ranks = two_nodes((6, 6))
    arrived = {"posted": 8, "received": 8, "delivered": 8, "consumed": 4}
    stopped = (send(0, sent=4, done=4, produced=4, comm_hash=DATA), recv(0, comm_hash=DATA, **arrived))
    verdict = diagnose(looks([*ranks[:2], replace(ranks[2], operations=stopped), ranks[3]], 8))
    assert verdict.verdict_class is VerdictClass.HARDWARE, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [2]


def waiting_in_tree(peer: int, comm_hash: int, moved: int) -> ProxyOperation:
    return as_tree(recv(peer, posted=8, received=moved, delivered=moved, consumed=moved, comm_hash=comm_hash))


def unsent(peer: int, comm_hash: int) -> ProxyOperation:
    return as_tree(send(peer, sent=0, done=0, produced=0, comm_hash=comm_hash))


def as_tree(operation: ProxyOperation) -> ProxyOperation:
    return replace(operation, algorithm="Tree")


def trees(called: tuple[int, int, int, int], *, moved: int = 0) -> list[Rank]:
    """Two nodes of two ranks, joined by trees through ranks 0 and 2; NVLink joins the ranks of a node. Rank 0 has a tree of one
    communicator open and rank 2 one of another, each waits for the other's data, and has produced none. ``called``: AllReduces on
    rank 2's; ``moved``: steps that rank 2's GPU has taken of it.
    """

    def part(rank: int, comm_hash: int, count: int) -> Communicator:
        peers = [(rank ^ 1, Transport.P2P)] + [((rank + 2) % 4, Transport.NET)] * (rank % 2 == 0)
        links = tuple((0, peer, way, transport) for peer, transport in peers for way in (Direction.SEND, Direction.RECV))
        return replace(communicator(rank, 4, comm_hash=comm_hash), sequence_numbers={"AllReduce": count}, transports=links)

    held = [(part(rank, TENSOR, called[rank]), part(rank, TENSOR + 1, 9)) for rank in range(4)]
    open_ = {
        0: (waiting_in_tree(2, TENSOR + 1, 0), unsent(2, TENSOR)),
        2: (waiting_in_tree(0, TENSOR, moved), unsent(0, TENSOR + 1)),
    }
    return [Rank(rank, 4, held[rank], open_.get(rank, ())) for rank in range(4)]


def test_a_cycle_of_trees_that_nobody_may_have_begun_waits_for_who_has_called_less() -> None:
    """An inner rank of a tree receives before it sends: that nothing has moved does not show whether it has begun."""
    verdict = diagnose(looks(trees((6, 5, 6, 6)), 8))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [1]


def test_where_one_of_a_cycle_of_trees_has_begun_the_other_waits_for_who_has_called_less() -> None:
    verdict = diagnose(looks(trees((6, 5, 6, 6), moved=4), 8))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [1]


def test_a_cycle_of_trees_that_one_may_not_have_begun_accuses_nobody() -> None:
    """As many calls: that an order was broken explains it, and so does rank 0's GPU, or the one beside it, that has stopped."""
    verdict = diagnose(looks(trees((6, 6, 6, 6), moved=4), 8))
    assert verdict.verdict_class is VerdictClass.UNKNOWN, verdict.summary


def test_of_a_cycle_of_ranks_that_have_sent_all_of_theirs_who_has_called_less_is_named() -> None:
    """Two groups of two, and NVLink beside each rank. Rank 1 has left a ReduceScatter out, and waits for rank 0 in the AllGather
    that follows. Their sends are over and gone: so both are amid what they wait in, and have not called it ahead.
    """
    reduce, gather = {"comm_hash": DATA, "collective": "ReduceScatter"}, {"comm_hash": PIPE, "collective": "AllGather"}
    held = [
        (
            tensor(0, 9),
            replace(communicator(rank, 2, comm_hash=DATA), sequence_numbers={"ReduceScatter": 6 - rank}),
            replace(communicator(rank, 2, comm_hash=PIPE), sequence_numbers={"AllGather": 6}),
        )
        for rank in (0, 1)
    ]
    arrived = recv(1, nsteps=1, posted=1, received=1, delivered=1, consumed=0, **gather)
    waits = [
        recv(1 - rank, nsteps=1, posted=1, received=0, delivered=0, consumed=0, **way)
        for rank, way in enumerate((reduce, gather))
    ]
    ahead = (arrived, send(1, nsteps=1, sent=0, done=0, produced=0, **gather))
    ranks = [Rank(0, 2, held[0], (waits[0], *ahead)), Rank(1, 2, held[1], (waits[1],))]
    verdict = diagnose(looks(ranks, 8))
    assert (verdict.verdict_class, [one.rank for one in verdict.culprits]) == (VerdictClass.NOT_ENTERED, [1]), verdict.summary


@pytest.mark.parametrize("alone", [False, True], ids=["NVLink beside them", "each alone on its host"])
def test_a_cycle_of_trees_that_nobody_may_have_begun_is_an_order_where_nothing_is_hidden(alone: bool) -> None:
    """As many calls: a GPU beside one of them may have stopped as well, if there is one beside it."""
    ranks = trees((6, 6, 6, 6))
    if alone:
        for one in ranks:
            seen = [[link for link in own.transports if link[3] is Transport.NET] for own in one.communicators]
            one.communicators = tuple(
                replace(own, transports=tuple(links)) for own, links in zip(one.communicators, seen, strict=True)
            )
    verdict = diagnose(looks(ranks, 8))
    assert verdict.verdict_class is (VerdictClass.DEADLOCK if alone else VerdictClass.UNKNOWN), verdict.summary


def test_ranks_that_have_called_as_much_are_not_told_apart_by_it() -> None:
    verdict = diagnose(looks(two_nodes((6, 6)), 8))
    assert not {1, 3} & {culprit.rank for culprit in verdict.culprits}, verdict.summary


@pytest.mark.parametrize(("made", "named"), [(None, []), ((3,), []), ((), [2])], ids=["unread", "connected", "none"])
def test_a_rank_without_connections_for_messages_waits_for_none(made: tuple[int, ...] | None, named: list[int]) -> None:
    """The communicator of all ranks has its rings and was never used: only where rank 2 has connections for a Send or Recv with
    rank 3 on it, it may wait there.
    """
    ranks = two_nodes((5, 6))
    made_by_rank = [communicator(rank, 4, transport=Transport.P2P) for rank in range(4)]
    whole = [replace(own, sequence_numbers={"AllReduce": 0}, message_peers=made) for own in made_by_rank]
    verdict = diagnose(looks([replace(one, communicators=(*one.communicators, whole[one.rank])) for one in ranks], 8))
    assert [culprit.rank for culprit in verdict.culprits] == named, verdict.summary


def test_who_may_wait_for_a_message_is_not_accused_of_a_call_it_has_not_made_there() -> None:
    """As above, and rank 2's connection for messages is on the communicator on which it has called less itself: rank 3, which has
    called more, may still owe it one.
    """
    ranks = two_nodes((0, 1))
    for one in ranks[2:]:
        level, inside, own = one.communicators
        one.communicators = (level, replace(inside, message_peers=(1 - inside.rank,)), own)
    verdict = diagnose(looks(ranks, 8))
    assert not verdict.culprits, verdict.summary


def test_a_proxy_that_does_not_notice_what_its_gpu_takes_is_told_by_what_was_sent_on() -> None:
    """Rank 3 has sent on eight steps of others, so rank 2's GPU has taken four: its proxy counts none, and opens no buffers."""
    ranks = ring_through_nodes(2)
    operations = [
        recv(3, posted=20, received=12, delivered=12, consumed=12, nsteps=24),
        send(2, sent=20, done=20, produced=20, nsteps=24),
        recv(1, posted=8, received=4, delivered=4, consumed=0, nsteps=24),
        send(0, sent=12, done=12, produced=12, nsteps=24),
    ]
    verdict = diagnose(looks([replace(one, operations=(own,)) for one, own in zip(ranks, operations, strict=True)], 8))
    assert verdict.verdict_class is VerdictClass.HARDWARE and [culprit.rank for culprit in verdict.culprits] == [2]
    assert "proxy" in verdict.summary


@pytest.mark.parametrize("counted", [False, True], ids=["2.25", "2.26, whose numbers are of those with a proxy"])
def test_who_has_another_collective_open_under_the_same_number_called_something_else(counted: bool) -> None:
    """Before 2.26 NCCL numbers all calls of a communicator alike. What one rank calls there, and nobody, itself included, calls
    under any other number, is the odd one, though its peers hold no other end of it.
    """
    ranks = tree_over_nodes((6, 6, 6, 6))
    other = [as_tree(send(0, sent=0, done=0, produced=0, op_count=26, collective="Broadcast"))]
    later = [as_tree(send(0, sent=0, done=0, produced=0, op_count=28, phase=OpPhase.READY))]
    made = [
        replace(one, operations=(*one.operations, *(other + later if one.rank == 1 else [])))
        for one in ranks
    ]  # fmt: skip
    if not counted:
        made = [replace(one, communicators=tuple(replace(own, sequence_numbers={}) for own in one.communicators)) for one in made]
    verdict = diagnose(looks(made, 8))
    assert (verdict.verdict_class is VerdictClass.INCONSISTENT) is not counted, verdict.summary
    if not counted:
        assert [culprit.rank for culprit in verdict.culprits] == [1]


def ring_through_nodes(stopped: int) -> list[Rank]:
    """A ring of four on two nodes, joined by NVLink inside them: 0 → 1 and 2 → 3. Rank 2 has taken six steps of an AllReduce from
    the network when its GPU, or the one behind it, stops; the others go on as far as eight buffers a connection let them.
    """
    # Steps: taken by rank 0; sent and produced by rank 1; sent by rank 3.
    taken, sent, produced, out = (6, 14, 14, 6) if stopped == 3 else (14, 14, 22, 14)

    def own(rank: int) -> Communicator:
        kinds = (Transport.P2P, Transport.NET) if rank % 2 else (Transport.NET, Transport.P2P)
        links = ((0, (rank - 1) % 4, Direction.RECV, kinds[0]), (0, (rank + 1) % 4, Direction.SEND, kinds[1]))
        return replace(communicator(rank, 4), transports=links)

    operations = [
        recv(3, posted=taken + 8, received=taken, delivered=taken, consumed=taken, nsteps=24),
        send(2, sent=sent, done=sent, produced=produced, nsteps=24),
        recv(1, posted=14, received=14, delivered=14, consumed=6, nsteps=24),
        send(0, sent=out, done=out, produced=out, nsteps=24),
    ]
    return [Rank(rank, 4, (own(rank),), (operations[rank],)) for rank in range(4)]


@pytest.mark.parametrize("ahead", [False, True], ids=["alone", "another called ahead"])
@pytest.mark.parametrize("stopped", [2, 3])
def test_a_gpu_that_has_stopped_beside_another_by_nvlink_is_told_by_what_the_ring_moved(stopped: int, ahead: bool) -> None:
    """Whoever is in the middle of one ring has not begun the next, also where nothing of its send shows."""
    ranks = ring_through_nodes(stopped)
    if ahead:
        after = {"posted": 8, "received": 0, "delivered": 0, "consumed": 0, "comm_hash": DATA, "nsteps": 24}
        unbegun = {"sent": 0, "done": 0, "produced": 0, "comm_hash": DATA, "nsteps": 24}
        for one, more in zip(ranks, (recv(3, **after), send(2, **unbegun), recv(1, **after), send(0, **unbegun)), strict=True):
            one.communicators += (replace(one.communicators[0], hash=DATA, address=DATA),)
            one.operations += (more,)
    verdict = diagnose(looks(ranks, 8))
    assert verdict.verdict_class is VerdictClass.HARDWARE, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [stopped]
    assert set(verdict.victims) == {0, 1, 2, 3} - {stopped}


def test_a_proxy_that_does_not_know_what_was_taken_is_told_by_who_is_through() -> None:
    """Rank 3 has sent all of the ring's operation on, and shows the next one alone: rank 2 has taken all of it."""
    ranks = ring_through_nodes(3)
    ranks[2].operations = (recv(1, posted=20, received=18, delivered=16, consumed=12, nsteps=24),)
    ranks[3].operations = (send(0, sent=0, done=0, produced=0, nsteps=24, op_count=28),)
    ranks[0].operations = (recv(3, posted=8, received=0, delivered=0, consumed=0, nsteps=24, op_count=28),)
    ranks[1].operations = (send(2, sent=4, done=4, produced=4, nsteps=24, op_count=28),)
    verdict = diagnose(looks(ranks, 8))
    assert verdict.verdict_class is VerdictClass.HARDWARE, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [2]
    assert "proxy" in verdict.culprits[0].reason


@pytest.mark.parametrize(("odd", "named"), [({"ReduceScatter": 40, "AllReduce": 1}, [1]), ({"ReduceScatter": 41}, [])])
def test_who_called_something_else_is_named_where_nvlink_hides_what_is_open(odd: dict[str, int], named: list[int]) -> None:
    """Nothing is open that the host can see. To be ahead in one collective and behind in another needs no wait to be seen."""
    counts = [odd if rank == 1 else {"ReduceScatter": 41} for rank in range(4)]
    own = [replace(communicator(rank, 4, transport=Transport.P2P), sequence_numbers=counts[rank]) for rank in range(4)]
    verdict = diagnose(looks([Rank(rank, 4, (own[rank],)) for rank in range(4)], 8))
    assert verdict.verdict_class is (VerdictClass.INCONSISTENT if named else VerdictClass.UNKNOWN), verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == named


def tree_over_nodes(
    called: Sequence[int] = (6, 6, 6, 6), hosts: Sequence[int] = (), a_node: int = 2
) -> list[Rank]:  # fmt: skip
    """One tree over two nodes, rank 0 its root: the first rank of the other node has sent nothing up. In each node ranks are one
    below the other, joined by NVLink.
    """
    world, hosts = 2 * a_node, hosts or (1,) * a_node + (2,) * a_node

    def own(rank: int) -> Communicator:
        peers = tuple(PeerInfo(other, host_hash=hosts[other], pid_hash=other) for other in range(world))
        first = rank % a_node == 0
        above, below = [] if first else [rank - 1], [] if (rank + 1) % a_node == 0 else [rank + 1]
        beside = [(other, Transport.P2P) for other in above + below] + [((rank + a_node) % world, Transport.NET)] * first
        links = tuple((0, peer, way, transport) for peer, transport in beside for way in (Direction.SEND, Direction.RECV))
        made = communicator(rank, world)
        rings = (replace(made.rings[0], parent=-1 if rank == 0 else 0 if first else rank - 1),)
        counted = {"AllReduce": called[rank] if rank < len(called) else called[-1]}
        return replace(made, peers=peers, rings=rings, transports=links, sequence_numbers=counted)

    open_ = {one: (waiting_in_tree(other, WORLD, 0), unsent(other, WORLD)) for one, other in ((0, a_node), (a_node, 0))}
    return [Rank(rank, world, (own(rank),), open_.get(rank, ())) for rank in range(world)]


@pytest.mark.parametrize("a_node", [2, 8])
def test_a_tree_that_gets_nothing_from_a_node_names_the_gpus_of_that_node(a_node: int) -> None:
    """A child sends up before it receives: nothing but its own GPU, or one below it, can hold it up."""
    verdict = diagnose(looks(tree_over_nodes(a_node=a_node), 8))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == list(range(a_node, 2 * a_node))
    assert verdict.confidence == 0.5 and set(verdict.victims) == set(range(a_node))
    assert verdict.summary.startswith("one of rank") and "NVLink hides" in verdict.summary


@pytest.mark.parametrize(
    ("called", "hosts", "named"),
    [((6, 6, 6, 5), (1, 1, 2, 2), [3]), ((6, 6, 6, 6), (1, 1, 2, 3), [])],
    ids=["one of them has called less", "they are on two hosts"],
)
def test_gpus_of_a_node_are_not_named_together_where_others_may_be_why(
    called: tuple[int, int, int, int], hosts: tuple[int, int, int, int], named: list[int]
) -> None:
    verdict = diagnose(looks(tree_over_nodes(called, hosts), 8))
    assert [culprit.rank for culprit in verdict.culprits] == named, verdict.summary


def two_trees(first: Mapping[int, int]) -> tuple[list[Rank], Known]:
    """A node does not take what the other has sent up a tree; both have called ahead on a second one, in which nothing has moved.
    ``first``: the communicator that ranks called first, by rank, as their recorded calls say.
    """
    ranks, orders = tree_over_nodes(), PerProcess[CallOrder]()
    for one in ranks:
        (own,) = one.communicators
        one.communicators = (own, replace(own, hash=DATA, address=address_of(DATA)))
        others = [other for other in (0, 2) if one.rank in (0, 2) and other != one.rank]
        made = [made for other in others for made in (waiting_in_tree(other, DATA, 0), unsent(other, DATA))]
        ahead = [replace(operation, address=operation.address + 0x1000) for operation in made]
        if one.rank == 0:
            arrived = recv(2, posted=8, received=8, delivered=8, consumed=0)
            one.operations = (as_tree(arrived), unsent(2, WORLD), *ahead)
        elif one.rank == 2:
            one.operations = (waiting_in_tree(0, WORLD, 0), *ahead)
        called = np.zeros(2, RECORD)
        called["time_ns"], called["function"] = (1, 2), Function.ALL_REDUCE
        called["comm"] = sorted((own.address, address_of(DATA)), key=lambda comm: comm != address_of(first.get(one.rank, WORLD)))
        sample = one.looks(1)[0]
        orders[sample.process.host, sample.process.pid] = order = CallOrder()
        order.add(called)
    return ranks, Known(orders=orders)


def test_who_called_ahead_waits_in_what_came_first_where_all_called_in_one_order() -> None:
    ranks, known = two_trees({})
    verdict = diagnose(looks(ranks, 8), known)
    assert [culprit.rank for culprit in verdict.culprits] == [0, 1], verdict.summary
    assert verdict.summary.startswith("one of rank 0")


def test_who_waits_in_a_tree_of_which_leaves_show_nothing_is_not_alone_in_it() -> None:
    """Rank 0 has called another operation in its place, and waits for rank 2 in a second tree. NVLink alone joins ranks 1 and 3
    to the trees: no proxy of theirs works. A release that counts launches of any kind.
    """
    ranks, _ = two_trees({})
    ranks[0].operations = ranks[0].operations[2:]
    for one in ranks:
        one.communicators = tuple(replace(own, sequence_numbers={}, op_count=14) for own in one.communicators)
    seen = [[replace(look, process=replace(look.process, version=(2, 25, 1))) for look in series] for series in looks(ranks, 8)]
    verdict = diagnose(seen)
    assert verdict.verdict_class is VerdictClass.INCONSISTENT, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [0]


def test_what_a_peer_has_passed_over_was_called_ahead() -> None:
    """No calls were recorded. Rank 2 has the second tree open, too, and is amid the first: ranks run one program."""
    ranks, _ = two_trees({})
    verdict = diagnose(looks(ranks, 8))
    assert [culprit.rank for culprit in verdict.culprits] == [0, 1], verdict.summary


def test_calls_in_two_orders_are_no_sign_of_a_node() -> None:
    ranks, known = two_trees({0: DATA, 1: DATA})
    verdict = diagnose(looks(ranks, 8), known)
    assert "NVLink hides" not in verdict.summary
    assert not {1, 3} & {culprit.rank for culprit in verdict.culprits}


def test_a_rank_behind_nvlink_that_left_out_a_call_and_waits_elsewhere_is_named() -> None:
    """Rank 2 is not in the ring of the others, and has called ahead what they have called as well. Rank 3, which NVLink joins to
    it, has sent its own part and nothing more.
    """
    after = {"posted": 8, "received": 0, "delivered": 0, "consumed": 0, "comm_hash": DATA, "nsteps": 24}
    ahead = {"sent": 0, "done": 0, "produced": 0, "comm_hash": DATA, "nsteps": 24}
    operations = [
        (recv(3, posted=12, received=4, delivered=4, consumed=4, nsteps=24), recv(3, **after)),
        (send(2, sent=12, done=12, produced=12, nsteps=24), send(2, **ahead)),
        (recv(1, **after),),
        (send(0, sent=4, done=4, produced=4, nsteps=24), send(0, **ahead)),
    ]
    ranks = ring_through_nodes(2)
    for one, own in zip(ranks, operations, strict=True):
        (ring,) = one.communicators
        counted = replace(ring, sequence_numbers={"AllReduce": 5 if one.rank == 2 else 6})
        other = replace(ring, hash=DATA, address=DATA, sequence_numbers={"AllReduce": 6})
        one.communicators, one.operations = (counted, other), own
    verdict = diagnose(looks(ranks, 8))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [2]


@pytest.mark.parametrize(
    ("called", "taken", "named"),
    [(5, 2, [3]), (6, 2, []), (5, 0, [3])],
    ids=["called less", "called as much", "nothing shows who is in it"],
)
def test_who_called_less_is_named_though_it_may_wait_inside_its_node_for_one_that_waits_for_it(
    called: int, taken: int, named: list[int]
) -> None:
    """Rank 3 has left a ReduceScatter out in which the others wait for it. It is in the AllGather that follows: there it may wait
    for rank 2, which NVLink joins to it, and which has taken some of the ReduceScatter already.
    """

    def shown(peer: int, arrived: int, consumed: int, comm_hash: int, collective: str) -> ProxyOperation:
        steps = {"posted": 3, "received": arrived, "delivered": arrived, "consumed": consumed}
        return replace(recv(peer, comm_hash=comm_hash, collective=collective, nsteps=3, **steps), protocol="LL")

    def sent(peer: int, steps: int, comm_hash: int, collective: str) -> ProxyOperation:
        made = send(peer, sent=steps, done=steps, produced=steps, nsteps=3, comm_hash=comm_hash, collective=collective)
        return replace(made, protocol="LL")

    reduce, gather = (WORLD, "ReduceScatter"), (DATA, "AllGather")
    operations = [
        (shown(3, 0, 0, *reduce), shown(3, 1, 0, *gather)),
        (sent(2, taken, *reduce), sent(2, 0, *gather)),
        (shown(1, taken, taken, *reduce), shown(1, 0, 0, *gather)),
        (sent(0, 1, *gather),),
    ]
    ranks = ring_through_nodes(2)
    for one, own in zip(ranks, operations, strict=True):
        (ring,) = one.communicators
        counted = replace(ring, sequence_numbers={"ReduceScatter": called if one.rank == 3 else 6})
        other = replace(ring, hash=DATA, address=address_of(DATA), sequence_numbers={"AllGather": 6})
        one.communicators, one.operations = (counted, other), own
    verdict = diagnose(looks(ranks, 8))
    assert [culprit.rank for culprit in verdict.culprits] == named, verdict.summary
    assert verdict.verdict_class is (VerdictClass.NOT_ENTERED if named else VerdictClass.UNKNOWN), verdict.summary
