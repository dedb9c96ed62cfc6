"""The judging session with what is known: what failed first, also after the processes are gone, and the rows of the tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ncclwatch.engine.session import DiagnosisSession, Node, Update
from ncclwatch.engine.verdict import severity
from ncclwatch.knowledge.failures import FailureLog, Incident, Life
from ncclwatch.knowledge.match import Before, advise
from ncclwatch.knowledge.postmortem import HANGS, after
from ncclwatch.knowledge.suspects import LOOKS, Suspects

if TYPE_CHECKING:
    from ncclwatch.collect.batch import NodeBatch
    from ncclwatch.engine.live import LiveDiagnosis
    from ncclwatch.model.looks import ProcessLook
    from ncclwatch.model.verdict import Verdict


MAX_LOOKS = 32
"""Bound: looks at processes that are shown."""
PROBED = "a probe of ours"
"""Words of every line of evidence about a probe of a path (``engine/evidence``)."""


class InformedSession(DiagnosisSession):
    """A session whose verdicts carry what is known of them, and stay when the job they are about has come down."""

    def __init__(self, diagnosis: LiveDiagnosis | None = None) -> None:
        super().__init__(diagnosis)
        self.failures, self.suspects = FailureLog(), Suspects()
        self.before: Before | None = None
        """Who tells the past of those whom a verdict names, where a history is kept."""
        self._judged: list[Verdict] = []
        """What the engine said last, before anything was added."""
        self._said: list[Verdict] = []
        self._state: tuple[int, bool] = (0, False)
        self._told: frozenset[str] = frozenset()
        self._hangs: dict[str, Verdict] = {}
        """By communicator the hang that stands, or stood when its job came down."""
        self._last: dict[str, Verdict] = {}
        """By communicator what was said last of a job that came down."""
        self._probed: set[str] = set()
        """Verdicts that were told with what probes of their paths found."""
        self._over: set[Life] = set()
        self._asked_of_none = False
        """Whether somebody has asked when no process was left to look at."""

    @property
    def seen_stacks(self) -> list[ProcessLook]:
        """Where those whom verdicts named were seen to stand, the newest first."""
        return self.suspects.newest(MAX_LOOKS)

    def feed(
        self, batch: NodeBatch, now_ns: int | None = None, *, source: str | None = None, wall_ns: int | None = None
    ) -> Node | None:
        """Take one batch, as :class:`DiagnosisSession` does."""
        self.failures.feed(batch)
        self.suspects.feed(batch)
        return super().feed(batch, now_ns, source=source, wall_ns=wall_ns)

    def ask(self) -> None:
        """Answer at the next judgement; of jobs of which nothing is left at once."""
        if any(sample.run_state != "X" for sample in self.samples.values()):
            super().ask()
        else:
            self._asked_of_none = True

    def is_due(self, now_ns: int) -> bool:
        """Whether there is anything to judge, or somebody waits."""
        return self._asked_of_none or super().is_due(now_ns)

    def judge(self, now_ns: int) -> Update:
        """What stands, with what is known of it."""
        self.verdicts = before = self._judged
        update = super().judge(now_ns)
        self._judged, lives = self.verdicts, self.verdicts is not before
        incidents = self.failures.incidents({node.name for node in self.nodes.values() if node.silent})
        state = self.failures.version, all(incident.over for incident in incidents)
        update.told = []
        if incidents and not lives and state == self._state:
            # Nobody is left of whom a look could tell more than was known when they ended.
            self.verdicts = update.verdicts = self._said
        else:
            if incidents:
                self.verdicts = update.verdicts = self._with_incidents(self.verdicts, incidents, lives=lives)
            self._keep_hangs(incidents)
            ended = [one.sample for incident in incidents for one in incident.processes]
            advise(self, update, ended, self.before)
            self.verdicts = update.verdicts = [self.suspects.beside(verdict) for verdict in self.verdicts]
            looking = {node.name for node in self.nodes.values() if any(p.name == LOOKS and p.running for p in node.planes)}
            update.orders += self.suspects.orders(self.verdicts, self.samples.values(), now_ns, looking)
        self._tell(update, incidents)
        self._said, self._state = self.verdicts, state
        return update

    def _tell(self, update: Update, incidents: Sequence[Incident]) -> None:
        """What is new: a verdict that begins to stand, that now says what was seen of those it names or what probes of its paths
        found, or whose job has ended.
        """
        accusing = {verdict.id: verdict for verdict in self.verdicts if verdict.verdict_class.accuses}
        fallen = {verdict.id for verdict in self._fallen(incidents)}
        seen = {verdict.id for verdict in self.suspects.news(accusing.values())}
        probed = {number for number, verdict in accusing.items() if any(PROBED in line for line in verdict.evidence)}
        fresh = fallen | seen | (probed - self._probed)
        update.told = [verdict for number, verdict in accusing.items() if number not in self._told or number in fresh]
        self._told, self._probed = frozenset(accusing), (probed | self._probed) & accusing.keys()
        if self._asked_of_none:
            self._asked_of_none, update.answers = False, [*update.answers, *self.verdicts]

    def _keep_hangs(self, incidents: Sequence[Incident]) -> None:
        """Remember the hangs that stand, and those that stood when their jobs came down."""
        hashes = {number for incident in incidents for number in incident.hashes}
        self._hangs = {number: verdict for number, verdict in self._hangs.items() if number in hashes}
        for verdict in self.verdicts:
            if verdict.verdict_class in HANGS and verdict.communicator is not None:
                self._hangs.setdefault(verdict.communicator.hash, verdict)

    def _fallen(self, incidents: Sequence[Incident]) -> list[Verdict]:
        """What is said of jobs whose last process has just ended: now all that failed is known."""
        fallen = [incident for incident in incidents if incident.over and incident.key not in self._over]
        self._over = {incident.key for incident in incidents if incident.over}
        return [self._last[number] for incident in fallen for number in sorted(incident.hashes & self._last.keys())[:1]]

    def _with_incidents(self, verdicts: Sequence[Verdict], incidents: Sequence[Incident], *, lives: bool) -> list[Verdict]:
        """The verdicts of the jobs that run, and one for each that came down."""
        rest, found = list(verdicts), []
        if not lives:
            rest = [verdict for verdict in rest if verdict.verdict_class.accuses]
        for incident in incidents:
            hashes = incident.hashes
            own = next((verdict for verdict in rest if _is_about(verdict, incident)), None)
            rest = [verdict for verdict in rest if verdict is not own]
            hang = next((self._hangs[number] for number in sorted(hashes & self._hangs.keys())), None)
            last = next((self._last[number] for number in sorted(hashes & self._last.keys())), None)
            time = max(*(one.seen for one in incident.processes), *(event.time for event in incident.events))
            said = after(incident, own or last, hang, time)
            if said is not None:
                self._last.update(dict.fromkeys(hashes, said))
                found.append(said)
        return sorted((*found, *rest), key=severity)


def _is_about(verdict: Verdict, incident: Incident) -> bool:
    """Whether a verdict is about the job of an incident."""
    if verdict.communicator is not None:
        return verdict.communicator.hash in incident.hashes
    places = {(one.life[0], one.life[1]) for one in incident.processes}
    return any((culprit.host, culprit.pid) in places for culprit in verdict.culprits)
