"""The tables of knowledge: form, words, sources, and that every pattern can occur and tells a near miss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ncclwatch.engine.rules import RULES
from ncclwatch.knowledge.match import Seen, cause_of, finding_of, fits, slow_cause_of, words_known
from ncclwatch.knowledge.rows import LISTS, Row, TableError, parse, parse_release, rows
from ncclwatch.model.cause import Cause
from ncclwatch.model.verdict import SlowCause
from ncclwatch.model.verdict import SlowKind as Kind

FIXTURES = Path(__file__).parents[2] / "fixtures"
ROWS = [pytest.param(row, id=row.id) for row in rows()]
NCCL = re.compile(r"nccl:v\d+\.\d+\.\d+-1( [0-9a-f]{8})?")
ISSUE = re.compile(r"issue:[\w.-]+/[\w.-]+#\d+")
PAPER = re.compile(r"paper:(c4|ccl-d|megatrace|mycroft) \S.*")
NEWEST = parse_release("2.99.0")


def test_ids_are_unique_and_defects_are_many() -> None:
    ids = [row.id for row in rows()]
    assert len(set(ids)) == len(ids)
    assert sum(row.defect for row in rows()) >= 20


@pytest.mark.parametrize("row", ROWS)
def test_a_pattern_asks_for_what_can_occur(row: Row) -> None:
    known = words_known()
    for key, values in row.when.lists.items():
        assert key in LISTS
        assert values <= known.get(key, values), f"{key}: {values - known[key]}"
    assert {"class", "cause", "doing", "gpu", "finding", "slow"} & set(row.when.lists), "it would fit any verdict"


@pytest.mark.parametrize("row", ROWS)
def test_each_row_cites_what_exists(row: Row) -> None:
    assert any(not source.startswith("engine:") for source in row.sources), "our own rule alone is no source"
    for source in row.sources:
        kind, _, rest = source.partition(":")
        if kind == "fixture":
            assert list(FIXTURES.glob(f"{rest}*")), source
        elif kind == "engine":
            assert rest.removeprefix("rule ") in {rule.id for rule in RULES}, source
        elif kind == "reference":
            assert rest.startswith("https://"), source
        else:
            assert NCCL.fullmatch(source) or ISSUE.fullmatch(source) or PAPER.fullmatch(source), source


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in rows() if row.defect])
def test_a_known_defect_has_a_reference_of_nccl_and_says_how_to_tell(row: Row) -> None:
    assert any(source.startswith(("nccl:", "issue:")) for source in row.sources)
    assert row.check
    if row.fixed_in:
        fixed = parse_release(row.fixed_in)
        # Of one that was first worked around the range ends before the fix.
        assert row.when.before is None or row.when.before <= fixed


def _exactly(row: Row) -> Seen:
    """What fits a row and no more."""
    values = {key: frozenset([min(values)]) for key, values in row.when.lists.items()}
    release = row.when.since or (0, 0, 0)
    return Seen(values, frozenset([release]) if row.when.by_release else frozenset(), row.when.max_ranks or row.when.min_ranks)


@pytest.mark.parametrize("row", ROWS)
def test_a_pattern_fits_and_each_part_of_it_counts(row: Row) -> None:
    what = _exactly(row)
    assert fits(row.when, what)
    for key in row.when.lists:
        assert not fits(row.when, Seen({**what.values, key: frozenset(["something else"])}, what.releases, what.ranks)), key
    if row.when.by_release:
        assert not fits(row.when, Seen(what.values, frozenset(), what.ranks)), "an unknown release is no proof"
        outside = row.when.before or (0, 0, 0)
        assert not fits(row.when, Seen(what.values, frozenset([outside]), what.ranks))
    if row.when.min_ranks:
        assert not fits(row.when, Seen(what.values, what.releases, row.when.min_ranks - 1))
    if row.when.max_ranks is not None:
        assert not fits(row.when, Seen(what.values, what.releases, row.when.max_ranks + 1))


def test_a_clause_tells_its_cause_again() -> None:
    for cause in Cause:
        detail = "AllReduce of 12 floats" if "detail" in cause else ""
        text = re.sub(r"\{.*?\}", "7", cause.replace("{detail}", detail))
        assert cause_of(text) == cause.label, text


def test_what_is_no_clause_is_no_cause() -> None:
    assert cause_of("") == ""
    assert cause_of("its process is stopped by a signal, said somebody") == ""


def test_a_finding_is_told_from_its_reason() -> None:
    for kind in Kind:
        assert finding_of(str(kind)) == kind
        assert finding_of(f"{kind}: it waits") == kind
    assert finding_of("linked list") == ""


def test_why_it_is_slow_is_told_from_its_reason() -> None:
    for cause in SlowCause:
        assert slow_cause_of(f"{Kind.HOST}: {cause}: x") == cause
    assert slow_cause_of("host") == slow_cause_of("host: it waits") == slow_cause_of("CPU throttling: x") == ""


GOOD = """
[[row]]
id = "a-b"
seen = "s"
cause = "c"
confidence = 0.5
do = ["d"]
sources = ["engine:rule link"]
when = { class = ["dead"] }
"""


def test_a_row_of_the_right_form_is_read() -> None:
    (row,) = parse(GOOD, "causes.toml")
    assert row.when.lists == {"class": frozenset(["dead"])}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('id = "a-b"', 'id = "A b"', "lower case"),
        ("confidence = 0.5", "confidence = 5.0", "between 0 and 1"),
        ('do = ["d"]', "do = []", "not empty"),
        ('seen = "s"', "", "'seen' is missing"),
        ('seen = "s"', 'seen = "s"\nwhat = 1', "'what'"),
        ('{ class = ["dead"] }', "{}", "empty"),
        ('{ class = ["dead"] }', '{ words = ["dead"] }', "'words'"),
        ('{ class = ["dead"] }', '{ release = { before = "2.x" } }', "no release of NCCL"),
        ('{ class = ["dead"] }', '{ release = { from = "2.2.0", before = "2.1.0" } }', "no release lies"),
        ("[[row]]", "[row]", "[[row]]"),
        ("[[row]]", "[[row", "no TOML"),
    ],
)
def test_a_row_of_another_form_is_refused_in_one_line(old: str, new: str, says: str) -> None:
    with pytest.raises(TableError, match=re.escape(says)) as error:
        parse(GOOD.replace(old, new), "causes.toml")
    assert "\n" not in error.value.message.removesuffix("\n") or "TOML" in says
