"""What NCCL's own state says in a process that a verdict names: made-up samples."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from ncclwatch.knowledge.match import informed
from ncclwatch.knowledge.tickets import by_place
from ncclwatch.model.inside import FEW_PENDING, Inside, inside
from ncclwatch.model.state import Direction, PendingOperation, ProcessSample
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from unit.synthetic import frozen_ring


def sample(pending: int = 0, release: tuple[int, int, int] = (2, 27, 5), **own: object) -> ProcessSample:
    [found] = frozen_ring()[2].looks(1)
    waiting = PendingOperation(1, Direction.SEND, 2, 0, 1, 16, "AllReduce", "Simple")
    communicators = tuple(replace(one, **own) for one in found.communicators)  # type: ignore[arg-type]
    return replace(
        found, process=replace(found.process, version=release), communicators=communicators, pending=(waiting,) * pending
    )  # fmt: skip


@pytest.mark.parametrize(
    ("own", "pending", "expected"),
    [
        ({"proxy_pool_full": True}, FEW_PENDING, [Inside.POOL_FULL]),
        ({"proxy_pool_full": True}, FEW_PENDING - 1, [Inside.POOL_LEAKED]),
        ({"proxy_pool_full": False}, FEW_PENDING, []),
        ({"proxy_pool_full": None}, 0, []),
        ({"async_result": "ncclRemoteError"}, 0, [Inside.ASYNC_ERROR]),
        ({"async_result": "ncclInProgress"}, 0, []),
        ({"aborted": True, "revoked": True}, 0, [Inside.ABORTED, Inside.REVOKED]),
        ({"finalize_called": True}, 0, [Inside.TEARDOWN]),
        ({"destroyed": True}, 0, [Inside.TEARDOWN]),
    ],
)
def test_what_is_so(own: dict[str, object], pending: int, expected: list[Inside]) -> None:
    assert [found for found, _ in inside(sample(pending, (2, 27, 5), **own))] == expected


@pytest.mark.parametrize(
    ("own", "pending", "release", "row"),
    [
        ({"proxy_pool_full": True}, 500, (2, 27, 5), "proxy-pool-full"),
        ({"proxy_pool_full": True}, 2, (2, 27, 5), "proxy-slots-leaked"),
        ({"finalize_called": True}, 0, (2, 27, 5), "communicator-torn-down"),
        ({"aborted": True}, 0, (2, 27, 5), "communicator-aborted"),
    ],
)
def test_rows_and_evidence_of_who_is_named(own: dict[str, object], pending: int, release: tuple[int, int, int], row: str) -> None:
    seen = sample(pending, release, **own)
    culprit = Culprit(2, 2, seen.process.host, seen.process.pid, 0)
    verdict = informed(Verdict(VerdictClass.NOT_ENTERED, "", (culprit,)), by_place([seen]))
    assert row in [advice.row for advice in verdict.knowledge]
    assert any(line.startswith("rank 2, communicator ") for line in verdict.evidence)
    again = informed(verdict, by_place([seen]))
    assert again.evidence == verdict.evidence
    other = informed(Verdict(VerdictClass.NOT_ENTERED, "", (replace(culprit, pid=cast(int, culprit.pid) + 1),)), by_place([]))
    assert row not in [advice.row for advice in other.knowledge]


def test_a_release_with_the_fix_has_not_leaked() -> None:
    seen = sample(2, (2, 29, 3), proxy_pool_full=True)
    culprit = Culprit(2, 2, seen.process.host, seen.process.pid, 0)
    verdict = informed(Verdict(VerdictClass.HARDWARE, "", (culprit,)), by_place([seen]))
    assert "proxy-slots-leaked" not in [advice.row for advice in verdict.knowledge]
