"""The table of rules in the documents is the table of the engine."""

from __future__ import annotations

from pathlib import Path

from ncclwatch.engine.rules import markdown

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_rules_in_the_document_are_those_of_the_engine() -> None:
    text = (DOCS / "engine.md").read_text("utf-8")
    assert "\n".join(markdown(short=True)) in text, "python -m ncclwatch.engine.rules --short"


def test_the_model_fits_on_few_pages() -> None:
    lines = sum(len((DOCS / name).read_text("utf-8").splitlines()) for name in ("engine.md", "slowdowns.md"))
    assert lines <= 250
