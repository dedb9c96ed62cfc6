"""Who works behind NVLink, by samples of a tree over two nodes: only what passes between nodes is seen."""

from __future__ import annotations

import pytest

from ncclwatch.engine.slow.profile import add_up
from ncclwatch.engine.slow.snapshot import Activity, Look, Part, take_look
from ncclwatch.model.job import assemble
from unit.engine.test_unobservable_waits import as_tree, tree_over_nodes
from unit.synthetic import Rank, recv, send


def look_at(ranks: list[Rank]) -> Look:
    (job,) = assemble([rank.looks(1) for rank in ranks])
    assert [member.rank for member in job.members] == list(range(len(ranks)))
    return take_look(job)


def held_up_by(look: Look) -> dict[int, float]:
    """Shares of all ranks' time, by rank of who is waited for."""
    return {at: share for at, share in enumerate(add_up([look], list(look.activities)).hold[Part.GPU].tolist()) if share}


def arrived() -> list[Rank]:
    """What rank 2 sent up lies at rank 0, whose GPU has not taken it; rank 1 is below that one, joined by NVLink."""
    ranks = tree_over_nodes()
    for rank, peer, got, has in ((0, 2, 8, 0), (2, 0, 0, 8)):
        reads = recv(peer, posted=8, received=got, delivered=got, consumed=0)
        writes = send(peer, sent=has, done=has, produced=has)
        ranks[rank].operations = tuple(as_tree(one) for one in (reads, writes))
    return ranks


@pytest.mark.parametrize(
    ("ranks", "works", "waits"),
    [(tree_over_nodes(), (2, 3), 0), (arrived(), (0, 1), 2), (tree_over_nodes(a_node=8), tuple(range(8, 16)), 0)],
    ids=["nothing is sent up", "what was sent up is not taken", "nothing is sent up by eight GPUs"],
)
def test_the_node_that_sends_nothing_works_and_the_other_waits(
    ranks: list[Rank], works: tuple[int, ...], waits: int
) -> None:  # fmt: skip
    look = look_at(ranks)
    held, doing = held_up_by(look), list(look.activities.values())
    assert set(held) == set(works)
    assert len(set(held.values())) == 1, "which of them it is does not show"
    assert {doing[rank] for rank in works} == {Activity.COMPUTES}
    assert doing[waits] is Activity.WAITS
    assert look.inferred >= {list(look.activities)[rank] for rank in works}
    profile = add_up([look], list(look.activities))
    assert all(profile.own()[1][rank] == 1 for rank in works), "a look in which one of them held others up counts for all"
