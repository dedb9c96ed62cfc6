"""Each transport, one hung job: what is seen of it leads to the rank, and what is not is named as unobserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.state import Communicator, Direction, Transport
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.synthetic import WORLD, Rank, address_of, communicator, looks, recv, send, shared


def named(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


def hidden(verdict: Verdict, *words: str) -> bool:
    """Whether one line of what was not observed holds all the words."""
    return any(all(word in line for word in words) for line in verdict.unobserved)


def called(rank: int, number: int, world: int = 4) -> NDArray[Any]:
    """Records of a communicator's creation and of so many AllReduces on it."""
    events = np.zeros(number + 1, EVENT_DTYPE)
    events["time_ns"] = 1000 + np.arange(number + 1)
    events["kind"], events["flags"], events["function"] = Kind.ENTER, Flag.COMM_READ, Function.ALL_REDUCE
    events["kind"][0], events["function"][0] = Kind.LEAVE, Function.COMM_INIT_RANK
    events["comm"], events["pid"], events["rank"], events["nranks"] = address_of(WORLD), 1000 + rank, rank, world
    events["count"], events["datatype"], events["peer"] = 4096, 7, -1
    return events


def late_rank_two(own: Sequence[Communicator], *, calls: bool) -> Verdict:
    """A job of these communicators in which memory shows no operation and rank 2 has not made the last call."""
    live = LiveDiagnosis()
    for communicator_ in own:
        if calls:
            live.add_calls(called(communicator_.rank, 5 if communicator_.rank == 2 else 6, len(own)))
    verdict = None
    series = looks([Rank(c.rank, len(own), (c,)) for c in own], count=8)
    for index in range(8):
        verdict = live.update([samples[index] for samples in series])
    assert verdict is not None
    return verdict


def test_network_steps_of_both_ends_lead_to_the_rank() -> None:
    """Rank 0 waits for data of rank 1, which waits for its own GPU."""
    ranks = [
        Rank(
            0,
            2,
            (communicator(0, 2),),
            (recv(1, posted=8, received=0, delivered=0, consumed=0), send(1, sent=8, done=4, produced=8)),
        ),
        Rank(
            1,
            2,
            (communicator(1, 2),),
            (send(0, sent=0, done=0, produced=0), recv(0, posted=8, received=4, delivered=4, consumed=0)),
        ),
    ]
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [1]
    assert any("steps" in line for line in verdict.evidence)
    assert not hidden(verdict, "NVLink") and not hidden(verdict, "shared-memory")


def test_shared_memory_shows_head_and_tail_but_not_whose_operation_it_is() -> None:
    """Eight steps for rank 1 lie unread."""
    pair = [communicator(rank, 2, transport=Transport.SHM) for rank in (0, 1)]
    ranks = [
        Rank(0, 2, (replace(pair[0], host_connections=(shared(Direction.SEND, 1, 16, 24),)),)),
        Rank(1, 2, (replace(pair[1], host_connections=(shared(Direction.RECV, 0, 16, 24),)),)),
    ]
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [1]
    assert hidden(verdict, "shared-memory", "operation", "not")


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        (Transport.P2P, ("NVLink", "GPU memory", "launches")),
        (Transport.NVLS, ("NVLS", "launches")),
        (Transport.COLLNET, ("CollNet", "not compared")),
        (Transport.UNKNOWN, ("not recognised",)),
    ],
)
def test_where_memory_shows_nothing_only_calls_name_a_rank(transport: Transport, words: tuple[str, ...]) -> None:
    own = [communicator(rank, 4, transport=transport) for rank in range(4)]
    by_calls = late_rank_two(own, calls=True)
    assert named(by_calls) == [2] and by_calls.planes == ("state", "calls")
    blind = late_rank_two(own, calls=False)
    assert not blind.verdict_class.accuses
    for verdict in (by_calls, blind):
        assert hidden(verdict, *words), verdict.unobserved


def test_nvlink_between_nodes_hides_what_the_network_would_show() -> None:
    own = [
        replace(communicator(rank, 4, transport=Transport.P2P), multi_node_nvlink=True, node=rank // 2, nnodes=2)
        for rank in range(4)
    ]
    assert named(late_rank_two(own, calls=True)) == [2]
    blind = late_rank_two(own, calls=False)
    assert not blind.verdict_class.accuses and hidden(blind, "MNNVL", "launches")


def test_with_pxn_the_proxy_of_a_neighbour_moves_a_ranks_data() -> None:
    """Ring 0 → 1 → 2 → 0. The GPU of rank 0 does not consume; its send to rank 1 runs in the process of rank 2, a victim."""
    lent = send(1, sent=4, done=4, produced=4)
    lent = replace(lent, subs=tuple(replace(sub, rank=0) for sub in lent.subs))
    ranks = [
        Rank(0, 3, (communicator(0, 3),), (recv(2, posted=12, received=8, delivered=8, consumed=4),)),
        Rank(
            1,
            3,
            (communicator(1, 3),),
            (recv(0, posted=12, received=4, delivered=4, consumed=4), send(2, sent=4, done=4, produced=4)),
        ),
        Rank(
            2,
            3,
            (communicator(2, 3),),
            (lent, recv(1, posted=12, received=4, delivered=4, consumed=4), send(0, sent=8, done=8, produced=8)),
        ),
    ]
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [0], verdict.evidence
    assert verdict.victims == (1, 2)
    assert any("rank 1" in line and "waits for rank 0" in line for line in verdict.evidence), verdict.evidence


@pytest.mark.parametrize(("transport", "consumed"), [(Transport.NET, 0), (Transport.P2P, 8)])
@pytest.mark.parametrize("lender", [3, 7, -1])
def test_a_proxy_may_receive_for_a_rank_that_nobody_observes(transport: Transport, consumed: int, lender: int) -> None:
    """On behalf of whom a proxy moves data is a record's word: such a rank is skipped, and there is a verdict."""
    ranks = []
    for rank in range(3):
        took = recv((rank - 1) % 4, posted=12, received=8, delivered=8, consumed=consumed)
        lent = replace(took, subs=tuple(replace(sub, rank=lender) for sub in took.subs))
        ranks.append(Rank(rank, 4, (communicator(rank, 4, transport=transport),), (lent,)))
    assert diagnose(looks(ranks)).summary


def test_replays_of_cuda_graphs_make_no_calls_but_show_steps() -> None:
    own = [replace(communicator(rank, 4), captured_plans=1) for rank in range(4)]
    blind = late_rank_two(own, calls=False)
    assert not blind.verdict_class.accuses and hidden(blind, "CUDA graph", "no calls")
    ranks = [
        Rank(0, 2, (replace(communicator(0, 2), captured_plans=2),), (recv(1, posted=8, received=0, delivered=0, consumed=0),)),
        Rank(1, 2, (replace(communicator(1, 2), captured_plans=2),)),
    ]
    seen = diagnose(looks(ranks))
    assert named(seen) == [1] and hidden(seen, "CUDA graph", "proxy steps")


def test_what_kernels_start_themselves_is_seen_by_nothing_on_the_host() -> None:
    own = [replace(communicator(rank, 4), device_initiated=True) for rank in range(4)]
    verdict = late_rank_two(own, calls=False)
    assert verdict.verdict_class is VerdictClass.IDLE and not verdict.culprits
    assert hidden(verdict, "device API", "neither calls nor proxy steps")


def test_many_communicators_with_unseen_ranks_do_not_flood_a_verdict() -> None:
    ranks = [Rank(0, 64, tuple(communicator(0, 64, comm_hash=WORLD + number) for number in range(40)))]
    verdict = diagnose(looks(ranks))
    assert len(verdict.unobserved) < 12
    assert hidden(verdict, "34 more communicators", "64 ranks")
