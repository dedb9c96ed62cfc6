"""The active probe over SoftRoCE: zero-payload writes of queue pairs of our own, by ports of our choice; a link that is down."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ncclwatch.pathprobe import varied_rdma
from ncclwatch.pathprobe.capture import capture
from ncclwatch.pathprobe.listener import Listener
from ncclwatch.pathprobe.outcome import Answer
from ncclwatch.pathprobe.rdma import probe_rdma
from ncclwatch.pathprobe.verbs import QueuePairProbe
from ncclwatch.wire import abi
from vm.fabric import Fabric

pytestmark = pytest.mark.vm


def test_zero_payload_writes_tell_a_live_path_from_a_dead_one(soft_roce: Fabric) -> None:
    """The ends agree over loopback, so that only what is between the two adapters decides."""
    a, b = soft_roce.a, soft_roce.b
    with Listener("127.0.0.1", 0, device=b.device, gid_index=b.gid_index) as listener:
        alive = probe_rdma("127.0.0.1", listener.port, a.device, gid_index=a.gid_index, count=7, timeout_s=10)
        assert (alive.answer, alive.answered) == (Answer.OK, 7), alive
        assert all(0 < trip < 10 for trip in alive.round_trips)
        try:
            soft_roce.set_down(b)
            dead = probe_rdma("127.0.0.1", listener.port, a.device, gid_index=a.gid_index, timeout_s=20)
        finally:
            soft_roce.set_up()
        # The listener's own port is down and says so, or nobody acknowledges.
        assert dead.answer in (Answer.TIMEOUT, Answer.NO_ROUTE, Answer.UNAVAILABLE), dead
        assert dead.answered == 0
        again = probe_rdma("127.0.0.1", listener.port, a.device, gid_index=a.gid_index, count=2, timeout_s=10)
        assert again.answer is Answer.OK, again


def test_a_path_that_dies_while_it_is_probed(soft_roce: Fabric) -> None:
    """Both ends are connected; then packets are dropped on the way: retries run out, and nobody is said to have answered."""
    a, b = soft_roce.a, soft_roce.b
    with QueuePairProbe(a.device, gid_index=a.gid_index) as near, QueuePairProbe(b.device, gid_index=b.gid_index) as far:
        far.connect(near.address)
        near.connect(far.address)
        status, _ = near.write(10)
        assert status == abi.Status.SUCCESS
        try:
            soft_roce.set_down(b)
            status, elapsed = near.write(20)
        finally:
            soft_roce.set_up()
        assert status in (abi.Status.RETRY_EXC_ERR, None)
        assert elapsed > 0.05


@pytest.mark.timeout(1200)
def test_queue_pairs_of_ours_leave_by_the_source_ports_they_are_given(soft_roce: Fabric) -> None:
    """By capture: one way, and the acknowledgements; the lowest port is the one whose label must not be 0."""
    a, b = soft_roce.a, soft_roce.b
    there, back = 0xC000, 50021
    with QueuePairProbe(a.device, gid_index=a.gid_index) as near, QueuePairProbe(b.device, gid_index=b.gid_index) as far:
        far.connect(near.address, back)
        near.connect(far.address, there)
        ends = (a.address, far.address.qp), (b.address, near.address.qp)
        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(capture, (a.netdev, b.netdev), ends, 120.0)
            while not seen.done():
                assert near.write(60)[0] == abi.Status.SUCCESS
        assert seen.result() == {ends[0]: {there}, ends[1]: {back}}
    with Listener("127.0.0.1", 0, device=b.device, gid_index=b.gid_index) as listener:
        trips = varied_rdma.probe((a.device, 1), ("127.0.0.1", listener.port), [there, 50001], 3)
    assert {port: len(each) for port, each in trips.items()} == {there: 3, 50001: 3}
