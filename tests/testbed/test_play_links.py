"""Faults of links in a played scenario last as long as the play: cables and traffic are processes that somebody has to hold."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ncclwatch.simulate.scenario import FaultKind, load_all
from ncclwatch.simulate.testbed import plan
from score.__main__ import SCENARIOS
from score.real import Transport, as_played
from testbed.netns import Host, Network, wait_until
from testbed.play import LINK_RATE, Play

pytestmark = [pytest.mark.attach]


def sent(host: Host) -> int:
    """Bytes that a host has sent on its first rail."""
    told = json.loads(host.run(f"ip -s -j link show nic0h{host.index}"))
    return int(told[0]["stats64"]["tx"]["bytes"])


@pytest.mark.long
def test_a_late_link_and_other_traffic_last_until_the_play_ends() -> None:
    """Iterations go on through the cable after everything that was to be done is done, and the traffic goes on beside them."""
    (limited,) = [scenario for scenario in load_all(SCENARIOS) if scenario.name == "quick-slow-link"]
    (fault,) = limited.faults
    late = replace(fault, rank=2, start_s=1.0, strength=1.0, delay_ms=20.0)
    traffic = replace(fault, kind=FaultKind.BACKGROUND_TRAFFIC, rank=3, peer=None, start_s=1.0)
    made = plan(as_played(replace(limited, faults=(late, traffic)), "2.27.5", Transport.SOCKET), links=True)
    with Network(hosts=len(made.hosts), rate=LINK_RATE) as network, Play(made, network=network) as play:
        play.begin()
        play.wait_onset(60)
        wait_until("both faults have begun", lambda: len(play.actions_done) == 2)
        play.job.wait_progress(2)
        frames, traffic_bytes = network.link(2).frames()[0], sent(network.host(3))
        play.job.wait_progress(3)
        assert network.link(2).frames()[0] > frames
        assert sent(network.host(3)) > traffic_bytes + LINK_RATE / 4
        assert play.problem is None
