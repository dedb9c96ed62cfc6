"""Hangs over InfiniBand verbs, judged by the engine: the guest's column of the matrix (`python -m vm.hangs` plays it too)."""

from __future__ import annotations

import os

import pytest

from testbed.job import VERSIONS, available
from vm.fabric import Fabric
from vm.guest import FULL_VARIABLE
from vm.hangs import HANGS, play

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(FULL_VARIABLE not in os.environ, reason=f"part of the full matrix: set {FULL_VARIABLE}"),
]


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_rank_or_the_port_is_named_live_and_afterwards(version: str, soft_roce: Fabric) -> None:
    if not available(version):
        pytest.skip(f"NCCL {version} is not in the cache")
    rows = list(play(soft_roce, version, list(HANGS.values()), seed=1))
    assert [row for row in rows if not row.right] == []
    assert {(row.hang, row.attach) for row in rows} == {(name, attach) for name in HANGS for attach in ("live", "post-hang")}
