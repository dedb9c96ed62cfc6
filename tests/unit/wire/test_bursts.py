"""The order of things in a burst: nothing counts while probes come and go, and one that fails leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from ncclwatch.errors import NcclwatchError
from ncclwatch.probes.instructions import CostClass
from ncclwatch.wire.bursts import Bursts
from ncclwatch.wire.governor import Governor
from ncclwatch.wire.prices import HitCost


class Kernel:
    def __init__(self, told: list[str]) -> None:
        self.told = told

    def pause(self) -> None:
        self.told.append("pause")

    def new_generation(self) -> int:
        self.told.append("count")
        return 1

    def resume(self) -> None:
        self.told.append("resume")

    def threads(self) -> dict[tuple[int, int], Any]:
        return {}


class Plane:
    """A plane without processes that notes what is done to it; ``fails`` in reading the accounts, so many times."""

    def __init__(self, fails: int = 0) -> None:
        self.told: list[str] = []
        self.kernel = Kernel(self.told)
        self.processes: dict[int, object] = {}
        self.fails = fails

    def attach(self, pids: Iterable[int] | None = None, *, paused: bool = False) -> None:
        assert paused
        self.kernel.pause()
        self.told.append(f"attach {'all' if pids is None else sorted(pids)}")

    def detach(self) -> None:
        self.told.append("detach")

    def accounts(self) -> list[object]:
        if "detach" in self.told and self.fails:
            self.fails -= 1
            raise NcclwatchError("the process has ended", "")
        return []


def bursts_of(plane: Plane) -> Bursts:
    governor = Governor({CostClass.EMULATED: HitCost(500.0, 800.0)}, 0.5)
    governor.enrol(7, 0)
    return Bursts(plane, governor)  # type: ignore[arg-type]


def test_between_two_moments_everything_counts_and_nothing_outside() -> None:
    plane = Plane()
    bursts = bursts_of(plane)
    assert bursts.order(0.004, 0.5, {7, 5}) == []
    assert plane.told == ["pause", "attach [5, 7]", "count", "pause", "detach", "resume"]
    began, ended = bursts.counted_ns
    assert ended - began > 3_000_000
    assert (bursts.governor.ordered, bursts.governor.bursts, bursts.governor.attached) == (1, 0, False)


def test_a_burst_that_fails_is_ended_and_the_next_one_can_begin() -> None:
    plane = Plane(fails=1)
    bursts = bursts_of(plane)
    with pytest.raises(NcclwatchError):
        bursts.order(0.002, 0.5)
    assert bursts.governor.attached
    bursts.abort()
    assert plane.told[-2:] == ["detach", "resume"] and not bursts.governor.attached
    assert bursts.order(0.002, 0.5) == []
