"""What a culprit costs: the measured loss where there is a past, what is seen of it where there is none."""

from __future__ import annotations

import pytest

from ncclwatch.engine.slow.classify import costs
from ncclwatch.engine.slow.detect import SlowDown
from ncclwatch.engine.slow.findings import Finding
from ncclwatch.model.verdict import SlowKind as Kind

SLOW = SlowDown(since=0.0, newest=0.0, normal_s=0.6, mean_s=1.0, iterations=20, slow=20)


def finding(share: float) -> Finding:
    return Finding(Kind.COMPUTE, (0,), share, 8, 0.0)


def test_one_culprit_costs_what_was_lost_however_the_looks_fell() -> None:
    for share in (0.25, 0.4, 0.7):
        (cost,) = costs([finding(share)], SLOW, 1.0)
        assert cost is not None and cost.share == pytest.approx(0.4) and cost.without == pytest.approx(0.6)
        assert cost.text() == "costs 40% of the iteration (0.40 s; without it: 0.60 s)"


def test_a_culprit_that_explains_little_is_not_charged_with_everything() -> None:
    (cost,) = costs([finding(0.1)], SLOW, 1.0)
    assert cost is not None and cost.seconds == pytest.approx(0.1) and cost.without == pytest.approx(0.9)


def test_several_culprits_share_the_loss() -> None:
    first, second = costs([finding(0.3), finding(0.1)], SLOW, 1.0)
    assert first is not None and second is not None
    assert first.seconds == pytest.approx(0.3) and second.seconds == pytest.approx(0.1)


def test_without_a_past_the_looks_say_it_and_without_iterations_nobody_does() -> None:
    (cost,) = costs([finding(0.25)], None, 2.0)
    assert cost is not None and cost.seconds == pytest.approx(0.5) and cost.without == pytest.approx(1.5)
    assert cost.least, "of who waits the looks show some"
    assert costs([finding(0.25)], None, None) == [None]
