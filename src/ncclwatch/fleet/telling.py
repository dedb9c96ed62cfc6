"""What a judge writes into the log of verdicts: each accusation once, and that it is over only when that was seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nats.errors import Error as NatsError

from ncclwatch.engine.session import DiagnosisSession, Update
from ncclwatch.errors import NcclwatchError
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.verdict_log import Record, SupersededError, VerdictLog, accusation
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.progress import progressed
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass

SETTLE_S = 15.0
"""A judge that takes over while something stands says nothing else for so long: it knows less than the one before it did."""
APART_LOOKS = 2.5
"""Samples of two nodes that are further apart, in intervals and half a second, are of two moments: what one waits for, the other
may have done since.
"""
HOLD_S = 15.0
"""So long nothing new is said because nodes were not heard up to the same moment. Who is not heard at all is silent by then."""
QUIET_LOOKS = 3
"""Judgements on end that have to say that a job runs, of one that stood before this judge began."""
SLOW_S = 120.0
"""A judge that takes over a job that is slow needs so long until it could say that it is."""


@dataclass(slots=True)
class Told:
    """What was appended: records, and of those that are verdicts the verdicts themselves."""

    records: list[Record]
    verdicts: list[Verdict]


class Teller:
    """One job's. ``shown`` makes the JSON of a verdict. What cannot be appended now is appended at a later judgement."""

    def __init__(
        self,
        connection: Connection,
        log: VerdictLog,
        shown: Callable[[Verdict], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection, self.log, self._shown, self._clock = connection, log, shown, clock
        self._began = clock()
        self._adopted = log.state.is_open
        """Whether what stands was told by another judge, and this one has not seen it by itself."""
        self._over = False
        self._quiet = 0
        self._held_since: float | None = None
        self._is_apart = True
        """Whether nodes were not heard up to the same moment, and not all of them have been since."""
        self._level_ns: int | None = None
        """The newest look when they were heard up to the same moment again."""
        self._first: dict[ProcessKey, ProcessSample] = {}
        """What each process showed first since nothing is accused any more."""

    def update(self, session: DiagnosisSession, update: Update, *, unheard: bool = False) -> Told:
        """Append what a judgement brought; ``unheard``: something waits to be heard. Raises :class:`SupersededError`."""
        told = Told([], [])
        if update.windows is None:
            return told
        accusing = [verdict for verdict in update.verdicts if verdict.verdict_class.accuses]
        self._note(session, update, accusing)
        self._note_apart(session, unheard=unheard)
        if (accusing or self._over) and self._holds_back():
            return told
        try:
            for verdict in accusing:
                record = self._tell(self._shown(verdict))
                if record is not None:
                    told.records.append(record)
                    told.verdicts.append(verdict)
            if self._over:
                record = self._connection.call(self.log.recover())
                self._over = self._adopted = False
                if record is not None:
                    told.records.append(record)
        except SupersededError:
            raise
        except (NatsError, NcclwatchError, OSError):
            # What stands is found again by the next judgement, what is over stays over.
            return told
        return told

    def _note_apart(self, session: DiagnosisSession, *, unheard: bool) -> None:
        """Whether nodes were heard up to different moments, as after a worker or NATS was away. That is over when every node has
        shown more than the newest look of when they seemed to be level: before, some of what one shows may still be what it was
        when another was somewhere else.
        """
        looks = _looks(session)
        if unheard or not _of_one_moment(session, looks):
            self._is_apart, self._level_ns = True, None
        elif self._is_apart:
            self._level_ns = self._level_ns or max(looks, default=0)
            self._is_apart = bool(looks) and min(looks) <= self._level_ns
        if not self._is_apart:
            self._held_since = None

    def _holds_back(self) -> bool:
        """Whether what is to be said waits for nodes that are apart; not for ever."""
        if self._is_apart and self._held_since is None:
            self._held_since = self._clock()
        return self._held_since is not None and self._clock() - self._held_since < HOLD_S

    def _tell(self, shown: dict[str, Any]) -> Record | None:
        known = accusation(shown) in self.log.state.told
        if known:
            self._adopted = False
            return None
        if self._adopted and self._clock() - self._began < SETTLE_S:
            return None
        return self._connection.call(self.log.tell(shown))

    def _note(self, session: DiagnosisSession, update: Update, accusing: list[Verdict]) -> None:
        if accusing or not self.log.state.is_open:
            self._over, self._quiet = False, 0
            self._first.clear()
            return
        if update.recoveries:
            # Seen to stand by this judge, and to go on.
            self._over = True
        runs = update.verdict is not None and update.verdict.verdict_class in (VerdictClass.RUNNING, VerdictClass.IDLE)
        moved = self._all_moved(session)
        if not runs or any(node.silent for node in session.nodes.values()):
            self._first.clear()
        self._quiet = self._quiet + 1 if runs and moved else 0
        slow = self.log.standing is not None and str(self.log.standing["class"]).startswith("slow")
        known_long = not (self._adopted and slow) or self._clock() - self._began > SLOW_S
        if self._quiet >= QUIET_LOOKS and known_long:
            self._over = True

    def _all_moved(self, session: DiagnosisSession) -> bool:
        """Whether every process that is observed has moved since nothing is accused any more, among them those on the hosts that
        the verdict names.
        """
        culprits = self.log.standing["culprits"] if self.log.standing is not None else ()
        samples = {key: sample for key, sample in session.samples.items() if sample.run_state != "X"}
        seen = {sample.process.host for sample in samples.values()}
        for key, sample in samples.items():
            self._first.setdefault(key, sample)
        named = {culprit["host"] for culprit in culprits}
        return bool(samples) and named <= seen and all(progressed(self._first[key], sample) for key, sample in samples.items())


def _looks(session: DiagnosisSession) -> list[int]:
    """When each node that is heard was looked at last, nanoseconds since the epoch by its clock."""
    heard = [node for node in session.nodes.values() if not node.silent and node.samples]
    return [next(iter(node.samples.values())).wall_ns for node in heard]


def _of_one_moment(session: DiagnosisSession, looks: list[int]) -> bool:
    interval_s = max((node.interval_s for node in session.nodes.values() if not node.silent and node.samples), default=1.0)
    return not looks or max(looks) - min(looks) <= (APART_LOOKS * interval_s + 0.5) * 1e9
