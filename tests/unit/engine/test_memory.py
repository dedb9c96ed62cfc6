"""What an engine keeps of processes, communicators and hosts that are gone: nothing that adds up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.lives import Lives, reached
from ncclwatch.cli.engine_service import EngineService
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine import live, patience
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.patience import Patience, WaitKind
from ncclwatch.engine.session import FORGET_NS, DiagnosisSession
from ncclwatch.model.network import NetworkLook
from ncclwatch.model.state import ProcessSample
from unit.fake_node import FakeNode, calls
from unit.synthetic import frozen_ring

SECOND = 10**9
HOST = "h"


def ring(*, host: str = HOST) -> list[ProcessSample]:
    """Four ranks of one host."""
    found = [rank.looks(1)[0] for rank in frozen_ring(2, 4, run_state="S")]
    return [replace(sample, process=replace(sample.process, host=host)) for sample in found]


def with_pids(samples: list[ProcessSample], more: int) -> list[ProcessSample]:
    """Other processes."""
    return [replace(s, process=replace(s.process, key=replace(s.process.key, pid=s.process.pid + more))) for s in samples]


def kept_of(diagnosis: LiveDiagnosis) -> tuple[int, ...]:
    """How much is known of calls."""
    ledger, cadences = diagnosis.ledger, diagnosis.slow.cadences
    return len(ledger.rows), len(ledger.records), len(cadences.of), len(cadences.orders)


def test_jobs_that_are_over_leave_nothing() -> None:
    """Sixteen jobs hold no more than eight, wherever one looks."""
    lives = Lives(looks=3)
    for _ in range(8):
        lives.one()
    before = reached(lives.engine())
    for _ in range(8):
        lives.one()
    after = reached(lives.engine())
    grown = {way: after[way] - before[way] for way in after if after[way] > before[way]}
    assert {way: more for way, more in grown.items() if "reader._epoch" not in way and more >= 8} == {}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked through every third round."""
    monkeypatch.setattr(live, "UNSEEN_ROUNDS", 3)


@pytest.mark.usefixtures("often")
def test_calls_of_a_process_that_was_never_looked_at_are_forgotten() -> None:
    diagnosis, samples = LiveDiagnosis(), ring()
    diagnosis.add_calls(calls(samples, 4), source=HOST)
    diagnosis.update(samples)
    known = kept_of(diagnosis)
    for life in range(10):
        diagnosis.add_calls(calls(with_pids(samples, 1000 * (life + 1)), 4), source=HOST)
        for _ in range(7):
            diagnosis.update(samples)
    assert kept_of(diagnosis) == known, "those that are there are as well known as before"


@pytest.mark.usefixtures("often")
def test_a_process_that_is_looked_at_late_keeps_its_calls() -> None:
    diagnosis, samples = LiveDiagnosis(), ring()
    newcomers = with_pids(samples, 1000)
    diagnosis.update(samples)
    for _ in range(4):
        diagnosis.add_calls(calls(newcomers, 4), source=HOST)
        diagnosis.update(samples)
    for _ in range(9):
        diagnosis.update([*samples, *newcomers])
    rows = [diagnosis.ledger.row(s.process, s.communicators[0]) for s in newcomers]
    assert [diagnosis.ledger.called[row] for row in rows if row is not None] == [16] * 4


@pytest.mark.usefixtures("often")
def test_communicators_that_a_process_has_destroyed_are_forgotten() -> None:
    """One that lives on makes new ones for every evaluation."""
    diagnosis, first = LiveDiagnosis(), ring()
    for life in range(10):
        samples = [replace(s, communicators=(replace(s.communicators[0], address=0x7000 + 64 * life),)) for s in first]
        diagnosis.add_calls(calls(samples, 4), source=HOST)
        for _ in range(7):
            diagnosis.update(samples)
        assert len(diagnosis.ledger.rows) <= 8 and len(diagnosis.ledger.called) == 64
    assert kept_of(diagnosis) == (4, 4, 4, 4)


@pytest.mark.usefixtures("often")
def test_communicators_that_cannot_be_read_for_a_while_keep_their_calls() -> None:
    diagnosis, samples = LiveDiagnosis(), ring()
    diagnosis.add_calls(calls(samples, 4), source=HOST)
    for _ in range(12):
        diagnosis.update([replace(sample, communicators=()) for sample in samples])
    assert diagnosis.ledger.called[list(diagnosis.ledger.rows.values())].tolist() == [4] * 4


def test_patience_remembers_the_kinds_it_met_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job brings kinds of its own: they must not fill the memory, and must not keep out those of the job that runs."""
    monkeypatch.setattr(patience, "MAX_KINDS", 3)
    known = Patience()

    def met(*groups: int, lasted: float = 2.0) -> None:
        known._pending = {WaitKind(group, "AllReduce", 0): lasted for group in groups}
        known.end_round()

    for group in range(10):
        met(group, 100)
    assert {kind.group for kind in known._learned} == {8, 9, 100}
    for lasted in range(40):
        met(100, lasted=float(lasted))
    assert known._learned[WaitKind(100, "AllReduce", 0)] == tuple(float(n) for n in range(24, 40))


def hear(session: DiagnosisSession, host: str, at_ns: int, *, sequence: int = 0) -> None:
    """A node that tells of its network and of calls."""
    samples = ring(host=host)
    batch = NodeBatch(
        host=host, boot_id="b", sequence=sequence, time_ns=at_ns, wall_ns=at_ns, looked=True, samples=tuple(samples),
        events=calls(samples, 4), network=NetworkLook(),
    )  # fmt: skip
    session.feed(batch, at_ns)
    session.judge(at_ns)


def test_hosts_that_are_gone_for_good_are_forgotten() -> None:
    """A job in containers has other host names each time."""
    session, at_ns = DiagnosisSession(), 10**15
    for life in range(5):
        hear(session, f"pod-{life}", at_ns)
        session.diagnosis.ledger.lose(f"pod-{life}")
        session.feed(NodeBatch(
            host=f"pod-{life}", boot_id="b", sequence=1, time_ns=at_ns, wall_ns=at_ns,
            events=calls(with_pids(ring(), 5000), 1),
        ), at_ns)  # fmt: skip
        at_ns += FORGET_NS + SECOND
    hear(session, "pod-5", at_ns)
    diagnosis = session.diagnosis
    assert list(session.nodes) == ["pod-5"] == list(diagnosis.known.network.hosts)
    assert {source for source, _ in diagnosis.ledger.records} == {"pod-5"}
    assert diagnosis.ledger.lossy == set()
    assert kept_of(diagnosis) == (4, 4, 4, 4)


def test_a_place_of_a_host_that_was_forgotten_is_never_anothers() -> None:
    session = DiagnosisSession()
    for host in ("a", "b", "c"):
        session.diagnosis.add_calls(calls(ring(), 1), source=host)
        assert {place[0] for place in session.diagnosis.ledger.places} == {host}
        session.diagnosis.forget_host(host)
    assert kept_of(session.diagnosis) == (0, 0, 0, 0)


def test_a_host_that_another_node_still_speaks_for_is_remembered() -> None:
    session = DiagnosisSession()
    for source, at_ns in (("one", 0), ("two", FORGET_NS), ("two", FORGET_NS + 2 * SECOND)):
        node = FakeNode(frozen_ring(2, 4), host="same", begin=at_ns // SECOND)
        session.feed(node.batch(network=NetworkLook()), at_ns, source=source)
        session.judge(at_ns)
    assert list(session.nodes) == ["two"] and list(session.diagnosis.known.network.hosts) == ["same"]


def test_which_agent_speaks_for_a_host_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.cli.engine_service.MAX_HOSTS", 3)
    service = EngineService("tcp://127.0.0.1:*")
    try:
        for number in range(9):
            for life in ("one", "two"):
                service._take("job", f"{life}-{number}", FakeNode(frozen_ring(2, 4), host=f"node{number}").batch())
        assert service.jobs["job"].lives == {f"node{number}": f"two-{number}" for number in (6, 7, 8)}
    finally:
        service.close()
