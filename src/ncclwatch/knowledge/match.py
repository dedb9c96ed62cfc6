"""Which rows of the tables fit a verdict: by its typed things, and what is known of the processes it is about."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from ncclwatch.knowledge.compare import Differs, Unlike, of_culprit
from ncclwatch.knowledge.rows import Pattern, Release, Row, placed, rows
from ncclwatch.knowledge.tickets import Processes, by_place, ticketed
from ncclwatch.model.cause import Cause
from ncclwatch.model.failure import Place
from ncclwatch.model.inside import inside
from ncclwatch.model.verdict import Advice, SlowCause, SlowKind, StepKind, Verdict, VerdictClass

if TYPE_CHECKING:
    from ncclwatch.engine.session import DiagnosisSession, Update
    from ncclwatch.model.network import NicRecord
    from ncclwatch.model.state import ProcessSample

MOST = 5
"""Rows that a verdict carries; ``ncclwatch explain`` has all."""
LOOKED = frozenset({"doing", "gpu", "inside"})
"""Keys of what somebody looked at because of the verdict: it tells more than the verdict itself."""
MOST_DEFECTS = 2
"""Known defects among them: each is a possibility only, and many are of old releases."""


MOST_ASKED = 64
"""Processes whose settings and machine count where nobody is named."""
MOST_INSIDE = 4
"""Lines of what NCCL's own state says in a process."""
MOST_COMPARED = 4
"""Culprits that are compared with their peers."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What rows are matched on. ``values``: by the key of a pattern what is there; ``releases``: of the processes involved, empty
    where unknown; ``ranks``: of the communicator, 0 where unknown.
    """

    values: Mapping[str, frozenset[str]]
    releases: frozenset[Release] = frozenset()
    ranks: int = 0


def seen(
    verdict: Verdict, releases: Iterable[Release] = (), arch: str = "", settings: Iterable[str] = (), within: Iterable[str] = (),
    differs: Iterable[str] = (),
) -> Seen:  # fmt: skip
    """The typed things of a verdict. ``settings``: ``NCCL_NAME=value`` of the processes it is about, ``within``: what NCCL's own
    state says in them, ``differs``: how culprits differ from their peers.
    """
    causes = {label for culprit in verdict.culprits if (label := cause_of(culprit.reason))} | set(_of_nobody(verdict))
    links = [link for link in (verdict.link, *(culprit.link for culprit in verdict.culprits)) if link is not None]
    values = {
        "class": {str(verdict.verdict_class)},
        "cause": causes,
        "finding": {found for culprit in verdict.culprits if (found := finding_of(culprit.reason))},
        "slow": {found for culprit in verdict.culprits if (found := slow_cause_of(culprit.reason))},
        "rule": set(verdict.rules),
        "plane": set(verdict.planes),
        "doing": {word for culprit in verdict.culprits for word in culprit.doing},
        "gpu": {word for culprit in verdict.culprits for word in culprit.gpu_trouble},
        "operation": {verdict.operation.name if verdict.operation else ""},
        "transport": {link.transport for link in links},
        "arch": {arch} if arch else set[str](),
        "setting": set(settings),
        "inside": set(within),
        "differs": set(differs),
        "failure": {str(one.kind) for one in verdict.failures if one.place in (Place.FIRST, Place.PERHAPS)},
    }
    ranks = verdict.communicator.nranks if verdict.communicator else 0
    return Seen({key: frozenset(found) for key, found in values.items()}, frozenset(releases), ranks)


def fits(pattern: Pattern, what: Seen) -> bool:
    """Whether everything the pattern asks for is there; what is not known does not fit."""
    if any(what.values.get(key, frozenset()).isdisjoint(wanted) for key, wanted in pattern.lists.items()):
        return False
    if pattern.by_release and not any(affects(pattern, release) for release in what.releases):
        return False
    if pattern.min_ranks and what.ranks < pattern.min_ranks:
        return False
    return pattern.max_ranks is None or 0 < what.ranks <= pattern.max_ranks


def affects(pattern: Pattern, release: Release) -> bool:
    """Whether a release lies within the pattern's bounds."""
    return (pattern.since is None or release >= pattern.since) and (pattern.before is None or release < pattern.before)


def fitting(what: Seen, table: Iterable[Row] | None = None) -> list[Row]:
    """Every row that fits: what was seen of the culprit first, then the likelier and the narrower; known defects last."""
    found = [row for row in (rows() if table is None else table) if fits(row.when, what)]
    return sorted(found, key=lambda row: (row.defect, not LOOKED & row.when.lists.keys(), -row.confidence, -row.when.narrowness))


def advised(
    verdict: Verdict, releases: Iterable[Release] = (), arch: str = "", settings: Iterable[str] = (), within: Iterable[str] = (),
    differs: Iterable[str] = (),
) -> Verdict:  # fmt: skip
    """The verdict with the rows that fit; one that accuses nobody of anything and knows no doubt carries none."""
    if verdict.verdict_class in (VerdictClass.RUNNING, VerdictClass.IDLE):
        return verdict
    found = fitting(seen(verdict, releases, arch, settings, within, differs))
    causes = [row for row in found if not row.defect]
    defects = [row for row in found if row.defect][:MOST_DEFECTS]
    place = _place(verdict)
    return replace(verdict, knowledge=tuple(_advice(row, place) for row in (*causes[: MOST - len(defects)], *defects)))


def with_looked(verdict: Verdict) -> Verdict:
    """The verdict whose culprits say what they were doing, or what is wrong with their GPUs, with the rows that speak of that
    before all others.
    """
    found = [row for row in fitting(seen(verdict)) if LOOKED & row.when.lists.keys()]
    rest = [advice for advice in verdict.knowledge if advice.row not in {row.id for row in found}]
    return replace(verdict, knowledge=(*(_advice(row, _place(verdict)) for row in found), *rest)[:MOST])


def _place(verdict: Verdict) -> dict[str, str]:
    first = next((culprit for culprit in verdict.culprits if culprit.pid is not None), None)
    known = {"pid": str(first.pid), "host": first.host} if first is not None else {}
    return {name: value for name, value in known.items() if value}


def _advice(row: Row, place: Mapping[str, str]) -> Advice:
    do, check = tuple(placed(step, **place) for step in row.do), placed(row.check, **place)
    return Advice(row.id, row.seen, row.cause, row.confidence, do, row.sources, row.defect, check, row.fixed_in)


def informed(verdict: Verdict, processes: Processes, nics: Iterable[NicRecord] = ()) -> Verdict:
    """The verdict with what a ticket needs of its culprits, and the rows that fit it and their processes."""
    if not _wants(verdict):
        return verdict
    named = [processes[place] for one in verdict.culprits if (place := (one.host, one.pid or 0)) in processes]
    asked = named if named else list(islice(processes.values(), MOST_ASKED))
    within = {str(found) for sample in asked for found, _ in inside(sample)}
    traits = [sample.process.traits for sample in asked if sample.process.traits is not None]
    settings = {f"{name}={value}" for one in traits for name, value in one.settings}
    machines = {one.machine for one in traits}
    arch = machines.pop() if len(machines) == 1 else ""
    verdict = replace(verdict, evidence=tuple(dict.fromkeys((*verdict.evidence, *_inside_lines(named)))))
    unlike = [(culprit, _unlike(culprit, named, processes)) for culprit in named[:MOST_COMPARED]]
    differs = {str(one.kind) for _, found in unlike for one in found if one.kind is not None}
    told = advised(ticketed(verdict, processes, nics), _releases(processes.values()), arch, settings, within, differs)
    return replace(told, differences=tuple(_differences(unlike)))


def _inside_lines(named: Iterable[ProcessSample]) -> Iterator[str]:
    """What NCCL's own state says in processes that a verdict names."""
    for sample in islice(named, MOST_COMPARED):
        name = f"rank {sample.rank}" if sample.rank is not None else f"pid {sample.process.pid}"
        yield from (f"{name}, {words}" for _, words in islice(inside(sample), MOST_INSIDE))


def _unlike(culprit: ProcessSample, named: Sequence[ProcessSample], processes: Processes) -> list[Unlike]:
    """How a culprit differs from the others of its communicators."""
    hashes = {communicator.hash for communicator in culprit.communicators}
    others = (one for one in processes.values() if all(one is not other for other in named))
    return of_culprit(culprit, [one for one in others if any(own.hash in hashes for own in one.communicators)])


def _differences(unlike: Sequence[tuple[ProcessSample, Sequence[Unlike]]]) -> Iterator[str]:
    """The same as lines, which name a culprit where there are several."""
    for culprit, found in unlike:
        name = f"rank {culprit.process.rank}: " if len(unlike) > 1 and culprit.process.rank is not None else ""
        yield from (f"{name}{one.line}" for one in found)


def _releases(samples: Iterable[ProcessSample]) -> frozenset[Release]:
    """The releases of NCCL that processes carry, as far as they are known."""
    return frozenset(sample.process.version for sample in samples if sample.process.version is not None)


Before = Callable[[Verdict], Sequence[str]]
"""What is known of the past of a verdict's culprits, as lines of evidence (:mod:`ncclwatch.history.recurrence`)."""


def advise(
    session: DiagnosisSession, update: Update, ended: Sequence[ProcessSample] = (), before: Before | None = None
) -> Update:
    """The update, and what the session says stands, with what is known of each verdict. A verdict that is in several places stays
    one object. ``ended``: the last looks at processes that may be gone.
    """
    every = [*update.verdicts, *update.told, *update.answers, *session.verdicts]
    if all(verdict.knowledge or not _wants(verdict) for verdict in every):
        return update
    processes = by_place((*ended, *session.samples.values()))
    nics = [nic for host in session.network.hosts.values() for nic in host.nics.values()]
    done = {id(verdict): _with_past(informed(verdict, processes, nics), before) for verdict in every}
    update.verdicts, update.told, update.answers, session.verdicts = (
        [done[id(verdict)] for verdict in found] for found in (update.verdicts, update.told, update.answers, session.verdicts)
    )
    return update


def _with_past(verdict: Verdict, before: Before | None) -> Verdict:
    lines = [line for line in before(verdict) if line not in verdict.evidence] if before is not None else []
    return replace(verdict, evidence=(*verdict.evidence, *lines)) if lines else verdict


def _wants(verdict: Verdict) -> bool:
    return verdict.verdict_class not in (VerdictClass.RUNNING, VerdictClass.IDLE)


# --- typed again ---------------------------------------------------------------------------------------------------------
# A culprit carries the clause of its cause, of a closed list with at most one part that is filled in: it is told from that.


@cache
def _clauses() -> tuple[tuple[re.Pattern[str], str], ...]:
    """(pattern, label) of every cause, those with most words of their own first."""
    ordered = sorted(Cause, key=lambda cause: -len(re.sub(r"\{.*?\}", "", cause)))
    parts = ((cause, re.split(r"\{[a-z_.:0-9]+\}", str(cause))) for cause in ordered)
    return tuple((re.compile(".*".join(map(re.escape, words)), re.DOTALL), cause.label) for cause, words in parts)


def cause_of(reason: str) -> str:
    """The label of the cause whose clause a culprit's reason is; empty for none."""
    return next((label for pattern, label in _clauses() if reason and pattern.fullmatch(reason)), "")


def finding_of(reason: str) -> str:
    """What a slow job's finding is about (:class:`~ncclwatch.model.verdict.SlowKind`); empty for none."""
    return next((str(kind) for kind in SlowKind if reason == kind or reason.startswith(f"{kind}: ")), "")


def slow_cause_of(reason: str) -> str:
    """Why a culprit of a slow job is slow (:class:`~ncclwatch.model.verdict.SlowCause`); empty where nothing says so."""
    rest = reason.removeprefix(f"{finding_of(reason)}: ")
    return next((str(cause) for cause in SlowCause if rest.startswith(f"{cause}: ")), "") if rest != reason else ""


_NOBODY = re.compile(r"nobody is named \(([a-z-]+)\)")


def _of_nobody(verdict: Verdict) -> Iterator[str]:
    """The cause of a verdict that names nobody, from the step that it stands by."""
    for step in verdict.trail:
        if step.kind is StepKind.STANDS and (found := _NOBODY.search(step.text)):
            yield found[1]


def words_known() -> dict[str, frozenset[str]]:
    """By the key of a pattern the values that can occur, for those whose list is closed."""
    from ncclwatch.engine.rules import RULES
    from ncclwatch.model.doing import Doing
    from ncclwatch.model.failure import FailureKind
    from ncclwatch.model.gpu import Trouble
    from ncclwatch.model.inside import Inside
    from ncclwatch.model.state import Transport

    every: dict[str, Iterable[Any]] = {
        "class": [kind for kind in VerdictClass if kind not in (VerdictClass.RUNNING, VerdictClass.IDLE)],
        "cause": [cause.label for cause in Cause],
        "finding": list(SlowKind),
        "slow": list(SlowCause),
        "rule": [rule.id for rule in RULES],
        "plane": ["calls", "state", "wire", "nic", "device"],
        "doing": [doing for doing in Doing if doing is not Doing.UNKNOWN],
        "gpu": list(Trouble),
        "inside": list(Inside),
        "differs": list(Differs),
        "failure": [kind for kind in FailureKind if kind is not FailureKind.ENDED],
        "transport": list(Transport),
        "arch": ["x86_64", "aarch64"],
    }
    return {key: frozenset(map(str, values)) for key, values in every.items()}
