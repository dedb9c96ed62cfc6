"""The order of things in a burst: nothing counts while probes come and go, and one that fails leaves nothing behind."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from ncclwatch.errors import NcclwatchError
from ncclwatch.probes.instructions import CostClass
from ncclwatch.wire import bursts as module
from ncclwatch.wire import layouts
from ncclwatch.wire.bursts import Bursts
from ncclwatch.wire.governor import Governor
from ncclwatch.wire.plane import WatchedProcess
from ncclwatch.wire.prices import HitCost
from ncclwatch.wire.sites import TAKEN, Site


class Kernel:
    def __init__(self, told: list[str]) -> None:
        self.told = told
        self.lost = 0
        self.hits = 0

    def pause(self) -> None:
        self.told.append("pause")

    def new_generation(self) -> int:
        self.told.append("count")
        return 1

    def resume(self) -> None:
        self.told.append("resume")

    def threads(self) -> dict[tuple[int, int], Any]:
        record = np.zeros(1, layouts.THREAD)[0]
        record["takes"] = self.hits
        return {(7, 8): record}

    def counters(self) -> dict[str, int]:
        return {"unattributed": self.lost}


class Plane:
    """A plane of one process that notes what is done to it; ``fails`` in reading the accounts, so many times."""

    def __init__(self, fails: int = 0, *, light: bool = False) -> None:
        self.told: list[str] = []
        self.kernel = Kernel(self.told)
        site = Site(7, 1, 2, "on_taken", False, TAKEN, "", "", CostClass.EMULATED)
        self.processes = {7: WatchedProcess(7, taken=[site])}
        self.fails = fails
        self.can_be_light = light
        self.light = False

    def attach(self, pids: Iterable[int] | None = None, *, paused: bool = False, light: bool = False) -> None:
        assert paused
        self.light = light
        self.kernel.pause()
        self.told.append(f"attach {'all' if pids is None else sorted(pids)}{' light' if light else ''}")

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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and bursts of a moment."""
    monkeypatch.setattr(module, "WINDOW_S", 0.005)
    monkeypatch.setattr("ncclwatch.wire.governor.MAX_BURST_S", 0.004)


@pytest.mark.usefixtures("quick")
def test_probes_that_only_work_hits_stay_in_place_while_that_is_cheap() -> None:
    plane = Plane(light=True)
    bursts = bursts_of(plane)
    assert bursts.step() == [] and bursts.unbroken and not bursts.complete
    assert plane.told == ["pause", "attach all light", "count"]
    first = bursts.counted_ns
    assert bursts.step() is None, "the window is not over"
    time.sleep(0.006)
    assert bursts.step() == [] and bursts.complete
    assert bursts.counted_ns[0] == first[1], "nothing is missing between two windows"
    plane.kernel.hits += 10**15
    time.sleep(0.006)
    assert bursts.step() == [] and not bursts.unbroken, "that cost more than there was"
    assert plane.told[3:] == ["pause", "detach", "resume"]
    assert bursts.governor.cut_short == 1 and bursts.step() is None


@pytest.mark.usefixtures("quick")
def test_an_order_ends_what_went_on_and_polls_are_probed_for_it() -> None:
    plane = Plane(light=True)
    bursts = bursts_of(plane)
    bursts.step()
    assert bursts.interrupted() == [] and not bursts.unbroken
    bursts.order(0.002, 0.5)
    assert plane.told[3:7] == ["pause", "detach", "resume", "pause"] and plane.told[7] == "attach all"
    assert not plane.light


@pytest.mark.usefixtures("quick")
def test_where_completions_are_taken_elsewhere_polls_are_probed() -> None:
    plane = Plane(light=True)
    bursts = bursts_of(plane)
    bursts.step()
    plane.kernel.lost = 1
    time.sleep(0.006)
    assert bursts.step() is None and not bursts.unbroken, "what was counted so is not told"
    assert plane.told[3:] == ["pause", "detach", "resume"]
    bursts.governor.enrol(7, 0)
    time.sleep(0.5)
    assert bursts.step() == [] and plane.told[7] == "attach all"
