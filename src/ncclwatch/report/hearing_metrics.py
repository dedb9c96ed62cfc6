"""What a hearing worker of a fleet says as metrics. Names, units and labels: ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from ncclwatch import __version__
from ncclwatch.fleet.hearing import HearingCounts, WorkerState
from ncclwatch.model.metric import Metric
from ncclwatch.report.exposition import metric, text_of


def hearing_metrics(state: WorkerState) -> str:
    """The whole page."""
    build = metric("ncclwatch_build_info", "gauge", "Version of ncclwatch.", [({"version": __version__}, 1)])
    return "".join(map(text_of, (*build, *_now(state), *_counted(state.counts))))


def _each(kind: Literal["gauge", "counter"], rows: Iterable[tuple[str, str, float]]) -> Iterator[Metric]:
    for name, text, value in rows:
        yield from metric(f"ncclwatch_hear_{name}", kind, text, [({}, value)])


def _now(state: WorkerState) -> Iterator[Metric]:
    yield from _each("gauge", (
        ("last_step_timestamp_seconds", "When the worker last heard, or looked whether there is something.", state.at_s),
        ("connected", "Whether there is a connection to the NATS server.", float(state.connected)),
        ("parts", "Parts of the nodes that the worker hears.", state.parts),
        ("nodes", "Nodes it has heard of these.", state.nodes),
        ("jobs", "Jobs of these nodes.", state.jobs),
        ("lag_seconds", "How long ago the oldest batch was stored that is not heard yet.", state.lag_s),
        ("waiting_batches", "Batches that are not heard yet, as far as the worker knows.", state.waiting),
        ("unsent_messages", "Messages for judges that could not be sent yet.", state.unsent),
    ))  # fmt: skip


def _counted(counts: HearingCounts) -> Iterator[Metric]:
    yield from _each("counter", (
        ("batches_total", "Batches heard.", counts.batches),
        ("windows_total", "Windows of ranks in them.", counts.windows),
        ("looks_total", "Looks at ranks in them.", counts.looks),
        ("calls_total", "Calls in them.", counts.calls),
        ("received_bytes_total", "Bytes of batches, those that were refused too.", counts.nbytes),
        ("missed_batches_total", "Batches that never came, though later ones of the same agent did.", counts.missed),
        ("keys_asked_total", "Times an agent was asked for a batch that builds on none before it.", counts.keys_asked),
        ("sent_messages_total", "Messages to judges.", counts.messages),
        ("sent_bytes_total", "Bytes of these.", counts.sent_bytes),
    ))  # fmt: skip
    refused = (("bad", counts.bad), ("repeated", counts.duplicates), ("flood", counts.flooded), ("node", counts.refused_nodes))
    yield from metric(
        "ncclwatch_hear_refused_batches_total", "counter", "Batches not taken, by why.",
        [({"reason": reason}, value) for reason, value in refused],
    )  # fmt: skip
