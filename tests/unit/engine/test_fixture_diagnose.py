"""Snapshots of real jobs that hung, recorded on the CPU testbed: they decode and are judged anywhere, without privileges."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.target.image import load_snapshot

FIXTURES = sorted((Path(__file__).resolve().parent.parent.parent / "fixtures").glob("hung-*.ncclwatch"))


def test_every_release_has_its_fixtures() -> None:
    versions = {path.name.split("-")[1] for path in FIXTURES}
    assert versions == {"2.21.5", "2.27.5", "2.32.3"}


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_the_frozen_rank_is_named_from_the_file(path: Path) -> None:
    found = re.search(r"-rank(\d+)", path.name)
    assert found is not None
    victim = int(found[1])
    assert path.stat().st_size < 2 << 20
    series = load_snapshot(path)
    assert len(series) == 4 and all(len(samples) == 2 for samples in series)
    assert all(sample.communicators for samples in series for sample in samples)
    verdict = diagnose(series)
    assert verdict.verdict_class is VerdictClass.STOPPED, verdict.summary
    assert [culprit.rank for culprit in verdict.culprits] == [victim]
    assert verdict.victims, verdict.evidence
    assert not any(sample.unavailable for samples in series for sample in samples)
