"""The report as one self-contained page: no script, no request to anywhere, every text from a target escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib import resources

from ncclwatch import __version__
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.report import svg
from ncclwatch.report.gather import Report
from ncclwatch.report.history import Incident
from ncclwatch.report.svg import text
from ncclwatch.text import duration, ranges
from ncclwatch.view.failures import failure_lines
from ncclwatch.view.ranks import rank_rows
from ncclwatch.view.states import BY_LETTER, URGENCY
from ncclwatch.view.steps import operation_name, waits_for
from ncclwatch.view.verdict_text import communicator_name, culprit_name, link_name
from ncclwatch.view.verdict_text import operation_name as operation_words
from ncclwatch.view.waits import paths_to
from ncclwatch.view.why import parts
from ncclwatch.view.work_text import work_line

MAX_TRANSFERS = 48
MAX_RANKS = 256
MAX_CROWDS = 16

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def page(report: Report) -> str:
    """The whole page."""
    title = report.focus.summary if report.focus else report.verdicts[0].summary if report.verdicts else "ncclwatch"
    return plain_page(title, "".join(_body(report)))


def plain_page(title: str, body: str) -> str:
    """A page around a body that is HTML already."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>ncclwatch: {text(title, 120)}</title><style>{_style()}</style></head><body>{body}</body></html>\n"
    )


def _style() -> str:
    return resources.files("ncclwatch.report").joinpath("page.css").read_text("utf-8")


def _body(report: Report) -> Iterator[str]:
    view = report.view
    count = len(view.frame.windows)
    hosts = view.hosts
    where = text(hosts[0]) if len(hosts) == 1 else f"{len(hosts)} hosts"
    yield f"<h1>ncclwatch report: {count} rank{'s' if count != 1 else ''} on {where}</h1>"
    focus = report.focus or (report.verdicts[0] if report.verdicts else None)
    crowded = _crowds(report)
    if focus is not None:
        yield from _verdict(report, focus, crowded)
    yield from _incidents(report)
    names = {w.rank: f"rank {w.rank} ({w.process.host}, pid {w.process.pid})" for w in view.frame.windows if w.rank is not None}
    yield "<h2>Ranks</h2>"
    yield f"<p class=dim>at {_when(view.frame.time)}</p><p>{svg.legend(view.census)}</p>"
    yield f"<div class=scroll>{svg.grid(view.grid)}</div>"
    yield "<h2>Around the event</h2>" if report.event is not None else "<h2>Over time</h2>"
    rows = sorted(rank_rows(view), key=lambda row: URGENCY[row.letter])
    labels = [(f"rank {'?' if row.window.rank is None else row.window.rank}", row.window.process.key) for row in rows]
    yield f"<div class=scroll>{svg.timeline(labels, report.timeline, report.event)}</div>"
    yield from _way(report, names)
    yield from _steps(report)
    yield "<h2>Who waited for whom</h2>"
    yield f"<p class=dim>share of {report.waits.samples} samples in which a rank's own counters waited for another</p>"
    yield f"<div class=scroll>{svg.delay_matrix(report.waits, names)}</div>"
    yield from _table(report)
    yield from _paths(report)
    yield from _work(report)
    yield from _unobserved(report, focus)
    yield from _environment(report)
    yield from _log(report)
    yield f"<footer><p>made by ncclwatch {text(__version__)}, {_when(report.begin)} to {_when(report.end)}</p></footer>"


def _crowds(report: Report) -> list[str]:
    """Flows that crowd on a link while others are empty, by what probes told."""
    if not report.probes or not report.view.frame.flows:
        return []
    from ncclwatch.paths.words import crowd_text
    from ncclwatch.view.paths import picture_of_view

    return [crowd_text(one) for one in picture_of_view(report.view, report.probes).crowded[:MAX_CROWDS]]


def _verdict(report: Report, verdict: Verdict, crowded: Sequence[str] = ()) -> Iterator[str]:
    kind = verdict.verdict_class
    style = "slow" if kind.slow else "" if kind.accuses else "unknown" if kind is VerdictClass.UNKNOWN else "calm"
    over = next((i.ended for i in report.incidents if i.verdict.id == verdict.id and i.ended is not None), None)
    sure = f", {verdict.confidence:.0%} sure" if kind.accuses else ""
    yield f'<div class="verdict {style}"><b>{text(kind.value.upper().replace("-", " "))}{sure}</b>{text(verdict.summary, 600)}'
    if report.event is not None:
        yield f"<br>since {_when(report.event)}" + (
            f", over after {duration(over - report.event)}" if over is not None else ", still so at the end"
        )
    yield "</div>"
    if verdict.next_steps:
        yield f"<p class=next>Next: {text(verdict.next_steps[0], 500)}</p>"
    facts = list(_facts(verdict))
    yield "<dl>" + "".join(f"<dt>{text(label)}</dt><dd>{text(value, 600)}</dd>" for label, value in facts) + "</dl>"
    if verdict.failures:
        yield "<h2>Failed, in the order of time</h2>" + _list(failure_lines(verdict))
    if verdict.evidence:
        yield "<h2>Evidence</h2>" + _list(verdict.evidence)
    if crowded:
        yield "<p class=dim>by probes of paths:</p>" + _list(crowded)
    if verdict.differences:
        yield "<h2>Unlike their peers</h2>" + _list(verdict.differences)
    if len(verdict.next_steps) > 1:
        yield "<h2>What to do</h2>" + _list(verdict.next_steps, ordered=True)
    yield from _known(verdict)
    yield from _why(verdict)


def _facts(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Who, in what, where: a label and a text each."""
    yield from (("culprit", culprit_name(one) + (f": {one.reason}" if one.reason else "")) for one in verdict.culprits[:16])
    if verdict.victims:
        yield "waiting", f"ranks {ranges(verdict.victims)}"
    if verdict.operation:
        yield "operation", operation_words(verdict.operation)
    if verdict.communicator:
        yield "in", communicator_name(verdict.communicator)
    if verdict.stage:
        yield "stage", verdict.stage
    if verdict.link:
        yield "link", link_name(verdict.link)
    if verdict.verdict_class.accuses:
        yield "id", verdict.id


def _known(verdict: Verdict) -> Iterator[str]:
    """Rows of the tables of knowledge that fit: what was seen, the likely cause, what to do, and who says so."""
    if verdict.knowledge:
        yield "<h2>What is known</h2><dl>"
        for advice in verdict.knowledge:
            fixed = f", fixed in {advice.fixed_in}" if advice.fixed_in else ""
            sure = f"perhaps this known defect of NCCL{fixed}" if advice.defect else f"judged {advice.confidence:.0%} likely"
            tell = f"<p class=dim>to tell: {text(advice.check, 400)}</p>" if advice.check else ""
            yield f"<dt>{text(advice.row)}</dt><dd>{text(advice.seen, 400)} → {text(advice.cause, 400)} ({text(sure)})"
            yield f"{tell}{_list(advice.do)}<p class=dim>{text('; '.join(advice.sources), 400)}</p></dd>"
        yield "</dl>"


def _why(verdict: Verdict) -> Iterator[str]:
    """How it came about; closed until somebody opens it."""
    if verdict.trail:
        yield "<details><summary>Why: which facts, which rules, what was weighed and lost, what was missing</summary><dl>"
        for part in parts(verdict):
            because = f"<p class=dim>because: {text(part.because, 300)}</p>" if part.because else ""
            yield f"<dt>{text(part.heading)}</dt><dd>{because}{_list(part.lines) if part.lines else ''}</dd>"
        yield "</dl></details>"


def _incidents(report: Report) -> Iterator[str]:
    others = [i for i in report.incidents if report.focus is None or i.verdict.id != report.focus.id]
    if others:
        yield "<h2>Other verdicts in this recording</h2>"
        yield _list([_incident(incident) for incident in others[:50]])


def _incident(incident: Incident) -> str:
    lasted = f"for {duration(incident.ended - incident.began)}" if incident.ended is not None else "until the end"
    return f"{_when(incident.began)} {lasted}: {incident.verdict.verdict_class.value.upper()} {incident.verdict.summary}"


def _way(report: Report, names: dict[int, str]) -> Iterator[str]:
    if report.focus is None:
        return
    culprits = [c.rank for c in report.focus.culprits if c.rank is not None]
    found = paths_to(set(culprits), report.now_waiting)
    if not culprits or not found:
        return
    yield "<h2>The way to the culprit</h2>"
    yield "<p class=dim>each box waits for the one its arrow points to, by its own counters; the shortest way is drawn</p>"
    yield f"<div class=scroll>{svg.way(culprits, found, names)}</div>"


def _steps(report: Report) -> Iterator[str]:
    view = report.view
    transfers = []
    for row in rank_rows(view):
        sample = view.frame.samples.get(row.window.process.key)
        for operation in sample.operations if sample else ():
            for sub in operation.subs:
                arrow = "→" if operation.direction is Direction.SEND else "←"
                label = f"{'?' if row.window.rank is None else row.window.rank} {arrow} {sub.peer} ch {sub.channel}"
                behind = sub.done / max(sub.nsteps, 1)
                words = f"{operation_name(operation)}: {waits_for(operation, sub)}"
                transfers.append((behind, (label, sub.done, sub.nsteps, words)))
    if not transfers:
        return
    transfers.sort(key=lambda item: item[0])
    yield "<h2>Progress of steps</h2>"
    yield "<p class=dim>unfinished transfers by rank, peer (of the communicator) and channel; the furthest behind first</p>"
    yield f"<div class=scroll>{svg.bars([bar for _, bar in transfers[:MAX_TRANSFERS]])}</div>"
    if len(transfers) > MAX_TRANSFERS:
        yield f"<p>… and {len(transfers) - MAX_TRANSFERS} more, further ahead</p>"


def _table(report: Report) -> Iterator[str]:
    rows = rank_rows(report.view)
    yield "<h2>Every rank</h2><div class=scroll><table><tr><th class=n>rank</th><th>state</th><th>operation</th>"
    yield "<th class=n>open for</th><th class=n>steps</th><th>host</th><th class=n>pid</th><th class=n>GPU</th></tr>"
    for row in rows[:MAX_RANKS]:
        window, operation = row.window, row.window.operation
        steps = f"{operation.steps_done}/{operation.steps_total}" if operation and operation.steps_total else ""
        name = f"{operation.name}{'' if operation.sequence is None else f' #{operation.sequence}'}" if operation else "–"
        age = (">" if operation.at_least else "") + duration(operation.age_s) if operation else ""
        cells = [
            ("n", "?" if window.rank is None else str(window.rank)), ("", f"{row.letter} {BY_LETTER[row.letter].word}"),
            ("", name), ("n", age), ("n", steps), ("", window.process.host), ("n", str(window.process.pid)),
            ("n", "–" if window.gpu is None else str(window.gpu)),
        ]  # fmt: skip
        inner = "".join(f"<td{' class=n' if kind else ''}>{text(value)}</td>" for kind, value in cells)
        yield f'<tr class="{row.letter if row.letter.isalpha() else ""}">{inner}</tr>'
    yield "</table></div>"
    if len(rows) > MAX_RANKS:
        yield f"<p>… and {len(rows) - MAX_RANKS} more (all of them with --json)</p>"


def _work(report: Report) -> Iterator[str]:
    """What every rank's ports carried, in the newest windows of the moment that is shown."""
    windows = report.view.ports
    if not windows:
        return
    yield "<h2>What the network carried</h2><div class=scroll><table>"
    yield "<tr><th class=n>rank</th><th>NIC</th><th>host</th><th>in the window that ended last</th></tr>"
    for window in windows[:MAX_RANKS]:
        nic = window.device + (f":{window.port}" if window.port else "")
        rank = "?" if window.global_rank is None else str(window.global_rank)
        inner = f"<td>{text(nic, 60)}</td><td>{text(window.host, 60)}</td><td>{text(work_line(window.work), 300)}</td>"
        yield f"<tr><td class=n>{text(rank)}</td>{inner}</tr>"
    yield "</table></div>"


def _paths(report: Report) -> Iterator[str]:
    """Which way flows take, and where they crowd."""
    if not report.view.frame.flows:
        return
    from ncclwatch.paths.words import crowd_text
    from ncclwatch.report.paths_svg import paths
    from ncclwatch.view.paths import picture_of_view

    picture = picture_of_view(report.view, report.probes)
    if not picture.edges:
        return
    yield "<h2>Paths of flows</h2>"
    if picture.crowded:
        yield _list([crowd_text(one) for one in picture.crowded[:MAX_CROWDS]])
    yield paths(picture)


def _unobserved(report: Report, verdict: Verdict | None) -> Iterator[str]:
    lines = list(verdict.unobserved) if verdict else []
    missing = [cell.rank for cell in report.view.grid if cell.window is None and cell.rank is not None]
    if missing:
        lines.append(f"ranks {ranges(missing)}: no process of theirs was looked at")
    lines += [f"{plane.name} plane: {plane.reason}" for plane in report.planes if plane.reason]
    if report.lost:
        lines.append(f"{report.lost} call records were lost: what they would have told is not known")
    lines += report.problems
    yield "<h2>Not observed</h2>" + (_list(lines) if lines else "<p>nothing that is known of</p>")


def _environment(report: Report) -> Iterator[str]:
    facts = list(report.environment)
    for meta in report.meta[:8]:
        shown = ", ".join(f"{key} {value}" for key, value in meta.items() if isinstance(value, (str, int)))
        if shown:
            facts.append(("recorded by", shown))
    if facts:
        yield "<h2>Environment</h2><dl>" + "".join(f"<dt>{text(a)}</dt><dd>{text(b, 800)}</dd>" for a, b in facts) + "</dl>"


def _log(report: Report) -> Iterator[str]:
    if report.log:
        rows = "".join(
            f"<tr><td class=n>{_when(e.time)[11:]}</td><td>{text(e.kind)}</td><td>{text(e.text, 500)}</td></tr>"
            for e in report.log
        )
        yield f"<h2>What happened</h2><div class=scroll><table>{rows}</table></div>"


def _list(lines: Sequence[str], *, ordered: bool = False) -> str:
    tag = "ol" if ordered else "ul"
    return f"<{tag}>" + "".join(f"<li>{text(line, 600)}</li>" for line in lines) + f"</{tag}>"


def _when(time: float) -> str:
    return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"
