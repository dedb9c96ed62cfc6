"""The calls plane against a library that exports what NCCL exports: exact counts, arguments, comings and goings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ncclwatch.model.events import Flag, Function, Kind
from ncclwatch.probes.attach import Backend
from ncclwatch.probes.functions import BLOCKING, FUNCTIONS, GRAPHS
from ncclwatch.probes.map_layouts import Counter, SiteKind
from ncclwatch.probes.tracer import CallTracer, Leave, TracedFile
from testbed.calls.harness import BREAKPOINT, STUB_OFFSETS, Caller, build_stub, calls, collect, compilation, summary

pytestmark = [pytest.mark.attach, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def caller(library: Path) -> Iterator[Caller]:
    with Caller(library, rank=2) as process:
        yield process


def start(library: Path, watch: list[int] | None, **options: object) -> CallTracer:
    return CallTracer.start([TracedFile(str(library), STUB_OFFSETS)], watch=watch, compilation=compilation(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", list(Backend))
def test_23_calls_give_23_records(library: Path, caller: Caller, backend: Backend) -> None:
    with start(library, [caller.pid], backend=backend) as tracer:
        assert tracer.backend is backend
        caller.run("allreduce 23")
        events = tracer.poll()
        assert summary(events) == {"ALL_REDUCE ENTER": 23}
        assert tracer.losses() == (0,) * len(tracer.losses())
        assert len(tracer.poll()) == 0


def test_what_a_record_says(library: Path, caller: Caller) -> None:
    address = int(caller.run("comm")[0].split()[1], 16)
    with start(library, [caller.pid]) as tracer:
        caller.run("allreduce 3")
        events = tracer.poll()
    assert set(events["pid"]) == set(events["tid"]) == {caller.pid}
    assert events["count"].tolist() == [1000, 1001, 1002]
    assert events["op_count"].tolist() == [0, 1, 2]
    assert set(events["flags"]) == {Flag.COMM_READ}
    one = events[0]
    assert (one["comm"], one["comm_hash"]) == (address, (0xFEEDFACE00000000 + caller.pid) ^ 0x5555)
    assert (one["rank"], one["nranks"], one["datatype"], one["redop"], one["peer"]) == (2, 4, 7, 2, -1)
    assert (one["sendbuff"], one["recvbuff"], one["stream"]) == (0x1111, 0x2222, 0x3333)
    assert one["caller"] != 0
    assert (np.diff(events["time_ns"].astype(np.int64)) > 0).all()


@pytest.mark.parametrize("backend", list(Backend))
def test_every_function_is_seen_once_with_its_arguments(library: Path, caller: Caller, backend: Backend) -> None:
    with start(library, [caller.pid], backend=backend) as tracer:
        caller.run("every")
        events = tracer.poll()
        nested = sum(tracer.counters()[Counter.NESTED])
    entered = [Function(int(f)) for f in events[events["kind"] == Kind.ENTER]["function"]]
    left = [Function(int(f)) for f in events[events["kind"] == Kind.LEAVE]["function"]]
    repeated = {Function.ALL_REDUCE: 2, Function.COMM_SPLIT: 2}  # with its Config variant; with and without a colour
    of_nccl = FUNCTIONS.keys() - GRAPHS - {Function.COMM_INIT_RANK}
    assert {f: entered.count(f) for f in of_nccl} == {f: repeated.get(f, 1) for f in of_nccl}
    assert {f: left.count(f) for f in set(left)} == {f: repeated.get(f, 1) for f in BLOCKING if f is not Function.COMM_INIT_RANK}
    # Bcast calls Broadcast, CommInitAll opens and closes a group: the user did not.
    assert nested == 1 + 2 + 1, "three nested enters and the leave of the nested GroupEnd"

    def arguments(function: Function, *names: str) -> list[tuple[int, ...]]:
        return [tuple(int(event[name]) for name in names) for event in calls(events, function)]

    assert arguments(Function.ALL_REDUCE, "count", "datatype", "redop", "stream") == [(101, 7, 1, 0x3333), (102, 7, 1, 0x3333)]
    assert arguments(Function.BROADCAST, "count", "datatype", "peer", "stream") == [(103, 1, 6, 0x3333)]
    assert arguments(Function.BCAST, "count", "datatype", "peer", "recvbuff", "stream") == [(104, 2, 5, 0x2222, 0x3333)]
    assert arguments(Function.REDUCE, "count", "datatype", "redop", "peer", "stream") == [(105, 3, 4, 2, 0x3333)]
    assert arguments(Function.ALL_GATHER, "count", "datatype", "stream") == [(106, 4, 0x3333)]
    assert arguments(Function.REDUCE_SCATTER, "count", "datatype", "redop") == [(107, 5, 3)]
    assert arguments(Function.ALL_TO_ALL, "count", "datatype", "stream") == [(108, 6, 0x3333)]
    assert arguments(Function.GATHER, "count", "datatype", "peer") == [(109, 7, 1)]
    assert arguments(Function.SCATTER, "count", "datatype", "peer") == [(110, 8, 0)]
    assert arguments(Function.SEND, "count", "datatype", "peer", "sendbuff", "recvbuff") == [(111, 9, 3, 0x1111, 0)]
    assert arguments(Function.RECV, "count", "datatype", "peer", "sendbuff", "recvbuff") == [(112, 10, 4, 0, 0x2222)]
    assert arguments(Function.PUT_SIGNAL, "count", "peer", "rank", "stream") == [(113, 2, 2, 0x3333)]
    assert arguments(Function.SIGNAL, "peer", "rank", "stream") == [(6, 2, 0x3333)]
    assert arguments(Function.WAIT_SIGNAL, "rank", "stream") == [(2, 0x3333)]
    assert arguments(Function.COMM_REGISTER, "count", "sendbuff") == [(4096, 0x1111)]
    assert arguments(Function.COMM_SPLIT, "color", "rank") == [(5, 2), (-1, 2)]


def test_communicators_are_known_from_their_making_on(library: Path, caller: Caller) -> None:
    with start(library, [caller.pid]) as tracer:
        caller.run("every")
        events = tracer.poll()
    identity = 0xFEEDFACE00000000 + caller.pid

    def left(function: Function) -> list[tuple[int, int, int]]:
        return [(int(e["comm_hash"]), int(e["rank"]), int(e["nranks"])) for e in calls(events, function, Kind.LEAVE)]

    assert calls(events, Function.GET_UNIQUE_ID, Kind.LEAVE)["unique_id"].tolist() == [identity]
    config = calls(events, Function.COMM_INIT_RANK_CONFIG)
    assert [(int(e["unique_id"]), int(e["rank"]), int(e["nranks"]), int(e["comm_hash"])) for e in config] == [(identity, 3, 4, 0)]
    scalable = calls(events, Function.COMM_INIT_RANK_SCALABLE)
    assert [(int(e["unique_id"]), int(e["rank"]), int(e["nranks"])) for e in scalable] == [(identity, 2, 4)]
    world = identity ^ 0x5555
    assert left(Function.COMM_INIT_RANK_CONFIG) == [(world, 3, 4)]
    assert left(Function.COMM_INIT_RANK_SCALABLE) == [(world, 2, 4)]
    assert left(Function.COMM_INIT_ALL) == [(0xA11, 0, 3)]
    assert left(Function.COMM_SPLIT) == [(world + 5, 1, 2), (0, -1, -1)], "the second colour makes no communicator"
    assert left(Function.COMM_SHRINK) == [(world + 100, 2, 3)]
    assert left(Function.COMM_GROW) == [(world + 200, 8, 9)]
    assert left(Function.COMM_DESTROY) == [(world, 3, 4)], "it is gone by then: what was known on entry"
    aborted = calls(events, Function.COMM_ABORT, Kind.LEAVE)
    assert aborted["result"].tolist() == [6]
    for event in events[events["kind"] == Kind.LEAVE]:
        entered = calls(events, Function(int(event["function"])))["time_ns"]
        assert event["enter_time_ns"] in entered
        assert event["time_ns"] > event["enter_time_ns"]
        assert not event["flags"] & Flag.NO_ENTER


def test_leaves_of_all_calls_or_of_none(library: Path, caller: Caller) -> None:
    with start(library, [caller.pid], leave=Leave.ALL) as tracer:
        caller.run("allreduce 23")
        assert summary(tracer.poll()) == {"ALL_REDUCE ENTER": 23, "ALL_REDUCE LEAVE": 23}
    with start(library, [caller.pid], leave=Leave.NONE) as tracer:
        caller.run("every")
        assert set(tracer.poll()["kind"]) == {Kind.ENTER}
        assert {hit.site.kind for hit in tracer.hits()} == {SiteKind.ENTER}


def test_gates_switch_records_off_and_on(library: Path, caller: Caller) -> None:
    with start(library, [caller.pid], leave=Leave.ALL) as tracer:
        tracer.set_gate(Function.ALL_REDUCE, enter=False, leave=False)
        caller.run("allreduce 7")
        caller.run("bcast 5")
        assert summary(tracer.poll()) == {"BCAST ENTER": 5, "BCAST LEAVE": 5}
        assert sum(tracer.counters()[Counter.GATED]) == 14
        tracer.set_gate(Function.ALL_REDUCE, enter=True, leave=False)
        caller.run("allreduce 7")
        assert summary(tracer.poll()) == {"ALL_REDUCE ENTER": 7}
        tracer.set_gate(Function.ALL_REDUCE, enter=False, leave=True)
        caller.run("allreduce 7")
        left = tracer.poll()
        assert summary(left) == {"ALL_REDUCE LEAVE": 7}
        assert (left["enter_time_ns"] > 0).all()


def test_a_call_that_began_before_the_probes_is_seen_to_leave(library: Path, caller: Caller) -> None:
    with start(library, [caller.pid], leave=Leave.ALL) as tracer:
        tracer.set_gate(Function.ALL_REDUCE, enter=True, leave=False)
        caller.run("allreduce 1")
        tracer.set_gate(Function.ALL_REDUCE)
        # As if the first call were still running: its leave comes without an enter that was kept.
        tracer._kernel.maps["functions"].update(
            int(Function.ALL_REDUCE).to_bytes(4, "little"),
            FUNCTIONS[Function.ALL_REDUCE].pack(enter=False, leave=True, leave_seen=False),
        )
        caller.run("allreduce 1")
        left = calls(tracer.poll(), Function.ALL_REDUCE, Kind.LEAVE)
    assert left["flags"].tolist() == [Flag.NO_ENTER]
    assert left["enter_time_ns"].tolist() == [0]


def test_many_threads_of_many_processes_lose_nothing(library: Path) -> None:
    callers = [Caller(library, rank=rank) for rank in range(4)]
    try:
        with start(library, [c.pid for c in callers], leave=Leave.ALL) as tracer:
            for process in callers:
                process.send("threads 8 503")
            wanted = 4 * 8 * 503 * 2
            events = collect(tracer, lambda e: len(e) >= wanted)
            for process in callers:
                process.finish()
            assert len(tracer.poll()) == 0
            assert sum(tracer.losses()) == 0
            assert sum(hit.hits for hit in tracer.hits()) == wanted
        assert summary(events) == {"ALL_REDUCE ENTER": wanted // 2, "ALL_REDUCE LEAVE": wanted // 2}
        for process in callers:
            mine = calls(events[events["pid"] == process.pid], Function.ALL_REDUCE)
            assert len(set(mine["tid"])) == 8
            assert sorted(mine["count"]) == sorted(list(range(1000, 1503)) * 8)
    finally:
        for process in callers:
            process.close()


def test_a_full_ring_loses_records_and_says_how_many(library: Path, caller: Caller) -> None:
    with start(library, [caller.pid], ring_bytes=16384) as tracer:
        caller.run("allreduce 1009")
        kept = len(tracer.poll())
        assert 0 < kept < 1009
        assert kept + sum(tracer.losses()) == 1009
        assert sum(tracer.counters()[Counter.RECORDS]) == kept
        caller.run("allreduce 23")
        assert len(tracer.poll()) == 23, "and goes on afterwards"


def test_two_jobs_on_one_library_never_report_each_other(library: Path) -> None:
    with Caller(library) as ours, Caller(library) as theirs, start(library, [ours.pid]) as tracer:
        for _ in range(3):
            theirs.run("allreduce 101")
            ours.run("allreduce 7")
            events = tracer.poll()
            assert set(events["pid"]) == {ours.pid}
            assert len(events) == 7
        with start(library, [theirs.pid]) as other:
            theirs.run("allreduce 5")
            ours.run("allreduce 3")
            assert (set(other.poll()["pid"]), set(tracer.poll()["pid"])) == ({theirs.pid}, {ours.pid})
        assert sum(tracer.counters()[Counter.FOREIGN]) > 0, "after the first poll the stranger is ruled out in the kernel"


def test_processes_come_and_go_while_attached(library: Path) -> None:
    with Caller(library) as first, Caller(library) as second, start(library, [first.pid]) as tracer:
        second.run("allreduce 5")
        assert len(tracer.poll()) == 0
        tracer.add_process(second.pid)
        second.run("allreduce 7")
        assert set(tracer.poll()["pid"]) == {second.pid}
        tracer.remove_process(second.pid)
        second.run("allreduce 11")
        first.run("allreduce 13")
        assert summary(tracer.poll()) == {"ALL_REDUCE ENTER": 13}


def test_when_all_are_watched_later_processes_are_seen_from_their_first_call(library: Path) -> None:
    with start(library, None) as tracer:
        with Caller(library, rank=3) as late:
            late.run("allreduce 23")
            pid = late.pid
        events = collect(tracer, lambda e: bool((e["kind"] == Kind.EXIT).any()))
        assert summary(events) == {
            "GET_UNIQUE_ID ENTER": 1,
            "GET_UNIQUE_ID LEAVE": 1,
            "COMM_INIT_RANK ENTER": 1,
            "COMM_INIT_RANK LEAVE": 1,
            "ALL_REDUCE ENTER": 23,
            "NONE EXIT": 1,
        }
        assert set(events["pid"]) == {pid}
        made = calls(events, Function.COMM_INIT_RANK, Kind.LEAVE)[0]
        assert (made["rank"], made["nranks"], made["unique_id"]) == (3, 4, 0xFEEDFACE00000000 + pid)


def test_children_of_a_watched_process_are_watched(library: Path, caller: Caller) -> None:
    with start(library, [caller.pid]) as tracer:
        child = int(caller.run("fork 23")[0].split()[1])
        caller.run("allreduce 2")
        assert set(tracer.poll()["pid"]) == {caller.pid}
        assert tracer.unidentified == 23, f"child {child} was gone when we looked: nobody can say whose it was, but it is counted"
    with Caller(library) as parent, start(library, [os.getpid()]) as tracer:
        parent.run("allreduce 23")
        events = tracer.poll()
        assert (set(events["pid"]), len(events)) == ({parent.pid}, 23), "a descendant of this very process"


def test_exec_is_reported_and_the_process_stays_watched(library: Path, caller: Caller) -> None:
    with start(library, [caller.pid]) as tracer:
        caller.send("exec")
        caller.wait_ready()
        caller.run("allreduce 23")
        events = tracer.poll()
        assert summary(events)["NONE EXEC"] == 1
        assert summary(events)["ALL_REDUCE ENTER"] == 23
        assert set(events["pid"]) == {caller.pid}
        assert events[0]["kind"] == Kind.EXEC
        caller.send("exec-true")
        events = collect(tracer, lambda e: bool((e["kind"] == Kind.EXIT).any()))
        assert events["kind"].tolist() == [Kind.EXEC, Kind.EXIT]


def test_every_exec_of_the_machine_on_demand(library: Path, caller: Caller) -> None:
    with start(library, [caller.pid], every_exec=True) as tracer:
        with subprocess.Popen(["/bin/true"]) as stranger:
            stranger.wait()
        events = collect(tracer, lambda e: stranger.pid in e["pid"])
        row = events[events["pid"] == stranger.pid][0]
        assert (row["kind"], row["flags"]) == (Kind.EXEC, Flag.UNKNOWN_PROCESS)


def test_a_file_found_later_is_attached_by_the_same_agent(library: Path, tmp_path: Path, caller: Caller) -> None:
    other = build_stub(tmp_path)
    with start(library, None) as tracer, Caller(other) as late:
        late.run("allreduce 3")
        assert late.pid not in tracer.poll()["pid"]
        number = tracer.add_file(TracedFile(str(other), STUB_OFFSETS))
        assert number == tracer.add_file(TracedFile(f"/proc/{late.pid}/root{other}", STUB_OFFSETS)), "one file, one attachment"
        late.run("allreduce 23")
        caller.run("allreduce 5")
        events = tracer.poll()
        assert len(calls(events[events["pid"] == late.pid], Function.ALL_REDUCE)) == 23
        assert set(events[events["pid"] == late.pid]["binary"]) == {number}
        tracer.remove_file(number)
        late.run("allreduce 7")
        caller.run("allreduce 5")
        events = tracer.poll()
        assert set(events[np.isin(events["pid"], [late.pid, caller.pid])]["pid"]) == {caller.pid}


def test_without_offsets_calls_are_still_seen(library: Path, caller: Caller) -> None:
    with CallTracer.start([TracedFile(str(library))], watch=[caller.pid], compilation=compilation()) as tracer:
        caller.run("allreduce 2")
        events = tracer.poll()
        assert (events["flags"].tolist(), events["rank"].tolist()) == ([0, 0], [-1, -1])
        assert (events["comm"] != 0).all()
        tracer.set_offsets(0, STUB_OFFSETS)
        caller.run("allreduce 1")
        assert tracer.poll()["rank"].tolist() == [2]


def test_target_in_other_namespaces(library: Path) -> None:
    """Another pid, mount, network, host name and ipc namespace: its numbers are translated to ours."""
    wrapper = ["unshare", "--pid", "--fork", "--mount", "--net", "--uts", "--ipc", "--mount-proc"]
    with Caller(library, prefix=wrapper) as inside:
        assert inside.pid_in_namespace == 1
        assert inside.pid != 1
        path = f"/proc/{inside.pid}/root{library}"
        with CallTracer.start([TracedFile(path, STUB_OFFSETS)], watch=[inside.pid], compilation=compilation()) as tracer:
            inside.run("allreduce 23")
            events = tracer.poll()
            assert summary(events) == {"ALL_REDUCE ENTER": 23}
            assert set(events["pid"]) == {inside.pid}


AGENT = """
    import json, sys, time
    from pathlib import Path
    from testbed.calls.harness import STUB_OFFSETS, Caller, summary
    from ncclwatch.probes.tracer import CallTracer, TracedFile
    library, mode = Path(sys.argv[1]), sys.argv[2]
    wrapper = ["unshare", "--pid", "--fork"] if "child" in mode else []
    with Caller(library, prefix=wrapper) as ours, Caller(library) as theirs:
        watch = None if mode.startswith("all") else [ours.pid]
        with CallTracer.start([TracedFile(str(library), STUB_OFFSETS)], watch=watch) as tracer:
            if "child" in mode and watch is None:
                tracer.add_process(ours.pid)
            for _ in range(2):
                theirs.run("allreduce 5")
                ours.run("allreduce 23")
                events = tracer.poll()
            names = {ours.pid: "ours", theirs.pid: "theirs"}
            pids = {names.get(int(pid), str(pid)): int((events["pid"] == pid).sum()) for pid in set(events["pid"])}
            print(json.dumps({"pids": pids, "initial": tracer._translation.initial, "rank": int(events["rank"][-1])}))
"""


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("one", {"ours": 23}),
        ("all", {"ours": 23, "theirs": 5}),
        ("one-child", {"ours": 23}),
        ("all-child", {"ours": 23, "theirs": 5}),
    ],
)
def test_agent_in_a_pid_namespace_of_its_own(library: Path, mode: str, expected: dict[str, int]) -> None:
    """As in a container without ``--pid=host``: the kernel's numbers mean nothing. A target may live one level below."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", textwrap.dedent(AGENT), str(library), mode]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer == {"pids": expected, "initial": False, "rank": 0}


def test_one_file_behind_two_overlays_reports_once(library: Path, tmp_path: Path) -> None:
    """Containers share image layers: two paths, two device numbers, one inode for the kernel."""
    mounts = []
    try:
        for name in ("a", "b"):
            for part in ("upper", "work", "merged"):
                (tmp_path / name / part).mkdir(parents=True)
            options = f"lowerdir={library.parent},upperdir={tmp_path}/{name}/upper,workdir={tmp_path}/{name}/work"
            mount = subprocess.run(
                ["mount", "-t", "overlay", "overlay", "-o", options, str(tmp_path / name / "merged")],
                check=False,
                capture_output=True,
            )
            if mount.returncode:
                pytest.skip("overlay mounts are not possible here")
            mounts.append(tmp_path / name / "merged")
        paths = [mount / library.name for mount in mounts]
        assert paths[0].stat().st_dev != paths[1].stat().st_dev
        files = [TracedFile(str(path), STUB_OFFSETS) for path in paths]
        with (
            Caller(paths[0]) as first,
            Caller(paths[1]) as second,
            CallTracer.start(files, watch=[first.pid, second.pid], compilation=compilation()) as tracer,
        ):
            for _ in range(3):
                first.run("allreduce 23")
                second.run("allreduce 7")
                events = tracer.poll()
                assert {pid: int((events["pid"] == pid).sum()) for pid in set(events["pid"])} == {first.pid: 23, second.pid: 7}
            assert len(tracer.files) == 1
    finally:
        for path in mounts:
            subprocess.run(["umount", str(path)], check=True)


KILLED_AGENT = """
    import sys, time
    from testbed.calls.harness import STUB_OFFSETS
    from ncclwatch.probes.tracer import CallTracer, Leave, TracedFile
    tracer = CallTracer.start([TracedFile(sys.argv[1], STUB_OFFSETS)], watch=[int(sys.argv[2])], leave=Leave.ALL)
    print("attached", flush=True)
    while True:
        tracer.poll(0.1)
"""


def test_a_killed_agent_leaves_no_probe_and_no_harm(library: Path, caller: Caller) -> None:
    """The breakpoint byte in the caller's memory is gone with the agent, and the caller computes on."""
    with start(library, [caller.pid]) as tracer:
        entry = next(f.entry for f in tracer.functions(0) if f.function is Function.ALL_REDUCE)

    def first_byte() -> int:
        return caller.byte_at(library, entry.address)

    assert first_byte() == entry.code[0]
    command = [sys.executable, "-c", textwrap.dedent(KILLED_AGENT), str(library), str(caller.pid)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "attached\n"
        caller.run("allreduce 1")
        assert first_byte() == BREAKPOINT
        caller.send("chaos 1000")
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    caller.finish()
    assert first_byte() == entry.code[0]
    caller.run("allreduce 23")
    assert caller.close() == 0


def test_attaching_and_detaching_in_the_middle_of_calls(library: Path, caller: Caller) -> None:
    caller.send("chaos 3000")
    for _ in range(5):
        with start(library, [caller.pid], leave=Leave.ALL) as tracer:
            events = collect(tracer, lambda e: len(e) > 100)
            assert set(events["pid"]) == {caller.pid}
    caller.finish()
    assert caller.close() == 0
