"""Judge a diagnoser's verdicts of one case, and count over cases."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.simulate.scenario import Scenario, ScoreClass
from score.cases import Case
from score.causes import right_cause
from score.diagnosers import Diagnoser

SCORE_OF = {
    VerdictClass.STOPPED: ScoreClass.H1,
    VerdictClass.DEAD: ScoreClass.H1,
    VerdictClass.NOT_ENTERED: ScoreClass.H1,
    VerdictClass.INCONSISTENT: ScoreClass.H2,
    VerdictClass.HARDWARE: ScoreClass.H3,
    VerdictClass.SLOW_COMPUTATION: ScoreClass.S1,
    VerdictClass.SLOW_COMMUNICATION: ScoreClass.S2,
    VerdictClass.SLOW_MIXED: ScoreClass.S3,
    VerdictClass.INIT_HANG: ScoreClass.INIT_HANG,
    VerdictClass.DEADLOCK: ScoreClass.DEADLOCK,
}


class Members(Protocol):
    """Who the communicators of a job consist of."""

    def members_of(self, comm_hash: str) -> tuple[int, ...]:
        """Global ranks by rank of the communicator; empty when the hash names none, or more than one."""
        ...


@dataclass(slots=True)
class Result:
    """One diagnoser on one case. ``None`` where a question does not arise (no link is expected, nothing was detected).

    ``setting`` says how a real run was made (release, transport, attachment, try); empty in simulation. ``analysis_s``: seconds
    of the judgement that first named the right place, with the taking in of what was new; None where it was not timed.
    ``confidence`` and ``rules`` are those of the verdict that counts; ``innocents`` all ranks that were named at any moment and
    are not at fault. ``visible`` (of slow jobs): whether the fault shows in the job's own iteration times (:mod:`score.visible`).
    ``right_cause``: whether the first row of knowledge that the verdict carries names what was played (:mod:`score.causes`).
    """

    case: str
    score_class: str
    diagnoser: str
    detected: bool
    right_class: bool
    right_rank: bool | None
    right_stage: bool | None
    right_link: bool | None
    false_alarm: bool
    detection_s: float | None
    location_s: float | None
    said: str
    named: list[int]
    summary: str
    setting: str = ""
    analysis_s: float | None = None
    confidence: float | None = None
    rules: tuple[str, ...] = ()
    innocents: tuple[int, ...] = ()
    visible: bool | None = None
    right_cause: bool | None = None

    @property
    def located(self) -> bool:
        """Whether what is expected of place (ranks, or link) was right."""
        return self.right_rank is not False and self.right_link is not False

    @property
    def right(self) -> bool:
        """Right class and right place; for a case in which nobody must be accused, silence."""
        if ScoreClass(self.score_class).quiet:
            return not self.false_alarm
        return self.detected and self.right_class and self.located


@dataclass(frozen=True, slots=True)
class _Judgement:
    right_class: bool
    right_rank: bool | None
    right_stage: bool | None
    right_link: bool | None
    named: tuple[int, ...]


def judge(scenario: Scenario, cast: Members, verdict: Verdict) -> _Judgement:
    """Compare one verdict with what is expected."""
    expect = scenario.expect
    named = {c.rank for c in verdict.culprits if c.rank is not None}
    for culprit in verdict.culprits:
        if culprit.rank is None and culprit.comm_rank is not None and culprit.communicator is not None:
            members = cast.members_of(culprit.communicator.hash)
            if culprit.comm_rank < len(members):
                named.add(members[culprit.comm_rank])
    allowed = set(expect.ranks) | set(expect.also)
    right_rank: bool | None = bool(named) and named <= allowed and named >= set(expect.ranks)
    if not allowed:
        right_rank = None
    said = " ".join(
        [verdict.stage, verdict.communicator.role if verdict.communicator else ""]
        + [c.stage + " " + (c.communicator.role if c.communicator else "") for c in verdict.culprits]
    ).lower()
    right_stage = any(word in said for word in expect.stage) if expect.stage else None
    right_link = set(expect.link) <= set(_link(cast, verdict)) if expect.link else None
    return _Judgement(verdict.verdict_class in expect.verdicts, right_rank, right_stage, right_link, tuple(sorted(named)))


def _link(cast: Members, verdict: Verdict) -> tuple[int, ...]:
    """Global ranks of the link a verdict names."""
    if verdict.link is None or verdict.communicator is None:
        return ()
    members = cast.members_of(verdict.communicator.hash)
    ends = (verdict.link.source, verdict.link.destination)
    return tuple(members[e] for e in ends if e < len(members))


@dataclass(slots=True)
class Tally:
    """What one diagnoser said of one case so far. The last accusing verdict counts; times are those of the first right one."""

    scenario: Scenario
    cast: Members
    name: str
    setting: str = ""
    _false_alarm: bool = False
    _last: tuple[Verdict, _Judgement] | None = None
    _detection: float | None = None
    _location: float | None = None
    _analysis: float | None = None
    _innocents: set[int] = field(default_factory=set)

    def hear(self, verdicts: Sequence[Verdict], since_effect_s: float, took_s: float | None = None) -> None:
        """Take what was said at one moment, seconds after the fault began to show (negative: before), and how long it took."""
        quiet = self.scenario.expect.score_class.quiet
        accusing = [v for v in verdicts if v.verdict_class.accuses]
        if not accusing:
            unknown = quiet and since_effect_s >= 0 and any(v.verdict_class is VerdictClass.UNKNOWN for v in verdicts)
            if unknown and self._detection is None and self.scenario.faults:
                self._detection = since_effect_s
            return
        judged = [(v, judge(self.scenario, self.cast, v)) for v in accusing]
        self._innocents |= _innocent(self.scenario, judged)
        if quiet:
            self._false_alarm, self._last = True, judged[0]
            return
        if since_effect_s < 0:
            # Calls that contradict each other are seen before the job comes to stand over them: early, and right, is no alarm.
            inconsistent = ScoreClass.H2 is self.scenario.expect.score_class
            self._false_alarm |= not (inconsistent and all(one.right_class and one.right_rank for _, one in judged))
            return
        best = max(judged, key=lambda item: (item[1].right_class, item[1].right_rank is not False))
        self._last = best
        if self._detection is None:
            self._detection = since_effect_s
        if self._location is None and best[1].right_rank is not False and best[1].right_link is not False:
            self._location = since_effect_s
            self._analysis = took_s

    def result(self) -> Result:
        """The case's outcome."""
        found = _result(self.scenario, self.name, self._last, self._false_alarm, self._detection, self._location)
        found.setting = self.setting
        found.analysis_s = self._analysis
        found.innocents = tuple(sorted(self._innocents))
        if not self.scenario.expect.score_class.quiet:
            found.right_cause = right_cause({fault.kind for fault in self.scenario.faults}, self._last and self._last[0])
        if self._last is not None:
            verdict = self._last[0]
            found.confidence, found.rules = round(verdict.confidence, 4), tuple(getattr(verdict, "rules", ()))
        return found


def _innocent(scenario: Scenario, judged: Sequence[tuple[Verdict, _Judgement]]) -> set[int]:
    """Ranks that were named and are not at fault; nobody where the expectation names no place."""
    expect = scenario.expect
    at_fault = {*expect.ranks, *expect.also, *expect.link}
    if not at_fault and not expect.score_class.quiet:
        return set()
    return {rank for _, one in judged for rank in one.named if rank not in at_fault}


def score_case(case: Case, diagnosers: Sequence[Diagnoser]) -> list[Result]:
    """Show every moment of a case to every diagnoser."""
    tallies = [Tally(case.scenario, case.cast, diagnoser.name) for diagnoser in diagnosers]
    for moment in case.moments():
        for diagnoser, tally in zip(diagnosers, tallies, strict=True):
            began = time.perf_counter()
            verdicts = diagnoser.diagnose(moment.records, moment.clock_s)
            tally.hear(verdicts, moment.since_effect_s, time.perf_counter() - began)
    visible = case.visible()
    return [replace(tally.result(), visible=visible) for tally in tallies]


def _result(
    scenario: Scenario,
    diagnoser: str,
    said: tuple[Verdict, _Judgement] | None,
    false_alarm: bool,
    detection: float | None,
    location: float | None,
) -> Result:
    verdict, judged = said if said else (None, None)
    quiet = scenario.expect.score_class.quiet
    known = judged if judged and not quiet else None
    nowhere = None if quiet or not (scenario.expect.ranks or scenario.expect.also) else False
    return Result(
        case=scenario.name,
        score_class=str(scenario.expect.score_class),
        diagnoser=diagnoser,
        detected=detection is not None,
        right_class=bool(known and known.right_class),
        right_rank=known.right_rank if known else nowhere,
        right_stage=known.right_stage if known else (False if scenario.expect.stage else None),
        right_link=known.right_link if known else (False if scenario.expect.link else None),
        false_alarm=false_alarm,
        detection_s=_rounded(detection),
        location_s=_rounded(location),
        said=str(verdict.verdict_class) if verdict else "",
        named=list(judged.named) if judged else [],
        summary=verdict.summary if verdict else "",
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


@dataclass(slots=True)
class Line:
    """One row of the table: a class, or all."""

    score_class: str
    cases: int
    detected: int
    right_class: int
    right: int
    right_rank: tuple[int, int]
    right_stage: tuple[int, int]
    right_link: tuple[int, int]
    right_cause: tuple[int, int]
    false_alarms: int
    detection_s: float | None
    location_s: float | None
    precision: float | None
    recall: float | None
    f1: float | None
    not_yet: bool = False


def summarise(results: Sequence[Result], diagnoser: Diagnoser) -> list[Line]:
    """Rows of one diagnoser: every class, clean, and all of them together. Latencies are medians over the cases that have one.

    Recall is right class and right place over the class's cases; precision the same over the cases, of any class, that were
    said to be of it.
    """
    own = [r for r in results if r.diagnoser == diagnoser.name]
    lines = []
    for score_class in ScoreClass:
        part = [r for r in own if r.score_class == score_class]
        said = sum(_said_class(r) == score_class for r in own)
        line = _line(str(score_class), part, sum(r.right for r in part), said)
        line.not_yet = score_class in diagnoser.not_yet
        lines.append(line)
    faulty = [r for r in own if not ScoreClass(r.score_class).quiet]
    everything = _line("all faults", faulty, sum(r.right for r in faulty), sum(bool(r.said) for r in own))
    everything.false_alarms = sum(r.false_alarm for r in own)
    lines.append(everything)
    return lines


def _said_class(result: Result) -> str | None:
    """The class that a case was said to be of: its own where the verdict is one of those that the case takes."""
    if result.right_class:
        return result.score_class
    return SCORE_OF.get(VerdictClass(result.said)) if result.said else None


def _line(name: str, part: Sequence[Result], right: int, said: int) -> Line:
    quiet = name in (ScoreClass.CLEAN, ScoreClass.UNSEEN)
    recall = right / len(part) if part and not quiet else None
    precision = right / said if said and not quiet else None
    both = precision is not None and recall is not None and precision + recall > 0
    return Line(
        score_class=name,
        cases=len(part),
        detected=sum(r.detected for r in part),
        right_class=sum(r.right_class for r in part),
        right=right,
        right_rank=_asked([r.right_rank for r in part]),
        right_stage=_asked([r.right_stage for r in part]),
        right_link=_asked([r.right_link for r in part]),
        right_cause=_asked([r.right_cause for r in part]),
        false_alarms=sum(r.false_alarm for r in part),
        detection_s=_median([r.detection_s for r in part]),
        location_s=_median([r.location_s for r in part]),
        precision=precision,
        recall=recall,
        f1=2 * precision * recall / (precision + recall) if both and precision is not None and recall is not None else None,
    )


def _asked(answers: Sequence[bool | None]) -> tuple[int, int]:
    known = [a for a in answers if a is not None]
    return sum(known), len(known)


def _median(values: Sequence[float | None]) -> float | None:
    known = sorted(v for v in values if v is not None and math.isfinite(v))
    return known[len(known) // 2] if known else None


def to_json(results: Sequence[Result], lines: dict[str, list[Line]], source: str = "simulation") -> dict[str, Any]:
    """The whole score as plain data."""
    return {
        "schema": "ncclwatch.score/1",
        "source": source,
        "summary": {name: [asdict(line) for line in part] for name, part in lines.items()},
        "results": [asdict(r) | {"right": r.right} for r in results],
    }
