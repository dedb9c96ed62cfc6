"""What lies between two ranks of a node, by what the ring's first has taken from the network and its last has sent into it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from ncclwatch.model.job import assemble
from ncclwatch.model.rings import CONNECTION_SLOTS, RingSteps, rings_inside, steps_unlike
from ncclwatch.model.state import Direction, ProxyOperation, Transport
from unit.synthetic import Rank, communicator, looks, send, shared

Shape = tuple[int, int, int, str]
"""Ranks, steps of a slice, rounds, collective."""


@dataclass
class _Rank:
    """A rank of a ring as ``runRing`` moves it (SIMULATED): what each slice takes and writes, and where it stands."""

    slices: list[tuple[int, int]]
    taken: int = 0
    written: int = 0
    made: int = 0

    @property
    def has_ended(self) -> bool:
        return self.made == len(self.slices)

    def may(self, unread: int, room: int) -> bool:
        return not self.has_ended and self.slices[self.made][0] <= unread and self.slices[self.made][1] <= room

    def step(self) -> None:
        takes, writes = self.slices[self.made]
        self.taken, self.written, self.made = self.taken + takes, self.written + writes, self.made + 1


def slices_of(shape: Shape) -> list[tuple[int, int]]:
    """Its own part first; then what it takes it sends on, but for the last part."""
    nranks, size, nrounds, collective = shape
    of_part, parts = (4 // size if size > 1 else 1), (nranks - 1) * (2 if collective == "AllReduce" else 1)
    return ([(0, size)] * of_part + [(size, size)] * of_part * (parts - 1) + [(size, 0)] * of_part) * nrounds


def run(shape: Shape, stalled: int | None, seed: int) -> list[_Rank]:
    """A ring that moves in a random order, until nothing goes on or, where nobody is to stall, to a random moment."""
    nranks, chance = shape[0], random.Random(seed)
    ranks = [_Rank(slices_of(shape)) for _ in range(nranks)]
    stops_after, moves = chance.randrange(len(ranks[0].slices)), chance.randrange(nranks * len(ranks[0].slices))
    while stalled is not None or sum(one.made for one in ranks) < moves:
        able = [
            at for at, one in enumerate(ranks)
            if one.may(ranks[at - 1].written - one.taken, CONNECTION_SLOTS - (one.written - ranks[(at + 1) % nranks].taken))
            and not (at == stalled and one.made >= stops_after)
        ]  # fmt: skip
        if not able:
            break
        ranks[chance.choice(able)].step()
    return ranks


SHAPES = [
    (4, 2, 1, "ReduceScatter"),
    (4, 2, 3, "AllGather"),
    (6, 2, 2, "AllReduce"),
    (8, 1, 2, "AllReduce"),
    (2, 2, 2, "AllReduce"),
]


def steps_of(nranks: int, size: int, nrounds: int, collective: str) -> RingSteps:
    nsteps = (nranks - 1) * (4 if size > 1 else 1) * (2 if collective == "AllReduce" else 1) * nrounds
    operation = replace(send(1, sent=0, done=0, produced=0, collective=collective), slice_steps=size)
    found = RingSteps.of(operation, nranks, nsteps)
    assert found is not None
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_at_any_moment_what_lies_between_two_ranks_is_within_the_bounds(shape: Shape) -> None:
    steps, told = steps_of(*shape), 0
    for seed in range(60):
        ranks = run(shape, stalled=None, seed=seed)
        first, last = ranks[0], ranks[1]
        # The last of the node has sent into the network what it has written.
        least, most = steps.between(first.taken, last.written)
        assert least <= first.written - last.taken <= most, seed
        told += least == most
    assert told > 10, "and they are bounds that tell something"


@pytest.mark.parametrize("shape", SHAPES)
def test_who_has_stopped_is_told_from_who_waits_for_it(shape: Shape) -> None:
    """Of two ranks of a node: where the last has stopped the first has no room for a slice; where the first has, it has room."""
    steps, size = steps_of(*shape), shape[1]
    for seed in range(40):
        for stalled in (0, 1):
            ranks = run(shape, stalled=stalled, seed=seed)
            first, last = ranks[0], ranks[1]
            if first.taken >= ranks[-1].written or first.has_ended or last.has_ended:
                continue  # The first lacks what comes from the network, or one has ended.
            least, most = steps.between(first.taken, last.written)
            if stalled == 1:
                assert most + size > CONNECTION_SLOTS, (seed, least, most)
            else:
                assert least + size <= CONNECTION_SLOTS, (seed, least, most)


def test_operations_that_move_otherwise_are_left_alone() -> None:
    operation = replace(send(1, sent=0, done=0, produced=0), slice_steps=2)
    assert RingSteps.of(operation, 4, 23) is None
    assert RingSteps.of(operation, 1, 24) is None


def amid(*open_: ProxyOperation, called: int = 13, names: tuple[str, ...] = ("ReduceScatter",)) -> set[int]:
    """Who is amid an operation in a ring of two nodes of two, where rank 3 has four steps to read of its neighbour."""
    ranks = []
    for rank in range(4):
        own = communicator(rank, 4)
        inside = {0: [shared(Direction.SEND, 1, 156, 156)], 1: [shared(Direction.RECV, 0, 156, 156)],
                  2: [shared(Direction.SEND, 3, 152, 156)], 3: [shared(Direction.RECV, 2, 152, 156)]}[rank]  # fmt: skip
        transports = [(*link[:3], Transport.SHM if link[1] // 2 == rank // 2 else Transport.NET) for link in own.transports]
        counts = dict.fromkeys(names, called if rank == 3 else 13)
        own = replace(own, host_connections=tuple(inside), transports=tuple(transports), sequence_numbers=counts)
        ranks.append(Rank(rank, 4, (own,), open_ if rank == 3 else ()))
    (job,) = assemble(looks(ranks))
    (group,) = job.groups.values()
    return {rank for ring in rings_inside(group).values() for rank in ring.amid}


def test_who_has_sent_all_into_the_network_and_has_data_unread_is_amid_an_operation() -> None:
    assert amid() == {3}
    assert amid(send(0, sent=0, done=0, produced=0)) == set(), "that is what it has not begun"
    assert amid(send(0, sent=0, done=0, produced=0, channel=1)) == {3}, "of another channel"
    assert amid(called=12) == set(), "its host has not called it"
    assert amid(names=("ReduceScatter", "Broadcast")) == set(), "the last rank of a Broadcast sends nothing"
    assert amid(names=("AllReduce",)) == set(), "it may have been a tree"
    assert amid(names=()) == set(), "what was called is not known"


@pytest.mark.parametrize(
    ("written", "through", "ended", "odd"),
    [
        ({0: 1600, 1: 1604}, set(), False, {1: True}),
        ({0: 1596, 1: 1600}, {0}, False, {0: False}),
        ({0: 1596, 1: 1600}, {1}, False, {}),
        ({0: 1592, 1: 1600}, {0}, False, {}),
        ({0: 1592, 1: 1600}, {0}, True, {0: False}),
        ({0: 1600, 1: 1600}, {0}, True, {}),
        ({0: 1540, 1: 1544}, {0}, True, {0: False, 1: False}),
        ({0: 50_000, 1: 50_004}, {0}, True, {0: False, 1: False}),
    ],
    ids=["more", "less", "is in it", "not begun", "ended", "alike", "of several sizes", "too many steps to tell"],
)  # fmt: skip
def test_who_has_written_other_than_two_hundred_calls_amount_to(
    written: dict[int, int], through: set[int], ended: bool, odd: dict[int, bool]
) -> None:
    assert steps_unlike(written, 200, 2, through, ended=ended) == odd
    assert steps_unlike(written, 0, 2, through, ended=ended) == {0: False, 1: False}, "how often was not told"
    assert steps_unlike(written, 200, 1, through, ended=ended) == {0: False, 1: False}, "no communicator has one rank and two"
