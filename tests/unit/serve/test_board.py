"""Streams: what tabs are sent, whoever keeps up and whoever does not; over real HTTP where it matters."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any

from ncclwatch.model.verdict import VerdictClass
from ncclwatch.serve.board import MAX_PENDING, Board, Reader
from ncclwatch.serve.feed import LIVE, UNREACHABLE, Feed, LiveFeed
from ncclwatch.stopping import Stop
from unit.serve.served import PushedFeed, served
from unit.views import TIME, view


def events(data: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in data.decode().split("\n\n"):
        name, separator, text = block.partition("\ndata: ")
        if separator:
            found.append((name.removeprefix("event: "), json.loads(text)))
    return found


def test_who_does_not_keep_up_gets_the_newest_whole() -> None:
    async def run() -> None:
        feed = PushedFeed("one", view(8))
        board = Board([feed])
        board.start()
        try:
            quick, slow = board.stream("one"), board.stream("one")
            deadline = time.monotonic() + 60
            while feed.newest is None and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            for stream in (quick, slow):
                first = events(await anext(stream))
                assert [name for name, _ in first] == ["jobs", "moment"]
                assert first[1][1]["after"] is None
            seen = []
            last = 3 * MAX_PENDING
            for at in range(1, last + 1):
                feed.push(view(8, VerdictClass.STOPPED if at == last else VerdictClass.RUNNING, number=at, time=TIME + at))
                seen += [data for name, data in events(await anext(quick)) if name == "moment"]
            assert [one["after"] for one in seen] == list(range(1, last + 1))
            missed = [data for name, data in events(await anext(slow)) if name == "moment"]
            assert missed[0]["after"] is None
            assert 0 < len(missed) <= MAX_PENDING
            assert missed[-1]["time"] == TIME + last
            # What it gets builds on what it has: nobody is left with a hole.
            for before, after in itertools.pairwise(missed):
                assert after["after"] == before["n"]
        finally:
            await board.stop()

    asyncio.run(run())


def test_a_reader_takes_each_line_of_the_list_once() -> None:
    async def run() -> None:
        reader = Reader("")
        reader.jobs = {"a": b'{"job":"a"}'}
        assert events(reader.take()) == [("jobs", [{"job": "a"}])]
        assert reader.take() == b""

    asyncio.run(run())


def test_addresses_answer_with_json() -> None:
    feed = PushedFeed("one", view(8, time=TIME), view(8, VerdictClass.STOPPED, culprit=3, time=TIME + 5))
    with served([feed]) as page:
        deadline = time.monotonic() + 60
        while len(feed.past) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        [line] = page.ask("/api/jobs").json["jobs"]
        assert (line["job"], line["state"], line["class"], line["ranks"], line["accuses"]) == ("one", "live", "stopped", 8, True)
        points = page.ask("/api/timeline?job=one").json["points"]
        assert [(time, name) for time, name, *_ in points] == [(TIME, "running"), (TIME + 5, "stopped")]
        assert page.ask(f"/api/moment?job=one&t={TIME + 3}").json["parts"]["verdicts"][0]["class"] == "running"
        assert page.ask(f"/api/moment?job=one&t={TIME + 7}").json["parts"]["verdicts"][0]["class"] == "stopped"
        assert page.ask("/api/rank?job=one&rank=3").json["letter"] == "X"
        for wrong, status in (("/api/moment?job=one", 400), ("/api/moment?job=one&t=nan", 400), ("/api/moment?job=none&t=1", 404),
                              ("/api/rank?job=one&rank=99", 404), ("/api/rank?job=one&rank=x", 404), ("/api/timeline", 404),
                              ("/api/moment?job=one&t=1e300", 400), ("/../pyproject.toml", 404),
                              ("/page/page.js", 404)):  # fmt: skip
            answer = page.ask(wrong)
            assert answer.status == status, wrong
        assert page.ask("/page.js").headers["content-type"].startswith("text/javascript")


class Refusing:
    """A session that does not come about."""

    def __init__(self, _stop: Stop) -> None:
        raise ValueError("this cannot be read")


def test_what_an_engine_says_ends_no_page() -> None:
    told: list[str] = []
    feed = LiveFeed("one", "an engine", Refusing)  # type: ignore[arg-type]
    feed.tell = lambda one, _snapshot: told.append(one.status.state)
    feed.start()
    deadline = time.monotonic() + 60
    while not told and time.monotonic() < deadline:
        time.sleep(0.02)
    feed.stop()
    feed.join()
    assert told == [UNREACHABLE]
    assert "could not be shown (ValueError)" in feed.summary()["text"]
    assert isinstance(feed, Feed)
    assert feed.status.state != LIVE
