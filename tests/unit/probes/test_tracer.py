"""What the tracer decides without a kernel: who is watched, whose numbers are whose, and twins of one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ncclwatch.errors import TargetError, TargetGoneError
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.state import VersionSource
from ncclwatch.probes.map_layouts import CONFIG_DTYPE, Numbering
from ncclwatch.probes.namespaces import NamespaceId, PidTranslation, process_key
from ncclwatch.probes.processes import is_descendant, start_time
from ncclwatch.probes.tracer import CallTracer, CommunicatorOffsets, Leave, _Binary
from ncclwatch.target.layout import Layout, Member, Struct


class FakeMap:
    """A map in a dictionary."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}

    def update(self, key: bytes, value: bytes) -> None:
        self.entries[key] = value

    def delete(self, key: bytes) -> bool:
        return self.entries.pop(key, None) is not None

    def lookup(self, key: bytes) -> bytes | None:
        return self.entries.get(key)

    def close(self) -> None:
        self.entries.clear()


class FakeKernel:
    def __init__(self) -> None:
        names = ("config", "sites", "functions", "binaries", "watched", "ignored", "hits", "counters")
        self.maps = {name: FakeMap() for name in names}

    def close(self) -> None:
        for entry in self.maps.values():
            entry.close()


def put_process(proc: Path, pid: int, *, parent: int = 1, started: int = 1000, namespace: str = "own", inner: str = "") -> None:
    """A process as ``/proc`` shows it; namespaces are plain files, which have inodes as well."""
    folder = proc / str(pid)
    (folder / "ns").mkdir(parents=True)
    target = proc / f"namespace-{namespace}"
    target.touch()
    os.link(target, folder / "ns/pid")
    (folder / "stat").write_text(f"{pid} (na) me) S {parent} " + " ".join(["0"] * 17) + f" {started} 0 0\n")
    (folder / "status").write_text(f"Name:\tx\nNSpid:\t{pid}{inner}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    put_process(tmp_path, 50)
    (tmp_path / "self").symlink_to("50")
    return tmp_path


def make_tracer(proc: Path, *, initial: bool = True) -> tuple[CallTracer, FakeKernel]:
    kernel: Any = FakeKernel()
    translation = PidTranslation.detect(proc)
    translation.initial = initial
    return CallTracer(kernel, None, translation, Leave.BLOCKING, frozenset()), kernel  # type: ignore[arg-type]


def make_events(*rows: dict[str, int]) -> Any:
    events = np.zeros(len(rows), EVENT_DTYPE)
    for index, row in enumerate(rows):
        events[index]["function"], events[index]["kind"] = Function.ALL_REDUCE, Kind.ENTER
        for name, value in row.items():
            events[index][name] = value
    return events


UNKNOWN = int(Flag.UNKNOWN_PROCESS)


def test_the_namespace_of_proc_is_our_own_as_a_rule(proc: Path) -> None:
    translation = PidTranslation.detect(proc)
    assert not translation.initial
    assert translation.namespaces == [NamespaceId.of(proc / "namespace-own")]


def test_a_proc_of_another_namespace_is_told_by_another_process(tmp_path: Path) -> None:
    put_process(tmp_path, 50, namespace="inner", inner=" 7")
    put_process(tmp_path, 60, namespace="outer")
    (tmp_path / "self").symlink_to("50")
    assert PidTranslation.detect(tmp_path).namespaces == [NamespaceId.of(tmp_path / "namespace-outer")]


def test_where_proc_shows_the_kernels_numbers_they_are_used(proc: Path) -> None:
    translation = PidTranslation.detect(proc)
    translation.initial = True
    assert translation.key(12345) == process_key(0, 12345)
    assert (
        np.frombuffer(translation.pack_config(watch_all=True, every_exec=False), CONFIG_DTYPE)[0]["numbering"] == Numbering.INIT
    )


def test_processes_of_child_namespaces_are_named_by_their_own_numbers(proc: Path) -> None:
    put_process(proc, 70)
    put_process(proc, 71, namespace="child", inner=" 3")
    translation = PidTranslation.detect(proc)
    assert translation.key(70) == process_key(0, 70)
    assert translation.key(71) == process_key(1, 3)
    config = np.frombuffer(translation.pack_config(watch_all=False, every_exec=True), CONFIG_DTYPE)[0]
    assert (config["numbering"], config["namespaces"], config["all"], config["every_exec"]) == (Numbering.NAMESPACE, 2, 0, 1)
    assert config["namespace_list"][1]["inode"] == (proc / "namespace-child").stat().st_ino
    assert translation.find(1, 3) == 71
    assert translation.find(1, 4) is None
    assert translation.find(9, 3) is None


def test_more_namespaces_than_a_program_can_try_are_refused(proc: Path) -> None:
    translation = PidTranslation.detect(proc)
    for number in range(3):
        put_process(proc, 80 + number, namespace=f"child{number}", inner=" 2")
        translation.key(80 + number)
    put_process(proc, 90, namespace="one-more", inner=" 2")
    with pytest.raises(TargetError, match="--pid=host"):
        translation.key(90)


def test_a_process_that_is_gone(proc: Path) -> None:
    with pytest.raises(TargetGoneError, match="process 999 is gone"):
        PidTranslation.detect(proc).key(999)
    with pytest.raises(TargetGoneError):
        start_time(proc, 999)
    assert start_time(proc, 999, missing=-1) == -1


def test_descent_follows_parents_and_ends(proc: Path) -> None:
    put_process(proc, 100)
    put_process(proc, 101, parent=100)
    put_process(proc, 102, parent=101)
    put_process(proc, 103, parent=103)
    assert is_descendant(proc, 102, {100})
    assert not is_descendant(proc, 100, {102})
    assert not is_descendant(proc, 103, {100}), "a loop of parents ends"
    assert not is_descendant(proc, 999, {100})


def test_watching_and_no_longer_watching(proc: Path) -> None:
    put_process(proc, 100, started=42)
    tracer, kernel = make_tracer(proc)
    tracer.add_process(100)
    assert kernel.maps["watched"].entries == {process_key(0, 100): (100).to_bytes(4, "little")}
    assert tracer.processes == {100}
    tracer.remove_process(100)
    assert not kernel.maps["watched"].entries
    assert process_key(0, 100) in kernel.maps["ignored"].entries
    tracer.remove_process(100)


def test_a_child_of_a_watched_process_is_adopted_with_its_first_record(proc: Path) -> None:
    put_process(proc, 100)
    put_process(proc, 101, parent=100)
    tracer, kernel = make_tracer(proc)
    tracer.add_process(100)
    events = tracer._settle_unknown(make_events({"pid": 101, "flags": UNKNOWN}, {"pid": 100}))
    assert events["pid"].tolist() == [101, 100]
    assert events["flags"].tolist() == [0, 0]
    assert tracer.processes == {100, 101}
    assert process_key(0, 101) in kernel.maps["watched"].entries


def test_another_job_on_the_same_library_is_ruled_out(proc: Path) -> None:
    put_process(proc, 100)
    put_process(proc, 200)
    tracer, kernel = make_tracer(proc)
    tracer.add_process(100)
    events = tracer._settle_unknown(make_events({"pid": 200, "flags": UNKNOWN}, {"pid": 100}, {"pid": 999, "flags": UNKNOWN}))
    assert events["pid"].tolist() == [100]
    assert set(kernel.maps["ignored"].entries) == {process_key(0, 200)}, "a number that is free again is nobody's"
    assert tracer.unidentified == 1


def test_a_process_whose_main_thread_ended_is_still_the_one_we_watched(proc: Path) -> None:
    """The kernel forgets it when the main thread exits; its other threads make it known again. A reused number is another one."""
    put_process(proc, 100, started=42)
    tracer, kernel = make_tracer(proc)
    tracer.add_process(100)
    kernel.maps["watched"].entries.clear()
    assert len(tracer._settle_unknown(make_events({"pid": 100, "flags": UNKNOWN}))) == 1
    kernel.maps["watched"].entries.clear()
    (proc / "100/stat").write_text((proc / "100/stat").read_text().replace(" 42 ", " 43 "))
    assert len(tracer._settle_unknown(make_events({"pid": 100, "flags": UNKNOWN}))) == 0


def test_when_all_are_watched_everybody_is_welcome(proc: Path) -> None:
    put_process(proc, 71, namespace="child", inner=" 3")
    tracer, _ = make_tracer(proc, initial=False)
    tracer._all = True
    tracer._translation.namespaces.append(NamespaceId.of(proc / "namespace-child"))
    events = tracer._settle_unknown(make_events({"pid": 3, "pid_namespace": 1, "flags": UNKNOWN}, {"pid": 999, "flags": UNKNOWN}))
    assert events["pid"].tolist() == [71, 999], "a process that is gone again still counts"


def test_execs_of_strangers_are_reported_but_watch_nobody(proc: Path) -> None:
    put_process(proc, 300)
    tracer, kernel = make_tracer(proc)
    events = tracer._settle_unknown(make_events({"pid": 300, "flags": UNKNOWN, "function": 0, "kind": Kind.EXEC}))
    assert len(events) == 1
    assert not kernel.maps["watched"].entries
    assert not kernel.maps["ignored"].entries


def binary(number: int, build_id: str) -> _Binary:
    return _Binary(number, f"/lib{number}", (1, number), build_id, (), {}, [], (0, 0))


def test_two_ways_to_one_file_report_once(proc: Path) -> None:
    tracer, _ = make_tracer(proc)
    tracer._binaries = {0: binary(0, "aa"), 1: binary(1, "aa"), 2: binary(2, "bb")}
    rows = [{"pid": 5, "binary": 0}, {"pid": 5, "binary": 1}, {"pid": 6, "binary": 2}, {"pid": 7, "binary": 2}]
    events = tracer._merge_twins(make_events(*rows))
    assert events["binary"].tolist() == [0, 2, 2]
    assert set(tracer.files) == {0, 2}
    late = tracer._merge_twins(make_events({"pid": 5, "binary": 1}, {"pid": 5, "binary": 0}))
    assert late["binary"].tolist() == [0], "records of the detached twin that were still in the ring"


def test_two_builds_in_one_process_are_no_twins(proc: Path) -> None:
    tracer, _ = make_tracer(proc)
    tracer._binaries = {0: binary(0, "aa"), 1: binary(1, "bb"), 2: binary(2, ""), 3: binary(3, "")}
    rows = [{"pid": 5, "binary": number} for number in range(4)]
    assert tracer._merge_twins(make_events(*rows))["binary"].tolist() == [0, 1, 2, 3]


def test_offsets_are_taken_from_a_layout_and_missing_ones_are_none() -> None:
    members = {
        "startMagic": Member("startMagic", 0, 8, "uint"),
        "commHash": Member("commHash", 100, 8, "uint"),
        "rank": Member("rank", 108, 4, "int"),
        "nRanks": Member("nRanks", 112, 8, "int"),  # of another width than we read
    }
    layout = Layout("", (2, 99, 0), VersionSource.DEBUG_INFO, {"ncclComm": Struct("ncclComm", 200, members)}, {}, {})
    assert CommunicatorOffsets.from_layout(layout) == CommunicatorOffsets(100, 108, None, None, 0)
