"""Probes of our own queue pairs that vary the source port of RoCE v2: how long writes of no bytes take by each.

A flow label gives the source port where the driver heeds it (:func:`ncclwatch.paths.ports.label_of`). Who answers is the listener
of :mod:`ncclwatch.pathprobe.listener` on the other host; the job's own queue pairs are never touched.

A round trip goes by the queues of the way back too. So each source port has a queue pair for each of :data:`BACK`, the ports that
acknowledgements leave by, and the shortest of their round trips counts: it waited on the way there, or all ways back are full.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from ncclwatch.errors import TargetError
from ncclwatch.pathprobe.channel import Channel, ChannelError
from ncclwatch.pathprobe.rdma import agree
from ncclwatch.pathprobe.tcp import ProbeEndedError, connected
from ncclwatch.pathprobe.verbs import QueuePairProbe
from ncclwatch.wire import abi

MOST_PORTS = 32
"""Bound: source ports of one probe."""
BACK = (50021, 55555, 60007)
"""Source ports of acknowledgements: any three, to go by several ways."""
PATIENCE_S = 5.0
"""A write that is not acknowledged in this time is lost, and its queue pair is asked no more."""
PAUSE_S = 0.01
"""Between two rounds, on average."""
LONGEST_S = 45.0
"""Bound: seconds of one probe. The listener lets go of a caller after a minute."""

Trips = dict[int, list[int]]
"""Source port → round trips in ns."""


def probe(
    device: tuple[str, int],
    listener: tuple[str, int],
    ports: Sequence[int],
    rounds: int,
    token: bytes = b"",
    back: Sequence[int] = BACK,
) -> Trips:
    """Round trips from a port of an RDMA device to that of a listener (address, TCP port).

    All source ports are asked once a round, in another order each time: an iteration has a period of its own. One that is not
    answered has no round trip.

    Raises :class:`TargetError` where the ends cannot agree, and :class:`ncclwatch.pathprobe.verbs.VerbsError` for what devices
    refuse.
    """
    ends = time.monotonic() + LONGEST_S
    try:
        with ExitStack() as stack, connected(*listener, token=token, timeout_s=PATIENCE_S) as channel:
            channel.deadline = ends
            pairs = {
                port: [_Pair(stack, channel, device, port, each) for each in back[: len(BACK)]] for port in ports[:MOST_PORTS]
            }
            trips = _rounds(pairs, rounds, ends)
            channel.deadline = time.monotonic() + PATIENCE_S
            with suppress(OSError):  # what was seen counts, also where the listener has let go
                channel.send({"op": "done"})
            return trips
    except ProbeEndedError as ended:
        problem = ended.outcome.detail
    except (OSError, ChannelError) as error:
        problem = str(error) or "no answer"
    raise TargetError(
        f"queue pairs could not be agreed on with {listener[0]}: {problem}",
        f"run 'ncclwatch probe --listen {listener[0]}' there, with the same --token-file",
    )


class _Pair:
    """A queue pair to the listener; ``alive`` until a write is not acknowledged."""

    def __init__(self, stack: ExitStack, channel: Channel, device: tuple[str, int], port: int, back: int) -> None:
        self._queue_pair = stack.enter_context(QueuePairProbe(*device))
        agree(self._queue_pair, channel, port, back)
        self.alive = True

    def trip(self) -> int | None:
        """One write: ns until it is acknowledged."""
        status, seconds = self._queue_pair.write(PATIENCE_S)
        self.alive = status == abi.Status.SUCCESS
        return int(seconds * 1e9) if self.alive else None


def _rounds(pairs: Mapping[int, Sequence[_Pair]], rounds: int, ends: float) -> Trips:
    draw = random.Random()  # noqa: S311 - no secret
    trips: Trips = {port: [] for port in pairs}
    for _ in range(rounds):
        for port in draw.sample(list(pairs), len(pairs)):
            if time.monotonic() > ends:
                return trips
            took = [trip for pair in pairs[port] if pair.alive and (trip := pair.trip()) is not None]
            if took:
                trips[port].append(min(took))
        time.sleep(PAUSE_S * 2 * draw.random())
    return trips
