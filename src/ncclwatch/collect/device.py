"""The device plane of one process: the frame that the counter shim publishes, decoded, and what is asked of its sampler.

A process without the shim costs a look at its open files every ten seconds. What is read never fails a look at the process: a
frame that cannot be read is a reason in ``problem``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ncclwatch.collect.functions import function
from ncclwatch.errors import NcclwatchError
from ncclwatch.model import events
from ncclwatch.model import frame_layout as layout
from ncclwatch.model.device import (
    ConnectionCounter,
    DeviceChannel,
    DeviceCommunicator,
    DeviceOperation,
    DeviceSample,
    StepWait,
    UnfinishedTransfer,
)
from ncclwatch.model.state import Direction, ProcessSample
from ncclwatch.target.devconn import CounterPlace
from ncclwatch.target.frame import FrameFile, FrameImage, WantedWord
from ncclwatch.text import clean

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEPT_FINISHED = 8
"""Finished operations of a communicator that a sample holds, the newest."""
SMALL_JOB = 64
"""Ranks of a job of which samples hold all the operations that frames do: then whole iterations can be put together."""

LOOK_AGAIN_S = 10.0
"""How often a process without a frame is looked at for one."""

LEASE_S = 10.0
"""For how long the sampler goes on without being asked again."""

IDLE_PERIOD_S = 1.0
BUSY_PERIOD_S = 0.01
"""Between two rounds of copies: while all is well, and while nothing moves."""

STALE_NS = 3_000_000_000
"""A value older than this is not of now: the slowest period is a second."""

MAX_COPY_SHARE = 0.05
"""Share of time the sampler may spend copying: the period is made longer where a round takes long."""

_UNKNOWN = (1 << 64) - 1
_ROOTED = frozenset({events.Function.BROADCAST, events.Function.BCAST, events.Function.REDUCE, events.Function.GATHER,
                     events.Function.SCATTER})  # fmt: skip
_STEP_STATES: dict[int, str] = {
    layout.StepState.BEGUN: "begun",
    layout.StepState.SEND_GPU_WAIT: "the GPU has not produced the data",
    layout.StepState.SEND_PEER_WAIT: "the receiver has given no buffer",
    layout.StepState.SEND_WAIT: "handed to the network, not completed",
    layout.StepState.RECV_WAIT: "nothing has arrived",
    layout.StepState.RECV_FLUSH_WAIT: "arrived, the flush to GPU memory runs",
    layout.StepState.RECV_GPU_WAIT: "the GPU has not consumed the data",
}
_WORD_PROBLEMS: dict[int, str] = {
    layout.WordStatus.NONE: "not read yet",
    layout.WordStatus.MALFORMED: "the request was refused as malformed",
    layout.WordStatus.NOT_HELD: "NCCL has dropped the connection",
    layout.WordStatus.NOT_DEVICE: "not in GPU memory",
    layout.WordStatus.FAILED: "the driver refused the copy",
    layout.WordStatus.IN_FLIGHT: "the copy has not come back",
}


def decode(
    image: FrameImage, asked: Sequence[CounterPlace] = (), answered: bool = False, *, kept: int = KEPT_FINISHED
) -> DeviceSample:
    """The records of a frame.

    ``asked`` are the places of the words that were requested, ``answered`` whether the shim took the request; ``kept`` is how
    many finished operations of a communicator are wanted.
    """
    frame = image.frame
    header = frame["header"]
    pending = int(header["copy_begun_ns"])
    return DeviceSample(
        entry=_name(layout.Entry, header["entry"]),
        interface=int(header["interface"]),
        sampler=_name(layout.Sampler, header["sampler"]),
        time_ns=image.time_ns,
        communicators=tuple(_communicators(frame, kept)),
        transfers=tuple(_transfers(frame)),
        counters=tuple(_counters(frame, image.time_ns, asked)) if answered else (),
        heartbeat_ns=int(header["heartbeat_ns"]) or None,
        copy_pending_ns=max(0, image.time_ns - pending) if pending else None,
        events=_count(header["events"]),
        unmatched=_count(header["unmatched"]),
        refused=_count(header["refused_communicators"]) + _count(header["refused_operations"]),
        contended=_count(header["contended"]),
        torn=image.torn,
        last_error=int(header["last_error"]),
    )


def _name(kind: type[layout.Entry] | type[layout.Sampler], number: Any) -> str:
    try:
        return kind(int(number)).name.lower().replace("_", " ")
    except ValueError:
        return f"unknown ({int(number)})"


def _count(number: Any) -> int:
    """A counter that was read from a process: no count reaches 63 bits."""
    return min(int(number), (1 << 62))


def _communicators(frame: NDArray[Any], kept: int) -> Iterable[DeviceCommunicator]:
    for comm in frame["communicators"][frame["communicators"]["state"] != layout.CommState.FREE]:
        nranks, rank = int(comm["nranks"]), int(comm["rank"])
        yield DeviceCommunicator(
            hash=int(comm["hash"]) or None,
            inside_address=int(comm["address"]),
            rank=rank if rank >= 0 else None,
            nranks=nranks if nranks > 0 else None,
            finished=int(comm["state"]) == layout.CommState.FINISHED,
            operations=_count(comm["operations"]),
            collectives=_count(comm["collectives"]),
            transfers=_count(comm["transfers"]),
            channels=tuple(
                DeviceChannel(index, _count(channel["started"]), _count(channel["finished"]), _count(channel["operation"]))
                for index, channel in enumerate(comm["channels"])
                if channel["started"]
            ),
            recent=_operations(comm["recent"], _count(comm["operations"]), bool(comm["channels"]["started"].any()), kept),
            name=clean(bytes(comm["name"]).partition(b"\0")[0].decode("utf-8", "replace"), layout.FRAME_NAME),
        )


def _operations(records: NDArray[Any], newest: int, reported: bool, wanted: int) -> tuple[DeviceOperation, ...]:
    """``reported``: NCCL has told of a kernel of this communicator at all. ``wanted``: how many that are finished."""
    found = sorted(
        (_operation(record) for record in records if newest - layout.FRAME_OPERATIONS < int(record["ordinal"]) <= newest),
        key=lambda operation: operation.ordinal,
    )
    found = [operation for operation in found if operation.ordinal]
    # What is never told of (copy-engine and symmetric kernels in some releases) must not look like a kernel that does not begin:
    # so only where this communicator's kernels are reported, and only after the last that has begun, since they run in order.
    begun = max((operation.ordinal for operation in found if operation.started), default=0)
    reported = reported or begun > 0
    found = [replace(o, observed=False) if not o.started and (not reported or o.ordinal < begun) else o for o in found]
    done = [operation.ordinal for operation in found if operation.state in ("finished", "unobserved")]
    kept = set(done[-wanted:])
    return tuple(o for o in found if o.state in ("running", "not started") or o.ordinal in kept)


def _operation(record: NDArray[Any]) -> DeviceOperation:
    number, point_to_point = int(record["function"]), bool(record["point_to_point"])
    sequence, peer = int(record["sequence"]), int(record["peer"])
    return DeviceOperation(
        ordinal=_count(record["ordinal"]),
        function=function(number).name if number else "",
        point_to_point=point_to_point,
        sequence=None if sequence == _UNKNOWN else _count(sequence),
        count=_count(record["count"]),
        peer=peer if peer >= 0 and (point_to_point or number in _ROOTED) else None,
        channels=int(record["channels"]) or None,
        started=int(record["started"]),
        finished=int(record["finished"]),
        observed=bool(record["device_known"]),
        launched_ns=_count(record["launched_ns"]),
        started_ns=_count(record["seen_start_ns"]) or None,
        finished_ns=_count(record["seen_stop_ns"]) or None,
        duration_ns=_count(record["duration_ns"]) or None,
    )


def _transfers(frame: NDArray[Any]) -> Iterable[UnfinishedTransfer]:
    comms = frame["communicators"]
    for record in frame["proxy"][frame["proxy"]["state"] == layout.ProxyState.OPEN]:
        index = int(record["communicator"])
        known = index < layout.FRAME_COMMUNICATORS and int(comms[index]["generation"]) == int(record["generation"])
        comm = comms[index] if known else None
        waits = sorted(
            (int(step["step"]), int(step["state"]), _count(step["since_ns"]))
            for step in record["steps"]
            if int(step["state"]) in _STEP_STATES
        )
        yield UnfinishedTransfer(
            hash=int(comm["hash"]) or None if comm is not None else None,
            rank=int(comm["rank"]) if comm is not None and int(comm["rank"]) >= 0 else None,
            channel=int(record["channel"]),
            peer=int(record["peer"]),
            is_send=bool(record["is_send"]),
            nsteps=int(record["nsteps"]),
            steps_begun=int(record["steps_begun"]),
            steps_finished=int(record["steps_finished"]),
            chunk_bytes=int(record["chunk"]),
            begun_ns=_count(record["begun_ns"]),
            changed_ns=_count(record["changed_ns"]),
            operation=_count(record["ordinal"]) or None,
            owner_pid=int(record["owner_pid"]),
            waits=tuple(StepWait(step, _STEP_STATES[state], since) for step, state, since in waits),
        )


def _counters(frame: NDArray[Any], image_ns: int, asked: Sequence[CounterPlace]) -> Iterable[ConnectionCounter]:
    for place, word in zip(asked, frame["words"], strict=False):
        status = int(word["status"])
        own = int(word["address"]) == place.address
        problem = "" if own and status == layout.WordStatus.OK else _WORD_PROBLEMS.get(status, "in a state not known")
        if not own:
            problem = "another reader asks for other words"
        # A copy that is under way leaves the value of the one before standing.
        value = int(word["value"]) if own and word["time_ns"] else None
        yield ConnectionCounter(
            comm_address=place.comm_address,
            channel=place.channel,
            peer=place.peer,
            is_send=place.direction is Direction.SEND,
            connection_index=place.connection_index,
            counter=place.counter,
            value=None if value is None or value >= 1 << 62 else value,
            time_ns=_count(word["time_ns"]),
            changes=_count(word["changes"]),
            changed_ns=_count(word["changed_ns"]) or None,
            problem=problem,
            stale=value is not None and image_ns - int(word["time_ns"]) > STALE_NS,
        )


def summary(device: DeviceSample) -> str:
    """One line for people: how the shim came in and what it can show."""
    entry = {"plugin": f"NCCL's profiler plugin, interface v{device.interface}", "preload": "LD_PRELOAD"}.get(
        device.entry, device.entry
    )
    kernels = "kernels seen" if device.entry == "preload" or device.interface >= 3 else "kernels not reported by this NCCL"
    silent = "; the copy engine does not respond" if device.copy_engine_silent else ""
    return f"counter shim loaded ({entry}): {kernels}, sampler {device.sampler}, {device.events:,} events{silent}"


@runtime_checkable
class Looked(Protocol):
    """What the device plane needs of an open process."""

    def counter_places(self) -> Sequence[CounterPlace]:
        """Counters of connections that the host cannot read, with where NCCL keeps their addresses."""


@dataclass(slots=True)
class _Asked:
    places: tuple[CounterPlace, ...] = ()
    number: int = -1
    period_s: float = 0.0
    until: float = 0.0


class DeviceWatch:
    """The device plane of one process over many looks."""

    def __init__(self, pid: int, find: Callable[[int], FrameFile | None] = FrameFile.find) -> None:
        self.pid = pid
        self.problem = ""
        """Why there is nothing to read; empty when there is, and when the process simply has no shim."""
        self._find = find
        self._frame: FrameFile | None = None
        self._next_try = 0.0
        self._asked = _Asked()
        self._last_words: tuple[int | None, ...] = ()
        self._read: dict[tuple[int, int, int, bool, int], tuple[int, int]] = {}

    @property
    def present(self) -> bool:
        """Whether the process has the shim."""
        return self._frame is not None

    def look(self, sample: ProcessSample, target: Looked | None = None) -> ProcessSample:
        """The sample with what the shim says beside it; unchanged where there is no shim."""
        frame = self._open()
        if frame is None:
            return sample
        try:
            image = frame.read()
            answered = int(image.frame["header"]["request_seen"]) == self._asked.number
            world = sample.process.world_size
            kept = layout.FRAME_OPERATIONS if world is not None and world <= SMALL_JOB else KEPT_FINISHED
            device = self._with_rates(decode(image, self._asked.places, answered, kept=kept))
            if target is not None and frame.writable:
                self._ask(frame, image, target, device)
        except NcclwatchError as error:
            self.problem = error.message
            return sample
        self.problem = ""
        return replace(sample, device=device)

    def _with_rates(self, device: DeviceSample) -> DeviceSample:
        """Rates of the counters since they were read before, by the times at which that was."""
        if not device.counters:
            # The shim has not answered what was asked last: the next answer is compared with the one before.
            return device
        before, self._read = self._read, {}
        counters = []
        for counter in device.counters:
            place = (counter.comm_address, counter.channel, counter.peer, counter.is_send, counter.connection_index)
            if counter.value is not None:
                self._read[place] = (counter.value, counter.time_ns)
                value, time_ns = before.get(place, (0, 0))
                if time_ns and counter.time_ns > time_ns and counter.value >= value:
                    counter = replace(counter, steps_per_s=(counter.value - value) * 1e9 / (counter.time_ns - time_ns))  # noqa: PLW2901
            counters.append(counter)
        return replace(device, counters=tuple(counters))

    def _open(self) -> FrameFile | None:
        if self._frame is None and time.monotonic() >= self._next_try:
            self._next_try = time.monotonic() + LOOK_AGAIN_S
            try:
                self._frame = self._find(self.pid)
                self.problem = ""
            except NcclwatchError as error:
                self.problem = error.message
        return self._frame

    def _ask(self, frame: FrameFile, image: FrameImage, target: Looked, device: DeviceSample) -> None:
        """Ask for the counters that nothing else shows: now and then while they move, often once they stand still."""
        places = tuple(target.counter_places())[: layout.FRAME_WORDS]
        now = time.monotonic()
        if not places and not self._asked.places:
            return
        words = tuple(counter.value for counter in device.counters)
        still = bool(words) and words == self._last_words
        self._last_words = words
        took = int(image.frame["header"]["round_duration_ns"]) / 1e9
        period = max(BUSY_PERIOD_S if still else IDLE_PERIOD_S, took / MAX_COPY_SHARE)
        if places == self._asked.places and period == self._asked.period_s and now < self._asked.until - LEASE_S / 2:
            return
        number = frame.ask([WantedWord(p.address, p.held_at, p.size) for p in places], period, LEASE_S)
        self._asked = _Asked(places, number, period, now + LEASE_S)

    def close(self) -> None:
        """Let go of the frame; what was asked for runs out by itself."""
        if self._frame is not None:
            self._frame.close()
            self._frame = None
