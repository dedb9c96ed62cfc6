"""RAS in text (2.24.3 and later), parsed: the table of communicators, and what it says of ranks that are unlike the others.

The text names a communicator only where it finds something to tell, and of its ranks the outliers: few, or alone with what they
did. The others of a communicator are those it did not name: their count is known where one group alone is not named. Up to 2.25
there is one count for all collectives together. Source: ``rasClientRunComms`` and ``rasClientBreakDownErrors``,
``src/ras/client_support.cc``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ncclwatch.ingest.base import IngestError
from ncclwatch.ingest.ras_answer import (
    MAX_NAMED,
    MAX_RANKS,
    RasAnswer,
    RasCommunicator,
    RasMissing,
    RasProcess,
    RasRank,
    version_of,
)

MAX_NAMED_RANKS = 4096
"""Ranks of one communicator up to which those that the text does not name are filled up."""
ALL_COLLECTIVES = "operations"
"""The name of the one count that there is up to 2.25."""
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_ROW = re.compile(r" *(\d{1,9}) +(\d{1,9}) +\d{1,9} +[\d-]{1,19} +(\d{1,9}) +(\d{1,9}) +([A-Z]+) +([A-Z,]+)$")
_COMMUNICATOR = re.compile(r"#(\d{1,9})-(\d{1,9}) \(([0-9a-f]{1,16})\) ([A-Z]+)$")
_MANAGED = r"GPU (\d{1,9})(?: \(NVML \d{1,9}\))? managed by process (\d{1,9}) on node (\S{1,64})$"
_RANK = re.compile(r" *Rank (\d{1,9})(.*?) -- (?:\[process information not found\]|" + _MANAGED + ")")
_PROCESS = re.compile(r" *(?:\[[\d :-]{19}\] PEER_(\w+): )?Process (\d{1,9}) on node (\S{1,64}) managing GPU(?: (\d{1,9})|s )")
"""Also of monitoring mode (2.29 on), one event a line."""
_LAUNCHED = re.compile(r" has launched up to operation (\d{1,19})$")
_SEVERAL = re.compile(r" *(\d{1,9}) ranks (?:have launched up to operation (\d{1,19})|have (not) launched any operations)")
_STATUS = re.compile(r" *\d{1,9} ranks have status ([A-Z]+)")
_REPORTED = re.compile(r" *\d{1,9} ranks reported (.*)")
_DIFFERENT = re.compile(r" *Communicator ranks have different (?:(\w+) operation|collective operation) counts")
_TIMEOUTS = re.compile(r" *Encountered (\d{1,9}) communication timeout")
_OLD_MISSING = re.compile(r" *The missing ranks?: ([\d, -]{1,4096})$")
_NO_TABLE = re.compile(rb"^(?:No communicator data collected|RAS Monitor Mode| ?\[[\d :-]{19}\] PEER_)", re.M)
_ERRORS = {
    "Unhandled CUDA error": "ncclUnhandledCudaError",
    "System error": "ncclSystemError",
    "Internal error": "ncclInternalError",
    "Invalid argument": "ncclInvalidArgument",
    "Invalid usage": "ncclInvalidUsage",
    "Remote process error": "ncclRemoteError",
}
"""``ncclErrorToString``."""


@dataclass(slots=True)
class _Section:
    """What lines mean that name ranks without saying what of: where in the text they stand."""

    communicator: RasCommunicator | None = None
    kind: str = ""
    """``INCOMPLETE``, ``ERROR``, ``MISMATCH``, ``DEAD``: the word that begins a paragraph."""
    collective: str = ""
    said: str = ""
    """What several ranks have in common, of which those that follow are some."""


@dataclass(slots=True)
class _Different:
    """Counts of one collective on one communicator: by rank, and how many of a value the text does not name."""

    named: dict[int, int] = field(default_factory=dict)
    several: list[tuple[int, int]] = field(default_factory=list)
    """(ranks, count) as the text has them, the ranks named below included."""


class _Reader:
    def __init__(self, answer: RasAnswer) -> None:
        self.answer = answer
        self.rows: dict[int, tuple[int, int, str, str]] = {}
        """Number of a group in the table: communicators in it, ranks of each, status, errors."""
        self.found: dict[tuple[int, int], RasCommunicator] = {}
        self.places: dict[int, int] = {}
        self.by_rank: dict[tuple[int, int], RasRank] = {}
        self.different: dict[tuple[int, str], _Different] = {}
        """By place of the communicator (in ``found``) and collective."""
        self.section = _Section()
        self.named = 0

    def line(self, line: str) -> None:
        """Take one line, without its end."""
        if not line.startswith(" "):
            self._heading(line)
        elif row := _ROW.match(line):
            self.rows[int(row[1])] = (int(row[2]), int(row[3]), row[5], row[6])
        elif rank := _RANK.match(line):
            self._rank(rank)
        elif process := _PROCESS.match(line):
            self._process(process)
        else:
            self._several(line)

    def _process(self, found: re.Match[str]) -> None:
        dead = "DEAD" in (found[1], self.section.kind)
        if (dead or not found[1]) and len(self.answer.processes) < MAX_NAMED:
            device = int(found[4]) if found[4] else None
            self.answer.processes.append(RasProcess(int(found[2]), found[3], dead, device))

    def _heading(self, line: str) -> None:
        if line in ("INCOMPLETE", "DEAD", "TIMEOUT"):
            self.section = _Section(None, line)
        elif version := _VERSION.match(line):
            self.answer.version = version_of(version[1])
        elif heading := _COMMUNICATOR.match(line):
            self.section = _Section(self._communicator(heading), heading[4])

    def _communicator(self, heading: re.Match[str]) -> RasCommunicator | None:
        place = int(heading[1]), int(heading[2])
        if place not in self.found:
            size = self.rows.get(place[0], (0, 0, "", ""))[1]
            if not 0 < size <= MAX_RANKS or len(self.found) >= MAX_NAMED:
                self.answer.problems.append(f"{self.answer.source}: {heading[0]}: the table above has no such group, left out")
                return None
            self.found[place] = made = RasCommunicator(int(heading[3], 16), size, f"0x{int(heading[3], 16):x}")
            self.places[id(made)] = len(self.places)
        return self.found[place]

    def _rank(self, found: re.Match[str]) -> None:
        communicator, section = self.section.communicator, self.section
        number, said = int(found[1]), found[2] or section.said
        if communicator is None or number >= communicator.size or self.named >= MAX_NAMED:
            return
        self.named += 1
        host, pid = (found[5], int(found[4])) if found[4] else ("", 0)
        device = int(found[3]) if found[3] else None
        if section.kind == "INCOMPLETE":
            communicator.missing.append(RasMissing(number, host, pid, device, unresponsive=True))
        elif said.endswith("status NOCOMM"):
            communicator.missing.append(RasMissing(number, host, pid, device, unresponsive=False, dead=False))
        else:
            rank = self._take(communicator, number)
            rank.host, rank.pid, rank.device = host or rank.host, pid or rank.pid, device if device is not None else rank.device
            self._learn(communicator, rank, said)

    def _take(self, communicator: RasCommunicator, number: int) -> RasRank:
        place = self.places[id(communicator)], number
        if place not in self.by_rank:
            self.by_rank[place] = RasRank(number)
            communicator.ranks.append(self.by_rank[place])
        return self.by_rank[place]

    def _learn(self, communicator: RasCommunicator, rank: RasRank, said: str) -> None:
        section = self.section
        if launched := _LAUNCHED.match(said):
            self._counts(communicator).named[rank.rank] = int(launched[1])
        elif said.endswith("not launched any operations"):
            self._counts(communicator).named[rank.rank] = 0
        elif " status " in said:
            status = said.rpartition(" ")[2]
            rank.aborted = True if status == "ABORT" else None
            rank.finalize_called = True if status == "FINALIZE" else None
            rank.init_state = "ncclInProgress" if status == "INIT" else None
        elif " reported " in said:
            result = _ERRORS.get(said.rpartition(" reported ")[2], "an error")
            if section.collective == "init":
                rank.init_state = result
            else:
                rank.async_error = result

    def _counts(self, communicator: RasCommunicator) -> _Different:
        return self.different.setdefault(
            (self.places[id(communicator)], self.section.collective or ALL_COLLECTIVES), _Different()
        )

    def _several(self, line: str) -> None:
        section, communicator = self.section, self.section.communicator
        if timeouts := _TIMEOUTS.match(line):
            self.answer.timeouts = int(timeouts[1])
        elif communicator is None:
            return
        elif different := _DIFFERENT.match(line):
            section.collective, section.said = different[1] or ALL_COLLECTIVES, ""
        elif "ranks have different status" in line:
            section.collective, section.said = "status", ""
        elif line.startswith("  Initialization error"):
            section.collective, section.said = "init", ""
        elif line.startswith("  Asynchronous error"):
            section.collective, section.said = "async", ""
        elif several := _SEVERAL.match(line):
            count = int(several[2] or 0)
            section.said = f" has launched up to operation {count}"
            counts = self._counts(communicator).several
            if len(counts) < MAX_NAMED:
                counts.append((int(several[1]), count))
        elif status := _STATUS.match(line):
            section.said = f" has status {status[1]}"
        elif reported := _REPORTED.match(line):
            section.said = f" reported {reported[1]}"
        elif old := _OLD_MISSING.match(line):
            self._old_missing(communicator, old[1])

    def _old_missing(self, communicator: RasCommunicator, listed: str) -> None:
        """``The missing ranks: 3,5-7``: up to 2.25, without their processes."""
        for first, last in ((part[0], part[-1]) for part in (one.strip().split("-") for one in listed.split(","))):
            if not first.isdigit() or not last.isdigit() or int(last) >= communicator.size:
                continue
            for number in range(int(first), min(int(last), int(first) + MAX_NAMED_RANKS) + 1):
                communicator.missing.append(RasMissing(number, unresponsive=True))

    def finish(self) -> None:
        """Fill up what is said of ranks together."""
        self._place_missing()
        dead = {(one.host, one.pid) for one in self.answer.processes if one.dead}
        for place, communicator in enumerate(self.found.values()):
            for missing in communicator.missing:
                missing.dead = (missing.host, missing.pid) in dead if missing.pid else missing.dead
            _drop_twice(communicator)
            collectives = {name: one for (at, name), one in self.different.items() if at == place}
            if communicator.size <= MAX_NAMED_RANKS:
                for number in sorted(set(range(communicator.size)) - _numbers(communicator)):
                    communicator.ranks.append(RasRank(number))
            elif collectives:
                self.answer.problems.append(
                    f"{self.answer.source}: communicator {communicator.hash:016x} has {communicator.size} ranks, of which the "
                    "text names some: the others are left out (JSON names them all)"
                )
            for name, different in collectives.items():
                self._fill(communicator, name, different)
            self.answer.communicators.append(communicator)
        self.answer.sound = list(self._sound())

    def _place_missing(self) -> None:
        """Up to 2.25 the text names ranks and processes that are missing apart from each other: one of each is the same."""
        missing = [one for communicator in self.found.values() for one in communicator.missing]
        alone = all(len(communicator.missing) <= 1 for communicator in self.found.values())
        if len(self.answer.processes) == 1 and alone and not any(one.pid for one in missing):
            for one in missing:
                one.host, one.pid = self.answer.processes[0].host, self.answer.processes[0].pid

    def _fill(self, communicator: RasCommunicator, name: str, different: _Different) -> None:
        """Counts of one collective, for whom the text has them: of ranks that it does not name where they are all alike."""
        for rank in communicator.ranks:
            if rank.rank in different.named:
                rank.counts = {**(rank.counts or {}), name: different.named[rank.rank]}
        values = list(different.named.values())
        unnamed = [(ranks, count) for ranks, count in different.several if values.count(count) < ranks]
        others = [rank for rank in communicator.ranks if rank.rank not in different.named]
        if len(unnamed) == 1 and unnamed[0][0] == len(others):
            for rank in others:
                rank.counts = {**(rank.counts or {}), name: unnamed[0][1]}
        elif others:
            self.answer.problems.append(
                f"{self.answer.source}: communicator {communicator.hash:016x}: the text does not tell which of {len(others)} "
                f"ranks has called {name} how often (JSON does)"
            )

    def _sound(self) -> Iterator[str]:
        told: dict[int, int] = {}
        for group, _ in self.found:
            told[group] = told.get(group, 0) + 1
        for number, (communicators, size, status, errors) in sorted(self.rows.items()):
            if (rest := communicators - told.get(number, 0)) > 0:
                yield f"{rest} communicator{'s' * (rest > 1)} of {size} ranks: {status}, {errors}"


def _numbers(communicator: RasCommunicator) -> set[int]:
    return {one.rank for one in communicator.ranks} | {one.rank for one in communicator.missing}


def _drop_twice(communicator: RasCommunicator) -> None:
    seen: set[int] = set()
    kept: list[RasMissing] = []
    for one in communicator.missing:
        if one.rank not in seen:
            kept.append(one)
        seen.add(one.rank)
    communicator.missing = kept
    communicator.ranks = [rank for rank in communicator.ranks if rank.rank not in seen]


def parse_text(data: bytes, source: str, written_s: float) -> RasAnswer:
    """An answer as text, plain or verbose. Raises :class:`IngestError` where it is cut off before its table."""
    answer = RasAnswer(source, written_s)
    reader = _Reader(answer)
    for line in data.decode(errors="replace").splitlines():
        reader.line(line[:4096].rstrip())
    if not reader.rows and not _NO_TABLE.search(data):
        raise IngestError(
            f"{source}: an answer of RAS without its table of communicators", "ask again, and keep the whole answer"
        )
    reader.finish()
    return answer
