"""One judge a job: leases and the log of verdicts on a real nats-server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fleet.servers import NatsServer
from ncclwatch.fleet import streams
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.lease import Lease, bucket, held
from ncclwatch.fleet.verdict_log import Record, SupersededError, VerdictLog
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.messaging.subjects import VERDICTS

TTL_S = 1.0


@pytest.fixture
def bus(nats_server: NatsServer) -> Iterator[Connection]:
    with Connection(Access(nats_server.address)) as connection:
        connection.call(streams.ensure(connection.jetstream, VERDICTS))
        yield connection


def lease_of(bus: Connection, owner: str, ttl_s: float = TTL_S) -> Lease:
    return Lease(bus.jetstream, bus.call(bucket(bus.jetstream, ttl_s)), "job.j", owner.encode(), ttl_s)


def accusing(rank: int, kind: str = "stopped") -> dict[str, Any]:
    return {"class": kind, "culprits": [{"rank": rank, "host": "node0", "pid": 100 + rank}], "summary": f"rank {rank}"}


def log_of(bus: Connection) -> list[Record]:
    """All records of job j, first to last."""

    async def read() -> list[Record]:
        import msgspec

        stream = await bus.jetstream.stream_info("NCW_VERDICTS")
        found = [await bus.jetstream.get_msg("NCW_VERDICTS", seq=n) for n in range(1, stream.state.last_seq + 1)]
        return [msgspec.json.decode(one.data or b"", type=Record) for one in found]

    return bus.call(read(), 20)


def until(condition: Any, within_s: float = 60.0) -> float:
    """Wait for a condition; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - began


def test_one_holds_a_lease_and_the_next_has_a_later_epoch(bus: Connection) -> None:
    first, second = lease_of(bus, "a"), lease_of(bus, "b")
    assert bus.call(first.acquire())
    assert not bus.call(second.acquire())
    assert first.holds
    assert not second.holds
    assert bus.call(held(bus.jetstream)) == {"job.j"}
    bus.call(first.release())
    assert not first.holds
    assert bus.call(second.acquire())
    assert second.epoch > first.epoch


def test_a_lease_is_kept_by_refreshing_it_and_runs_out_without(bus: Connection) -> None:
    first, second = lease_of(bus, "a", 5.0), lease_of(bus, "b", 5.0)
    assert bus.call(first.acquire())
    epoch = first.epoch
    for _ in range(4):
        time.sleep(0.1)
        assert bus.call(first.refresh())
    assert first.epoch == epoch
    assert not bus.call(second.acquire())
    # The server lets it go; the holder has known earlier that it might.
    until(lambda: bus.call(second.acquire()))
    assert not first.holds
    assert not bus.call(first.refresh())


def test_a_refresh_whose_answer_was_lost_is_no_loss(bus: Connection) -> None:
    lease = lease_of(bus, "a", 30.0)
    assert bus.call(lease.acquire())
    # As if the client had given up waiting: the server has a later revision than the holder knows.
    bus.call(lease.bucket.put("job.j", b"a"))
    assert bus.call(lease.refresh())
    assert lease.holds
    # Stolen: the same, by somebody else.
    bus.call(lease.bucket.put("job.j", b"thief"))
    assert not bus.call(lease.refresh())
    assert not lease.holds


def test_a_lease_outlives_a_server_that_is_killed(nats_server: NatsServer, bus: Connection) -> None:
    lease = lease_of(bus, "a", 60.0)
    assert bus.call(lease.acquire())
    nats_server.kill()
    nats_server.start()
    until(lambda: bus.connected)
    assert bus.call(lease.refresh())
    bus.call(lease.release())
    again = lease_of(bus, "b", 60.0)
    assert bus.call(again.acquire())
    assert again.epoch > lease.epoch > -1


def test_what_was_told_is_told_once_over_judges(bus: Connection) -> None:
    one, two = VerdictLog(bus.jetstream, "j", "one"), VerdictLog(bus.jetstream, "j", "two")
    bus.call(one.take_over(5))
    told = bus.call(one.tell(accusing(3)))
    assert told is not None
    assert bus.call(one.tell(accusing(3))) is None
    assert bus.call(two.take_over(8)).state.is_open
    assert two.standing == accusing(3)
    assert bus.call(two.tell(accusing(3))) is None
    for late in (one.tell(accusing(4)), one.recover()):
        with pytest.raises(SupersededError):
            bus.call(late)
    over = bus.call(two.recover())
    assert over is not None
    assert over.duration_s is not None
    assert bus.call(two.recover()) is None
    # The same trouble again is another finding.
    again = bus.call(two.tell(accusing(3)))
    assert again is not None
    assert again.id != told.id
    assert [record.type for record in log_of(bus)] == ["takeover", "verdict", "takeover", "recovery", "verdict"]


def test_a_job_that_is_part_of_another_leaves_nothing_standing(bus: Connection) -> None:
    log = VerdictLog(bus.jetstream, "j", "one")
    bus.call(log.take_over(1))
    bus.call(log.tell(accusing(3)))
    record = bus.call(log.join("older"))
    assert (record.into, record.verdict) == ("older", accusing(3))
    assert not bus.call(VerdictLog(bus.jetstream, "j", "two").take_over(2)).state.is_open
    assert [found.type for found in log_of(bus)] == ["takeover", "verdict", "joined", "takeover"]


def test_an_earlier_epoch_cannot_take_over(bus: Connection) -> None:
    one, two = VerdictLog(bus.jetstream, "j", "one"), VerdictLog(bus.jetstream, "j", "two")
    bus.call(two.take_over(8))
    with pytest.raises(SupersededError):
        bus.call(one.take_over(5))
    assert bus.call(two.tell(accusing(1))) is not None


def test_an_append_whose_answer_was_lost_is_neither_lost_nor_told_twice(bus: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    log = VerdictLog(bus.jetstream, "j", "one")
    bus.call(log.take_over(1))
    real = bus.jetstream.publish
    lost = 0

    async def publish(*arguments: Any, **named: Any) -> Any:
        nonlocal lost
        answer = await real(*arguments, **named)
        lost += 1
        if lost == 1:
            raise TimeoutError
        return answer

    monkeypatch.setattr(bus.jetstream, "publish", publish)
    assert bus.call(log.tell(accusing(3))) is not None
    assert bus.call(log.recover()) is not None
    assert [record.type for record in log_of(bus)] == ["takeover", "verdict", "recovery"]


def test_the_log_goes_on_over_a_server_that_is_killed(nats_server: NatsServer, bus: Connection) -> None:
    log = VerdictLog(bus.jetstream, "j", "one")
    bus.call(log.take_over(1))
    bus.call(log.tell(accusing(3)))
    nats_server.kill()
    nats_server.start()
    until(lambda: bus.connected)
    assert bus.call(log.recover()) is not None
    assert [record.type for record in log_of(bus)] == ["takeover", "verdict", "recovery"]


PAUSED = """
import json, sys, time
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.fleet import streams
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.lease import Lease, bucket
from ncclwatch.fleet.verdict_log import SupersededError, VerdictLog

url, ttl_s, check = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "check"
with Connection(Access(url)) as bus:
    lease = Lease(bus.jetstream, bus.call(bucket(bus.jetstream, ttl_s)), "job.j", b"paused", ttl_s)
    assert bus.call(lease.acquire())
    log = VerdictLog(bus.jetstream, "j", "paused")
    bus.call(log.take_over(lease.epoch))
    print("judging", flush=True)
    sys.stdin.readline()
    # Without looking at its lease it is the server that refuses.
    if check and not lease.holds:
        print("lost", flush=True)
    else:
        try:
            bus.call(log.tell(json.loads(sys.argv[4])))
            print("told", flush=True)
        except SupersededError:
            print("refused", flush=True)
"""


@pytest.mark.parametrize(("check", "said"), [("check", "lost"), ("no-check", "refused")])
def test_a_judge_that_was_stopped_says_nothing(nats_server: NatsServer, bus: Connection, check: str, said: str) -> None:
    command = [sys.executable, "-c", PAUSED, nats_server.address, str(TTL_S), check, json.dumps(accusing(1))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as paused:
        assert paused.stdin is not None
        assert paused.stdout is not None
        try:
            assert paused.stdout.readline() == "judging\n"
            paused.send_signal(signal.SIGSTOP)
            other = lease_of(bus, "other")
            took = until(lambda: bus.call(other.acquire()))
            print(f"the lease of a judge that was stopped was free after {took:.2f} s (it runs for {TTL_S:.0f} s)")
            log = VerdictLog(bus.jetstream, "j", "other")
            bus.call(log.take_over(other.epoch))
            assert bus.call(log.tell(accusing(2))) is not None
            paused.send_signal(signal.SIGCONT)
            paused.stdin.write("\n")
            paused.stdin.flush()
            assert paused.stdout.readline() == f"{said}\n"
        finally:
            paused.kill()
    assert [(record.type, record.judge) for record in log_of(bus)] == [
        ("takeover", "paused"), ("takeover", "other"), ("verdict", "other"),
    ]  # fmt: skip
