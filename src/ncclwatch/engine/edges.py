"""What the wait-for graph is made of: waits along connections, and what a rank could do and does not; and the words of both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from ncclwatch.engine.evidence.base import AbsentNode, Fact, FactKind, HiddenNode, Node, RankNode, Strength, node_of
from ncclwatch.model.job import Group, Job, Member
from ncclwatch.model.rings import CHUNK_STEPS, Ring
from ncclwatch.model.state import Direction, OpPhase, ProxyOperation, ProxySub
from ncclwatch.model.verdict import OperationRef

NOBODY = -1
"""Fact: stands for the object of a fact in columns that has none."""


class ConnectionKey(NamedTuple):
    """One direction of one connection; ranks are of the communicator."""

    group: int
    channel: int
    source: int
    destination: int
    point_to_point: bool


@dataclass(slots=True)
class End:
    """One end of a transfer over the network: the operation, its sub-operation, and the process on whose behalf it runs."""

    key: ConnectionKey
    member: Member
    operation: ProxyOperation
    sub: ProxySub

    @property
    def sends(self) -> bool:
        """Whether it is the sender's."""
        return self.operation.direction is Direction.SEND

    @property
    def under_way(self) -> bool:
        """Whether some of it has been done already."""
        return max(self.sub.done, self.sub.received, self.sub.transmitted) > 0


def has_produced(sub: ProxySub) -> bool:
    """Whether the GPU has produced anything of a send; what cannot be told counts as produced."""
    return sub.done > 0 or sub.gpu_ready is None or sub.gpu_ready > 0 or sub.posted == 0


class Why(StrEnum):
    """Why one side needs the other, as the clause that follows its name."""

    NO_OPERATION = "which has no operation open for it"
    NOT_BEGUN = "whose proxy has not begun the operation that is queued for it"
    GPU_NOT_READY = "whose GPU has not produced the data"
    NOT_TRANSMITTED = "whose proxy has not sent data that is ready"
    IN_NETWORK = "data was handed to the network and has not arrived"
    UNCONFIRMED = "data has arrived, and the network has not confirmed it to the sender"
    LEFT_BEHIND = "which has already gone past this step"
    NO_BUFFER = "which has no receive buffer open"
    NO_CREDIT = "the receiver has buffers open, but the sender may not send: the clear-to-send has not arrived"
    NOT_TAKEN = "which does not take the data sent"
    EMPTY = "which has written nothing more for it"
    FULL = "which does not consume what was written for it"
    NOT_CALLED = "which has not called it"
    GPU_NOT_BEGUN = "whose GPU has not begun it"
    NO_MESSAGE = "which has not called the other half of it"
    BROKEN = "whose connection is broken: NCCL has dropped the receive"
    DROPPED = "in an operation that shows no more: NCCL drops the transfers with a rank that has ended"
    UNOBSERVED = "which was not observed"


class Stall(StrEnum):
    """What a rank could do and does not do."""

    GPU_NOT_PRODUCING = "its GPU produces no data although buffers are free"
    GPU_NOT_CONSUMING = "its GPU does not consume data that has arrived"
    FLUSH = "data arrived but the flush to GPU memory does not complete"
    PROXY_NOT_SENDING = "its proxy does not send data that is ready although the receiver has buffers open"
    PROXY_NOT_POSTING = "its proxy opens no receive buffers"
    PROXY_NOT_TAKING = "data has arrived in its memory, and its proxy does not take it"
    PROXY_NOT_COMPLETING = "what it sent has been received, and its proxy does not take the completions"
    PROXY_NOT_BEGUN = "its proxy thread does not begin a queued operation"


OF_THE_LINK = frozenset({Why.IN_NETWORK, Why.UNCONFIRMED, Why.NO_CREDIT})
"""Both sides have done their part: it is the link that does not do its own."""
GPU_STALLS = frozenset({Stall.GPU_NOT_PRODUCING, Stall.GPU_NOT_CONSUMING})
PROXY_STALLS = frozenset({
    Stall.PROXY_NOT_SENDING, Stall.PROXY_NOT_POSTING, Stall.PROXY_NOT_TAKING, Stall.PROXY_NOT_COMPLETING,
    Stall.PROXY_NOT_BEGUN,
})  # fmt: skip
"""What a proxy thread alone decides: no peer and no GPU can hold it up there."""
SAID_BY_THE_OTHER = frozenset({Why.EMPTY, Why.FULL})
"""What is said of a rank that was observed."""
OF_CALLS = SAID_BY_THE_OTHER | {Why.NO_OPERATION, Why.NOT_CALLED}
"""Where counts of calls can tell whether the rank that is waited for has called what others wait in."""
FINISHED_THERE = frozenset({Why.IN_NETWORK, Why.UNCONFIRMED, Stall.PROXY_NOT_TAKING})
"""Where no other end is open, that is because it is through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnConnection(Fact):
    """What a rank shows at its end of a connection; ``end`` where that is one of the network with a transfer open."""

    subject: Node
    key: ConnectionKey
    end: End | None = None
    operation: OperationRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(OnConnection):
    """An edge of the wait-for graph: the subject cannot go on before the object does something, as sure as ``strength``."""

    kind: FactKind = FactKind.WAITS_FOR
    object: Node
    why: Why
    other: End | None = None
    """The far end of the transfer, where that is open."""
    number: int = -1
    """In the graph it was taken from."""

    @property
    def weak(self) -> bool:
        """Whether nothing shows that the waiter has begun the operation."""
        return self.strength is Strength.LIKELY


@dataclass(frozen=True, slots=True, kw_only=True)
class StallMark(OnConnection):
    """One thing a rank could do and does not do: it accuses nobody by itself, for the rank may wait elsewhere."""

    kind: FactKind = FactKind.STANDS
    subject: RankNode
    member: Member
    stall: Stall


def waits_for(
    job: Job, group: Group, member: Member, rank: int, why: Why, detail: str = "", *, channel: int = 0,
    sends: bool = False, point_to_point: bool = False, strength: Strength = Strength.PROVEN, target: Node | None = None,
    end: End | None = None, operation: OperationRef | None = None, where: str = "",
) -> Wait:  # fmt: skip
    """A wait on the connection to a rank (``sends``) or from it; ``target``: where else it leads, ``where``: where, unseen."""
    target = target or node_of(group, rank)
    own = group.ranks[member.index]
    if isinstance(target, AbsentNode) and why in SAID_BY_THE_OTHER:
        why = Why.UNOBSERVED

    def describe() -> str:
        verb = "may wait" if strength is Strength.POSSIBLE else "waits"
        reason = "" if isinstance(target, HiddenNode) else f", {why}"
        text = f": {detail}" if detail else ""
        return f"{member.label} {verb}{where} for {job.rank_name(group.id, rank)}{reason}{text}"

    return Wait(
        subject=RankNode(member.index), object=target, why=why, strength=strength, end=end, operation=operation,
        key=ConnectionKey(group.id, channel, *((own, rank) if sends else (rank, own)), point_to_point), describe=describe,
    )  # fmt: skip


def stalls_at(end: End, other: End | None, stall: Stall) -> StallMark:
    """That a rank does not do what it could at its end of a transfer over the network; ``other``: the far end, if it is open."""
    return StallMark(
        subject=RankNode(end.member.index), member=end.member, stall=stall, key=end.key, end=end,
        describe=lambda: f"{end.member.label}: {stall}: {_transfer_text(end, other, stall)}",
    )  # fmt: skip


def wait_facts(waits: Iterable[Wait]) -> list[Fact]:
    """Waits as they are told: one for all channels between the same two ranks that stand for the same reason."""
    alike: dict[Hashable, list[Wait]] = defaultdict(list)
    for wait in waits:
        alike[wait.subject, wait.object, wait.why, wait.end.operation.direction if wait.end else None].append(wait)
    return [replace(found[0], describe=partial(_text, found)) for found in alike.values()]


def _text(waits: Sequence[Wait]) -> str:
    more = len({wait.key.channel for wait in waits}) - 1
    return waits[0].text + (f" (and {more} more channel{'s' if more > 1 else ''})" if more else "")


def told(text: str) -> Fact:
    """A line of evidence that is made already."""
    return Fact(FactKind.TOLD, None, describe=partial(str, text))


# --- words of the network's ends ----------------------------------------------------------------------------------------


def wait_text(job: Job, end: End, other: End | None, why: Why) -> str:
    """Who waits for whom, or which link does not do its part; ``other`` is the far end of the transfer where it is open."""
    source, destination = (job.rank_name(end.key.group, rank) for rank in (end.key.source, end.key.destination))
    who = f"{end.member.label} waits for {destination if end.sends else source}, "
    if why in OF_THE_LINK:
        who = f"{source} → {destination}: "
    return f"{who}{why}: {_transfer_text(end, other, why)}"


def operation_text(end: End) -> str:
    """``AllReduce #13 sending``."""
    one = end.operation
    name = one.collective or ("point-to-point" if one.is_point_to_point else "operation")
    return f"{name} #{one.sequence} {'sending' if end.sends else 'receiving'}"


def _transfer_text(end: End, other: End | None, shows: Why | Stall) -> str:
    if end.operation.phase is not OpPhase.PROGRESS:
        return f"{operation_text(end)}, channel {end.key.channel}, {end.sub.nsteps} steps queued"
    far = "; its other end has finished this transfer" if shows in FINISHED_THERE else ""
    far = f"; {'sender' if other.sends else 'receiver'} {_counters(other)}" if other is not None else far
    return f"{operation_text(end)}, channel {end.key.channel}, {_counters(end)} of {end.sub.nsteps} steps{far}"


def _counters(end: End) -> str:
    sub = end.sub
    if end.sends:
        produced = f"produced {sub.gpu_ready}, " if sub.gpu_ready is not None else ""
        return f"{produced}opened {sub.posted}, sent {sub.transmitted}, completed {sub.done}"
    return f"posted {sub.posted}, received {sub.received}, delivered {sub.transmitted}, consumed {sub.done}"


def laggards(job: Job, rings: Mapping[int, Mapping[int, Ring]]) -> Iterator[Wait]:
    """Waits for ranks that lag in a ring of shared memory; ``rings``: as of :attr:`Case.rings`. O(connections).

    A rank whose own counters say that it waits waits for the one before. Who has written less than all others of its ring has
    not come as far, and nobody ends a collective before the last has contributed. For one that waits itself no other is said to
    wait, nor who is further ahead than it can be without it: they were read at different moments.
    """
    for group in job.groups.values():
        for channel, ring in rings[group.id].items() if group.nranks > 1 else ():
            waiting = {rank: at.ring.prev for rank, at in ring.amid.items() if not at.unread}
            for rank, prev in waiting.items():
                if prev in group.members:
                    yield _lags(job, group, channel, rank, prev, "all that was written into shared memory is read")
            written = ring.written
            least = min(written.values(), default=0)
            if len(written) < group.nranks or least == max(written.values()):
                continue
            for other in [rank for rank, steps in written.items() if steps == least and rank not in waiting]:
                hops = ring.hops(other)
                for rank, steps in written.items():
                    if 0 < steps - least <= CHUNK_STEPS * hops.get(rank, 0):
                        yield _lags(job, group, channel, rank, other, f"{steps - least} steps behind in shared memory")


def _lags(job: Job, group: Group, channel: int, reader: int, writer: int, how: str) -> Wait:
    return waits_for(job, group, group.members[reader][0], writer, Why.EMPTY, f"channel {channel}, {how}", channel=channel)
