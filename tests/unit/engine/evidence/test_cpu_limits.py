"""What CPU limits do to processes, between their samples."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.engine.evidence.base import FactKind, RankNode, Strength
from ncclwatch.engine.evidence.kernel import throttled_share
from ncclwatch.model.state import CpuLimit, ProcessSample
from unit.engine.evidence.said import case_of
from unit.synthetic import frozen_ring, looks


def limited(samples: list[list[ProcessSample]], ranks: dict[int, tuple[int, int]]) -> list[list[ProcessSample]]:
    """The second sample of these ranks says (periods, throttled) more than the first."""
    done = []
    for rank, own in enumerate(samples):
        more = ranks.get(rank, (0, 0))
        base = CpuLimit(100, 10) if rank in ranks else CpuLimit(0, 0)
        later = CpuLimit(base.periods + more[0], base.throttled + more[1])
        done.append([replace(own[0], cpu_limit=base), *(replace(one, cpu_limit=later) for one in own[1:])])
    return done


def throttled(series: list[list[ProcessSample]]) -> list[tuple[object, Strength, float | None]]:
    return [(fact.subject, fact.strength, fact.value) for fact in case_of(series).facts.of(FactKind.THROTTLED)]


def test_the_share_between_the_samples_is_proven() -> None:
    series = limited(looks(frozen_ring(2)), {2: (50, 40), 1: (50, 0)})
    assert throttled(series) == [(RankNode(2), Strength.PROVEN, 0.8)]
    (fact,) = case_of(series).facts.of(FactKind.THROTTLED)
    assert fact.text == "rank 2 (node2, pid 1002): a CPU limit holds it back in 80% of the limit's periods"


def test_where_hardly_a_period_has_passed_all_so_far_are_likely() -> None:
    known = CpuLimit(139, 125, 7)
    series = looks(frozen_ring(2))
    series[2] = [replace(sample, cpu_limit=known) for sample in series[2]]
    assert throttled(series) == [(RankNode(2), Strength.LIKELY, 125 / 139)]


def test_shares_between_readings() -> None:
    assert throttled_share(CpuLimit(10, 1), CpuLimit(20, 6)) == 0.5
    assert throttled_share(CpuLimit(0, 0), CpuLimit(0, 0)) == 0.0, "no limit"
    assert throttled_share(None, CpuLimit(5, 1)) is None and throttled_share(CpuLimit(5, 1), None) is None
    assert throttled_share(CpuLimit(0, 0), CpuLimit(90, 80)) is None, "put into the group in between: its past is not its own"
    assert throttled_share(CpuLimit(90, 80), CpuLimit(3, 1)) is None, "moved to another group"
