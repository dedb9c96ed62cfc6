"""``ncclwatch paths topology``: the links that were learned, how sure each is, and what a file says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclwatch.cli.options import JsonOption
from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.errors import UsageError
from ncclwatch.text import Style, clean, columns

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ncclwatch.paths.known import Contradiction
    from ncclwatch.paths.learned import Edge
    from ncclwatch.paths.measured import MeasuredFlow
    from ncclwatch.paths.tomography import Listing, Shared

SCHEMA_NAME = "ncclwatch.pathtopology/1"
MAX_ROWS = 256


@dataclass(frozen=True, slots=True)
class Hint:
    """Flows that seem to share a bottleneck, by their rates."""

    flows: tuple[MeasuredFlow, ...]
    confidence: float


def topology(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Probes, flow maps, verdicts, recordings: as of 'paths plan'.")
    ],
    known: Annotated[
        Path | None, typer.Option("--known", metavar="FILE", help="TOML file of the fabric: say where it is contradicted.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the links that were learned, each with its confidence; in recordings, which flows seem to share a bottleneck."""
    from ncclwatch.cli.paths_inputs import inputs_of
    from ncclwatch.paths import known as knowledge
    from ncclwatch.paths.learned import edges
    from ncclwatch.paths.measured import open_links, where_now
    from ncclwatch.paths.suspects import suspects
    from ncclwatch.store.container import is_recording

    said = knowledge.read(known) if known is not None else None
    given = inputs_of(files)
    now = where_now(given.flows, given.probes)
    told, notes = suspects(given.told, given.flows, now, open_links(given.probes))
    learned = edges(given.probes, given.flows, now, told)
    recordings = [file for file in files if is_recording(file)]
    hints = hints_of(recordings, given.flows) if recordings else []
    if not learned and not hints and not recordings:
        raise UsageError("these files tell of no link", "give output of 'ncclwatch paths probe -o FILE', or recordings")
    wrong, apart = knowledge.contradictions(said, given.probes, learned) if said is not None else ([], [])
    notes = [*given.notes, *notes, *apart]
    if as_json:
        emit_json(to_json(learned, hints, wrong if said is not None else None, notes))
        return
    for line in screen(learned, hints, wrong if said is not None else None, Style()):
        emit(line)
    for line in notes:
        note(line)


def hints_of(recordings: Sequence[Path], flows: Sequence[MeasuredFlow]) -> list[Hint]:
    """Flows of recordings that seem to share a bottleneck."""
    from ncclwatch.paths.tomography import series, shared

    by_key: dict[Hashable, MeasuredFlow] = {(*flow.connection, flow.channel): flow for flow in flows}
    keys, rates = series(_listings(recordings))
    return [_hint(group, [by_key.get(key) for key in keys]) for group in shared(rates)]


def _hint(group: Shared, flows: Sequence[MeasuredFlow | None]) -> Hint:
    return Hint(tuple(flow for number in group.flows if (flow := flows[number]) is not None), group.confidence)


def _listings(recordings: Sequence[Path]) -> Iterator[Listing]:
    from ncclwatch.store.replay import Recordings

    with Recordings(recordings) as opened:
        for time_ns, source, batch in opened.batches():
            if batch.network is not None and batch.network.flows:
                yield time_ns / 1e9, source, _rates(batch.network.flows)


def _rates(records: Iterable[Any]) -> Mapping[Hashable, float]:
    """Rate of what each connection sends, 0 while it rests; (communicator, sender, receiver, channel)."""
    from ncclwatch.model.network import FlowState

    found: dict[Hashable, float] = {}
    for one in records:
        if one.sends_data and one.comm_hash is not None:
            key = f"{one.comm_hash:016x}", one.rank, one.peer, one.channel
            rests = one.state is FlowState.IDLE
            found[key] = found.get(key, 0.0) + (0.0 if rests else one.bandwidth or 0.0)
    return found


def screen(learned: Sequence[Edge], hints: Sequence[Hint], wrong: Sequence[Contradiction] | None, style: Style) -> Iterator[str]:
    """Lines for people."""
    from ncclwatch.paths.words import who

    rows = [
        (
            clean(edge.link[0], 60),
            clean(edge.link[1], 60),
            str(edge.by),
            str(edge.ports),
            f"{edge.confidence:.1%}",
            str(len(edge.flows)),
            f"{edge.rate / 1e6:,.1f} MB/s" if edge.rate else "",
            _state(edge),
        )
        for edge in learned[:MAX_ROWS]
    ]
    lines = columns(("FROM", "TO", "BY", "PORTS", "CONFIDENCE", "FLOWS", "RATE", "STATE"), rows, right=(3, 4, 5, 6))
    yield style.dim(lines[0])
    yield from lines[1:]
    if len(learned) > MAX_ROWS:
        yield f"… and {len(learned) - MAX_ROWS} more links (all of them with --json)"
    for hint in hints:
        text = f"{len(hint.flows)} flows seem to share a bottleneck, by their rates ({who(hint.flows)}"
        yield f"{style.warn('HINT')}  {text}; confidence {hint.confidence:.0%})"
    for one in wrong or ():
        yield f"{style.bad('CONTRADICTED')}  {one.text} (confidence {one.confidence:.0%})"
    if wrong is not None and not wrong:
        yield f"{style.good('NOT CONTRADICTED')}  nothing that was seen is otherwise than the file says"


def _state(edge: Edge) -> str:
    if edge.state is None:
        return ""
    word = "dead" if edge.state.left == 0 else f"slow ({edge.state.left:.0%})"
    return f"{word}, {edge.state.confidence:.0%}"


def to_json(
    learned: Sequence[Edge], hints: Sequence[Hint], wrong: Sequence[Contradiction] | None, notes: Sequence[str]
) -> dict[str, Any]:
    """``ncclwatch.pathtopology/1`` (docs/flow-map.md)."""
    keys = ("job", "rank", "peer", "channel", "source", "source_port", "destination", "port")

    def named(flows: Sequence[MeasuredFlow]) -> list[dict[str, Any]]:
        return [{key: getattr(flow, key) for key in keys} for flow in flows]

    return {
        "schema": SCHEMA_NAME,
        "edges": [
            {
                "link": list(edge.link),
                "by": str(edge.by),
                "confidence": edge.confidence,
                "ports": edge.ports,
                "flows": named(edge.flows),
                "bytes_per_s": edge.rate,
                "state": None
                if edge.state is None
                else {"left": edge.state.left, "confidence": edge.state.confidence, "text": edge.state.text},
            }
            for edge in learned
        ],
        "shared": [{"flows": named(hint.flows), "confidence": hint.confidence} for hint in hints],
        "contradictions": None if wrong is None else [{"text": one.text, "confidence": one.confidence} for one in wrong],
        "notes": list(notes),
    }
