"""How many messages that a process has called are not done yet inside its node: counted by the steps of their connections.

A receive that waits for its peer leaves no trace in shared memory, nor does a send that has not begun. But head and tail of a
connection count steps since it was made, and messages of equal size take equally many. So steps and calls tell how many messages
are over, and with the order of calls that is where the process's GPU stands. What one message takes is learned from the job.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ncclwatch.model.rings import CONNECTION_SLOTS
from ncclwatch.model.state import Direction, HostConnection, ProcessSample

Way = tuple[bool, int] | None
"""Of a send or receive: whether it sends, and the peer; ``None`` for a collective."""
Place = tuple[int, Way]
"""Address of the communicator in its process, and the way."""

MARGIN = 2
"""Calls must outnumber those that may be open by so much before what one takes counts as known, and so many times what was ever
open means that messages have another size. Unit: ratio. From: chosen.
"""
STEADY = 8
"""Samples in which nobody was further than thought, after which it is believed that at some everything was over. Unit: samples.
From: chosen; positions that contradict the order of the calls count for nothing anyway.
"""
RESTS = 32
"""In so many samples nothing is open at one at least, or what is counted is not what was called. Unit: samples. From: chosen."""
COMPARED = 8
"""Bound: samples before that a sample is compared with."""
PLACES = 4096
"""Bound: places that are counted of one process."""
RATIOS = 32
"""Bound: numbers of steps that one message may take."""


@dataclass(slots=True)
class _Messages:
    """Messages at one place, by how many were called and how many steps were made at each sample.

    Between two samples at which as many were open, each took the steps between them by the calls between them: a whole number.
    What most calls agree on is what one takes. At a sample where steps lag behind calls least, everything was over.
    """

    whole: bool
    """Whether all calls since the connection was made were seen: then all steps are theirs."""
    calls: int = 0
    steps: int = 0
    each: int = 0
    """Steps of a message; 0: not known."""
    base: int = 0
    """Steps less those of all calls, when nothing is open: the most that was seen."""
    most: float = 0.0
    """Messages that were open at a sample, at most."""
    steady: int = 0
    """Samples since ``base`` last rose."""
    rested: int = 0
    """Samples since nothing was open."""
    since: int = 0
    """Calls when ``each`` was found."""
    settled: bool = False
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=COMPARED))
    agree: Counter[int] = field(default_factory=Counter)
    """Calls that speak for so many steps each."""

    def learn(self, calls: int, steps: int) -> None:
        """Of a sample: so many were called, and so many steps made, since ever."""
        if self.recent and (calls < self.recent[-1][0] or steps < self.recent[-1][1]):
            self.forget()
        self.calls, self.steps = calls, steps
        if self.settled and self.open > MARGIN * (self.most + 1):
            # Messages have another size now.
            self.forget()
        for before, made in self.recent:
            if calls > before and steps > made and (steps - made) % (calls - before) == 0:
                self.agree[(steps - made) // (calls - before)] += calls - before
        self.recent.append((calls, steps))
        if len(self.agree) > RATIOS:
            self.agree = Counter(dict(self.agree.most_common(RATIOS // 2)))
        each = max(self.agree, key=self.agree.__getitem__, default=0)
        if each and each != self.each:
            self.each, self.base, self.most, self.steady, self.since = each, steps - each * calls, 0.0, 0, calls
        self._follow(steps - each * calls)

    def _follow(self, left: int) -> None:
        """What the newest sample says of where nothing is open."""
        self.steady = 0 if left > self.base else self.steady + 1
        self.base = max(self.base, left)
        known = self.whole and self.each > 0 >= self.base and self.base % self.each == 0
        if known:
            # As many steps as of whole messages; else the first was of another size, or of a protocol that counts none.
            self.base = 0
        self.most = max(self.most, self.open)
        self.rested = 0 if self.open < 1.0 / (self.each + 1) else self.rested + 1
        enough = self.calls - self.since >= MARGIN * (self.most + 1)
        self.settled = self.each > 0 and enough and (known or (self.steady >= STEADY and self.rested < RESTS))

    def forget(self) -> None:
        """Learn anew: how many steps the calls so far have made is no longer known."""
        self.each, self.whole, self.settled = 0, False, False
        self.recent.clear()
        self.agree.clear()

    @property
    def open(self) -> float:
        """Messages that are not over by now: whole ones, and what is left of the one under way."""
        return self.calls - (self.steps - self.base) / self.each if self.each else 0.0


class MessageSteps:
    """Of one process, by place. Small messages (LL) are not counted, nor what NVLink moves where the host reads no steps."""

    def __init__(self) -> None:
        self._of: dict[Place, _Messages] = {}
        self._newest: dict[Place, int] = {}
        """Steps at the newest sample."""
        self._ended_ns = 0

    def take(self, sample: ProcessSample, called: Callable[[int], Mapping[Place, int] | None]) -> None:
        """Take a sample of the process; ``called``: how much it had called by a moment, by place, if known. O(connections).

        Calls that were made while a sample was taken may only be known at the next: then it is learned from.
        """
        end_ns = sample.time_ns + sample.duration_ns
        if end_ns <= self._ended_ns:
            return
        if (before := called(self._ended_ns)) is not None:
            for place, made in self._newest.items():
                self._of[place].learn(before.get(place, 0), made)
        self._newest = {
            (own.address, way): made for own in sample.communicators for way, made in _steps(own.host_connections).items()
        }  # fmt: skip
        # A connection that was not there before was made since: all its calls were seen.
        seen, self._ended_ns = self._ended_ns > 0, end_ns
        calls = called(end_ns) or {}
        if len(self._of) > PLACES:
            self._of = {place: known for place, known in self._of.items() if place in self._newest}
        for place, made in self._newest.items():
            # It is kept where one sample misses it, torn.
            known = self._of.setdefault(place, _Messages(seen or not made))
            known.calls, known.steps = calls.get(place, 0), made

    def steps_at(self, place: Place) -> int:
        """Steps at the newest sample."""
        return self._newest[place]

    def forget(self, place: Place) -> None:
        """Messages at a place have another size now."""
        if place in self._of:
            self._of[place].forget()

    def open(self) -> dict[Place, float]:
        """Messages that are not over, by place, as of the newest sample; where that is not known, nothing. No more than were
        called: with more the process shows something else than its steps.
        """
        known = {place: self._of[place] for place in self._newest if self._of[place].settled}
        return {place: max(0.0, one.open) for place, one in known.items() if one.open <= one.calls}


def way_of(end: HostConnection) -> Way:
    """Of a connection; NCCL has connections of their own for messages (``connIndex`` 1, ``src/enqueue.cc``)."""
    return (end.direction is Direction.SEND, end.peer) if end.connection_index else None


def _steps(connections: tuple[HostConnection, ...]) -> dict[Way, int]:
    """Steps that a process has made at each place: written by its sends, read by its receives."""
    found: dict[Way, int] = defaultdict(int)
    unseen: set[Way] = set()
    for end in connections:
        way = way_of(end)
        # Only the protocol Simple moves the tail.
        if end.head is None or end.tail is None or not 0 <= end.tail - end.head <= CONNECTION_SLOTS:
            unseen.add(way)
            continue
        found[way] += end.tail if end.direction is Direction.SEND else end.head
    return {way: made for way, made in found.items() if way not in unseen}
