"""The guest itself: two RDMA ports that exchange data over a cable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vm.fabric import Fabric
from vm.perftest import run_perftest

pytestmark = pytest.mark.vm


def test_ports_are_active(soft_roce: Fabric) -> None:
    for port in (soft_roce.a, soft_roce.b):
        state = Path("/sys/class/infiniband", port.device, "ports/1/state").read_text().strip()
        assert state == "4: ACTIVE"


def test_23_writes_cross_the_cable(soft_roce: Fabric) -> None:
    before = _sent_packets(soft_roce)
    result = run_perftest("ib_write_bw", soft_roce, iterations=23, size=65536)
    assert result.iterations == 23
    assert result.size == 65536
    # 23 writes of 64 KiB in packets of 1 KiB or less cross the virtual cable, not the loopback.
    assert _sent_packets(soft_roce) - before >= 23 * 64


def test_root_is_the_hosts_under_an_overlay() -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    assert [kind for _, point, kind, *_ in mounts if point == "/"][-1] == "overlay"
    assert [options for source, _, kind, options, *_ in mounts if kind == "9p" and source == "root"] in ([], ["ro"])


def test_the_emulated_machine_sorts_like_a_real_one() -> None:
    """What the engine's columns stand on; see ``guest.CPU``."""
    generator = np.random.default_rng(7)
    for size in range(1, 200):
        numbers = generator.integers(-5, 6, size)
        assert numbers[np.argsort(numbers)].tolist() == sorted(numbers.tolist())
        assert np.unique(numbers).tolist() == sorted(set(numbers.tolist()))


def _sent_packets(fabric: Fabric) -> int:
    return int(Path("/sys/class/net", fabric.a.netdev, "statistics/tx_packets").read_text())
