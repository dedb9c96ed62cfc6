"""docs/threat-model.md: every claim names tests, and those are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "threat-model.md"
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def test_every_test_that_is_named_exists() -> None:
    named = _TEST.findall(DOC.read_text("utf-8"))
    assert len(named) > 30
    for file, name in named:
        path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "unit" / file
        assert f"\ndef {name}(" in path.read_text("utf-8"), (file, name)


def test_every_claim_names_a_test() -> None:
    rows = [line for line in DOC.read_text("utf-8").split("## Hostile input")[0].splitlines() if line.startswith("| ")]
    claims = [line for line in rows if not line.startswith(("| claim", "| ---"))]
    assert len(claims) >= 18
    assert [line for line in claims if not _TEST.search(line)] == []
