"""How far a sender has written into shared memory by LL and LL128, from the flags in its slots."""

from __future__ import annotations

import pytest

from ncclwatch.model.state import ProcessSample
from ncclwatch.target.shmlines import STEPS, produced
from unit.target.test_memory_state import look
from unit.target_fake import FakeJob, released_layout

NONE = (0,) * STEPS
WRAP = 1 << 32


def slots(*steps: int) -> tuple[int, ...]:
    """Flags after these steps (counted from 1) were written."""
    flags = [0] * STEPS
    for step in steps:
        flags[(step - 1) % STEPS] = step
    return tuple(flags)


@pytest.mark.parametrize(
    ("head", "tail", "ll", "ll128", "expected"),
    [
        (100, 104, NONE, NONE, 104),  # Simple alone
        (0, 0, slots(1, 2, 3), NONE, 3),  # nothing consumed yet
        (20, 0, slots(*range(16, 24)), NONE, 23),
        (20, 0, NONE, slots(*range(15, 23)), 22),
        (20, 0, slots(*range(14, 20)), slots(20, 21), 21),  # LL128 after LL
        (17, 16, slots(*range(5, 9), 17, 18), NONE, 18),  # LL after Simple
        (8, 16, slots(*range(1, 7)), NONE, 16),  # Simple after LL
        (8, 6, slots(*range(1, 7)), NONE, 8),  # Simple rounds up what is consumed before it writes
        (8, 0, slots(*range(1, 7)), NONE, None),  # two steps without data were consumed
        (8, 8, slots(*range(1, 7)), NONE, 8),
        (20, 0, slots(*range(13, 21)), NONE, 20),  # all consumed
        (3, 0, slots(4, 6), NONE, None),  # step 5 left nothing: whether 7 did is not known either
        (18, 16, slots(5, 19), NONE, None),  # a gap that was consumed: this sender's messages have some
        (0, 0, slots(*range(5, 13)), NONE, 8),  # read later than the head: at most a buffer ahead
    ],
)
def test_produced(head: int, tail: int, ll: tuple[int, ...], ll128: tuple[int, ...], expected: int | None) -> None:
    assert produced(head, tail, (ll, ll128)) == expected


def test_flags_of_ll_wrap_and_those_of_ll128_do_not() -> None:
    around = range(WRAP - 3, WRAP + 5)
    assert produced(WRAP + 1, 0, (tuple(step % WRAP for step in _by_slot(around)), NONE)) in (WRAP + 4, None)
    assert produced(WRAP + 1, 0, (NONE, tuple(_by_slot(around)))) == WRAP + 4


def _by_slot(steps: range) -> list[int]:
    return sorted(steps, key=lambda step: (step - 1) % STEPS)


def shared(version: tuple[int, int, int], ll: tuple[int, ...], device_offset: int) -> ProcessSample:
    """One connection in shared memory whose GPU addresses differ from the process's own by an offset."""
    job = FakeJob(released_layout(version))
    process, layout = job.process, job.layout
    send = process.new("ncclSendMem", head=2)
    recv = process.allocate(layout.size("ncclRecvMem") + (16 << 20), 4096)
    process.write(recv, bytes(layout.size("ncclRecvMem")))
    step_bytes, ll128_bytes = 65536, 614400
    buffer = recv + layout.size("ncclRecvMem")
    for slot, flag in enumerate(ll):
        process.write(buffer + slot * step_bytes + 4, flag.to_bytes(4, "little"))
        process.write(buffer + 8 * step_bytes + slot * ll128_bytes + 120, bytes(8))
    resources = process.new(
        "shmSendResources", hostMem=send, remHostMem=recv, devHostMem=send + device_offset, devRemHostMem=recv + device_offset
    )
    job.connect(0, 2, "send", "SHM", resources)
    for index, size in enumerate((8 * step_bytes, 8 * ll128_bytes)):
        process.set(job.comm, f"ncclComm.buffSizes[{index}]", size)
    connector = job.peers[(0, 2)] + layout.member("ncclChannelPeer.send").at(0)
    first = buffer + device_offset
    process.set(connector, "ncclConnector.conn.buffs[0]", first)
    process.set(connector, "ncclConnector.conn.buffs[1]", first + 8 * step_bytes)
    return look(job)


@pytest.mark.parametrize("version", [(2, 18, 3), (2, 21, 5), (2, 27, 5), (2, 32, 3)])
@pytest.mark.parametrize("device_offset", [0, 1 << 40])
def test_lines_are_found_where_the_process_has_them(version: tuple[int, int, int], device_offset: int) -> None:
    (connection,) = shared(version, slots(1, 2, 3, 4, 5), device_offset).communicators[0].host_connections
    assert (connection.head, connection.tail) == (2, 5)


def test_steps_without_data_leave_the_tail_open() -> None:
    sample = shared((2, 27, 5), slots(1, 3), 0)
    assert sample.communicators[0].host_connections[0].tail is None
    assert "some steps have no data" in sample.unavailable["steps written into shared memory"]
