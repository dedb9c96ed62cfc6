"""What is wrong with the paths of a job's flows (:mod:`ncclwatch.paths.findings`): collisions, bonds, dead and slow links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ncclwatch.engine.evidence.base import Fact, FactKind, Source, Strength
from ncclwatch.paths.findings import PathFinding

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFact(Fact):
    """Something that is wrong with the path of flows; ``subject`` is the link or NIC in words, ``value`` as ``finding.share``."""

    finding: PathFinding


class Paths(Source):
    """Paths of elephant flows, by probes of ours and by what ports of bonds send."""

    kinds = frozenset({FactKind.PATH})

    def facts(self, case: Case) -> Iterator[PathFact]:
        """What the job's flows suffer from, what costs most first. O(flows) when flows were listed anew."""
        hashes = {f"{group.hash:016x}" for group in case.job.groups.values()}
        for one in case.known.network.path_findings() if hashes else ():
            if not hashes.isdisjoint(one.jobs):
                text = partial(str, one.text)
                yield PathFact(FactKind.PATH, one.where, Strength.LIKELY, value=one.share, finding=one, describe=text)

    def coverage(self, case: Case) -> Iterator[str]:
        """Pairs of addresses of which nobody asked how their flows go, where of others it was asked."""
        ways = case.known.network.ways
        if ways.probes and ways.unasked:
            yield f"which way flows take between {ways.unasked} pairs of addresses: no probe was made there"
