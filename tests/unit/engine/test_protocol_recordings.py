"""Recordings of real jobs by LL, by LL128 and on a tree, in which a rank never came: judged anywhere, without privileges.

``python -m testbed.job`` with ``--fault stuck:rank=R,at=20`` made them; files are named for protocol, hosts and rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.state import Transport
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.target.image import load_snapshot

FOLDER = Path(__file__).resolve().parent.parent.parent / "fixtures" / "protocols"
NAMED = {"ll-shm-rank2": 2, "ll128-hosts-3-1-rank1": 1}


@pytest.mark.parametrize("name", NAMED)
def test_what_lines_say_names_the_rank_that_never_came(name: str) -> None:
    series = load_snapshot(FOLDER / f"{name}.ncclwatch")
    ends = [end for samples in series for end in samples[-1].communicators[0].host_connections]
    assert any(end.tail for end in ends if end.transport is Transport.SHM)
    verdict = diagnose(series)
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [NAMED[name]], verdict.evidence


TREES = {
    "tree-ll-hosts-2-2-rank1": 1,
    "tree-ll-hosts-3-1-rank1": 1,
    "tree-simple-hosts-2-2-rank1": 1,
    "tree-simple-hosts-3-1-rank2": 2,
}


@pytest.mark.parametrize("name", TREES)
def test_a_parent_in_a_tree_waits_for_its_children_in_the_node(name: str) -> None:
    """NCCL's own choice for small AllReduce on several nodes: rank 0 stands still for rank 1, which gave it nothing."""
    verdict = diagnose(load_snapshot(FOLDER / f"{name}.ncclwatch"))
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [TREES[name]], verdict.evidence
