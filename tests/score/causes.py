"""Whether the cause that a verdict tells is the one that was played: the first row of knowledge that a verdict carries.

The rows were not written for these faults: each names a cause in the field's words; :data:`CAUSES` says which of them are right.
"""

from __future__ import annotations

from collections.abc import Collection

from ncclwatch.knowledge.match import advised
from ncclwatch.model.verdict import Advice, Verdict
from ncclwatch.simulate.scenario import FaultKind

_SLOW_HOST = frozenset({"slow-host", "late-host"})
_SLOW_NETWORK = frozenset({"slow-network"})
_CALLS = frozenset({"calls-differ"})

CAUSES: dict[FaultKind, frozenset[str]] = {
    FaultKind.STOP: frozenset({"stopped-by-signal"}),
    FaultKind.KILL: frozenset({"process-ended", "crashed-by-signal"}),
    FaultKind.CRASH: frozenset({"process-ended", "left-with-status"}),
    FaultKind.SKIP: frozenset({"left-out"}),
    FaultKind.NEVER_ENTERS: frozenset({"late-host"}),
    FaultKind.OTHER_OPERATION: _CALLS,
    FaultKind.OTHER_SIZE: _CALLS,
    FaultKind.OTHER_TYPE: _CALLS,
    FaultKind.SWAP: frozenset({"order-of-communicators"}),
    FaultKind.GPU_STALL: frozenset({"gpu-not-begun", "gpu-stuck"}),
    FaultKind.PROXY_STALL: frozenset({"proxy-starved", "proxy-pool-full"}),
    FaultKind.LINK_DOWN: frozenset({"port-down", "path-dead"}),
    FaultKind.INIT_MISSING: frozenset({"rendezvous"}),
    FaultKind.SLOW_GPU: frozenset({"slow-compute"}),
    FaultKind.HOST_LOAD: _SLOW_HOST | {"cpu-contention"},
    FaultKind.GC_PAUSE: _SLOW_HOST | {"pauses"},
    FaultKind.SLOW_LOADER: _SLOW_HOST,
    FaultKind.CPU_LIMIT: frozenset({"cpu-limit"}),
    # The testbed plays it as a limit of the control group of all ranks of a host.
    FaultKind.FEW_CPUS: frozenset({"cpu-limit", "cpu-contention", "cpu-set"}),
    FaultKind.SLOW_COPY: frozenset({"slow-compute", "slow-host"}),
    FaultKind.SLOW_LINK: _SLOW_NETWORK,
    FaultKind.LOSSY_LINK: _SLOW_NETWORK,
    FaultKind.NIC_LIMIT: _SLOW_NETWORK,
    FaultKind.BACKGROUND_TRAFFIC: _SLOW_NETWORK,
    FaultKind.PROXY_SLEEP: frozenset({"slow-proxy"}),
}
"""Rows that name the cause of a fault; all else is wrong."""


SURE = 0.8
"""Confidence from which on a row claims to be the cause; below it is one of several possibilities."""


def _rows(verdict: Verdict) -> list[Advice]:
    """The rows that a verdict tells, of those that are no known defect."""
    return [row for row in verdict.knowledge or advised(verdict).knowledge if not row.defect]


def told(verdict: Verdict) -> str:
    """The row that a verdict tells first; empty for none."""
    return next((row.row for row in _rows(verdict)), "")


def right_answer(kinds: Collection[FaultKind], verdict: Verdict | None, *, must_accuse: bool) -> bool:
    """Whether the answer is honest where the cause is not plain: of several faults at once, of one that is too small to matter
    (``must_accuse`` is false), of none.

    Of a healthy job and of what is too small silence is right. Whoever is accused is so for a cause that was played: each of the
    faults is among the rows that are told, or the first row is of one of them and does not claim to be sure.
    """
    if verdict is None:
        return not must_accuse
    rows = _rows(verdict)
    if not rows or not right_cause(kinds, verdict):
        return False
    return rows[0].confidence < SURE or all(any(row.row in CAUSES[kind] for row in rows) for kind in kinds)


def right_cause(kinds: Collection[FaultKind], verdict: Verdict | None) -> bool | None:
    """Whether a verdict tells the cause of one of these faults; ``None`` where no fault was played."""
    if not kinds:
        return None
    allowed = frozenset[str]().union(*(CAUSES[kind] for kind in kinds))
    return verdict is not None and told(verdict) in allowed
