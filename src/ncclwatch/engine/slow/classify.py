"""S1 computation, S2 communication or S3 mixed (CCL-D 2.2), and what the cause may be where evidence says so."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ncclwatch.engine.slow.contention import lacks_cpu
from ncclwatch.engine.slow.findings import Finding, Kind
from ncclwatch.model.verdict import VerdictClass

if TYPE_CHECKING:
    from ncclwatch.engine.slow.watch import Judgement

SLOWER = 1.25
"""From this factor on of the times between a rank's calls its work is slower, whatever its communication does."""
MIXED_SHARE = 0.25
"""A second kind of slowness counts from this share of the first."""
MIXED_SHARE_MEASURED = 0.1
"""The same for work of which the calls say as well that it is slower."""


def classify(judgement: Judgement) -> VerdictClass:
    """The class by what is blamed, and by how the times between calls grew: in proportion (work) or by an addition (calls)."""
    findings = judgement.findings
    computes = max((f.share for f in findings if f.kind.computes), default=0.0)
    communicates = max((f.share for f in findings if not f.kind.computes), default=0.0)
    if not computes and communicates and any(works_slower(judgement, f) for f in findings):
        return VerdictClass.SLOW_MIXED
    measured = any(f.kind.computes and np.all(judgement.factors[list(f.members)] >= SLOWER) for f in findings)
    least = MIXED_SHARE_MEASURED if measured and communicates > computes else MIXED_SHARE
    if min(computes, communicates) >= least * max(computes, communicates):
        return VerdictClass.SLOW_MIXED
    return VerdictClass.SLOW_COMPUTATION if computes > communicates else VerdictClass.SLOW_COMMUNICATION


def works_slower(judgement: Judgement, finding: Finding) -> bool:
    """Whether the work of all ranks of a finding about communication grew as well."""
    factors = judgement.factors[list(finding.members)]
    return bool(finding.kind is Kind.NIC and len(factors) and np.all(factors >= SLOWER))


def cause(judgement: Judgement, finding: Finding) -> str:
    """A sub-cause in words; empty where nothing singles one out."""
    if finding.kind.computes and (lack := lacks_cpu(judgement.profile, judgement.context, list(finding.members))):
        return lack
    if finding.kind is Kind.COMPUTE:
        return _compute_cause(judgement, finding)
    if finding.kind is Kind.HOST:
        factors = judgement.factors[list(finding.members)]
        extras = judgement.extras[list(finding.members)]
        if len(factors) and np.all(factors < 0.5) and np.all(extras > 0.001):
            pace = float(np.median(extras)) * 1e3
            return f"its host takes about {pace:.0f} ms for each call: too little CPU (throttling, affinity, load)"
        return _host_cause(judgement, finding)
    if finding.kind is Kind.PROXY:
        return "its proxy thread does not run for stretches: CPU contention or an overloaded proxy core"
    if finding.kind is Kind.NIC:
        many = len(finding.members) > 1
        if len(set(judgement.context.nodes[list(finding.members)].tolist())) > 1:
            return "all links between their hosts are slow: a NIC at either end, the switch, or congestion; which does not show"
        return "all links of the host are slow: congestion or its NICs" if many else "all its links are slow: its NIC or port"
    return ""


def short_cause(judgement: Judgement, finding: Finding) -> str:
    """The sub-cause in a word or two, for a summary; empty where nothing singles one out, or only many words do."""
    if not finding.kind.computes:
        return ""
    if lack := lacks_cpu(judgement.profile, judgement.context, list(finding.members)):
        return lack.partition(":")[0]
    if finding.kind is Kind.COMPUTE:
        pauses = periodic_pauses(judgement)
        return "pauses" if pauses and _compute_cause(judgement, finding) == pauses else ""
    if not starts_late(judgement, finding):
        return ""
    return "pauses" if _is_rarely_late(judgement, finding) else "begins iterations late"


def starts_late(judgement: Judgement, finding: Finding) -> bool:
    """Whether the hosts of a finding's ranks are seen to begin iterations later than the others."""
    late = judgement.context.late
    return finding.kind is Kind.HOST and late is not None and bool(np.all(late.share[list(finding.members)] > 0))


def _host_cause(judgement: Judgement, finding: Finding) -> str:
    late = judgement.context.late
    members = list(finding.members)
    if late is None or not starts_late(judgement, finding):
        return "its host calls late while its GPU has nothing queued: data loader, Python, or CPU"
    times, seconds = int(late.late[members].max()), float(late.seconds[members].mean())
    seen = f"its host begins {times} of {late.seen} iterations {seconds:.2f} s later than the others"
    rare = _is_rarely_late(judgement, finding)
    return seen + (
        ": pauses (garbage collection, or another process)" if rare else ": slow data loader, or other work of the host"
    )


def _is_rarely_late(judgement: Judgement, finding: Finding) -> bool:
    """Whether hosts that are late are so now and then only."""
    late = judgement.context.late
    return late is not None and int(late.late[list(finding.members)].max()) <= 0.6 * late.seen


def _compute_cause(judgement: Judgement, finding: Finding) -> str:
    factors = judgement.factors[list(finding.members)]
    if len(factors) and np.all(factors >= SLOWER):
        return (
            f"its work takes {float(np.median(factors)):.1f} times as long throughout: GPU clocks, power or temperature, or load"
        )
    pattern = periodic_pauses(judgement)
    if pattern:
        return pattern
    if len(factors) and not math.isnan(float(factors[0])) and np.all(factors < 1.1):
        return "most of its work is as fast as ever and some parts of the iteration take longer: copies, input, one layer"
    return ""


def periodic_pauses(judgement: Judgement) -> str:
    """Slow iterations among normal ones: pauses at their own rhythm, as of a garbage collector."""
    slow = judgement.slow
    if slow is None or slow.slow > 0.5 * slow.iterations or slow.slow < 2:
        return ""
    seen = f"{slow.slow} of {slow.iterations} iterations are slow and the others normal"
    return f"{seen}: pauses of their own rhythm (garbage collection)"
