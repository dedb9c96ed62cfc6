"""Snapshots of jobs that hung on a real GPU (four ranks on an NVIDIA H200, driver 580.159.04), judged without one.

``tests/gpu/test_gpu_faults.py`` made them with ``$OUT`` set; files are named for release, way and fault.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.test_gpu_faults import FAULTS, HIDDEN, VICTIM
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.target.image import load_snapshot

FILES = sorted((Path(__file__).resolve().parent.parent.parent / "fixtures" / "h200").glob("*.ncclwatch"))


def way_and_fault(path: Path) -> tuple[str, str]:
    name = path.stem.partition("-")[2]
    fault = next(fault for fault in FAULTS if name.endswith(f"-{fault}"))
    return name.removesuffix(f"-{fault}"), fault


def test_every_protocol_algorithm_and_fault_is_there() -> None:
    found = {way_and_fault(path) for path in FILES}
    ways = {way for way, _ in found}
    assert {
        "LL-ring",
        "Simple-ring",
        "LL128-ring",
        "LL-tree",
        "Simple-tree",
        "as-NCCL-likes",
        "graph",
        "P2P",
        "P2P-graph",
    } <= ways
    assert found == {(way, fault) for way in ways for fault in FAULTS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_rank_with_the_fault_is_named_where_memory_tells_it(path: Path) -> None:
    way, fault = way_and_fault(path)
    verdict = diagnose(load_snapshot(path))
    told = f"{verdict.verdict_class}: {verdict.summary} {verdict.evidence}"
    if (way, fault) in HIDDEN:
        assert not verdict.culprits and verdict.unobserved, told
        return
    assert [culprit.rank for culprit in verdict.culprits] == [VICTIM], told
    assert verdict.verdict_class in FAULTS[fault].classes, told
