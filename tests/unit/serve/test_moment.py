"""What the page is told of a moment: bounded, cleaned, and the same whether it comes whole or as what changed."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.serve.moment import MAX_ROWS, cost_of, run_lengths, usual_of
from ncclwatch.serve.past import Past
from ncclwatch.serve.rank import rank_detail
from ncclwatch.serve.snapshot import Composer, Snapshot
from ncclwatch.view.frame import View
from unit.views import TIME, verdict_of, view


def letters_of(grid: dict[str, Any]) -> str:
    """As the page's script reads them."""
    found, run = "", ""
    for ch in grid["letters"]:
        if ch.isdigit():
            run += ch
        else:
            found, run = found + ch * int(run or 1), ""
    assert len(found) == grid["count"]
    return found


def applied(before: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """A moment with what changed, as the page's script puts it together."""
    assert message["after"] == before["n"]
    letters = letters_of(message["parts"]["grid"]) if "grid" in message["parts"] else before["letters"]
    for at, letter in message.get("cells", []):
        letters = letters[:at] + letter + letters[at + 1 :]
    return {**message, "parts": before["parts"] | message["parts"], "letters": letters}


def whole(snapshot: Snapshot) -> dict[str, Any]:
    message = json.loads(snapshot.whole)
    return {**message, "letters": letters_of(message["parts"]["grid"])}


@pytest.mark.parametrize("text", ["", "r", "rr", "rXr", "r" * 1000 + "X" + "w" * 12, "?..s"])
def test_letters_are_told_as_runs(text: str) -> None:
    assert letters_of({"letters": run_lengths(text), "count": len(text)}) == text


@pytest.mark.parametrize("ranks", [8, 1024])
def test_what_changed_put_together_is_the_whole(ranks: int) -> None:
    composer = Composer("job")
    views = [
        view(ranks),
        view(ranks, number=8),
        view(ranks, VerdictClass.STOPPED),
        view(ranks, VerdictClass.STOPPED, culprit=5),
        view(ranks + 8),
    ]
    snapshots = [composer.compose(each) for each in views]
    known = whole(snapshots[0])
    for before, snapshot in itertools.pairwise(snapshots):
        known = applied(known, json.loads(snapshot.since(before)))
        expected = whole(snapshot)
        assert known["letters"] == expected["letters"]
        assert {n: p for n, p in known["parts"].items() if n != "grid"} == {
            n: p for n, p in expected["parts"].items() if n != "grid"
        }


def test_of_many_ranks_only_those_that_changed_are_told() -> None:
    composer = Composer("job")
    stuck = view(4096, VerdictClass.STOPPED, culprit=3, samples=False)
    other = view(4096, VerdictClass.STOPPED, culprit=9, samples=False)
    first, second = composer.compose(stuck), composer.compose(other)
    change = json.loads(second.since(first))
    assert {at for at, _ in change["cells"]} == {3, 9}
    assert "grid" not in change["parts"]


def test_rows_are_the_most_urgent_and_bounded() -> None:
    moment = whole(Composer("job").compose(view(4096, VerdictClass.STOPPED, culprit=4000, samples=False)))
    rows = moment["parts"]["rows"]
    assert len(rows) == MAX_ROWS
    assert rows[0]["rank"] == 4000
    assert len(moment["parts"]["grid"]["letters"]) < 100


HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e\x00" + "A" * 5000


def hostile_view() -> View:
    frame = view(8, VerdictClass.STOPPED).frame
    windows = [
        replace(w, problem=HOSTILE, process=replace(w.process, host=HOSTILE, name=HOSTILE, command=(HOSTILE,) * 99))
        for w in frame.windows
    ]
    verdict = verdict_of(VerdictClass.STOPPED, 2, 8)
    culprit = replace(verdict.culprits[0], host=HOSTILE, reason=HOSTILE, doing=(HOSTILE,), gpu_trouble=(HOSTILE,))
    bad = replace(
        verdict, summary=HOSTILE, culprits=(culprit,) * 999, evidence=(HOSTILE,) * 999, next_steps=(HOSTILE,), stage=HOSTILE
    )
    return View(replace(frame, windows=windows, verdicts=(bad,) * 99, layout=HOSTILE))


def test_what_a_target_calls_itself_is_cleaned_and_bounded() -> None:
    text = json.dumps(whole(Composer("job").compose(hostile_view())), ensure_ascii=False)
    assert len(text) < 3_000_000
    assert not any(ch in text for ch in "\x1b\x00\u202e")
    assert "A" * 800 not in text
    detail = json.dumps(rank_detail(hostile_view(), 3), ensure_ascii=False)
    assert "\x1b" not in detail
    assert "A" * 800 not in detail


def test_one_rank_in_full() -> None:
    detail = rank_detail(view(8, VerdictClass.STOPPED), 3)
    assert detail is not None
    assert detail["communicators"]
    assert detail["transfers"]
    assert all(one["waits"] for one in detail["transfers"])
    assert rank_detail(view(8), 99) is None


def slow(since: float) -> Verdict:
    return replace(verdict_of(VerdictClass.SLOW_COMPUTATION, 1, 8), since=since)


def test_a_slow_job_costs_what_its_iterations_take_longer() -> None:
    times = [(TIME + at, 1.0) for at in range(10)] + [(TIME + 10 + 2 * at, 2.0) for at in range(1, 11)]
    assert usual_of(times, slow(TIME + 9.5)) == 1.0
    cost = cost_of(slow(TIME + 9.5), times, 8, TIME + 40)
    assert cost == {"seconds": 10.0, "share": 0.5, "rank_seconds": 80.0}
    assert cost_of(slow(TIME + 9.5), times[:5], 8, TIME + 40) is None


def test_a_job_that_stands_costs_all_the_time_since() -> None:
    verdict = replace(verdict_of(VerdictClass.STOPPED, 1, 8), since=TIME - 30)
    assert cost_of(verdict, (), 8, TIME) == {"seconds": 30.0, "share": 1.0, "rank_seconds": 240.0}
    assert cost_of(verdict_of(VerdictClass.RUNNING, 1, 8), (), 8, TIME) is None


# --- the past ----------------------------------------------------------------------------------------------------------------


def moments(count: int, *, kind: VerdictClass = VerdictClass.RUNNING, every: float = 1.0) -> list[Snapshot]:
    composer = Composer("job")
    return [composer.compose(view(8, kind, number=at, time=TIME + every * at, samples=False)) for at in range(count)]


def test_the_past_is_asked_by_time() -> None:
    past = Past()
    for snapshot in moments(10):
        past.add(snapshot)
    assert len(past.points()) == 10

    def at(time: float) -> float:
        found: float = json.loads(past.at(time) or b"{}")["time"]
        return found

    assert (at(TIME + 4.7), at(TIME + 5), at(TIME - 100), at(TIME + 1000)) == (TIME + 4, TIME + 5, TIME, TIME + 9)
    assert Past().at(TIME) is None


def test_one_moment_a_second_is_kept_and_each_beginning_of_a_verdict() -> None:
    past = Past()
    for snapshot in moments(20, every=0.1):
        past.add(snapshot)
    assert len(past) == 2
    past.add(Composer("job").compose(view(8, VerdictClass.STOPPED, time=TIME + 1.95, samples=False)))
    assert len(past) == 3


@pytest.mark.parametrize("bounds", [{"max_moments": 50}, {"max_bytes": 60_000}])
def test_the_past_is_thinned_where_it_is_long_ago(bounds: dict[str, int]) -> None:
    past = Past(**bounds)
    for snapshot in moments(400):
        past.add(snapshot)
    points = past.points()
    assert len(past) <= bounds.get("max_moments", 400)
    assert past.nbytes <= bounds.get("max_bytes", 1 << 30)
    assert points[0][0] == TIME
    assert points[-1][0] == TIME + 399
    steps = [after[0] - before[0] for before, after in itertools.pairwise(points)]
    assert steps[0] > steps[-1] == 1.0


def test_the_page_knows_every_state() -> None:
    from ncclwatch.view.states import STATES

    page = Path(__file__).parents[3] / "src/ncclwatch/serve/page"
    script, style = (page / "states.js").read_text(), (page / "page.css").read_text()
    listed = [
        (letter, word) for letter, word in [(state.letter, state.word) for state in STATES] if f'["{letter}", "{word}"]' in script
    ]
    assert listed == [(state.letter, state.word) for state in STATES]
    names = {"?": "unread", ".": "unseen"}
    for state in STATES:
        assert f"--state-{names.get(state.letter, state.letter)}:" in style


def test_the_page_needs_nothing_from_elsewhere_and_reads_no_markup() -> None:
    page = Path(__file__).parents[3] / "src/ncclwatch/serve/page"
    for file in page.iterdir():
        text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, file
        assert "https:" not in text, file
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
            "setHTML",
        ):
            assert word not in text, (file, word)
        if file.suffix == ".html":
            assert " style=" not in text
            assert " on" + "click" not in text
            assert "<script>" not in text
            assert "<style" not in text
