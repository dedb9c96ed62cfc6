"""What an agent keeps for an engine that begins anew: the newest calls, as they were sent."""

from __future__ import annotations

import numpy as np

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.messaging.agent import History
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.writer import BatchWriter, ledger_calls
from unit.fake_node import FakeNode, calls
from unit.synthetic import frozen_ring


def said(looked: tuple[bool, ...], number: int = 20) -> list[tuple[NodeBatch, bytes]]:
    """Batches with calls of four ranks, and as they were sent."""
    node, writer = FakeNode(frozen_ring(2, 4), looks=len(looked) + 1), BatchWriter(calls="all", grouped=True)
    samples = [series[0] for series in node.series]
    found = []
    for at, with_look in enumerate(looked):
        batch = node.batch(looked=with_look, events=ledger_calls(calls(samples, number, begin_ns=1 + at * 10**9)))
        found.append((batch, writer.encode(batch)))
    return found


def test_calls_come_back_whether_they_were_sent_with_a_look_or_alone() -> None:
    history, batches = History(), said((True, False, False, True, False))
    for n, (batch, data) in enumerate(batches):
        history.add(n, batch, data)
    for upto in (1, 3, 5):
        past = history.before(upto)
        assert past is not None and past.events is not None
        wanted = np.concatenate([batch.events for batch, _ in batches[:upto] if batch.events is not None])
        assert len(past.events) == len(wanted)
        for pid in set(wanted["pid"].tolist()):
            assert (past.events[past.events["pid"] == pid] == wanted[wanted["pid"] == pid]).all()
        newest = batches[upto - 1][0]
        assert (past.host, past.boot_id, past.sequence) == (newest.host, newest.boot_id, newest.sequence)
        assert not (past.looked or past.samples or past.windows or past.changes or past.notes)
    assert history.before(0) is None


def test_what_is_kept_of_a_look_is_its_calls() -> None:
    history, batches = History(), said((True, False, True))
    for n, (batch, data) in enumerate(batches):
        history.add(n, batch, data)
    looks, alone = BatchReader().decode(history._kept[0][1]).batch, history._kept[1][1]
    assert not looks.looked and not looks.samples and looks.events is not None
    assert alone is batches[1][1], "what was sent with calls alone is not encoded again"


def test_only_the_newest_calls_are_kept() -> None:
    batches = said((False,) * 10)
    each = len(batches[0][0].events if batches[0][0].events is not None else ())
    history = History(max_calls=3 * each)
    for n, (batch, data) in enumerate(batches):
        history.add(n, batch, data)
    past = history.before(10)
    assert past is not None and past.events is not None and len(past.events) == 3 * each
    assert past.events["time_ns"].min() >= 1 + 7 * 10**9, "those of the last three batches"
    assert history.before(7) is None
