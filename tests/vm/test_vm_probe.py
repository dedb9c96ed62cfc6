"""The active probe over SoftRoCE: zero-payload writes from queue pairs of our own, and a link that is down."""

from __future__ import annotations

import pytest

from ncclwatch.pathprobe.listener import Listener
from ncclwatch.pathprobe.outcome import Answer
from ncclwatch.pathprobe.rdma import probe_rdma
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
    from ncclwatch.pathprobe.verbs import QueuePairProbe
    from ncclwatch.wire import abi

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
