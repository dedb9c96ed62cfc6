"""The one-shot diagnosis on hand-made jobs: who is named, and when nobody may be."""

from __future__ import annotations

from dataclasses import replace

import jsonschema
import pytest

from ncclwatch.engine.case import Known
from ncclwatch.engine.diagnose import diagnose, judge_jobs
from ncclwatch.engine.patience import Patience
from ncclwatch.model.state import Communicator, Direction, HostConnection, OpPhase, PeerInfo, ProxyOperation, Transport
from ncclwatch.model.verdict import Verdict, VerdictClass, schema
from unit.synthetic import (
    WORLD,
    Rank,
    absent_from_ring,
    communicator,
    frozen_ring,
    looks,
    moved,
    recv,
    send,
    shared,
)


def named(verdict: Verdict) -> list[int | None]:
    """The ranks a verdict accuses; also proves that it keeps to the schema."""
    jsonschema.validate(verdict.to_json(), schema())
    return sorted((c.rank for c in verdict.culprits), key=lambda rank: -1 if rank is None else rank)


@pytest.mark.parametrize("victim", range(4))
def test_a_stopped_rank_is_named_and_the_others_are_its_victims(victim: int) -> None:
    verdict = diagnose(looks(frozen_ring(victim)))
    assert verdict.verdict_class is VerdictClass.STOPPED
    assert named(verdict) == [victim]
    assert verdict.victims == tuple(rank for rank in range(4) if rank != victim)
    assert verdict.operation is not None and verdict.operation.name == "AllReduce"
    assert any("state T" in line for line in verdict.evidence)
    assert verdict.confidence > 0.9


def test_progress_of_anyone_means_nobody_is_accused() -> None:
    samples = looks(frozen_ring(2))
    samples[0][1] = moved(samples[0][1])
    verdict = diagnose(samples)
    assert verdict.verdict_class is VerdictClass.RUNNING
    assert named(verdict) == []
    assert any("state T" in line for line in verdict.evidence), "the stopped process is mentioned, not accused"


def test_progress_long_ago_does_not_hide_a_standstill() -> None:
    samples = looks(frozen_ring(2), count=4)
    samples[0][1:] = [moved(sample) for sample in samples[0][1:]]
    assert named(diagnose(samples)) == [2]


def test_a_single_look_accuses_nobody() -> None:
    verdict = diagnose(looks(frozen_ring(2), count=1))
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert named(verdict) == []


def test_who_was_looked_at_once_hides_nobody_else_and_is_not_accused() -> None:
    """An agent that has just come tells of its ranks once: the others' standstill is judged, its own ranks' is not yet."""
    samples = looks(frozen_ring(2))
    samples[0] = samples[0][1:]
    verdict = diagnose(samples)
    assert verdict.verdict_class is VerdictClass.STOPPED and named(verdict) == [2]
    assert any("1 process was looked at only once" in line for line in verdict.unobserved)
    samples = looks(frozen_ring(2))
    samples[2] = samples[2][1:]
    verdict = diagnose(samples)
    assert verdict.verdict_class is VerdictClass.UNKNOWN and named(verdict) == []


def test_nothing_observed_is_unknown() -> None:
    assert diagnose([]).verdict_class is VerdictClass.UNKNOWN


def test_a_rank_that_has_not_entered_is_where_the_waits_end() -> None:
    verdict = diagnose(looks(absent_from_ring()))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert named(verdict) == [2]
    assert verdict.victims == (0, 1, 3)
    assert any("py-spy" in step for step in verdict.next_steps)


def test_patience_before_a_rank_is_accused_on_waits_alone() -> None:
    samples = looks(absent_from_ring(), count=3)
    assert diagnose(samples, Known(patience=Patience(5))).verdict_class is VerdictClass.UNKNOWN
    assert named(diagnose(looks(absent_from_ring(), count=7), Known(patience=Patience(5)))) == [2]
    assert named(diagnose(looks(frozen_ring(1)), Known(patience=Patience(5)))) == [1], "a stopped process needs no patience"


def test_a_rank_nobody_looked_at_is_not_accused() -> None:
    ranks = [rank for rank in absent_from_ring() if rank.rank != 2]
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert named(verdict) == []
    assert "rank 2" in verdict.summary and "not observed" in verdict.summary


def test_a_missing_rank_whose_peers_report_an_error_has_ended() -> None:
    ranks = [rank for rank in absent_from_ring() if rank.rank != 2]
    broken = replace(ranks[1].communicators[0], async_result="ncclRemoteError")
    ranks[1] = replace(ranks[1], communicators=(broken,))
    ranks[2] = replace(ranks[2], communicators=(replace(ranks[2].communicators[0], async_result="ncclRemoteError"),))
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.DEAD
    assert named(verdict) == [2]
    assert not verdict.culprits[0].observed
    assert any("ncclRemoteError" in line for line in verdict.evidence)


def test_a_missing_rank_of_a_host_that_was_seen_whole_has_ended() -> None:
    ranks = []
    for rank in absent_from_ring():
        peers = tuple(replace(peer, host_hash=7) for peer in rank.communicators[0].peers)
        ranks.append(replace(rank, host="node", communicators=(replace(rank.communicators[0], peers=peers),)))
    present = looks([rank for rank in ranks if rank.rank != 2])
    assert named(diagnose(present)) == []
    verdict = diagnose(present, Known(complete_hosts=frozenset({"node"})))
    assert verdict.verdict_class is VerdictClass.DEAD
    assert named(verdict) == [2]


def test_where_nobody_is_seen_to_wait_for_a_missing_rank_all_of_its_collective_do() -> None:
    """Only rank 0 still shows what it waits in: the proxies of the neighbours have dropped their transfers."""
    ranks = []
    for rank in absent_from_ring():
        peers = tuple(replace(peer, host_hash=7) for peer in rank.communicators[0].peers)
        left = rank.operations if rank.rank == 0 else ()
        ranks.append(replace(rank, host="node", operations=left, communicators=(replace(rank.communicators[0], peers=peers),)))
    verdict = diagnose(looks([rank for rank in ranks if rank.rank != 2]), Known(complete_hosts=frozenset({"node"})))
    assert verdict.verdict_class is VerdictClass.DEAD and named(verdict) == [2]
    assert verdict.victims == (0, 1, 3)


def test_who_waits_for_a_peer_of_one_that_has_ended_is_a_victim_as_well() -> None:
    """Rank 4 is in no communicator with rank 2: it waits in a pipeline for rank 0, which shows no wait of its own any more."""
    ranks = []
    for rank in absent_from_ring():
        peers = tuple(replace(peer, host_hash=7) for peer in rank.communicators[0].peers)
        own = (replace(rank.communicators[0], peers=peers), *([communicator(0, 2, comm_hash=0xE0)] if rank.rank == 0 else []))
        ranks.append(replace(rank, host="node", operations=rank.operations if rank.rank == 3 else (), communicators=own))
    message = recv(0, posted=8, received=0, delivered=0, consumed=0, comm_hash=0xE0)
    ranks.append(Rank(4, 5, (communicator(1, 2, comm_hash=0xE0),), (message,), host="node"))
    verdict = diagnose(looks([rank for rank in ranks if rank.rank != 2]), Known(complete_hosts=frozenset({"node"})))
    assert verdict.verdict_class is VerdictClass.DEAD and named(verdict) == [2]
    assert verdict.victims == (0, 1, 3, 4)


def test_a_job_that_ends_rank_by_rank_accuses_nobody() -> None:
    """Ranks 0 and 3 have ended; 1 and 2 have destroyed the communicator that these held last, and still have another."""
    ranks = []
    for rank in range(4):
        # A communicator's hashes of processes are its own (NCCL adds its hash, src/init.cc).
        last, other = (
            replace(made, peers=tuple(PeerInfo(peer, host_hash=7 + key, pid_hash=peer + key) for peer in range(4)))
            for key, made in ((0, communicator(rank, 4)), (100, communicator(rank, 4, comm_hash=0xE0)))
        )
        ended = rank in (0, 3)
        ranks.append(Rank(rank, 4, (last, other) if ended else (other,), host="node", run_state="X" if ended else "S"))
    verdict = diagnose(looks(ranks), Known(complete_hosts=frozenset({"node"})))
    assert not verdict.verdict_class.accuses, verdict


def test_a_process_that_ended_while_being_watched_is_dead() -> None:
    verdict = diagnose(looks(frozen_ring(3, run_state="X")))
    assert verdict.verdict_class is VerdictClass.DEAD
    assert named(verdict) == [3]


def test_a_gpu_that_stops_in_the_middle_is_a_hardware_verdict() -> None:
    ranks = frozen_ring(2, run_state="S")
    operations = (
        send(3, sent=92, done=92, produced=92),
        recv(1, posted=96, received=96, delivered=96, consumed=92),
    )
    ranks[2] = replace(ranks[2], operations=operations)
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert named(verdict) == [2]
    assert "GPU" in verdict.summary


@pytest.mark.parametrize("sent", [True, False])
def test_a_gpu_whose_send_is_complete_is_in_the_operation_though_only_its_receive_is_open(sent: bool) -> None:
    """A ring begins with a send: rank 1 has sent all of the ReduceScatter, or nothing of it, and takes nothing."""
    scatter: dict[str, object] = {"nsteps": 4, "collective": "ReduceScatter"}
    gather: dict[str, object] = {"nsteps": 4, "collective": "AllGather", "op_count": 28, "base": 964}
    open_send = () if sent else (send(0, sent=0, done=0, produced=0, **scatter),)
    arrived = recv(0, posted=4, received=4, delivered=4, consumed=0, **scatter)
    here = 4 if sent else 0
    ahead = (
        send(0, sent=0, done=0, produced=0, **gather),
        recv(0, posted=4, received=here, delivered=here, consumed=0, **gather),
    )
    waiting = (recv(1, posted=4, received=0, delivered=0, consumed=0, **(gather if sent else scatter)),)
    ranks = [Rank(0, 2, (communicator(0, 2),), waiting), Rank(1, 2, (communicator(1, 2),), (*open_send, arrived, *ahead))]
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [1]
    assert verdict.verdict_class is (VerdictClass.HARDWARE if sent else VerdictClass.NOT_ENTERED)


def test_a_proxy_that_does_not_send_what_is_ready_is_named() -> None:
    ranks = absent_from_ring()
    ranks[2] = replace(
        ranks[2],
        operations=(
            send(3, sent=0, done=0, produced=8),
            recv(1, posted=8, received=0, delivered=0, consumed=0),
        ),
    )
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [2], "the link into it is not blamed: its own proxy stands still"
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert any("proxy does not send" in line for line in verdict.evidence)


def test_data_lost_between_two_live_ranks_names_the_link() -> None:
    ranks = absent_from_ring(late=9)  # everybody is in
    for rank in range(4):
        following, previous = (rank + 1) % 4, (rank - 1) % 4
        sent = 8 if rank == 1 else 4
        ranks[rank] = replace(
            ranks[rank],
            operations=(
                send(following, sent=sent, done=0 if rank == 1 else sent, produced=sent),
                recv(previous, posted=8 if rank == 2 else 12, received=0 if rank == 2 else 4, delivered=0 if rank == 2 else 4,
                     consumed=0 if rank == 2 else 4),
            ),
        )  # fmt: skip
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert verdict.link is not None and (verdict.link.source, verdict.link.destination) == (1, 2)
    assert named(verdict) == [1, 2]
    assert set(verdict.victims) >= {0, 3}


def shared_ring(late: int = 2, world: int = 4) -> list[Rank]:
    """All ranks of one node over shared memory: no proxy operations at all. One rank leaves data unread."""
    ranks = []
    for rank in range(world):
        following, previous = (rank + 1) % world, (rank - 1) % world
        ends = (
            shared(Direction.RECV, previous, head=40, tail=44 if rank == late else 40),
            shared(Direction.SEND, following, head=40, tail=44 if following == late else 40),
        )
        comm = replace(communicator(rank, world, transport=Transport.SHM), host_connections=ends)
        ranks.append(Rank(rank, world, (comm,), host="node0"))
    return ranks


def test_shared_memory_alone_names_the_rank_that_leaves_data_unread() -> None:
    verdict = diagnose(looks(shared_ring()))
    assert named(verdict) == [2]
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert {0, 3} <= set(verdict.victims), "who comes after it finds nothing to read"


def test_who_has_sent_more_in_shared_memory_than_it_has_read_is_in_the_operation() -> None:
    """As read from a real job (2.29.2) whose GPU stalled: each has begun by sending a part of its own, four steps."""
    steps = {(0, 1): (44, 52), (1, 2): (40, 48), (2, 3): (44, 44), (3, 0): (48, 48)}
    ranks = []
    for rank in range(4):
        following, previous = (rank + 1) % 4, (rank - 1) % 4
        ends = (
            shared(Direction.RECV, previous, *steps[previous, rank]),
            shared(Direction.SEND, following, *steps[rank, following]),
        )
        own = replace(communicator(rank, 4, transport=Transport.SHM), host_connections=ends)
        ranks.append(Rank(rank, 4, (own,), host="node0"))
    verdict = diagnose(looks(ranks))
    assert (verdict.verdict_class, named(verdict)) == (VerdictClass.HARDWARE, [2])
    assert "in the middle of the operation" in verdict.summary


def test_shared_memory_at_rest_is_idle() -> None:
    verdict = diagnose(looks(shared_ring(late=9)))
    assert verdict.verdict_class is VerdictClass.IDLE
    assert any("shared-memory" in line for line in verdict.unobserved)


def test_a_full_shared_buffer_is_followed_to_its_reader() -> None:
    ranks = shared_ring(late=2)
    for rank in (1, 2):
        ends = []
        for end in ranks[rank].communicators[0].host_connections:
            full = (rank == 1 and end.direction is Direction.SEND) or (rank == 2 and end.direction is Direction.RECV)
            stuck = rank == 1 and end.direction is Direction.RECV
            ends.append(replace(end, tail=48 if full else 44 if stuck else end.tail))
        ranks[rank] = replace(ranks[rank], communicators=(replace(ranks[rank].communicators[0], host_connections=tuple(ends)),))
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [2], "rank 1 has unread input too, but its own output is full"
    assert 1 in verdict.victims


def test_three_and_one_hosts_follow_the_wait_through_shared_memory() -> None:
    """Ranks 0-2 share a node, rank 3 is alone; rank 1 has not entered: only ranks 2, 3 and 0 have proxy operations."""

    def comm(rank: int, *ends: tuple[Direction, int, int, int]) -> Communicator:
        return replace(communicator(rank, 4), host_connections=tuple(shared(d, p, h, t) for d, p, h, t in ends))

    ranks = [
        Rank(0, 4, (comm(0, (Direction.SEND, 1, 0, 8)),), (recv(3, posted=8, received=4, delivered=4, consumed=0),), host="a"),
        Rank(1, 4, (comm(1, (Direction.RECV, 0, 0, 8), (Direction.SEND, 2, 0, 0)),), (), host="a"),
        Rank(2, 4, (comm(2, (Direction.RECV, 1, 0, 0)),), (send(3, sent=4, done=4, produced=4),), host="a"),
        Rank(
            3, 4, (comm(3),),
            (send(0, sent=4, done=4, produced=4), recv(2, posted=12, received=4, delivered=4, consumed=4)), host="b",
        ),
    ]  # fmt: skip
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [1]
    assert verdict.victims == (0, 2, 3)


def test_a_wait_inside_nvlink_is_not_guessed() -> None:
    ranks = [
        Rank(
            2, 4, (replace(communicator(2, 4), transports=((0, 1, Direction.RECV, Transport.P2P),)),),
            (send(3, sent=4, done=4, produced=4),), host="a",
        ),
        Rank(3, 4, (communicator(3, 4),), (recv(2, posted=12, received=4, delivered=4, consumed=4),), host="b"),
    ]  # fmt: skip
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert named(verdict) == []
    assert any("P2P" in line for line in verdict.unobserved)


def test_two_orders_on_two_communicators_are_a_deadlock() -> None:
    first, second = 0xC1, 0xC2

    def comms(rank: int) -> tuple[Communicator, ...]:
        return (communicator(rank, 2), communicator(rank, 2, comm_hash=first), communicator(rank, 2, comm_hash=second))

    ranks = [
        Rank(0, 2, comms(0), (recv(1, posted=8, received=0, delivered=0, consumed=0, comm_hash=first),)),
        Rank(1, 2, comms(1), (recv(0, posted=8, received=0, delivered=0, consumed=0, comm_hash=second),)),
    ]
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.DEADLOCK
    assert named(verdict) == [0, 1]


def test_an_operation_the_proxy_never_begins_names_that_proxy() -> None:
    ranks = absent_from_ring()
    waiting = send(3, sent=0, done=0, produced=0, phase=OpPhase.READY)
    ranks[2] = replace(ranks[2], operations=(waiting,))
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [2]
    assert verdict.verdict_class is VerdictClass.HARDWARE


def test_jobs_are_judged_apart() -> None:
    hung = looks(frozen_ring(1))
    other = [
        replace(rank, communicators=(replace(rank.communicators[0], hash=WORLD + 1),), operations=(), host=f"other{rank.rank}")
        for rank in absent_from_ring()
    ]
    verdicts = [verdict for _, verdict in judge_jobs([*looks(other), *hung])]
    assert [verdict.verdict_class for verdict in verdicts] == [VerdictClass.STOPPED, VerdictClass.IDLE]


def test_the_same_trouble_has_the_same_id() -> None:
    first, second = diagnose(looks(frozen_ring(2))), diagnose(looks(frozen_ring(2), count=5))
    assert first.id == second.id
    assert diagnose(looks(frozen_ring(1))).id != first.id


def inconsistent_ring(odd: dict[int, tuple[str, int]], world: int = 4) -> list[Rank]:
    """A ring in which some ranks called another collective or size than the others: (collective, steps) by rank."""
    ranks = []
    for rank in range(world):
        following, previous = (rank + 1) % world, (rank - 1) % world
        name, steps = odd.get(rank, ("AllReduce", 96))
        operations = (
            send(following, sent=40, done=40, produced=40, nsteps=steps, collective=name),
            recv(previous, posted=48, received=40, delivered=40, consumed=40, nsteps=steps, collective=name),
        )
        ranks.append(Rank(rank, world, (communicator(rank, world),), operations))
    return ranks


@pytest.mark.parametrize("call", [("AllGather", 96), ("AllReduce", 48)])
def test_a_rank_that_called_something_else_is_outvoted(call: tuple[str, int]) -> None:
    verdict = diagnose(looks(inconsistent_ring({1: call})))
    assert verdict.verdict_class is VerdictClass.INCONSISTENT
    assert named(verdict) == [1]
    assert verdict.victims == (0, 2, 3)
    assert any("3 ranks agree" in line for line in verdict.evidence)


def test_equally_large_groups_are_a_tie() -> None:
    verdict = diagnose(looks(inconsistent_ring({0: ("AllGather", 96), 1: ("AllGather", 96)})))
    assert verdict.verdict_class is VerdictClass.INCONSISTENT
    assert named(verdict) == [0, 1, 2, 3]
    assert any("tie" in line for line in verdict.evidence)
    assert verdict.confidence <= 0.5


def test_ranks_that_end_when_the_work_is_done_are_not_accused() -> None:
    done = [replace(rank, operations=(), run_state="X" if rank.rank in (1, 2) else "S") for rank in frozen_ring()]
    assert diagnose(looks(done)).verdict_class is VerdictClass.IDLE
    assert diagnose(looks([replace(rank, run_state="X") for rank in done])).verdict_class is VerdictClass.IDLE


def test_a_rank_that_ends_while_the_others_still_move_is_not_yet_missed() -> None:
    samples = looks(frozen_ring(3, run_state="X"))
    samples[0][1] = moved(samples[0][1])
    assert diagnose(samples).verdict_class is VerdictClass.RUNNING


def test_a_link_is_not_blamed_when_the_sender_was_stopped_while_sending() -> None:
    """As read from a real job: rank 1 was stopped with two of its four steps still in its own proxy."""
    state = {0: (10, 14, 14), 1: (0, 4, 2), 2: (2, 6, 6), 3: (6, 10, 10)}
    ranks = []
    for rank, (received, sent, done) in state.items():
        operations = (
            recv((rank - 1) % 4, posted=received + 8, received=received, delivered=received, consumed=received, nsteps=24),
            send((rank + 1) % 4, sent=sent, done=done, produced=sent, nsteps=24),
        )
        ranks.append(Rank(rank, 4, (communicator(rank, 4),), operations, "T" if rank == 1 else "S"))
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [1]
    assert verdict.verdict_class is VerdictClass.STOPPED
    assert verdict.victims == (0, 2, 3)


def test_communicators_of_equal_hash_are_told_apart() -> None:
    """2.21.5: splits of one parent by the same colour have one hash; rank 0 holds two of them, with rank 1 and with rank 2."""
    both = 0x77

    def split(rank: int, address: int, peers: dict[int, int]) -> Communicator:
        made = replace(communicator(rank, 2, comm_hash=both), address=address)
        return replace(made, peers=tuple(PeerInfo(r, r, r, comm_address=at) for r, at in peers.items()))

    first, second = {0: 0x10, 1: 0x21}, {0: 0x12, 1: 0x32}
    to_first = replace(recv(1, posted=4, received=0, delivered=0, consumed=0, comm_hash=both), comm_address=0x10)
    from_zero = replace(recv(0, posted=4, received=0, delivered=0, consumed=0, comm_hash=both), comm_address=0x32)
    ranks = [
        Rank(0, 3, (split(0, 0x10, first), split(0, 0x12, second)), (to_first,)),
        Rank(1, 3, (split(1, 0x21, first),)),
        Rank(2, 3, (split(1, 0x32, second),), (from_zero,)),
    ]
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [1], "rank 2 waits for rank 0 in the second, rank 0 for rank 1 in the first"
    assert verdict.victims == (0, 2)


@pytest.mark.parametrize("seen", ["not read at all", "seen to end"])
def test_a_killed_rank_is_named_although_its_neighbour_has_silently_dropped_the_receive(seen: str) -> None:
    """As read from a real job on 2.27.5: the successor of the killed rank has only its send left, and no error anywhere."""
    ranks = []
    for rank, (received, sent) in {0: (4, 8), 1: (8, 12), 3: (None, 4)}.items():
        operations = [send((rank + 1) % 4, sent=sent, done=sent, produced=sent, nsteps=24)]
        if received is not None:
            posted = received + 8
            got = recv((rank - 1) % 4, posted=posted, received=received, delivered=received, consumed=received, nsteps=24)
            operations.append(got)
        ranks.append(Rank(rank, 4, (communicator(rank, 4),), tuple(operations)))
    if seen == "seen to end":
        ranks.append(Rank(2, 4, (communicator(2, 4),), (), "X"))
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.DEAD
    assert named(verdict) == [2]
    assert verdict.victims == (0, 1, 3)
    assert any("has dropped the receive" in line for line in verdict.evidence)


def test_a_proxy_that_holds_ready_data_back_is_named_although_older_data_is_still_under_way() -> None:
    """As read from a real job whose proxy thread stopped: two steps under way, two more ready, the receiver has buffers open."""
    state = {0: (6, 10, 10, 10), 1: (10, 14, 14, 14), 2: (2, 6, 4, 2), 3: (2, 6, 6, 6)}
    ranks = []
    for rank, (received, produced, sent, done) in state.items():
        operations = (
            recv((rank - 1) % 4, posted=received + 8, received=received, delivered=received, consumed=received, nsteps=24),
            send((rank + 1) % 4, sent=sent, done=done, produced=produced, nsteps=24),
        )
        ranks.append(Rank(rank, 4, (communicator(rank, 4),), operations))
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert named(verdict) == [2]
    assert "proxy" in verdict.summary


def test_a_missing_process_is_one_rank_of_the_job_in_whatever_communicators_it_is_missing() -> None:
    """Rank 1 of 4, killed: rank 0 waits for it in one pair, rank 3 in another, and only the world numbers it as the job does."""
    tensor, data = 0xC1, 0xC2

    def pair(comm_hash: int, own: int, members: tuple[int, int]) -> Communicator:
        peers = tuple(PeerInfo(i, host_hash=7, pid_hash=rank) for i, rank in enumerate(members))
        return replace(communicator(own, 2, comm_hash=comm_hash), peers=peers)

    world = tuple(PeerInfo(rank, host_hash=7, pid_hash=rank) for rank in range(4))
    waits = {0: (pair(tensor, 0, (0, 1)), 1), 3: (pair(data, 1, (1, 3)), 0)}
    ranks = []
    for rank in (0, 2, 3):
        comms = [replace(communicator(rank, 4), peers=world)]
        operations: tuple[ProxyOperation, ...] = ()
        if rank in waits:
            comms.append(waits[rank][0])
            operations = (recv(waits[rank][1], posted=8, received=0, delivered=0, consumed=0, comm_hash=comms[1].hash),)
        ranks.append(Rank(rank, 4, tuple(comms), operations, host="node"))
    verdict = diagnose(looks(ranks), Known(complete_hosts=frozenset({"node"})))
    assert verdict.verdict_class is VerdictClass.DEAD
    assert [(culprit.rank, culprit.observed) for culprit in verdict.culprits] == [(1, False)]
    assert verdict.summary.startswith("rank 1 ")


def test_a_stage_whose_message_lies_unread_waits_for_the_answer_and_is_not_accused_beside_the_one_that_reads_nothing() -> None:
    """As read from a real job within one host: rank 1 never enters; rank 0 has sent it an activation and waits for a gradient.

    Shared memory shows no open receive, and what rank 2 reduces with rank 0 lies unread there as well.
    """
    pipeline, data = 0xC1, 0xC2

    def message(direction: Direction, peer: int, head: int, tail: int) -> HostConnection:
        return HostConnection(0, peer, direction, 1, head, tail)

    def member(rank: int, comm_hash: int, own: int, *ends: HostConnection) -> Communicator:
        return replace(communicator(own, 2, comm_hash=comm_hash, transport=Transport.SHM), host_connections=ends)

    ranks = [
        Rank(0, 4, (
            member(0, pipeline, 0, message(Direction.SEND, 1, 200, 204), message(Direction.RECV, 1, 196, 196)),
            member(0, data, 0, shared(Direction.RECV, 1, 40, 44), shared(Direction.SEND, 1, 40, 40)),
        ), host="node"),
        Rank(1, 4, (
            member(1, pipeline, 1, message(Direction.RECV, 0, 200, 204), message(Direction.SEND, 0, 196, 196)),
        ), host="node"),
        Rank(2, 4, (
            member(2, data, 1, shared(Direction.SEND, 0, 40, 44), shared(Direction.RECV, 0, 40, 40)),
        ), host="node"),
    ]  # fmt: skip
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED
    assert named(verdict) == [1]
    assert 0 in verdict.victims


def test_one_rank_with_another_order_is_named_against_the_many() -> None:
    first, second = 0xC1, 0xC2
    ranks = []
    for rank in range(4):
        comms = (communicator(rank, 4), communicator(rank, 4, comm_hash=first), communicator(rank, 4, comm_hash=second))
        entered = second if rank == 2 else first
        waiting = recv((rank - 1) % 4, posted=8, received=0, delivered=0, consumed=0, comm_hash=entered)
        ranks.append(Rank(rank, 4, comms, (waiting,)))
    # Rank 3 waits for rank 2 in the first, rank 2 for rank 1 in the second.
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.DEADLOCK
    assert named(verdict) == [2]
    assert verdict.victims == (0, 1, 3)
    assert sum("first and wait" in line for line in verdict.evidence) == 2


def creation(present: set[int], world: int = 4) -> list[Rank]:
    """Ranks that wait in the creation of the world communicator; the others have none yet."""
    return [
        Rank(r, world, (replace(communicator(r, world), init_state="ncclInProgress"),) if r in present else ())
        for r in range(world)
    ]


def test_a_rank_that_never_comes_to_creation_is_named_after_a_while() -> None:
    early = diagnose(looks(creation({0, 1, 3})), Known(creation_patience_s=15))
    assert early.verdict_class is VerdictClass.UNKNOWN
    assert "3 of 4 ranks" in early.summary and any("rank 2" in line for line in early.evidence)
    verdict = diagnose(looks(creation({0, 1, 3}), count=20), Known(creation_patience_s=15))
    assert verdict.verdict_class is VerdictClass.INIT_HANG
    assert named(verdict) == [2]
    assert verdict.victims == (0, 1, 3)


def test_a_rank_missing_from_creation_that_nobody_looked_at_is_not_accused() -> None:
    ranks = [rank for rank in creation({0, 1, 3}) if rank.rank != 2]
    verdict = diagnose(looks(ranks, count=20), Known(creation_patience_s=15))
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert named(verdict) == []
    assert any("rank 2" in line and "not observed" in line for line in verdict.evidence)


def test_a_process_of_unknown_rank_is_mentioned_where_a_creation_waits_and_not_accused() -> None:
    series = looks(creation({0, 1, 3}), count=20)
    series[2] = [replace(s, process=replace(s.process, rank=None, world_size=None)) for s in series[2]]
    verdict = next(v for _, v in judge_jobs(series, Known(creation_patience_s=15)) if "creation" in v.summary)
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert named(verdict) == []
    assert any("perhaps among those" in line and "pid 1002 on node2" in line for line in verdict.evidence)


def test_the_wait_is_followed_through_ranks_that_have_no_proxy_at_all() -> None:
    """As read from a real job of hosts 3 + 1: rank 0 was stopped; rank 1 has only shared memory, all of it read."""

    def comm(rank: int, *ends: tuple[Direction, int, int]) -> Communicator:
        own = communicator(rank, 4)
        transports = own.transports if rank != 1 else ()
        made = tuple(shared(direction, peer, steps, steps) for direction, peer, steps in ends)
        return replace(own, host_connections=made, transports=transports)

    halted = (recv(3, posted=8, received=2, delivered=2, consumed=0, nsteps=24),)
    alone = (
        recv(2, posted=20, received=12, delivered=12, consumed=12, nsteps=24),
        send(0, sent=16, done=16, produced=16, nsteps=24),
    )
    ranks = [
        Rank(0, 4, (comm(0, (Direction.SEND, 1, 172)),), halted, "T", host="a"),
        Rank(1, 4, (comm(1, (Direction.RECV, 0, 172), (Direction.SEND, 2, 176)),), host="a"),
        Rank(2, 4, (comm(2, (Direction.RECV, 1, 176)),), (send(3, sent=12, done=12, produced=12, nsteps=24),), host="a"),
        Rank(3, 4, (comm(3),), alone, host="b"),
    ]
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [0]
    assert verdict.victims == (1, 2, 3)
    running = [replace(rank, run_state="S") for rank in ranks]
    assert named(diagnose(looks(running))) == [0], "also without the operating system's word"


def test_a_proxy_that_opens_no_send_buffers_is_named_rather_than_the_link() -> None:
    """As read from a real job whose proxy thread stopped after a send that did not complete."""
    state = {0: (6, 10, 10), 1: (10, 14, 14), 2: (2, 4, 2), 3: (2, 6, 6)}
    ranks = []
    for rank, (received, sent, done) in state.items():
        out = send((rank + 1) % 4, sent=sent, done=done, produced=sent, nsteps=24)
        if rank == 2:
            out = replace(out, subs=(replace(out.subs[0], posted=8),))
        got = recv((rank - 1) % 4, posted=received + 8, received=received, delivered=received, consumed=received, nsteps=24)
        ranks.append(Rank(rank, 4, (communicator(rank, 4),), (got, out)))
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert named(verdict) == [2]


def successor_of_the_killed_with_nothing_left() -> list[Rank]:
    """As read from a real job on 2.32.3: the successor of the killed rank has lost both its transfers and shows nothing."""
    return [
        Rank(0, 4, (communicator(0, 4),), (recv(3, posted=8, received=0, delivered=0, consumed=0, nsteps=24),)),
        Rank(1, 4, (communicator(1, 4),), (recv(0, posted=12, received=4, delivered=4, consumed=4, nsteps=24),)),
        Rank(3, 4, (communicator(3, 4),)),
    ]


def test_a_rank_with_nothing_open_beside_one_nobody_looked_at_is_not_accused() -> None:
    verdict = diagnose(looks(successor_of_the_killed_with_nothing_left()))
    assert verdict.verdict_class is VerdictClass.UNKNOWN
    assert named(verdict) == []
    assert "rank 2" in verdict.summary and "rank 3" in verdict.summary


def test_the_same_names_the_rank_that_was_seen_to_end() -> None:
    ranks = [*successor_of_the_killed_with_nothing_left(), Rank(2, 4, (communicator(2, 4),), (), "X")]
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.DEAD
    assert named(verdict) == [2]
    assert verdict.victims == (0, 1, 3)


def test_an_error_that_a_rank_seen_to_end_explains_accuses_no_rank_nobody_observed() -> None:
    """As read from a real job on 2.29.2 with one host unobserved: the successor of the killed rank reports an error and waits for
    the rank after it, of which nothing is known.
    """
    left = Rank(
        2, 3, (replace(communicator(2, 3), async_result="ncclRemoteError"),), (send(0, sent=0, done=0, produced=4, nsteps=8),)
    )
    verdict = diagnose(looks([left, Rank(1, 3, (communicator(1, 3),), (), "X")]))
    assert verdict.verdict_class is VerdictClass.DEAD
    assert named(verdict) == [1]
    alone = diagnose(looks([left]))
    assert named(alone) == [0], "without one that has ended the error is told of whom it waits for"


def test_two_broken_links_with_one_rank_in_common_name_that_rank() -> None:
    """As read from a real job whose proxy thread stopped: nothing arrives at rank 2 and nothing from it."""
    state = {0: (6, 10, 10), 1: (10, 14, 14), 2: (0, 4, 2), 3: (2, 6, 6)}
    ranks = []
    for rank, (received, sent, done) in state.items():
        operations = (
            send((rank + 1) % 4, sent=sent, done=done, produced=sent, nsteps=24),
            recv((rank - 1) % 4, posted=received + 8, received=received, delivered=received, consumed=received, nsteps=24),
        )
        ranks.append(Rank(rank, 4, (communicator(rank, 4),), operations))
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert named(verdict) == [2]
    assert set(verdict.victims) == {0, 1, 3}


def test_a_rank_inside_a_node_may_still_be_in_the_operation_before() -> None:
    """Ring 0 → 1 → 2 → 3 → 0 over hosts (0, 1, 2) and (3). The GPU of rank 0 stopped in #13; rank 3 is in #14, waits for rank 2.

    Rank 2 shows nothing on the network: it still waits for rank 1, and that for rank 0, through shared memory.
    """
    inside = {
        0: (shared(Direction.SEND, 1, 20, 20),),
        1: (shared(Direction.RECV, 0, 20, 20), shared(Direction.SEND, 2, 22, 22)),
        2: (shared(Direction.RECV, 1, 22, 22),),
        3: (),
    }
    own = {rank: replace(communicator(rank, 4), host_connections=inside[rank]) for rank in range(4)}
    later = {"op_count": 28, "base": 1056}
    operations = {
        0: (recv(3, posted=22, received=20, delivered=20, consumed=14),),
        1: (),
        2: (),
        3: (
            recv(2, posted=8, received=0, delivered=0, consumed=0, **later),
            send(0, sent=4, done=4, produced=4, **later),
        ),
    }
    ranks = [Rank(rank, 4, (own[rank],), operations[rank], host="b" if rank == 3 else "a") for rank in range(4)]
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [0], verdict.evidence
    assert verdict.victims == (1, 2, 3)
    stopped = diagnose(looks([replace(ranks[0], run_state="T"), *ranks[1:]]))
    assert stopped.verdict_class is VerdictClass.STOPPED and stopped.victims == (1, 2, 3)


def test_a_rank_that_lacks_only_the_last_part_of_a_ring_waits_for_it() -> None:
    """As read from a real job on 2.32.3: the GPU of rank 0 stopped in an AllReduce 0 → 1 → 2 → 3 → 0 over hosts (0, 1), (2, 3).

    Rank 3 has sent all that it had to, and has all of it but the last part, which comes through shared memory; on the network it
    shows only the next operation, of another communicator, which its GPU has not begun.
    """
    inside = {
        0: (shared(Direction.SEND, 1, 302, 302),),
        1: (shared(Direction.RECV, 0, 302, 302),),
        2: (shared(Direction.SEND, 3, 310, 310),),
        3: (shared(Direction.RECV, 2, 310, 310),),
    }
    own = {rank: replace(communicator(rank, 4), host_connections=inside[rank]) for rank in range(4)}
    unread = {2: shared(Direction.SEND, 1, 144, 152), 3: shared(Direction.RECV, 0, 144, 152)}
    following = {
        rank: replace(communicator(rank - 2, 3, comm_hash=0xB2), host_connections=(unread[rank],) if rank in unread else ())
        for rank in (2, 3, 4)
    }
    begun = {"nsteps": 24, "base": 288}
    called = {"nsteps": 12, "comm_hash": 0xB2, "collective": "AllGather", "base": 144}
    operations = {
        0: (recv(3, posted=18, received=18, delivered=18, consumed=10, **begun),),
        1: (send(2, sent=18, done=18, produced=18, **begun),),
        2: (recv(1, posted=24, received=18, delivered=18, consumed=18, **begun),),
        3: (send(2, sent=0, done=0, produced=0, **called),),
        4: (recv(1, posted=8, received=0, delivered=0, consumed=0, **called),),
    }
    ranks = [
        Rank(
            rank,
            5,
            tuple(c for c in (own.get(rank), following.get(rank)) if c is not None),
            operations[rank],
            host="abc"[rank // 2],
        )
        for rank in range(5)
    ]
    verdict = diagnose(looks(ranks))
    assert named(verdict) == [0], verdict.evidence
    assert verdict.victims == (1, 2, 3, 4)


def test_an_error_that_nccl_reports_is_told_where_nothing_is_open() -> None:
    ranks = [Rank(rank, 2, (communicator(rank, 2),)) for rank in range(2)]
    assert diagnose(looks(ranks)).verdict_class is VerdictClass.IDLE
    ranks[1].communicators = (replace(ranks[1].communicators[0], async_result="ncclSystemError"),)
    verdict = diagnose(looks(ranks))
    assert verdict.verdict_class is VerdictClass.ERROR and verdict.rules == ("nothing-open",)
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert verdict.culprits[0].reason == "reports ncclSystemError"


def test_the_ranks_of_a_communicator_that_nobody_looked_at_are_told_by_number() -> None:
    ranks = [rank for rank in frozen_ring(2, world=8) if rank.rank not in (4, 5, 7)]
    unobserved = diagnose(looks(ranks, count=20)).unobserved
    assert [line for line in unobserved if line.endswith("3 of 8 ranks were not observed (4-5,7)")], unobserved
