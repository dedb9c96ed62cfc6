"""Links that verdicts call dead or slow, for the planner to do without (C4, section on C4P: what C4D found is avoided by C4P).

A verdict tells of links in two ways. Probes of paths name two routers ("10.80.0.1 → 10.80.0.2 is dead"). The hang and slowness
diagnosis names two ranks and channels: then the link is one that flows of these channels take, that paths differ in, and that no
other channel of the same ranks takes. One fault is taken to explain all channels that are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from ncclwatch.errors import UsageError
from ncclwatch.model.verdict import SCHEMA_NAME, VerdictClass
from ncclwatch.paths.measured import SLOWER, Link, MeasuredFlow
from ncclwatch.paths.words import link_text
from ncclwatch.text import clean

BARRED = 0.5
"""A link that is dead with at least this confidence carries nothing in a plan where another path is left."""
LEAST_LEFT = 0.1
"""What is left of a dead link in a prediction, beside 1 of a sound one: a job that hangs would gain without end."""
ALIVE = "the path is alive"
"""What the evidence says where a probe of the engine's found that the application is silent, and not the path."""
MAX_LINES = 4096
"""Bound: lines of evidence of one verdict."""

_DEAD = re.compile(r"^(\S{1,48}) → (\S{1,48}) is dead: .{0,4000}confidence (\d{1,3})%\)")
_FULL = re.compile(
    r"^(\S{1,48}) → (\S{1,48}) is full with ([\d,.]{1,20}) MB/s, .{0,200}has carried ([\d,.]{1,20}) MB/s "
    r"\(.{0,4000}confidence (\d{1,3})%\)"
)
"""As :mod:`ncclwatch.paths.findings` writes them."""

_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]


class _Communicator(msgspec.Struct):
    hash: _Text


class _Link(msgspec.Struct):
    source: int
    destination: int
    channels: Annotated[list[int], msgspec.Meta(max_length=1024)] = msgspec.field(default_factory=list)


class _Culprit(msgspec.Struct):
    communicator: _Communicator | None = None
    link: _Link | None = None


class _Verdict(msgspec.Struct, rename={"verdict_class": "class"}):
    schema: _Text
    id: _Text
    verdict_class: VerdictClass
    confidence: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    culprits: Annotated[list[_Culprit], msgspec.Meta(max_length=1 << 16)]
    evidence: Annotated[list[_Text], msgspec.Meta(max_length=MAX_LINES)]


@dataclass(frozen=True, slots=True)
class Told:
    """What a verdict, or a file, says of a link: two routers, or a connection (communicator, sender, receiver) and its channels.

    ``left`` is the part of its capacity that is left, 0 of a dead one; ``by`` says who told it: ``verdict 3fbb3eb87af2``.
    """

    left: float
    confidence: float
    by: str
    link: Link | None = None
    connection: tuple[str, int, int] = ("", 0, 0)
    channels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspect:
    """A link to do without. ``left`` and ``confidence`` (0 to 1) as in :class:`Told`; ``text`` is for people."""

    link: Link
    left: float
    confidence: float
    text: str

    @property
    def expected(self) -> float:
        """The part of its capacity that is to be expected, never below :data:`LEAST_LEFT`."""
        return max(LEAST_LEFT, 1 - self.confidence * (1 - self.left))

    @property
    def barred(self) -> bool:
        """Whether a plan puts nothing on it."""
        return self.left == 0 and self.confidence >= BARRED


def told_by(verdict: Mapping[str, Any], name: str) -> list[Told]:
    """What a verdict (``ncclwatch.verdict/1`` as plain data) says of links; nothing of most. ``name`` is where it is from.

    Raises :class:`UsageError` for anything that is no verdict.
    """
    try:
        found = msgspec.convert(verdict, _Verdict, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"{clean(name)} holds no verdict: {clean(str(error), 200)}", "give 'diagnose --json'") from None
    if found.schema != SCHEMA_NAME:
        raise UsageError(f"{clean(name)} has the schema {clean(found.schema, 60)}", f"this release reads {SCHEMA_NAME}")
    by = f"verdict {clean(found.id, 12)}"
    told: list[Told] = []
    for line in found.evidence:
        if (dead := _DEAD.match(line)) is not None:
            told.append(Told(0.0, min(int(dead[3]), 100) / 100, by, (dead[1], dead[2])))
        elif (full := _FULL.match(line)) is not None:
            carries, most = (_number(word) for word in full.group(3, 4))
            if 0 <= carries < most:
                told.append(Told(carries / most, min(int(full[5]), 100) / 100, by, (full[1], full[2])))
    left = {VerdictClass.HARDWARE: 0.0, VerdictClass.SLOW_COMMUNICATION: SLOWER}.get(found.verdict_class)
    if left is None or any(ALIVE in line for line in found.evidence):
        return told
    for one in found.culprits:
        if one.link is not None and one.communicator is not None:
            ends = one.communicator.hash, one.link.source, one.link.destination
            told.append(Told(left, found.confidence, by, None, ends, tuple(one.link.channels)))
    return list(dict.fromkeys(told))


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return -1.0


def suspects(
    told: Iterable[Told],
    flows: Sequence[MeasuredFlow],
    now: Sequence[tuple[Link, ...]],
    open_: Mapping[tuple[str, str], set[Link]],
) -> tuple[list[Suspect], list[str]]:
    """The links that are meant, of each what is worst, and what could not be placed, in words. ``now``: links of each flow."""
    found: dict[Link, Suspect] = {}
    notes: list[str] = []
    for one in told:
        links = [one.link] if one.link is not None else _of_connection(one, flows, now, open_)
        if not links:
            _, rank, peer = one.connection
            notes.append(f"{one.by}: on which link ranks {rank} → {peer} of its communicator fail is not told by these probes")
        for link in links:
            state = "dead" if one.left == 0 else f"slow ({one.left:.0%} of what it should carry)"
            alone = "" if len(links) == 1 else f", this or another of {len(links)} links"
            text = f"{link_text(link)} is {state} (confidence {one.confidence:.0%}{alone}; {one.by})"
            made = Suspect(link, one.left, one.confidence, text)
            if link not in found or made.expected < found[link].expected:
                found[link] = made
    return sorted(found.values(), key=lambda each: (each.expected, each.link)), list(dict.fromkeys(notes))


def _of_connection(
    one: Told, flows: Sequence[MeasuredFlow], now: Sequence[tuple[Link, ...]], open_: Mapping[tuple[str, str], set[Link]]
) -> list[Link]:
    """Links that all flows of the channels share, that paths differ in, and no other channel of these ranks takes."""
    meant: list[set[Link]] = []
    others: set[Link] = set()
    for flow, links in zip(flows, now, strict=True):
        if flow.connection != one.connection:
            continue
        mine = set(links) & open_.get((flow.source, flow.destination), set())
        if not one.channels or flow.channel in one.channels:
            meant.append(mine)
        else:
            others |= mine
    return sorted(set.intersection(*meant) - others) if meant else []
