"""``paths move``: what is asked of a process, and what is said of its answers (the process: ``testbed/test_path_labels.py``)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ncclwatch.cli import main

SECRET = "sixteen-bytes-it-is"  # noqa: S105 - of a test


@contextmanager
def process(folder: Path, *answers: bytes) -> Iterator[list[bytes]]:
    """Stands where the library's thread listens: what it was asked, with an answer each."""
    (folder / "key").write_text(SECRET + "\n")
    heard: list[bytes] = []

    def serve(end: socket.socket) -> None:
        for said in answers:
            caller, _ = end.accept()
            with caller:
                heard.append(caller.recv(256))
                caller.sendall(said)

    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(folder / "17.sock"))
        end.listen()
        thread = threading.Thread(target=serve, args=(end,))
        thread.start()
        yield heard
        thread.join(60)


def test_each_queue_pair_is_asked_for_and_what_stays_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with process(tmp_path, b"0\n", b"95\n", b"5\n") as heard:
        status = main.run(["paths", "move", str(tmp_path), "17", "1234:50001", "5:50002", "6:65535"])
    said = capsys.readouterr()
    assert heard == [f"{SECRET} {ask}\n".encode() for ask in ("1234 50001", "5 50002", "6 65535")]
    assert status == 3 and said.out == "queue pair 1234 leaves by source port 50001\n"
    assert "queue pair 5 stays: its device or driver cannot" in said.err and "6 stays: Input/output error" in said.err


def test_an_answer_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with process(tmp_path, b"what?\n"):
        assert main.run(["paths", "move", str(tmp_path), "17", "5:50002"]) == 3
    assert "process 17 does not answer" in capsys.readouterr().err


def test_nobody_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["paths", "move", str(tmp_path), "17", "5:50002"]) == 2 and "holds no secret" in capsys.readouterr().err
    (tmp_path / "key").write_text(SECRET)
    assert main.run(["paths", "move", str(tmp_path), "17", "5:50002"]) == 3
    assert "process 17 does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["5", "5:", ":50001", "5:4791", "5:65536", "0:50001", "16777216:50001", "x:50001", "٥:50001"])
def test_what_is_no_move(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main.run(["paths", "move", str(tmp_path), "17", text]) == 2 and "QUEUE_PAIR:PORT" in capsys.readouterr().err
