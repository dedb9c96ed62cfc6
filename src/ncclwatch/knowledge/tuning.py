"""Does what NCCL chose fill the links it was given, and what would another choice gain? A pure function of what was seen.

The loop is C4's (its paper, *Co-design with the collective library*): what locates slowness also says that an algorithm, a
protocol or a number of connections under-fills the fabric. Advice only. Gains are of NCCL's own model of cost
(``src/graph/tuning.cc``), with what was measured in place of its constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ncclwatch.model.tuning import (
    Advice,
    CommunicatorUse,
    Exposure,
    FlowUse,
    Kind,
    LinkAdvice,
    LinkUse,
    ProcessUse,
    TuningLook,
)
from ncclwatch.text import share, size

FULL = 0.8
"""A link that carries this share of its capacity while operations move is full. Unit: share. From: links limited by a token
bucket carried 83 to 91 % of it as TCP's payload on an idle machine (tests/testbed/test_tuning.py); headers take 6 %."""
REACHED = 0.95
"""What a full link carries of its capacity as payload. Unit: share. From: TCP over Ethernet: 1448 bytes of 1538 on the wire."""
BOUND = 0.9
"""A job of which operations move for this share of the time is bound by them. Unit: share. From: chosen: what is left is less
than what is worth telling (WORTH)."""
BUSY = 0.6
"""A connection that has something under way for this share of the time in which operations move is what they wait for. Unit:
share. From: connections that limited a ring were busy for 0.62 to 0.95 of it."""
QUEUE = 4.0
"""A round trip so many times the shortest one may stand in a queue. Unit: ratio. From: token buckets made it a thousand times,
windows that were full 1.4 times."""
STANDING = 16 * 1448
"""…which holds so much of the connection. Unit: bytes. From: 30 to 90 KB stood in token buckets, 1 to 11 KB of connections that
were paced (bursts of segments and acknowledgements that wait are no queue)."""
LOSSY = 0.01
"""Segments sent again: from this share on, loss is what limits. Unit: share. From: by Mathis et al. (1997) TCP keeps 12 segments
under way there."""
LATENT = 0.5
"""What round trips must explain of an operation's time. Unit: share. From: what explains less is not the larger part."""
WORTH = 1.1
"""Less than so many times as fast is not advised. Unit: ratio. From: iterations of one job differ by 5 to 10 % (overhead.md)."""
LONG = 1 << 19
"""A tree is full both ways from so many bytes of an operation and connection on. Unit: bytes. From: four chunks of 128 KiB, below
which NCCL cuts less (``src/enqueue.cc``, ``calcCollChunking``); with 768 KiB a tree gained what is said here."""
FEW_PERIODS = 12
"""Bound: periods from which it is judged whether anything waits for communication."""
CERTAIN = 0.25
"""Bound: standard error of the slope beyond which nothing is said of it."""
HIDDEN, EXPOSED = 0.3, 0.7
"""Bound: slopes up to which communication is hidden, and from which it is not."""
MAX_MORE = 8
"""Bound: times as many connections as are advised at once."""

EFFICIENCY = {"LL": 0.5, "LL128": 120 / 128}
"""Fact: the share of data in what a protocol sends; the rest are flags (NCCL ``src/include/device.h``: ``ncclLLFifoLine``,
``NCCL_LL128_DATAELEMS``)."""

CHANNEL_SETTINGS = ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL_NCHANNELS_PER_NET_PEER")


def advise(look: TuningLook) -> list[LinkAdvice]:
    """What is said of each link, the emptiest first."""
    exposure, slope = exposed(look)
    told = [_of_link(link, look, exposure, slope) for link in look.links]
    return sorted(told, key=lambda one: (not one.advice, one.fill if one.fill is not None else 1.0, one.link.name))


# --- does anything wait for communication --------------------------------------------------------------------------------------


def exposed(look: TuningLook) -> tuple[Exposure, float]:
    """Whether the job waits for its operations, and for which share of their time.

    Operations that never pause bound it. Else periods that take longer than others tell: where the next one begins later by as
    much, what lies between waits for them; where it begins when it would have anyway, they are hidden behind computation.
    """
    if max((one.moving for one in look.processes), default=0.0) >= BOUND:
        return Exposure.BOUND, 1.0
    slopes = [slope for one in look.processes if (slope := _slope(one, look.interval_s)) is not None]
    if not slopes:
        return Exposure.UNKNOWN, 1.0
    slope = min(max(sum(slopes) / len(slopes), 0.0), 1.0)
    if slope <= HIDDEN:
        return Exposure.HIDDEN, slope
    return (Exposure.EXPOSED, slope) if slope >= EXPOSED else (Exposure.UNKNOWN, 1.0)


def _slope(one: ProcessUse, interval_s: float) -> float | None:
    """By how many seconds the next period begins later for each second that a period takes longer; ``None``: cannot be told.

    Beginnings and ends are known to one look. That noise, of variance interval² / 12 each, is in the length twice and, as what
    both share, in the covariance once: it is taken out (regression with errors in variables, Fuller 1987, 1.2).
    """
    pairs = [(length, after - begin) for (begin, length), (after, _) in pairwise(one.periods)]
    if len(pairs) < FEW_PERIODS:
        return None
    middle_x, middle_y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    noise = interval_s**2 / 12
    spread = sum((x - middle_x) ** 2 for x, _ in pairs) / (len(pairs) - 1)
    common = sum((x - middle_x) * (y - middle_y) for x, y in pairs) / (len(pairs) - 1)
    if spread - 2 * noise < noise:
        return None
    slope = (common - noise) / (spread - 2 * noise)
    rest = sum((y - middle_y - slope * (x - middle_x)) ** 2 for x, y in pairs) / (len(pairs) - 2)
    error = math.sqrt(rest / (len(pairs) * (spread - 2 * noise)))
    return slope if error <= CERTAIN else None


# --- one link ------------------------------------------------------------------------------------------------------------------


def _of_link(link: LinkUse, look: TuningLook, exposure: Exposure, slope: float) -> LinkAdvice:
    fill = min(link.rate_moving / link.capacity, 1.0) if link.rate_moving is not None and link.capacity else None
    hashes = {flow.comm_hash for flow in link.flows}
    users = [one for one in look.communicators if one.comm_hash in hashes]
    if not link.moving or not users:
        return LinkAdvice(link, fill, exposure, "no operation was seen to use it")
    if exposure is Exposure.HIDDEN:
        return LinkAdvice(link, fill, exposure, "computation goes on meanwhile and does not wait: nothing to gain")
    found: list[Advice] = []
    for user in users:
        kind, part = max(user.kinds.items(), key=lambda item: item[1])
        weight = part * user.moving / link.moving
        flows = [flow for flow in link.flows if flow.comm_hash == user.comm_hash]
        settings = _settings(look.processes)
        told = (
            _protocol(user, kind, fill, flows, settings),
            _two_hosts(user, kind, fill, flows, look.seconds, settings),
            _latency(user, kind, look.seconds, flows, settings),
            _connections(link, user, kind, fill, flows, settings),
        )
        weighed = (_weighed(advice, min(weight, 1.0), link.moving, exposure, slope) for advice in told if advice is not None)
        found += [advice for advice in weighed if advice is not None]
    return LinkAdvice(link, fill, exposure, _says(link, fill, bool(found)), tuple(sorted(found, key=lambda one: -one.faster[0])))


def _says(link: LinkUse, fill: float | None, advised: bool) -> str:
    if fill is not None and fill >= FULL:
        return "full"
    if _queued(link.flows) and (fill is None or not advised):
        return "what is sent stands in a queue on the path: a link on it is full"
    if fill is None:
        return "how much it can carry is not known (--link says it)"
    if advised:
        return "not full"
    if all(flow.busy < BUSY * link.moving for flow in link.flows):
        return "not full, and not what is waited for: mostly its connections have nothing to send"
    if any((flow.resent or 0.0) >= LOSSY for flow in link.flows):
        return "not full: segments are lost and sent again, which is to be mended first"
    return "not full, and nothing that NCCL chose explains it"


def _weighed(advice: Advice, weight: float, moving: float, exposure: Exposure, slope: float) -> Advice | None:
    """An advice for operations that are a part of what moves; ``None`` where it gains too little."""
    low, high = (1 / (1 - weight * (1 - 1 / factor)) for factor in advice.faster)
    if high < WORTH:
        return None
    saved = None if exposure is Exposure.UNKNOWN else moving * slope * (1 - 1 / high)
    return Advice(advice.rule, advice.communicator, advice.seen, advice.change, (max(low, 1.0), high), saved, advice.provided)


def _protocol(
    user: CommunicatorUse, kind: Kind, fill: float | None, flows: Sequence[FlowUse], settings: Mapping[str, str]
) -> Advice | None:
    """Flags fill the wire: another protocol sends the same data in fewer bytes."""
    data = EFFICIENCY.get(kind.protocol)
    wire = _wire(fill, flows)
    if data is None or wire is None:
        return None
    seen = f"{kind}: {share(1 - data)} of what it sends are flags"
    return _fewer_bytes("protocol", user, seen, _other(settings, "NCCL_PROTO", kind.protocol, "Simple"), data, wire)


def _two_hosts(
    user: CommunicatorUse,
    kind: Kind,
    fill: float | None,
    flows: Sequence[FlowUse],
    seconds: float,
    settings: Mapping[str, str],
) -> Advice | None:
    """Between two hosts a ring carries 2 (n - 1) / n of the data each way, a tree once (nccl-tests, ``doc/PERFORMANCE.md``).

    A tree sends both ways at once only where an operation is long enough to be under way up and down together.
    """
    wire = _wire(fill, flows)
    if wire is None or user.nranks < 3 or (kind.collective, kind.algorithm, user.nnodes) != ("AllReduce", "Ring", 2):
        return None
    if not user.operations or max((flow.rate or 0.0 for flow in flows), default=0.0) * seconds / user.operations < LONG:
        return None
    ring = 2 * (user.nranks - 1) / user.nranks
    seen = f"{kind} of {user.nranks} ranks on two hosts sends each byte {ring:.3g} times each way, a tree once"
    return _fewer_bytes("two-hosts", user, seen, _other(settings, "NCCL_ALGO", "Ring", "Tree"), 1 / ring, wire)


def _fewer_bytes(rule: str, user: CommunicatorUse, seen: str, change: str, part: float, wire: float) -> Advice:
    """Only ``part`` of the bytes, which are on the wire for the share ``wire`` of the time: at least these fall away, at most the
    rest of the time shrinks with them.
    """
    return Advice(rule, user.comm_hash, seen, change, (1 / (1 - min(wire, 1.0) * (1 - part)), 1 / part), None)


def _latency(
    user: CommunicatorUse, kind: Kind, seconds: float, flows: Sequence[FlowUse], settings: Mapping[str, str]
) -> Advice | None:
    """A ring of many hosts pays 2 (m - 1) times the way from host to host, a tree 2 log2 m times (``src/graph/tuning.cc``)."""
    hosts, ways = user.nnodes or 0, sorted(flow.min_rtt_us / 2e6 for flow in flows if flow.min_rtt_us)
    if (kind.collective, kind.algorithm) != ("AllReduce", "Ring") or hosts < 4 or not user.operations or not ways:
        return None
    each = user.moving * seconds * user.kinds[kind] / user.operations
    way = ways[len(ways) // 2]
    waits = 2 * (hosts - 1) * way
    if waits < LATENT * each:
        return None
    waits = min(waits, each)
    by_tree = each - waits + waits * int(math.log2(hosts)) / (hosts - 1)
    part = f"{share(waits / each)} of it the way from host to host ({way * 1e3:.2g} ms), {2 * (hosts - 1)} times"
    seen = f"{kind} takes {each * 1e3:.3g} ms, {part}"
    factor = each / by_tree
    return Advice("latency", user.comm_hash, seen, _other(settings, "NCCL_ALGO", "Ring", "Tree"), (factor, factor), None)


def _connections(
    link: LinkUse, user: CommunicatorUse, kind: Kind, fill: float | None, flows: Sequence[FlowUse], settings: Mapping[str, str]
) -> Advice | None:
    """Each connection carries what one can, and together they do not fill the link: more of them would."""
    working = [flow for flow in flows if flow.busy >= BUSY * link.moving]
    if not fill or fill >= FULL or len(working) * 2 < len(flows) or _queued(working):
        return None
    if any((flow.resent or 0.0) >= LOSSY for flow in working):
        return None
    wanted = REACHED / fill
    more = min(math.ceil(wanted), MAX_MORE)
    rates = [flow.rate / max(flow.busy, 1e-9) for flow in working if flow.rate]
    each = f"each carries {_speed(sum(rates) / len(rates))}" if rates else "each is waited for"
    window = sum((flow.window_limited or 0.0) > 0.5 for flow in working) * 2 > len(working)
    seen = f"{kind} goes through {len(working)} connection{'s' if len(working) != 1 else ''}; {each}"
    seen += ", as much as the window of the other end lets through (net.ipv4.tcp_rmem, or it reads late)" if window else ""
    return Advice(
        "connections",
        user.comm_hash,
        seen,
        _more(working, settings, more),
        (min(wanted, more), min(wanted, more)),
        None,
        "if it is the connection that limits, and no link further on",
    )


def _more(flows: Sequence[FlowUse], settings: Mapping[str, str], times: int) -> str:
    """What makes ``times`` as many connections: what holds them down is let go of first."""
    held = [f"{name}={settings[name]}" for name in CHANNEL_SETTINGS if name in settings]
    if held:
        return f"raise {' and '.join(held)}, which holds channels down, {times} times (or unset it)"
    if any(flow.sockets for flow in flows):
        threads, each = (_number(settings.get(name)) for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"))
        return f"NCCL_NSOCKS_PERTHREAD={each * times} (NCCL_SOCKET_NTHREADS={threads}): {times} times the sockets a connection"
    pairs = _number(settings.get("NCCL_IB_QPS_PER_CONNECTION"))
    return f"NCCL_IB_QPS_PER_CONNECTION={pairs * times}: {times} times the queue pairs a connection"


# --- small things --------------------------------------------------------------------------------------------------------------


def _wire(fill: float | None, flows: Sequence[FlowUse]) -> float | None:
    """The share of the time in which bytes were on the wire; ``None`` where it is not known that they are what is waited for."""
    if fill is not None:
        return fill
    return 0.0 if _queued(flows) else None


def _queued(flows: Sequence[FlowUse]) -> bool:
    """Whether what is sent stands in a queue: most round trips are far longer than the shortest."""
    known = [
        flow.rtt_us >= QUEUE * flow.min_rtt_us and (flow.rtt_us - flow.min_rtt_us) * 1e-6 * (flow.rate or 0.0) >= STANDING
        for flow in flows
        if flow.rtt_us and flow.min_rtt_us
    ]
    return sum(known) * 2 > len(known)


def _settings(processes: Sequence[ProcessUse]) -> dict[str, str]:
    return {name: value for one in processes for name, value in one.settings.items()}


def _other(settings: Mapping[str, str], name: str, now: str, better: str) -> str:
    """Another choice: first by letting NCCL choose, where a setting holds it to this one."""
    return f"unset {name}={settings[name]}, or {name}={better}" if name in settings else f"{name}={better} (it chose {now})"


def _number(value: str | None) -> int:
    return int(value) if value is not None and value.isascii() and value.isdigit() and int(value[:4]) > 0 else 1


def _speed(per_second: float) -> str:
    return f"{size(per_second)}/s"
