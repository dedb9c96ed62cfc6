"""``ncclwatch serve``: what it refuses, what it serves, and an engine that it follows; the page is asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.cli.engine_service import EngineService
from ncclwatch.cli.serve import Watched, _jobs_of, _live, _recorded, _rules, _watched
from ncclwatch.errors import UsageError
from ncclwatch.messaging.agent import Agent
from unit.fake_node import FakeNode
from unit.synthetic import frozen_ring

ROOT = Path(__file__).parents[3]
RECORDING = ROOT / "tests/fixtures/stopped-8-ranks.recording"
SLOW = ROOT / "tests/fixtures/jobs/drawn-801-28-slow-loader-2.32.3-shm-live-0.ncclwatch"


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command on a port of its own choice; gives its address."""
    child = subprocess.Popen(
        [sys.executable, "-m", "ncclwatch", "serve", "--bind", ":0", *arguments], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        assert "serving" in line, child.communicate(timeout=60)
        yield child, line.split(" on ")[1].split()[0]
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(60)


def ask(address: str, path: str) -> Any:
    with urllib.request.urlopen(f"{address.rstrip(chr(47))}{path}", timeout=60) as answer:  # noqa: S310
        return json.load(answer)


def until(holds: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_recordings_are_served_with_iterations_and_what_slowness_costs() -> None:
    with command("--recording", str(SLOW)) as (child, address):
        [job] = [line["job"] for line in ask(address, "/api/jobs")["jobs"]]
        until(lambda: ask(address, "/api/jobs")["jobs"][0]["state"] == "recorded")
        [line] = ask(address, "/api/jobs")["jobs"]
        assert line["class"] == "slow-computation"
        assert 0.4 < line["cost"]["share"] < 0.6
        points = ask(address, f"/api/timeline?job={job}")["points"]
        assert len(points) > 20
        moment = ask(address, f"/api/moment?job={job}&t={points[-1][0]}")["parts"]
        # As the verdict says: 0.74 s instead of 0.38 s.
        assert 0.33 < moment["iterations"]["usual"] < 0.43
        assert 0.6 < moment["iterations"]["times"][-1][1] < 0.9
        ends = [end for end, _ in moment["iterations"]["times"]]
        assert ends == sorted(ends)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0


def test_an_engine_is_followed_and_waited_for(tmp_path: Path) -> None:
    engine = EngineService("tcp://127.0.0.1:*", interval_s=0.05)
    where = engine.hub.address
    file = tmp_path / "jobs.toml"
    file.write_text(f'[[job]]\nname = "training"\nengine = "{where}"\n\n[[job]]\nname = "away"\nengine = "tcp://127.0.0.1:9"\n')
    sender = Agent(where)
    sender.start()
    node = FakeNode(frozen_ring(2, 4), looks=60)
    try:
        with command("--jobs", str(file)) as (_, address):

            def line() -> dict[str, Any]:
                sender.take(node.batch())
                engine.step(lambda _job, _update: None, until=time.monotonic() + 0.05)
                found = {each["job"]: each for each in ask(address, "/api/jobs")["jobs"]}
                return dict(found["training"])

            # An engine that this process does not run for a moment is late: the job is live once it is heard of again.
            until(lambda: (now := line()).get("class") == "stopped" and now["state"] == "live")
            assert ask(address, "/api/rank?job=training&rank=2")["letter"] == "X"
            until(lambda: "no engine answers" in ask(address, "/api/jobs")["jobs"][1]["text"])
    finally:
        sender.link.close(flush_s=0.2)
        engine.close()


def rules(
    address: str = "127.0.0.1",
    token: Path | None = None,
    header: str | None = None,
    proxy: Sequence[str] = (),
    *,
    tls: bool = False,
) -> Any:
    return _rules(address, token, header, proxy, (), secure=tls)


def test_nobody_beyond_this_machine_is_let_in_for_nothing(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123")
    assert not rules().asks
    with pytest.raises(UsageError, match="nobody is asked who they are"):
        rules("0.0.0.0")  # noqa: S104
    with pytest.raises(UsageError, match="in the clear"):
        rules("10.0.0.1", token)
    assert rules("10.0.0.1", token, tls=True).secure
    assert rules(token=token).asks
    with pytest.raises(UsageError, match="can be set by whoever asks"):
        rules(header="X-User")
    with pytest.raises(UsageError, match="belongs to --user-header"):
        rules(proxy=["10.0.0.2"])
    with pytest.raises(UsageError, match="no name of a header"):
        rules(header="X User\r\n", proxy=["10.0.0.2"])
    assert rules("10.0.0.1", header="X-User", proxy=["10.0.0.2"]).user_header == "X-User"


def test_jobs_are_named_by_what_was_asked_for() -> None:
    assert _watched([], [], None, None, alone=True) == [Watched("127.0.0.1")]
    assert _watched([], [], None, None, alone=False) == []
    found = _watched(["127.0.0.1:7001", "127.0.0.1:7002"], ["big=abc", "def"], None, None, alone=True)
    assert [(one.engine, one.name, one.token) for one in found][:2] == [
        ("127.0.0.1:7001", "big", "abc"),
        ("127.0.0.1:7001", "", "def"),
    ]
    names = [feed.job for feed in _live(found)]
    assert names[0] == "big@127.0.0.1:7001"
    assert len(set(names)) == 4
    assert [feed.job for feed in _live([Watched("127.0.0.1")])] == ["default"]
    with pytest.raises(UsageError, match="cannot name a job"):
        _live([Watched("127.0.0.1", name="<b>")])
    with pytest.raises(UsageError, match="two jobs"):
        _live([Watched("127.0.0.1", "a", "x"), Watched("127.0.0.1", "b", "x")])
    with pytest.raises(UsageError, match="there are no keys"):
        _live([Watched("tcp://10.0.0.1:7311")])


@pytest.mark.parametrize(
    "text, words",
    [("[[job]\n", "no TOML"), ("a = 1\n", "names no job"), ("job = 3\n", "names no job"),
     ('[[job]]\nengin = "x"\n', "no field engin"),
     ("[[job]]\nname = 3\n", "only text"), ("\udcff", "no TOML")],
)  # fmt: skip
def test_a_file_of_jobs_that_makes_no_sense_is_told(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "jobs.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=words):
        _jobs_of(file, None)
    with pytest.raises(UsageError, match="cannot be read"):
        _jobs_of(tmp_path / "none", None)


def test_recordings_have_names_for_links(tmp_path: Path) -> None:
    folder = tmp_path / "my job"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).symlink_to(RECORDING)
    assert [feed.job for feed in _recorded([folder, RECORDING, RECORDING])] == ["my-job", "stopped-8-ranks", "stopped-8-ranks-3"]
    with pytest.raises(UsageError, match="no such file"):
        _recorded([tmp_path / "none"])
    (tmp_path / "text").write_text("no recording")
    with pytest.raises(UsageError, match="holds no recording"):
        _recorded([tmp_path / "text"])


@pytest.mark.parametrize(
    "arguments, words",
    [(("--bind", "example"), "no address to serve the page on"), (("--tls-cert", "x"), "give both"),
     (("--token-file", "/none"), "cannot be read"),
     (("--tls-cert", "/none", "--tls-key", "/none"), "TLS cannot be served"), (("--recording", "/none"), "no such file")],
)  # fmt: skip
def test_what_cannot_be_served_is_one_line(arguments: Sequence[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ncclwatch", "serve", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
