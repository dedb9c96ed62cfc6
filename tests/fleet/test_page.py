"""The page in a real browser: what it shows, where keys and links lead, and that names of a job stay text."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from fleet.browser import WAIT_MS, browser, tab
from ncclwatch.history.rows import Run
from ncclwatch.model.looks import ProcessLook
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.serve.access import Rules
from ncclwatch.serve.feed import RECORDED, RecordedFeed
from ncclwatch.serve.remembered import Remembered
from ncclwatch.view.frame import View
from unit.histories import incident, keep
from unit.serve.served import PushedFeed, Served, served
from unit.views import TIME, verdict_of, view

RECORDING = Path(__file__).parents[1] / "fixtures" / "stopped-8-ranks.recording"
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


def hung(ranks: int, culprit: int, *, time: float = TIME, samples: bool = True) -> View:
    return view(ranks, VerdictClass.STOPPED, culprit=culprit, time=time, samples=samples)


def hostile() -> View:
    frame = hung(8, 2).frame
    windows = [
        replace(w, problem=HOSTILE, process=replace(w.process, host=HOSTILE, name=HOSTILE, command=(HOSTILE,)))
        for w in frame.windows
    ]
    verdict = verdict_of(VerdictClass.STOPPED, 2, 8)
    culprit = replace(verdict.culprits[0], host=HOSTILE, reason=HOSTILE)
    bad = replace(
        verdict, summary=HOSTILE, culprits=(culprit,), evidence=(HOSTILE,), next_steps=(HOSTILE, HOSTILE), stage=HOSTILE
    )
    return View(replace(frame, windows=windows, verdicts=(bad,), layout=HOSTILE, log=[replace(frame.log[0], text=HOSTILE)]))


def opened(page: Page, served_at: Served, address: str = "/") -> None:
    page.goto(served_at.url + address)
    expect(page.locator("#connection")).to_have_text("connected")


def test_the_list_leads_to_a_job_and_a_rank_by_keys_alone(chromium: Browser) -> None:
    feeds = [PushedFeed("calm", view(16)), PushedFeed("hung", hung(16, 5))]
    with served(feeds) as at, tab(chromium) as (page, wrong):
        opened(page, at)
        expect(page.locator("#job-list li").first).to_contain_text("hung")
        expect(page.locator("#job-list li")).to_have_count(2)
        expect(page.locator("#job-list li").first).to_contain_text("GPU")
        page.keyboard.press("j")
        expect(page.locator("#job-title")).to_have_text("hung")
        expect(page.locator(".verdict .summary")).to_contain_text("rank 5 (node000, pid 1005")
        assert "stopped: hung" in page.title()
        page.keyboard.press("w")
        expect(page.locator("details.why")).to_have_attribute("open", "")
        page.keyboard.press("g")
        page.keyboard.press("Home")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        expect(page.locator("#grid-says")).to_contain_text("rank 3: waiting")
        page.keyboard.press("Enter")
        expect(page.locator("#rank-title")).to_have_text("Rank 3")
        expect(page.locator("#rank")).to_contain_text("Unfinished transfers")
        expect(page).to_have_url(re.compile(r"job=hung&rank=3&why=1"))
        page.keyboard.press("Escape")
        expect(page.locator("#rank-title")).to_have_text("Rank")
        page.keyboard.press("a")
        expect(page.locator("#jobs-title")).to_be_visible()
        page.keyboard.press("?")
        expect(page.locator("#keys-dialog")).to_be_visible()
        assert wrong == []


def test_a_link_to_a_rank_shows_all_of_it_at_once(chromium: Browser) -> None:
    """A page that is younger than the pause between two questions asks all the same."""
    with served([PushedFeed("hung", hung(16, 5))]) as at, tab(chromium) as (page, wrong):
        page.add_init_script("performance.now = () => 1")
        opened(page, at, "/?job=hung&rank=3")
        expect(page.locator("#rank")).to_contain_text("Unfinished transfers")
        assert wrong == []


def test_what_happens_is_shown_without_asking(chromium: Browser) -> None:
    feed = PushedFeed("one", view(8, time=TIME))
    with served([feed]) as at, tab(chromium) as (page, wrong):
        # The only job is opened at once.
        opened(page, at)
        expect(page.locator(".verdict .badge")).to_have_text("running")
        feed.push(hung(8, 3, time=TIME + 5))
        expect(page.locator(".verdict .badge")).to_have_text("stopped")
        expect(page.locator("#legend")).to_contain_text("1 culprit")
        expect(page.locator("#legend")).to_contain_text("7 waiting")
        expect(page.locator("#way")).to_contain_text("rank 3")
        page.locator("#verdicts button.culprit").click()
        expect(page.locator("#rank-title")).to_have_text("Rank 3")
        feed.push(view(8, time=TIME + 9))
        expect(page.locator(".verdict .badge")).to_have_text("running")
        assert wrong == []


def test_a_link_holds_job_rank_and_moment(chromium: Browser) -> None:
    feed = PushedFeed("one", view(8, time=TIME), hung(8, 3, time=TIME + 5), view(8, time=TIME + 9, number=9))
    with served([feed, PushedFeed("two", view(8))]) as at, tab(chromium) as (page, wrong):
        opened(page, at, f"/?job=one&rank=3&t={TIME + 6}")
        expect(page.locator(".verdict .badge")).to_have_text("stopped")
        expect(page.locator("#rank")).to_contain_text("culprit")
        expect(page.locator("#moment")).to_contain_text("4.0s before now")
        page.keyboard.press("]")
        expect(page.locator(".verdict .badge")).to_have_text("running")
        page.keyboard.press("[")
        expect(page.locator(".verdict .badge")).to_have_text("stopped")
        page.keyboard.press("c")
        expect(page.locator("#toast")).to_contain_text("Link copied")
        assert page.evaluate("navigator.clipboard.readText()") == f"{at.url}/?job=one&rank=3&t={TIME + 5:.0f}"
        page.keyboard.press("l")
        expect(page.locator(".verdict .badge")).to_have_text("running")
        expect(page).to_have_url(re.compile(r"job=one&rank=3$"))
        # A moment that is not kept is said to be none.
        page.goto(f"{at.url}/?job=one&t={TIME - 4000}")
        expect(page.locator("#notice")).to_contain_text("not kept")
        assert wrong == []


def test_stacks_and_the_history_of_a_node(chromium: Browser, tmp_path: Path) -> None:
    now, hour = time.time_ns(), 3600 * 10**9
    rows = [
        *incident(Run("llama", "r1"), "node000", now - hour, stood_s=60.0),
        *incident(Run("llama", "r1"), "node9", now - 2 * hour),
    ]
    keep(tmp_path, rows)
    frames = (
        ("wait", "threading.py", "wait (threading.py:327)"),
        ("_next_data", "dataloader.py", "_next_data (dataloader.py:1401)"),
    )
    look = ProcessLook("node000", 1005, TIME, "S", ("sleeping",), frames, kernel="main thread sleeping in futex_do_wait")
    stuck = View(replace(hung(16, 5).frame, stacks=(look, replace(look, pid=77, frames=(("f", "f", HOSTILE),)))))
    with served([PushedFeed("one", stuck)], past=Remembered(str(tmp_path))) as at, tab(chromium) as (page, wrong):
        opened(page, at)
        expect(page.locator("#stacks article")).to_have_count(2)
        expect(page.locator("#stacks article").first).to_contain_text("rank 5 node000, pid 1005")
        expect(page.locator("#stacks .frames li").nth(1)).to_have_text("_next_data (dataloader.py:1401)")
        expect(page.locator("#stacks")).to_contain_text("futex_do_wait")
        page.locator(".verdict a", has_text="history of node000").click()
        expect(page.locator("#history-title")).to_have_text("History of node000")
        expect(page.locator("#history-says")).to_contain_text("blamed 1 time since")
        expect(page.locator("#history-found")).to_contain_text("recovered after 1m00s")
        expect(page).to_have_url(re.compile(r"/\?node=node000$"))
        page.keyboard.press("h")
        expect(page.locator("#history-found tbody tr")).to_have_count(2)
        page.reload()
        expect(page.locator("#history-says")).to_contain_text("2 nodes blamed")
        page.keyboard.press("a")
        expect(page.locator("#jobs-title")).to_be_visible()
        assert page.title() != "owned"
        assert wrong == []


def test_a_recording_can_be_scrubbed(chromium: Browser) -> None:
    feed = RecordedFeed("rec", "a recording", [RECORDING])
    with served([feed]) as at, tab(chromium) as (page, wrong):
        deadline = time.monotonic() + WAIT_MS / 1000
        while feed.status.state != RECORDED:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        points = feed.past.points()
        hangs = next(place for place, point in enumerate(points) if point[1] == "stopped")
        opened(page, at)
        expect(page.locator("#moment")).to_contain_text("the end")
        # The newest moment is one more, where it is not kept: less than a second after the last that is.
        expect(page.locator("#scrub")).to_have_attribute("max", re.compile(f"^({len(points) - 1}|{len(points)})$"))
        page.locator("#scrub").fill(str(hangs))
        expect(page.locator(".verdict .summary")).to_contain_text("rank 2 (node1, pid 18300, GPU 0) holds up the job")
        expect(page.locator("#table tbody tr").first).to_contain_text("18300")
        page.locator("#scrub").focus()
        page.keyboard.press("Home")
        expect(page.locator(".verdict .summary")).not_to_contain_text("holds up the job")
        expect(page).to_have_url(re.compile(rf"t={points[0][0]:.3f}".rstrip("0")))
        page.keyboard.press("End")
        expect(page.locator(".verdict .summary")).to_contain_text("makes progress")
        assert wrong == []


def test_names_of_a_job_stay_text(chromium: Browser) -> None:
    with served([PushedFeed("evil", hostile())]) as at, tab(chromium) as (page, wrong):
        opened(page, at, "/?job=evil&rank=2&why=1")
        expect(page.locator(".verdict .summary")).to_have_text(HOSTILE)
        expect(page.locator("#rank")).to_contain_text(HOSTILE)
        expect(page.locator("#log")).to_contain_text(HOSTILE)
        page.goto(f"{at.url}/?job={HOSTILE.replace('=', '%3D')}")
        expect(page.locator("#job-title")).to_have_text(HOSTILE)
        assert "owned" not in page.title().replace(HOSTILE, "")
        assert page.locator("main img, main script, [onerror]").count() == 0
        assert wrong == []


def test_no_page_frames_it(chromium: Browser) -> None:
    with served([PushedFeed("one", view(8))]) as at, tab(chromium) as (page, _):
        page.set_content(f'<iframe src="{at.url}/"></iframe>')
        page.wait_for_timeout(500)
        [inside] = page.frames[1:]
        assert inside.locator("#job-list").count() == 0


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [(360, 740), (1440, 900), (3840, 2160)])
def test_it_fits_every_screen(chromium: Browser, size: tuple[int, int], dark: bool) -> None:
    with (
        served([PushedFeed("hung", hung(64, 21)), PushedFeed("calm", view(8))]) as at,
        tab(chromium, width=size[0], height=size[1], dark=dark) as (page, wrong),
    ):
        for address in ("/", "/?job=hung&rank=21&why=1"):
            opened(page, at, address)
            expect(page.locator("main section:visible").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == dark
        assert wrong == []


def test_text_can_be_read_on_its_ground(chromium: Browser) -> None:
    """WCAG 2.1, 1.4.3: 4.5 to 1."""
    measure = """() => {
      const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
      const light = (c) => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
      const read = (text) => text.match(/[\\d.]+/g).map(Number);
      const ground = (node) => {
        const colour = read(getComputedStyle(node).backgroundColor);
        return colour.length < 4 || colour[3] === 1 ? colour : ground(node.parentElement);
      };
      const poor = [];
      for (const node of document.querySelectorAll("body *")) {
        if (!node.checkVisibility() || ![...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim())) continue;
        if (node.closest("svg, :disabled, .away, .skip")) continue;
        const a = light(read(getComputedStyle(node).color)), b = light(ground(node));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) poor.push(`${node.tagName}.${node.className} ${node.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
      }
      return poor;
    }"""
    feeds = [
        PushedFeed("hung", hung(16, 5)),
        PushedFeed("slow", view(8, VerdictClass.SLOW_COMPUTATION)),
        PushedFeed("odd", view(8, VerdictClass.UNKNOWN)),
    ]
    with served(feeds) as at:
        for dark in (False, True):
            with tab(chromium, dark=dark) as (page, _):
                for address in ("/", "/?job=hung&rank=5&why=1", "/?job=slow", "/?job=odd"):
                    opened(page, at, address)
                    expect(page.locator("main section:visible").first).to_be_visible()
                    assert page.evaluate(measure) == [], (dark, address)


def test_a_hundred_thousand_ranks_are_one_grid(chromium: Browser) -> None:
    """Simulated: a job of that size has not been seen."""
    feed = PushedFeed("large", hung(100_000, 70_001, samples=False))
    with served([feed]) as at, tab(chromium) as (page, wrong):
        opened(page, at)
        expect(page.locator("#legend")).to_contain_text("1 culprit")
        expect(page.locator("#legend")).to_contain_text("99,999 waiting")
        page.locator("#verdicts button.culprit").click()
        expect(page.locator("#rank-title")).to_have_text("Rank 70001")
        feed.push(hung(100_000, 3, samples=False, time=TIME + 5))
        expect(page.locator(".verdict .summary")).to_contain_text("rank 3 ")
        page.keyboard.press("g")
        page.keyboard.press("Home")
        expect(page.locator("#grid-says")).to_contain_text(
            "culprit" if "a cell is" in page.locator("#legend").inner_text() else "rank 0"
        )
        assert wrong == []


def test_signing_in_leads_to_the_link(chromium: Browser) -> None:
    token = secrets.token_urlsafe(16)
    with (
        served([PushedFeed("one", hung(8, 3)), PushedFeed("two", view(8))], Rules(token=token)) as at,
        tab(chromium) as (page, wrong),
    ):
        page.goto(f"{at.url}/?job=one&rank=3")
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#wrong")).to_be_visible()
        page.fill("#token", token)
        page.keyboard.press("Enter")
        expect(page.locator("#rank-title")).to_have_text("Rank 3")
        expect(page).to_have_url(re.compile(r"job=one&rank=3"))
        assert page.evaluate("document.cookie") == ""
        assert wrong == []
