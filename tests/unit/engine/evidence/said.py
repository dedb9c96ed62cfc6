"""A source that says what a test wants, and cases around records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ncclwatch.collect.network_memory import NetworkMemory
from ncclwatch.engine.case import SOURCES, Case, Known
from ncclwatch.engine.evidence.base import Fact, Source
from ncclwatch.model.job import Job, assemble
from ncclwatch.model.state import ProcessSample


class Said(Source):
    """Says these facts of every job."""

    def __init__(self, *facts: Fact) -> None:
        self._facts = facts
        self.kinds = frozenset(fact.kind for fact in facts)

    def facts(self, case: Case) -> Iterable[Fact]:
        return self._facts


def with_facts(*facts: Fact) -> tuple[Source, ...]:
    """All sources, and one that says these facts."""
    return (*SOURCES, Said(*facts))


def of_network(memory: NetworkMemory) -> Case:
    """A case of which nothing is known but what the nodes say of their network."""
    return Case(Job([]), Known(network=memory))


def case_of(samples: Sequence[Sequence[ProcessSample]], **more: Any) -> Case:
    """A case around the one job that samples of processes make."""
    (job,) = assemble(samples)
    return Case(job, Known(**more))
