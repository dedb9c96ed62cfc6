"""The list of sources, and the container of what they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ncclwatch.engine.case import SOURCES, Case
from ncclwatch.engine.evidence.base import Fact, FactKind, Source, one_by_one
from ncclwatch.engine.evidence.kernel import Logged
from ncclwatch.model.network import KernelLogLine, LinkChange, NetworkLook, NicRecord
from ncclwatch.model.state import CpuLimit
from unit.engine.evidence.said import Said, case_of
from unit.engine.evidence.test_device import nvlink_ring
from unit.engine.evidence.test_sockets import remembering, trying
from unit.engine.network_looks import NIC
from unit.synthetic import Rank, communicator, frozen_ring, looks


def everything() -> Case:
    """A job of which every source has something to say."""
    ranks = [*nvlink_ring(), Rank(4, 5, (communicator(4, 5, comm_hash=0xA2),), run_state="T")]
    series = []
    for own in looks(ranks):
        wide = communicator(own[0].process.rank or 0, 5, comm_hash=0xA2)
        series.append([
            replace(
                sample, communicators=(*[c for c in sample.communicators if c.hash != 0xA2], wide),
                cpu_limit=CpuLimit(100 + 50 * number, 10 + 45 * number),
            )
            for number, sample in enumerate(own)
        ])  # fmt: skip
    down = NicRecord("node1", "eth0", "netdev", up=False, state="down", used_by=(1,))
    worn = replace(NIC, name="eth1", errors={"rx_crc_errors": 40})
    line = KernelLogLine("node1", "xid", "0000:3b:00", "NVRM: Xid 79", 0, 3, 79)
    change = LinkChange("node1", "eth0", False, "no carrier", 5, 5)
    memory = remembering(NetworkLook((down, worn), (change,), (line,), (trying(3),)))
    return case_of(series, network=memory)


def test_sources_are_unique_and_facts_are_of_the_kinds_that_they_say() -> None:
    assert len({type(source) for source in SOURCES}) == len(SOURCES)
    case = everything()
    for source in SOURCES:
        source.complete(case.job)
    silent, blind = [], list[str]()
    for source in SOURCES:
        facts = list(one_by_one(source.facts(case)))
        assert {fact.kind for fact in facts} <= source.kinds, source
        assert all(fact.text for fact in facts if fact.kind is not FactKind.LOST), source
        blind += source.coverage(case)
        silent += [type(source).__name__] if not facts else []
    # Nothing is open in the network, no call or work request was recorded, the only connection ends at no rank of this job, and
    # nobody probed a path.
    assert silent == ["Proxies", "Calls", "OpenCalls", "SequenceCounts", "WorkRequests", "Paths"]
    assert "no calls were recorded" in blind and "2 hosts say nothing of their NICs, connections and kernel logs" in blind


class Counting(Source):
    """Counts how often it is asked."""

    kinds = frozenset({FactKind.HALTED, FactKind.STANDS})
    asked = 0

    def facts(self, case: Case) -> Iterator[Fact]:
        self.asked += 1
        yield Fact(FactKind.HALTED, "a")
        yield Fact(FactKind.STANDS, "b")


def test_a_source_is_asked_once_and_only_for_what_it_knows() -> None:
    counting, other = Counting(), Said(Fact(FactKind.HALTED, "c"))
    facts = case_of(looks(frozen_ring()), sources=(counting, other)).facts
    assert facts.of(FactKind.LOGGED) == () and counting.asked == 0
    assert [fact.subject for fact in facts.of(FactKind.HALTED)] == ["a", "c"]
    assert [fact.subject for fact in facts.about(FactKind.STANDS, "b")] == ["b"]
    assert facts.about(FactKind.STANDS, "a") == () and counting.asked == 1
    assert facts.of(FactKind.HALTED, Logged) == ()
