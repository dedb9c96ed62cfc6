"""The dashboard as a person uses it: keys and mouse, what stays put while views come in, and text that must do no harm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from ncclwatch.dashboard.app import Dashboard
from ncclwatch.dashboard.grid import RankGrid
from ncclwatch.dashboard.history import History, spark
from ncclwatch.dashboard.source import Mailbox, StillSource
from ncclwatch.dashboard.table import RowTable
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.verdict import Culprit, VerdictClass
from ncclwatch.view.frame import View
from ncclwatch.view.ranks import RankRow
from unit.screens import play, screen, text
from unit.views import TIME, view

STOPPED = VerdictClass.STOPPED


class Feed(StillSource):
    """Views one at a time, as the test hands them in."""

    def __init__(self) -> None:
        super().__init__([])
        self.mailbox = Mailbox()
        self.stopped = False
        self.over = ""

    def take(self) -> list[View]:
        return self.mailbox.take()

    def stop(self) -> None:
        self.stopped = True

    @property
    def finished(self) -> str:
        return self.over

    def save(self) -> str:
        raise NcclwatchError("the disk is full", "make room")


def ranks_shown(shown: str) -> list[int]:
    return [int(line.split()[0]) for line in shown.splitlines() if " AllReduce #1124 " in line and line.split()[0].isdigit()]


def test_the_filter_narrows_while_it_is_typed_and_escape_ends_it() -> None:
    keys = ("slash", "n", "o", "d", "e", "0", "0", "3")
    shown = screen([view(512, STOPPED)], (100, 30), *keys)
    assert ranks_shown(shown) == list(range(24, 32))
    assert len(ranks_shown(screen([view(512, STOPPED)], (100, 30), *keys, "escape"))) > 8
    assert "nothing matches" in screen([view(8)], (100, 30), "slash", "z", "z")


def test_sorting_by_key_and_by_a_click_on_the_heading() -> None:
    async def act(pilot: Pilot[Any], app: Dashboard) -> None:
        await pilot.press("s", "r")
        await pilot.pause()
        assert ranks_shown(text(app)) == list(range(7, -1, -1))
        table = app.query_one("#ranks RowTable", RowTable)
        await pilot.click(table, offset=(2, 0))
        await pilot.pause()
        assert ranks_shown(text(app)) == list(range(8))

    play([view(8)], (100, 30), act)


def test_urgent_ranks_come_first_and_the_cursor_is_on_them_until_it_is_moved() -> None:
    feed = Feed()

    async def act(pilot: Pilot[Any], app: Dashboard) -> None:
        table = app.query_one("#ranks RowTable", RowTable)
        feed.mailbox.put(view(64))
        app.redraw()
        assert row(table) == 0
        feed.mailbox.put(view(64, STOPPED, culprit=50))
        app.redraw()
        assert row(table) == 50
        await pilot.press("down")
        assert row(table) == 0
        feed.mailbox.put(view(64))
        app.redraw()
        assert row(table) == 0

    play(feed, (100, 30), act)


def row(table: RowTable[Any]) -> int | None:
    assert isinstance(table.current, RankRow)
    return table.current.window.rank


def test_a_click_in_the_grid_opens_the_rank_and_on_one_nobody_observes_says_so() -> None:
    async def act(pilot: Pilot[Any], app: Dashboard) -> None:
        grid = app.query_one("#ranks RankGrid", RankGrid)
        await pilot.click(grid, offset=(6 + 6 * 3 + 1, 0))
        await pilot.pause()
        assert text(app).startswith(" rank 3")
        await pilot.press("escape")
        await pilot.click(grid, offset=(6 + 6 * 3 + 1, 1))
        await pilot.pause()
        assert "rank 19 is not observed" in text(app)

    play([view(16, STOPPED, world=32)], (120, 40), act)


def test_a_tick_after_the_last_screen_has_gone_does_no_harm() -> None:
    app = Dashboard(StillSource([view(8)]))
    assert not app.screen_stack
    app.redraw()


def test_the_picture_can_be_stopped_and_the_past_looked_at_while_views_come() -> None:
    feed = Feed()

    async def act(pilot: Pilot[Any], app: Dashboard) -> None:
        for i in range(20):
            feed.mailbox.put(view(8, time=TIME + i, number=i))
            app.redraw()
        await pilot.press("space", "left_square_bracket", "left_square_bracket")
        feed.mailbox.put(view(8, STOPPED, time=TIME + 20))
        app.redraw()
        await pilot.pause()
        assert "PAUSED 3.0s ago" in text(app)
        assert "STOPPED" not in text(app)
        await pilot.press("left_curly_bracket")
        await pilot.pause()
        assert "PAUSED 13s ago" in text(app)
        await pilot.press("e")
        await pilot.pause()
        assert "STOPPED" in text(app)

    play(feed, (100, 30), act)


def test_leaving_stops_the_session_and_its_end_ends_the_dashboard() -> None:
    feed = Feed()

    async def leave(pilot: Pilot[Any], app: Dashboard) -> None:
        await pilot.press("q")
        await pilot.pause()
        assert app.return_value == "interrupted"

    play(feed, (80, 24), leave)
    assert feed.stopped
    over = Feed()

    async def ends(pilot: Pilot[Any], app: Dashboard) -> None:
        over.over = "every watched process has ended"
        app.redraw()
        await pilot.pause()
        assert app.return_value == "every watched process has ended"

    play(over, (80, 24), ends)


def test_what_cannot_be_saved_is_a_line_and_the_dashboard_goes_on() -> None:
    feed = Feed()

    async def act(pilot: Pilot[Any], app: Dashboard) -> None:
        await pilot.press("S")
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "the disk is full: make room" in text(app)

    play(feed, (100, 30), act)


EVIL = "[bold red]x[/] \x1b[2J\x1b]0;owned\x07\r\u202e[link=http://x]"


@pytest.mark.parametrize("keys", [(), ("enter",), ("enter", "enter"), ("v",), ("3",), ("4",), ("7",), ("8",)])
def test_text_of_a_target_is_neither_markup_nor_control(keys: tuple[str, ...]) -> None:
    good = view(4, STOPPED)
    frame = good.frame
    windows = [
        replace(w, process=replace(w.process, host=EVIL, name=EVIL, command=(EVIL,)), problem=EVIL,
                operation=replace(w.operation, name=EVIL, protocol=EVIL) if w.operation else None)
        for w in frame.windows
    ]  # fmt: skip
    samples = {
        key: replace(
            sample,
            process=windows[0].process,
            communicators=tuple(replace(c, name=EVIL, async_result=EVIL) for c in sample.communicators),
            operations=tuple(replace(o, collective=EVIL) for o in sample.operations),
        )
        for key, sample in frame.samples.items()
    }
    culprit = Culprit(1, 1, EVIL, 1001, 1, reason=EVIL)
    guilty = replace(frame.verdicts[0], summary=EVIL, evidence=(EVIL,), next_steps=(EVIL,), culprits=(culprit,))
    bad = View(replace(frame, windows=windows, samples=samples, verdicts=(guilty,)))
    for line in screen([bad], (120, 40), *keys).splitlines():
        assert line.isprintable()
        assert "\u202e" not in line
    if keys in ((), ("v",)):
        assert "[bold red]x[/]" in screen([bad], (120, 40), *keys)


def test_no_colour_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def act(pilot: Pilot[Any], app: Dashboard) -> None:
        assert app.no_color
        assert " 2 X" in text(app)

    play([view(8, STOPPED)], (80, 24), act)


def test_the_past_is_thinned_not_cut_off() -> None:
    history = History(max_views=100, max_windows=10**9)
    for i in range(1000):
        history.add(view(1, time=TIME + i, samples=False))
    times = [v.frame.time - TIME for v in history.views]
    assert len(times) <= 100
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-20:] == list(range(980, 1000))
    assert history.nearest(TIME + 990.5) == times.index(990)


def test_memory_of_the_past_is_bounded_by_windows_and_samples() -> None:
    history = History(max_views=1000, max_windows=640, max_samples=128)
    for i in range(50):
        history.add(view(64, time=TIME + i))
    assert sum(len(v.frame.windows) for v in history.views) <= 640
    assert sum(len(v.frame.samples) for v in history.views) <= 128
    assert history.views[-1].frame.samples


def test_a_mailbox_that_nobody_empties_does_not_grow() -> None:
    mailbox = Mailbox()
    for i in range(100):
        mailbox.put(view(1, number=i, samples=False))
    assert [v.frame.number for v in mailbox.take()] == list(range(84, 100))
    assert mailbox.dropped == 84


def test_sparklines() -> None:
    assert spark([0, 1, None, 2, 4], 6) == " ▁▂ ▄█"
    assert spark([0.0, 0.0], 2) == "▁▁"
    assert spark([], 3) == "   "


@pytest.mark.parametrize(("rank", "world"), [(1 << 40, 8), (3, 1 << 50), (-5, 8)])
def test_a_rank_or_world_that_cannot_be_costs_nothing(rank: int, world: int) -> None:
    base = view(2, STOPPED, samples=False)
    first = base.frame.windows[0]
    odd = replace(first, rank=rank, process=replace(first.process, rank=rank, world_size=world))
    found = View(replace(base.frame, windows=(odd,)))
    assert [cell.rank for cell in found.grid] == [rank]
    screen([found], (80, 24))
