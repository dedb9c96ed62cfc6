"""Ranks joined by shared memory: nothing that is queued shows, so what the rings say is all there is to know of who works."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.engine.job import Job, assemble
from ncclwatch.engine.slow.cadence import Cadence
from ncclwatch.engine.slow.equals import equals
from ncclwatch.engine.slow.looks import Activity, take_look
from ncclwatch.engine.slow.watch import SlowWatch
from ncclwatch.model.state import Communicator, Direction, Transport
from unit.synthetic import Rank, communicator, shared

WORLD = 4


def job_of(written: list[int], communicators: list[Communicator] | None = None) -> Job:
    """A ring in one host; each rank has written so many steps to the next and consumed all there was."""
    ranks = []
    for rank, tail in enumerate(written):
        own = communicators[rank] if communicators else communicator(rank, WORLD, transport=Transport.SHM)
        came = written[(rank - 1) % WORLD]
        ends = (
            shared(Direction.SEND, (rank + 1) % WORLD, tail, tail),
            shared(Direction.RECV, (rank - 1) % WORLD, came, came),
        )
        ranks.append(Rank(rank, WORLD, (replace(own, host_connections=ends),), host="node"))
    (job,) = assemble([rank.looks(1) for rank in ranks])
    return job


def activities(job: Job) -> list[Activity]:
    found = take_look(job).activities
    return [found[member.info.key] for member in job.members]


def test_who_is_behind_in_a_ring_works_and_the_others_wait() -> None:
    assert activities(job_of([8, 8, 4, 8])) == [Activity.WAITS, Activity.WAITS, Activity.COMPUTES, Activity.WAITS]


def test_where_nobody_waits_nothing_is_known_of_anybody() -> None:
    assert set(activities(job_of([8, 8, 8, 8]))) == {Activity.UNKNOWN}


def test_ends_of_a_ring_with_fewer_connections_do_equal_work() -> None:
    more = (0, 0, Direction.SEND, Transport.SHM)
    made = [communicator(rank, WORLD, transport=Transport.SHM) for rank in range(WORLD)]
    made[1:3] = [replace(one, transports=(*one.transports, more)) for one in made[1:3]]
    job, watch = job_of([8] * WORLD, made), SlowWatch()
    for member in job.members:
        watch.cadences.of[member.info.host, member.info.pid] = Cadence(marker=1, program=7)
    assert equals(job, None, watch.cadences).tolist() == [0, 0, 0, 0]
    over_the_network = [communicator(rank, WORLD, transport=Transport.NET if rank else Transport.SHM) for rank in range(WORLD)]
    assert equals(job_of([8] * WORLD, over_the_network), None, watch.cadences).tolist() == [-1, 1, 1, 1], "seen by other means"
