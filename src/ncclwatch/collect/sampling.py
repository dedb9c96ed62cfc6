"""Looking at a few ranks while all is well: Mycroft's sampling (section 4.3, Algorithm 1).

A rank that stands still soon makes everybody stand still, so a few ranks show that something is wrong; only then all are looked
at, to find out what. Mycroft samples at most 10 ranks, one of each data-parallel group at least. Which groups are data-parallel
is not known here; ranks are chosen so that every communicator has one among them, as far as the limit allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.progress import progressed
from ncclwatch.model.state import ProcessSample

MYCROFT_RANKS = 10
"""Mycroft 4.3: at most so many ranks are sampled, whatever the size of the job."""

CALM_LOOKS = 3
"""After an alarm everybody is looked at until the sampled ranks have moved in so many looks on end."""


def choose(samples: Iterable[ProcessSample], limit: int = MYCROFT_RANKS) -> frozenset[ProcessKey]:
    """At most ``limit`` processes that between them hold a rank of as many communicators as possible. O(limit x memberships)."""
    left = {sample.process.key: {c.hash for c in sample.communicators} for sample in samples}
    chosen: list[ProcessKey] = []
    open_ = set().union(*left.values()) if left else set()
    while left and open_ and len(chosen) < limit:
        best = max(left, key=lambda key: len(left[key] & open_))
        open_ -= left.pop(best)
        chosen.append(best)
    return frozenset(chosen)


@dataclass(slots=True)
class Sampling:
    """Which processes to look at: a few while they move, all when one of them does not, or ``limit`` holds everybody."""

    limit: int = MYCROFT_RANKS
    chosen: frozenset[ProcessKey] = frozenset()
    alarmed: bool = True
    """Everybody is looked at: at the beginning, to choose from."""
    _calm: int = 0
    _before: dict[ProcessKey, ProcessSample] = field(default_factory=dict)

    def alarm(self) -> None:
        """Look at everybody until the sampled ranks have moved for a while."""
        self.alarmed, self._calm = True, 0

    def wants(self, key: ProcessKey) -> bool:
        """Whether a process is to be looked at now."""
        return self.alarmed or key in self.chosen

    def looked(self, samples: Iterable[ProcessSample]) -> None:
        """Take what a look brought and decide about the next one."""
        newest = {sample.process.key: sample for sample in samples}
        if not self.chosen & set(newest):
            self.chosen = choose(newest.values(), self.limit)
        watched = {key: newest[key] for key in self.chosen if key in newest}
        still = [
            key
            for key, sample in watched.items()
            if key in self._before and not (sample is not self._before[key] and progressed(self._before[key], sample))
        ]
        known = all(key in self._before for key in watched)
        gone = any(sample.run_state in "XZ" for sample in newest.values())
        if still or not known or gone:
            self.alarm()
        elif self.alarmed:
            self._calm += 1
            if self._calm >= CALM_LOOKS:
                # Groups may have changed meanwhile: choose anew while all are known.
                self.alarmed, self.chosen = False, choose(newest.values(), self.limit)
                self._before = {key: newest[key] for key in self.chosen}
                return
        self._before = watched
