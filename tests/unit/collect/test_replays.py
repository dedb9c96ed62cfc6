"""Calls that CUDA graphs capture count where a launch replays them, and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclwatch.collect import replays
from ncclwatch.collect.replays import Replays
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind

GRAPH, EXECUTABLE, COMM = 0x1000, 0x2000, 0xC0
PID, TID = 7, 70


class Process:
    """A thread that calls NCCL and CUDA, as its records come out of the ring."""

    def __init__(self, pid: int = PID, tid: int = TID) -> None:
        self.pid, self.tid, self.time_ns = pid, tid, 1000
        self.records: list[NDArray[Any]] = []

    def say(self, function: Function, kind: Kind = Kind.ENTER, **fields: int) -> Process:
        record = np.zeros(1, EVENT_DTYPE)
        self.time_ns += 10
        for name, value in {"pid": self.pid, "tid": self.tid, "time_ns": self.time_ns, **fields}.items():
            record[name] = value
        record["function"], record["kind"] = function, kind
        self.records.append(record)
        return self

    def all_reduce(self, count: int) -> Process:
        return self.say(Function.ALL_REDUCE, comm=COMM, count=count, flags=Flag.COMM_READ)

    def capture(self, *counts: int, graph: int = GRAPH, executable: int = EXECUTABLE) -> Process:
        self.say(Function.STREAM_BEGIN_CAPTURE)
        for count in counts:
            self.all_reduce(count)
        self.say(Function.STREAM_END_CAPTURE).say(Function.STREAM_END_CAPTURE, Kind.LEAVE, comm=graph)
        return self.instantiate(graph, executable)

    def instantiate(self, graph: int, executable: int) -> Process:
        self.say(Function.GRAPH_INSTANTIATE, sendbuff=graph)
        return self.say(Function.GRAPH_INSTANTIATE, Kind.LEAVE, comm=executable)

    def launch(self, executable: int = EXECUTABLE) -> Process:
        return self.say(Function.GRAPH_LAUNCH, sendbuff=executable)

    def take(self) -> NDArray[Any]:
        records, self.records = self.records, []
        return np.concatenate(records)


def made(events: NDArray[Any]) -> list[int]:
    """Counts of the AllReduces among them."""
    found: list[int] = events["count"][events["function"] == Function.ALL_REDUCE].tolist()
    return found


def unknown(events: NDArray[Any]) -> list[bool]:
    """Of each launch, whether what it replays was not seen."""
    flags = events["flags"][events["function"] == Function.GRAPH_LAUNCH]
    return [bool(one) for one in flags & np.uint16(Flag.UNKNOWN_GRAPH)]


def test_captured_calls_count_at_each_launch_and_not_when_they_are_captured() -> None:
    known, process = Replays(), Process()
    events = known.expand(process.all_reduce(1).capture(2, 3).all_reduce(4).take())
    assert made(events) == [1, 4]
    events = known.expand(process.launch().all_reduce(5).launch().take())
    assert made(events) == [2, 3, 5, 2, 3]
    assert unknown(events) == [False, False]
    replayed = events["flags"] & np.uint16(Flag.REPLAYED) != 0
    assert events["count"][replayed].tolist() == [2, 3, 2, 3]
    assert (events["flags"][replayed] & np.uint16(Flag.COMM_READ) != 0).all() and (events["comm"][replayed] == COMM).all()
    assert (np.diff(events["time_ns"].astype(np.int64)) >= 0).all(), "they are of the moment of their launch"


def test_a_capture_may_come_in_pieces_and_other_threads_go_on() -> None:
    known, one, other = Replays(), Process(), Process(tid=71)
    assert made(known.expand(one.say(Function.STREAM_BEGIN_CAPTURE).all_reduce(2).take())) == []
    assert made(known.expand(other.all_reduce(9).take())) == [9]
    one.all_reduce(3).say(Function.STREAM_END_CAPTURE).say(Function.STREAM_END_CAPTURE, Kind.LEAVE, comm=GRAPH)
    assert made(known.expand(one.instantiate(GRAPH, EXECUTABLE).launch().take())) == [2, 3]


def test_without_graphs_records_are_handed_on_as_they_are() -> None:
    events = Process().all_reduce(1).take()
    assert Replays().expand(events) is events


def test_a_graph_that_was_captured_before_watching_began_is_unknown() -> None:
    events = Replays().expand(Process().launch().take())
    assert unknown(events) == [True] and made(events) == []
    assert events["comm"].tolist() == events["sendbuff"].tolist(), "which graph it is stays known where nothing else is kept"


def test_many_launches_of_several_processes_at_once() -> None:
    known, one, other = Replays(), Process(), Process(pid=8)
    known.expand(one.capture(2, 3).capture(graph=GRAPH + 1, executable=EXECUTABLE + 1).take())
    known.expand(other.capture(4).take())
    one.launch().launch(EXECUTABLE + 1).launch(0x9999).launch()
    events = known.expand(np.concatenate([one.take(), other.launch().launch().take(), one.all_reduce(5).launch().take()]))
    assert unknown(events) == [False, False, True, False, False, False, False]
    reduced = events[events["function"] == Function.ALL_REDUCE]
    assert reduced["count"].tolist() == [2, 3, 2, 3, 4, 4, 5, 2, 3]
    assert reduced["pid"].tolist() == [PID] * 4 + [8] * 2 + [PID] * 3
    # Each stands behind its launch, and is of the same moment.
    launch = np.maximum.accumulate(np.where(events["function"] == Function.GRAPH_LAUNCH, np.arange(len(events)), 0))
    replayed = events["flags"] & np.uint16(Flag.REPLAYED) != 0
    assert (events["time_ns"][launch[replayed]] == events["time_ns"][replayed]).all()


def test_records_that_were_lost_may_have_been_captured() -> None:
    known, process = Replays(), Process()
    known.expand(process.capture(2).take())
    known.forget()
    assert unknown(known.expand(process.launch().take())) == [True]


def test_handles_are_used_again() -> None:
    known, process = Replays(), Process()
    known.expand(process.capture(2).capture(3).take())
    assert made(known.expand(process.launch().take())) == [3]
    known.expand(process.instantiate(0x3000, EXECUTABLE).take())
    assert unknown(known.expand(process.launch().take())) == [True], "made of a graph that nobody captured"
    assert unknown(known.expand(Process(pid=8).launch().take())) == [True], "handles are a process's own"


def test_an_executable_that_is_updated_replays_the_other_graph() -> None:
    known, process = Replays(), Process()
    process.capture(2).capture(3, graph=GRAPH + 1, executable=EXECUTABLE + 1)
    process.say(Function.GRAPH_EXEC_UPDATE, sendbuff=EXECUTABLE, recvbuff=GRAPH + 1).launch()
    assert made(known.expand(process.take())) == [3]


def test_a_graph_launched_into_a_capture_becomes_part_of_it() -> None:
    known, process = Replays(), Process()
    process.capture(2).say(Function.STREAM_BEGIN_CAPTURE).launch().all_reduce(3)
    process.say(Function.STREAM_END_CAPTURE).say(Function.STREAM_END_CAPTURE, Kind.LEAVE, comm=GRAPH + 1)
    process.instantiate(GRAPH + 1, EXECUTABLE + 1).launch(EXECUTABLE + 1)
    assert made(known.expand(process.take())) == [2, 3]


@pytest.mark.parametrize("kind", [Kind.EXEC, Kind.EXIT])
def test_the_graphs_of_a_process_that_ended_are_forgotten(kind: Kind) -> None:
    known, process = Replays(), Process()
    known.expand(process.capture(2).say(Function.NONE, kind).take())
    assert unknown(known.expand(process.launch().take())) == [True]


def test_of_a_long_graph_only_collectives_are_repeated_and_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "MAX_REPEATED", 3)
    known, process = Replays(), Process()
    process.say(Function.STREAM_BEGIN_CAPTURE).say(Function.SEND, peer=1, comm=COMM)
    for count in range(5):
        process.all_reduce(count)
    process.say(Function.STREAM_END_CAPTURE).say(Function.STREAM_END_CAPTURE, Kind.LEAVE, comm=GRAPH)
    events = known.expand(process.instantiate(GRAPH, EXECUTABLE).launch().take())
    assert made(events) == [0, 1, 2] and Function.SEND not in events["function"]


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "MAX_GRAPHS", 2)
    known, process = Replays(), Process()
    for number in range(3):
        process.capture(number, graph=GRAPH + number, executable=EXECUTABLE + number)
    for number in range(3):
        process.launch(EXECUTABLE + number)
    assert unknown(known.expand(process.take())) == [True, False, False]
