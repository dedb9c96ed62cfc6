"""dump and ps: what a person reads at night, and the same as JSON; nothing of a target reaches the terminal as a command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ncclwatch.cli import main
from ncclwatch.cli.dump_text import bus, process_lines
from ncclwatch.cli.options import pids, split_words
from ncclwatch.cli.output import plain
from ncclwatch.cli.ps import table
from ncclwatch.errors import TargetError, TargetGoneError, UsageError
from ncclwatch.model.state import Direction, OpPhase, PendingOperation, ProcessSample, ProxyOperation
from ncclwatch.text import Style
from unit import fake_targets
from unit.synthetic import Rank, communicator, frozen_ring, process, recv, send, shared

EVIL = "\x1b[31m\x1b]0;t\x07\r\n\u202e"


def block(sample: ProcessSample) -> str:
    return "\n".join(process_lines(sample, Style(enabled=False)))


def look(*operations: ProxyOperation, **extra: object) -> ProcessSample:
    [sample] = Rank(0, 4, (communicator(0, 4),), operations).looks(1)
    return replace(sample, **extra)  # type: ignore[arg-type]


def test_a_block_aligns_its_columns() -> None:
    text = block(look(send(1, sent=60, done=56, produced=64), recv(3, posted=96, received=92, delivered=92, consumed=92)))
    lines = text.splitlines()
    [heading] = [line for line in lines if "OPERATION" in line]
    rows = [line for line in lines if "AllReduce #13" in line]
    assert len(rows) == 2
    for title, values in (("STEPS", ("96", "96")), ("POSTED", ("96", "64")), ("DONE", ("92", "56"))):
        end = heading.index(title) + len(title)
        assert tuple(row[:end].rsplit(maxsplit=1)[-1] for row in rows) == values
    start = heading.index("WAITS FOR")
    assert {row[start:] for row in rows} == {"the network to complete step 57", "step 93 from rank 3"}


def test_counters_of_what_has_not_begun_are_not_shown() -> None:
    text = block(look(send(1, sent=77, done=77, produced=77, phase=OpPhase.READY)))
    assert "77" not in text


def test_what_is_missing_is_said() -> None:
    text = block(
        look(torn=2, truncated=("communicators: 4096",), unavailable={"gpu_ready": "no such member", "steps": "no such member"})
    )
    assert "not available: gpu_ready, steps: no such member" in text
    assert "2 structures changed while being read" in text
    assert "cut short: communicators: 4096" in text
    assert "no unfinished operation in the proxy" in text


def test_pending_operations_and_shared_memory_are_told_in_few_lines() -> None:
    pending = tuple(PendingOperation(0xA1, Direction.SEND, 28, channel, 1, 24, "AllReduce", "Simple") for channel in range(8))
    comm = replace(
        communicator(0, 4), host_connections=tuple(replace(shared(Direction.SEND, 1, 5, 9), channel=c) for c in range(8))
    )
    text = block(look(pending=pending, communicators=(comm,)))
    assert "8 posted by the main thread, not yet taken by the proxy: AllReduce #14 send x8" in text
    assert [line.split()[:3] for line in text.splitlines() if "0-7" in line] == [["send", "1", "0-7"]]


def test_bus_ids_read_as_the_kernel_writes_them() -> None:
    assert bus(0x0001_1B_00_1) == "0001:1b:00.1"[:-1] + "1"
    assert bus(0x1B000) == "0000:1b:00.0"
    assert bus(None) == ""


def test_nothing_of_a_target_reaches_the_terminal_as_a_command() -> None:
    info = replace(process(0, 4), name=EVIL, command=(EVIL, EVIL), host=EVIL, library=EVIL, container_id=EVIL)
    comm = replace(communicator(0, 4), name=EVIL, async_result=EVIL, init_state=EVIL, sequence_numbers={EVIL: 3}, finder=EVIL)
    operation = replace(send(1, sent=60, done=56, produced=64), collective=EVIL, net_name=EVIL, protocol=EVIL, algorithm=EVIL)
    pending = PendingOperation(0xA1, Direction.SEND, 28, 0, 1, 24, EVIL, EVIL)
    sample = look(operation, process=info, communicators=(comm,), pending=(pending,), unavailable={EVIL: EVIL}, truncated=(EVIL,))
    for line in [*process_lines(sample, Style(enabled=False)), *table([info], [[EVIL]], [EVIL])]:
        assert line.isprintable(), line


def test_a_million_arguments_and_operations_stay_readable() -> None:
    info = replace(process(0, 4), command=("x" * 1000,) * 100_000)
    sample = look(*(send(1, sent=1, done=0, produced=1, op_count=2 * n, channel=n) for n in range(1000)), process=info)
    lines = list(process_lines(sample, Style(enabled=False)))
    assert len(lines) < 220
    assert max(map(len, lines)) < 260
    assert "… and 800 more" in lines[-1]


def test_json_is_plain_bounded_and_exact() -> None:
    comm = replace(communicator(0, 4), hash=0xFEDCBA9876543210)
    data = json.loads(
        json.dumps(plain(look(communicators=(comm,), process=replace(process(0, 4), name=EVIL + "\udc80"))), allow_nan=False)
    )
    assert data["communicators"][0]["hash"] == "fedcba9876543210", "a number of 64 bits would lose digits in most readers"
    assert data["process"]["name"].isprintable()
    assert plain(float("inf")) is None
    assert plain(float("nan")) is None


def test_dump_shows_every_rank_in_order_and_names_what_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = fake_targets.still(reversed(frozen_ring(2)))
    targets[7] = TargetGoneError("there is no process 7", "look again")
    fake_targets.install(monkeypatch, targets)
    assert main.run(["dump", "--pid", "7,1003,1002,1001,1000"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines() if line.startswith("rank ")] == ["0/4", "1/4", "2/4", "3/4"]
    assert "stopped" in out
    assert err == "ncclwatch: pid 7: there is no process 7: look again\n"


def test_dump_json_holds_the_failures_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2))
    targets[7] = TargetGoneError("there is no process 7", "look again")
    fake_targets.install(monkeypatch, targets)
    assert main.run(["dump", "--json", "--pid", "7,1000"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "ncclwatch.dump/1"
    assert [p["process"]["rank"] for p in data["processes"]] == [0]
    assert data["errors"] == [{"target": "pid 7", "pid": 7, "error": "there is no process 7", "hint": "look again"}]


def test_one_target_that_fails_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_targets.install(monkeypatch, {7: TargetError("process 7 has no NCCL", "choose another")})
    assert main.run(["dump", "7"]) == 3
    assert capsys.readouterr() == ("", "ncclwatch: error: process 7 has no NCCL: choose another\n")


def test_words_are_pids_or_files(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pids(["1,2", "2 3"]) == [1, 2, 3]
    assert split_words(["1"], ["22", "a.snap"])[0] == [1, 22]
    assert [str(file) for file in split_words([], ["a.snap", "-1"])[1]] == ["a.snap", "-1"]
    for wrong in ("-1", "0", "1e3", "٣", "4194305", "9" * 5000):
        with pytest.raises(UsageError):
            pids([wrong])


def test_ps_table_leaves_out_what_says_nothing() -> None:
    lines = table([process(0, 4), replace(process(1, 4), rank=None, world_size=None)], [[], []], ["S", "T"])
    assert lines[0].split() == ["PID", "RANK", "NCCL", "STATE", "LIBRARY", "COMMAND"]
    assert lines[1].split() == ["1000", "0/4", "2.27.5", "sleeping", "libnccl.so.2", "train"]
    assert lines[2].split() == ["1001", "-", "2.27.5", "stopped", "libnccl.so.2", "train"]


def test_ps_counts_further_libraries_of_a_process() -> None:
    lines = table([process(0, 4)], [["/opt/framework/libnccl.so.2"]], ["S"])
    assert "libnccl.so.2 +1" in lines[1]
