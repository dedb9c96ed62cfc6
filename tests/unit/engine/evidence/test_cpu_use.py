"""CPUs that processes use and wait for, between two samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.engine.evidence.base import FactKind, Measure, Quantity
from ncclwatch.engine.evidence.cpu_use import CpuUse, cpus_used, cpus_waited
from ncclwatch.engine.nodes import RankNode
from unit.engine.evidence.said import case_of
from unit.synthetic import SECOND, frozen_ring, looks


def test_use_and_waits_are_averages_over_the_time_between_the_samples() -> None:
    series = looks(frozen_ring(run_state="S"), count=3)
    series[1] = [
        replace(sample, cpu_time_ns=number * 3 * SECOND, run_queue_wait_ns=number * SECOND // 4)
        for number, sample in enumerate(series[1])
    ]
    case = case_of(series)
    found = {(fact.subject, fact.quantity): fact for fact in case.facts.of(FactKind.SLOWED, Measure)}
    assert {key: fact.value for key, fact in found.items()} == {
        (RankNode(1), Quantity.CPU_USED): 3.0,
        (RankNode(1), Quantity.CPU_WAITED): 0.25,
    }
    used = found[RankNode(1), Quantity.CPU_USED]
    assert used.interval == (1_700_000_000.0, 1_700_000_002.0) and used.quantity.unit == "CPUs"
    assert "use 3.0 CPUs" in used.text
    coverage = CpuUse().coverage(case)
    assert (coverage.seen, coverage.wanted) == (1, 4)


@pytest.mark.parametrize(("before", "after"), [(None, 5), (5, None), (9, 5)])
def test_what_was_not_read_or_has_fallen_since_is_not_known(before: int | None, after: int | None) -> None:
    first, second = looks(frozen_ring())[0]
    pair = (
        replace(first, run_queue_wait_ns=before, cpu_time_ns=before),
        replace(second, run_queue_wait_ns=after, cpu_time_ns=after),
    )
    assert cpus_waited(*pair) is None and cpus_used(*pair) is None
    assert cpus_used(replace(first, cpu_time_ns=0), replace(first, cpu_time_ns=5)) is None, "no time has passed"
