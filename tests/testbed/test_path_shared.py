"""Flows that share a link, found by their rates alone on real packets: no router answers, and nothing is probed."""

from __future__ import annotations

import json
import random
import time
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest

from testbed.job import available
from testbed.path_jobs import COUNT, ncclwatch, pinned, recorded
from testbed.spines import LEAVES, Spines

pytestmark = [
    pytest.mark.attach,
    pytest.mark.paced,
    pytest.mark.long,
    pytest.mark.skipif(not available("2.27.5"), reason="NCCL 2.27.5 is not cached"),
]

SECONDS = 200.0
SPELL_S = (5.0, 16.0)
"""How long a spine is slow, or not, at a stretch."""
RATE, SLOW = 2_500_000, 900_000
"""Bytes a second of a spine's links when it is not and when it is."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fabric", [{"answers": False, "rate": RATE}], indirect=True)
def test_flows_of_a_spine_are_told_by_drops_of_their_rates(fabric: Spines, library: str, tmp_path: Path) -> None:
    """Two jobs with a channel on each of two spines. Each spine has spells in which its links carry less: flows of one job that
    are on different spines share nothing, flows of both jobs on one spine do."""
    recording = tmp_path / "jobs.recording"
    with ExitStack() as stack:
        jobs = []
        for number in range(2):
            plan = tmp_path / f"{number}.pins"
            plan.write_text(pinned(fabric, 40000 + 1000 * number, (0, 1)))
            jobs.append(stack.enter_context(fabric.job(pins=(library, str(plan)), count=COUNT)))
        stack.enter_context(recorded(recording, jobs))
        disturb(fabric, SECONDS)
    said = json.loads(ncclwatch("paths", "topology", str(recording), "--json"))
    flows = {spine_of(fabric, one): None for group in said["shared"] for one in group["flows"]}
    told = [(spine_of(fabric, a), spine_of(fabric, b)) for group in said["shared"] for a, b in combinations(group["flows"], 2)]
    right = sum(a[-1] == b[-1] for a, b in told)
    print(f"pairs told {len(told)}, right {right}, of 12 that share a spine; flows in groups {len(flows)} of 8")
    assert right >= 6 and right >= 0.9 * len(told), said["shared"]


def spine_of(fabric: Spines, flow: dict[str, object]) -> tuple[object, ...]:
    """Who the flow is, and at the end the spine that the kernel takes for it."""
    source, port = int(str(flow["source_port"])), int(str(flow["port"]))
    leaf = [fabric.address(number) for number in range(LEAVES)].index(str(flow["source"]))
    return leaf, port, source, fabric.route(leaf, str(flow["destination"]), port, source)


def disturb(fabric: Spines, seconds: float) -> None:
    """Spells of either spine for so long; those of one have nothing to do with those of the other."""
    draw = random.Random(7)
    now = time.monotonic()
    ends, due, slow = now + seconds, [now, now], [False, False]
    while (at := min(due)) < ends:
        time.sleep(max(0.0, at - time.monotonic()))
        spine = due.index(at)
        slow[spine] = not slow[spine]
        for leaf in range(LEAVES):
            fabric.limit(leaf, spine, SLOW if slow[spine] else RATE)
        due[spine] = at + draw.uniform(*SPELL_S)
