"""The plain live view: verdict on top, one row a rank, a footer that says what is seen and what watching costs (rich)."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ncclwatch.dashboard import rows
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from ncclwatch.report.verdict_text import culprit_name, verdict_lines
from ncclwatch.text import Style, clean, duration, rate, size, wrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ncclwatch.cli.live import Session
    from ncclwatch.collect.batch import Overhead, PlaneState
    from ncclwatch.collect.windows import RankWindow
    from ncclwatch.engine.session import Update

MAX_NEWS = 3
"""Lines about what happened last: processes that came or went, losses, recoveries."""
EVIDENCE_LINES = 3
MAX_OTHERS = 3


class TerminalSurface:
    """Shows a session on a terminal and leaves the last verdict on the screen when it ends."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False, transient=True)
        self._news: list[str] = []
        self._windows: list[RankWindow] = []
        self._overhead: Overhead | None = None
        self._lost = 0

    def attached(self, session: Session) -> None:
        """Take over the screen."""
        self._news = [f"not watched: {problem.line}" for problem in session.problems][-MAX_NEWS:]
        self._windows = list(session.windows)
        self._live.start()
        self._draw(session)

    def update(self, session: Session, update: Update) -> None:
        """Redraw when there is something new."""
        for change in update.changes:
            rank = f"rank {change.info.rank}, " if change.info and change.info.rank is not None else ""
            self._tell(f"{change.change}: {rank}pid {change.pid}" + (f" ({change.detail})" if change.detail else ""))
        for text in update.notes:
            self._tell(text)
        for recovery in update.recoveries:
            self._tell(f"recovered after {duration(recovery.duration_s)}; it was: {recovery.verdict.summary}")
        self._lost = update.lost
        if update.windows is None:
            return
        self._windows = update.windows
        self._overhead = session.overhead()
        self._draw(session)

    def end(self, session: Session, reason: str) -> None:
        """Give the screen back; what stands remains to be read."""
        self._live.stop()
        stands = session.verdict if session.verdict and session.verdict.verdict_class.accuses else None
        print(f"ncclwatch: {reason or 'ended'}" + ("" if stands else "; no verdict stands"))
        for line in verdict_lines(stands, Style()) if stands else ():
            print("\n".join(wrap(line, self._console.width)))

    def _tell(self, line: str) -> None:
        self._news = [*self._news, f"{datetime.now():%H:%M:%S} {clean(line, 300)}"][-MAX_NEWS:]

    def _draw(self, session: Session) -> None:
        width, height = self._console.size
        view = screen(
            self._windows,
            session.verdict,
            width=width,
            height=height,
            news=self._news,
            footer=footer(session.planes, self._lost, self._overhead),
            others=session.verdicts[1:],
        )
        self._live.update(view, refresh=True)


def screen(
    windows: Sequence[RankWindow],
    verdict: Verdict | None,
    *,
    width: int,
    height: int,
    news: Sequence[str] = (),
    footer: str = "",
    others: Sequence[Verdict] = (),
) -> RenderableType:
    """Everything on the screen, at most ``height`` lines of at most ``width`` cells; ``others``: verdicts of further jobs."""
    top = [*banner(verdict, width), *other_jobs(others)]
    below = [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in news]
    below += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in footer.splitlines()]
    # One line for the table's heading, one for the title, one free at the end so that the terminal does not scroll.
    room = height - len(top) - len(below) - 4
    standing = [v for v in (verdict, *others) if v is not None]
    culprits = {culprit.pid for v in standing for culprit in v.culprits if culprit.pid is not None}
    shown = rows.choose(windows, room, culprits)
    hidden = len(windows) - len(shown)
    victims = set(verdict.victims) if verdict else set()
    lines: list[RenderableType] = [_title(windows, width), *top, _table(shown, width, culprits, victims)]
    if hidden > 0:
        lines.append(Text(f"… {hidden} more ranks, all of them less urgent", style="dim"))
    return Group(*lines, *below)


def _title(windows: Sequence[RankWindow], width: int) -> Text:
    hosts = sorted({window.process.host for window in windows})
    versions = sorted({".".join(map(str, w.process.version)) for w in windows if w.process.version})
    where = clean(hosts[0], 40) if len(hosts) == 1 else f"{len(hosts)} hosts"
    count = f"{len(windows)} rank{'s' if len(windows) != 1 else ''}"
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("ncclwatch", style="bold")
    text.append(f"  {where}  {count}  NCCL {', '.join(versions) or '?'}")
    quit_hint = "Ctrl-C ends"
    text.append(" " * max(2, width - text.cell_len - len(quit_hint)) + quit_hint, style="dim")
    return text


def banner(verdict: Verdict | None, width: int) -> list[Text]:
    """The verdict in a line or two and, when somebody is accused, the culprits and the first lines of evidence."""
    if verdict is None:
        return [Text("LOOKING  one more look is needed to tell running from standing still", style="yellow")]
    accuses = verdict.verdict_class.accuses
    style = "bold white on red" if accuses else "yellow" if verdict.verdict_class is VerdictClass.UNKNOWN else "green"
    word = str(verdict.verdict_class).upper().replace("-", " ")
    sure = f"  {verdict.confidence:.0%}" if accuses else ""
    head = f"{word}  {clean(verdict.summary, 400)}{sure}"
    lines = Text(f" {head} " if accuses else head, style=style)
    console = Console(width=width, height=100)
    wrapped = list(lines.wrap(console, width))[:3]
    if accuses:
        for line in wrapped:
            line.pad_right(max(width - line.cell_len, 0))
        wrapped += [
            Text(culprit_line(c, verdict.summary), style="bold red", no_wrap=True, overflow="ellipsis")
            for c in verdict.culprits[:4]
        ]
        details = [*verdict.evidence[:EVIDENCE_LINES], *(f"do: {step}" for step in verdict.next_steps[:1])]
        wrapped += [Text(f"  {clean(line, 300)}", no_wrap=True, overflow="ellipsis") for line in details]
    return wrapped


def other_jobs(verdicts: Sequence[Verdict]) -> list[Text]:
    """A line for each further job among the processes; of many calm ones only their number."""
    troubled = [verdict for verdict in verdicts if not _calm(verdict)]
    lines = [
        Text(
            f"other job: {str(v.verdict_class).upper().replace('-', ' ')}  {clean(v.summary, 300)}",
            style="bold red" if v.verdict_class.accuses else "yellow",
            no_wrap=True,
            overflow="ellipsis",
        )
        for v in troubled[:MAX_OTHERS]
    ]
    rest = len(verdicts) - len(lines)
    if rest:
        lines.append(Text(f"{rest} more job{'s' if rest > 1 else ''}" + (" run or idle" if rest else ""), style="dim"))
    return lines


def _calm(verdict: Verdict) -> bool:
    return verdict.verdict_class in (VerdictClass.RUNNING, VerdictClass.IDLE)


def culprit_line(culprit: Culprit, summary: str = "") -> str:
    """``▶ rank 2  host node1  pid 4711  GPU 2  its process is stopped``; the reason only where the summary does not give it."""
    reason = clean(culprit.reason, 200)
    return f"▶ {culprit_name(culprit)}" + (f"  {reason}" if reason and culprit.reason not in summary else "")


def _table(windows: Sequence[RankWindow], width: int, culprits: set[int], victims: set[int]) -> Table:
    columns = rows.visible(width)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column.title, width=column.width, justify="right" if column.right else "left", no_wrap=True)
    for window in windows:
        waiting = window.rank in victims and window.process.pid not in culprits
        texts = [Text(cell) for cell in rows.cells(window, columns, waiting=waiting)]
        table.add_row(*texts, style="yellow" if waiting else _row_style(window, culprits))
    return table


def _row_style(window: RankWindow, culprits: set[int]) -> str:
    if window.process.pid in culprits:
        return "bold red"
    if window.run_state in rows.HALTED:
        return "red"
    return "yellow" if window.problem or (window.torn and window.operation is None) else ""


def footer(states: Sequence[PlaneState], lost: int, overhead: Overhead | None) -> str:
    """Planes, losses, and what watching costs."""
    planes = "planes: " + ", ".join(plane.name for plane in states if plane.running)
    planes += "".join(f"; no {plane.name}: {clean(plane.reason, 120)}" for plane in states if not plane.running)
    if any(plane.name == "calls" and plane.running for plane in states):
        planes += f"; {lost} call records lost"
    costs = []
    if overhead is not None:
        if overhead.probe_share is not None and overhead.hits_per_s is not None:
            costs.append(f"probes {rate(overhead.hits_per_s)} hits/s = {overhead.probe_share:.3%} of a core")
        costs.append(f"ncclwatch {overhead.own_share:.1%} of a core, {size(overhead.rss_bytes)}")
    return planes + ("\ncost: " + ", ".join(costs) if costs else "")
