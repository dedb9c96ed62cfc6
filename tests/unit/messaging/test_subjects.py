"""Names on the bus: no name of a job or node reaches another level, or holds a wildcard."""

from __future__ import annotations

import re

import pytest

from ncclwatch.messaging import subjects

HOSTILE = ["", "a.b", "*", ">", "a b", "a\r\nPUB x 1", "ü", "x" * 65, "$JS", "node.example.org", "\udcff", "a\n"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_does_not_fit_is_hashed(name: str) -> None:
    token = subjects.token_of(name)
    assert re.fullmatch(r"h-[0-9a-f]{20}", token)
    assert subjects.token_of(name) == token
    assert subjects.batch_parts(subjects.batch(name, name)) == (token, token)
    assert subjects.batch_parts(f"ncw.batch.31.{token}.{token}") == (token, token)


@pytest.mark.parametrize("name", ["default", "node-1", "a_b", "x" * 64, "0"])
def test_a_name_that_fits_stays(name: str) -> None:
    assert subjects.token_of(name) == name


@pytest.mark.parametrize(
    "subject", ["ncw.ask.a.b", "$JS.API.STREAM.PURGE.X", "_INBOX", "_INBOX.", "_INBOX.*", "_INBOX.>", "_INBOX.a b", ""]
)
def test_what_is_no_inbox_gets_no_answer(subject: str) -> None:
    assert not subjects.is_inbox(subject)
    assert subjects.is_inbox("_INBOX.UABC.x1") and subjects.is_inbox("_R_.aB3.c")


def test_different_names_stay_apart() -> None:
    assert len({subjects.token_of(name) for name in HOSTILE}) == len(HOSTILE)


@pytest.mark.parametrize(
    "subject",
    ["ncw.batch.a", "ncw.batch.a.b.c", "ncw.batch..b", "ncw.batch.*.b", "ncw.view.a", "xncw.batch.a.b", "ncw.batch.a.b\n", ""],
)
def test_what_is_no_subject_of_a_batch_has_no_parts(subject: str) -> None:
    assert subjects.batch_parts(subject) is None
