"""Samples of a job made by hand, and cases of who is named for them: what tests of the slowness estimate have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from ncclwatch.engine.slow.attribute import find
from ncclwatch.engine.slow.findings import Context
from ncclwatch.engine.slow.lateness import Lateness
from ncclwatch.engine.slow.profile import add_up
from ncclwatch.engine.slow.snapshot import Activity, Hold, LinkPlace, Look, Part
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.verdict import SlowKind as Kind

RANKS = 8
ALL = frozenset(range(RANKS))
KEYS = [ProcessKey("boot", 100 + rank, 1, "build") for rank in range(RANKS)]
Named = tuple[Kind | None, tuple[int, ...]]
"""Kind of a finding (``None``: any) and the ranks."""


def but(*ranks: int) -> frozenset[int]:
    """All ranks but some."""
    return ALL.difference(ranks)


def sample(holds: Sequence[Hold], busy: Collection[int], waiting: Collection[int], ranks: int = RANKS) -> Look:
    """One sample: who holds others up, who computes and who waits; the rest move data."""
    activities = {
        key: Activity.COMPUTES if rank in busy else Activity.WAITS if rank in waiting else Activity.TRANSFERS
        for rank, key in enumerate(KEYS[:ranks])
    }
    return Look(float(len(holds)), ranks, tuple(holds), activities)


def own(rank: int, weight: float, part: Part = Part.GPU) -> Hold:
    """So much of all ranks' time is spent waiting for a part of a rank."""
    return Hold(part, weight, KEYS[rank], None, "AllReduce", 7)


def link(source: int, destination: int, weight: float, ranks: int = RANKS) -> Hold:
    """The same of a link."""
    place = LinkPlace(7, source, destination, KEYS[source], KEYS[destination], (0,))
    return Hold(Part.LINK, weight, None, place, "AllReduce", 7)


def context(lost: float | None, hosts: int = RANKS, ranks: int = RANKS, **more: Any) -> Context:
    """Ranks that do equal work, on so many hosts."""
    host = np.arange(ranks) // (ranks // hosts)
    return replace(Context(np.zeros(ranks, np.int64), host, lost), **more)


def late(shares: Mapping[int, float], times: int = 12, ranks: int = RANKS) -> Lateness:
    """Hosts that begin iterations late, for such shares of the time, in ``times`` of 12 iterations."""
    share = np.array([shares.get(rank, 0.0) for rank in range(ranks)])
    return Lateness(share, np.where(share > 0, times, 0), 12, 2 * share)


HEALTHY = [sample([], ALL, ())] * 6
"""Samples in which everybody computes."""


@dataclass(frozen=True)
class Case:
    """What was sampled, and who is named for it: exactly ``named`` (or these ``ranks``, in however many findings), or, where
    ``never`` or ``among`` are given, not those ranks, or those among others.
    """

    name: str
    samples: Sequence[Look]
    context: Context
    named: Sequence[Named] = ()
    ranks: frozenset[int] | None = None
    never: Sequence[Named] | None = None
    among: Sequence[Named] | None = None
    disagrees: str = ""
    """What the estimate says instead, where it does not say what a person wants."""

    def found(self) -> list[tuple[Kind, tuple[int, ...]]]:
        """Whom the estimate names."""
        keys = KEYS[: len(self.context.host)]
        return [(finding.kind, finding.members) for finding in find(add_up(self.samples, keys), self.context)]

    def check(self) -> None:
        """Raise ``AssertionError`` where somebody else is named."""
        found = self.found()
        if self.ranks is not None:
            assert {rank for _, members in found for rank in members} == self.ranks, found
        elif self.never is not None or self.among is not None:
            assert not any(_is(one, other) for one in found for other in self.never or ()), found
            assert all(any(_is(one, other) for one in found) for other in self.among or ()), found
        else:
            assert len(found) == len(self.named) and all(map(_is, found, self.named)), found


def _is(found: tuple[Kind, tuple[int, ...]], wanted: Named) -> bool:
    return found[1] == wanted[1] and wanted[0] in (None, found[0])


def cases(*listed: Case) -> pytest.MarkDecorator:
    """Parametrise a test by ``case``."""
    parameters = []
    for case in listed:
        marks = [pytest.mark.xfail(reason=case.disagrees)] if case.disagrees else []
        parameters.append(pytest.param(case, id=case.name, marks=marks))
    return pytest.mark.parametrize("case", parameters)
