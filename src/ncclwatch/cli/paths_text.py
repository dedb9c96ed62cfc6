"""``paths`` for people: one row a flow, and below, in words, what is not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ncclwatch.model.network import FlowKind
from ncclwatch.model.paths import Origin
from ncclwatch.paths.flow_map import MappedFlow
from ncclwatch.text import Style, clean, columns, fit, share, size, wrap

MAX_ROWS = 256
MAX_REASONS = 16

_COLUMNS = ("JOB", "RANK", "PEER", "CH", "FROM", "TO", "FIVE-TUPLE", "KNOWN", "QP", "DATA/S", "SHARE")
_RIGHT = ("RANK", "PEER", "CH", "QP", "DATA/S", "SHARE")
_PLACE = 24


def screen(found: Sequence[MappedFlow], *, width: int, style: Style) -> Iterator[str]:
    """All lines, each of at most ``width`` cells."""
    if not found:
        yield from wrap("no connection over a network: these ranks are joined inside the node, or have not connected yet", width)
        return
    names = [name for name in _COLUMNS if width >= 120 or name not in ("JOB", "TO", "QP")]
    rows = [tuple(cells(one)[name] for name in names) for one in found[:MAX_ROWS]]
    lines = columns(
        names, rows, right=[number for number, name in enumerate(names) if name in _RIGHT], gap=1 if width < 100 else 2
    )
    yield style.dim(fit(lines[0], width))
    yield from (fit(line, width) for line in lines[1:])
    if len(found) > MAX_ROWS:
        yield f"… and {len(found) - MAX_ROWS} more flows (all of them with --json)"
    for line in explanations(found):
        yield from wrap(line, width)


def cells(one: MappedFlow) -> dict[str, str]:
    """What stands in each column."""
    flow, five = one.flow, one.flow.tuple
    member = f"/{one.bond[flow.source.link]}" if one.bond and one.link_known else "/?" if one.bond else ""
    return {
        "JOB": flow.job[:8],
        "RANK": str(flow.rank if one.global_rank is None else one.global_rank),
        "PEER": str(one.global_peer) if one.global_peer is not None else f"{flow.peer}",
        "CH": f"{flow.channel}" + (f"/{one.connection_index}" if one.connection_index else ""),
        "FROM": _place(flow.source.host, flow.source.nic + member),
        "TO": _place(flow.destination.host, flow.destination.nic),
        "FIVE-TUPLE": "?"
        if five is None
        else f"{five.protocol} {_end(five.source, five.source_port)} → {_end(five.destination, five.destination_port)}",
        "KNOWN": "" if five is None else str(flow.origin),
        "QP": "" if flow.queue_pair is None else str(flow.queue_pair),
        "DATA/S": "-" if flow.rate is None else size(flow.rate),
        "SHARE": "-" if flow.share is None else share(flow.share),
    }


def _place(host: str, nic: str) -> str:
    return fit(clean(f"{host} {nic}".strip() or "?", 200), _PLACE)


def _end(address: str, port: int) -> str:
    shown = clean(address, 48)
    return f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"


def explanations(found: Sequence[MappedFlow]) -> Iterator[str]:
    """How five-tuples are known, and what is not known: each reason once."""
    rules = Counter(one.rule for one in found if one.flow.tuple is not None and one.flow.origin is Origin.PREDICTED)
    for rule, number in sorted(rules.items()):
        yield f"source ports of {number} flows are predicted by the rule {rule} of their driver; no packet was looked at"
    if any(one.kind is FlowKind.SOCKET for one in found):
        yield "DATA/S: while there was something to send; ports of sockets are the kernel's own"
    reasons = Counter(reason for one in found for reason in one.missing)
    for reason, number in reasons.most_common(MAX_REASONS):
        yield f"not known of {number} flow{'s' if number != 1 else ''}: {clean(reason, 300)}"
