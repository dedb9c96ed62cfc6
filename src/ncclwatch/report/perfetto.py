"""A recording as a trace that ui.perfetto.dev and chrome://tracing open (the JSON trace event format).

Processes are hosts, threads are ranks: what each was seen to do, by its state, with the operation inside it. One more process
holds a thread for every communicator with the operations open in it, another the verdicts. Culprits are flagged in their names
and by the category ``culprit``. Looks are a second apart: an edge lies between the two looks around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from ncclwatch.dashboard.states import BY_LETTER
from ncclwatch.dashboard.view import View, operation_title
from ncclwatch.model.identity import ProcessKey
from ncclwatch.report.history import Incident
from ncclwatch.text import clean

VERDICTS_PID, GROUPS_PID = 1, 2
FIRST_HOST_PID = 10

Event = dict[str, Any]


class TraceBuilder:
    """Takes views in the order of time and writes events; memory is one open slice a track."""

    def __init__(self, out: TextIO, begin: float) -> None:
        self._out = out
        self._begin = begin
        self._first = True
        self._hosts: dict[str, int] = {}
        self._threads: dict[ProcessKey, tuple[int, int]] = {}
        self._groups: dict[int, int] = {}
        self._open: dict[tuple[int, int, int], tuple[str, float, Event]] = {}
        """By (pid, tid, depth): name, begin, what else."""
        self._time = begin
        out.write('{"displayTimeUnit":"ms","traceEvents":[')

    def add(self, view: View) -> None:
        """Take a look."""
        time = self._time = view.frame.time
        groups: dict[int, set[str]] = {}
        for window, letter in zip(view.frame.windows, view.letters, strict=True):
            pid, tid = self._thread(view, window.process.key)
            operation = window.operation
            state = BY_LETTER[letter]
            category = "culprit" if letter == "X" else "state"
            self._step(pid, tid, 0, state.word, time, {"cat": category, "cname": _COLOURS.get(letter)})
            title = operation_title(operation) if operation is not None else ""
            inside: Event = {"cat": "operation"}
            if operation is not None:
                inside["args"] = {"communicator": f"{operation.comm_hash:016x}", "steps": operation.steps_total}
                groups.setdefault(operation.comm_hash, set()).add(title)
            # The outer slice ends with the state; what is open inside it is cut there, and goes on in the next one.
            self._step(pid, tid, 1, title, time, inside, cut=state.word)
            if window.bytes_per_s is not None:
                self._write({"ph": "C", "pid": pid, "tid": tid, "ts": self._us(time), "name": f"bytes/s of rank {window.rank}",
                             "args": {"bytes": round(window.bytes_per_s)}})  # fmt: skip
        for comm_hash in set(groups) | set(self._groups):
            names = sorted(groups.get(comm_hash, ()))
            self._step(GROUPS_PID, self._group(comm_hash, view), 0, ", ".join(names[:4]), time, {"cat": "operation"})

    def finish(self, incidents: list[Incident], end: float) -> None:
        """Close what is open, name the tracks, and tell the verdicts."""
        for slot in list(self._open):
            self._end(slot, max(end, self._time))
        if incidents:
            self._write(_name("process_name", VERDICTS_PID, 0, "verdicts"))
        for i, incident in enumerate(incidents):
            verdict = incident.verdict
            begin, over = max(incident.began, self._begin), incident.ended if incident.ended is not None else end
            name = f"{verdict.verdict_class.value.upper()}: {clean(verdict.summary, 200)}"
            args = {
                "id": verdict.id,
                "confidence": round(verdict.confidence, 3),
                "evidence": [clean(line, 400) for line in verdict.evidence],
            }
            start = self._us(begin)
            where = {"pid": VERDICTS_PID, "tid": i + 1, "ts": start, "dur": self._us(over) - start}
            self._write({"ph": "X", **where, "name": name, "cat": "verdict", "args": args})
            self._write(_name("thread_name", VERDICTS_PID, i + 1, verdict.verdict_class.value))
            accused = {(c.host, c.pid) for c in verdict.culprits}
            for key, (pid, tid) in self._threads.items():
                if (self._host_of(pid), key.pid) in accused:
                    flag = {"ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": start, "cat": "culprit"}
                    self._write({**flag, "name": "culprit from here on", "args": {"verdict": verdict.id}})
        accused = {(c.host, c.pid) for incident in incidents for c in incident.verdict.culprits}
        for host, pid in self._hosts.items():
            self._write(_name("process_name", pid, 0, host))
        for key, (pid, tid) in self._threads.items():
            mark = " ◀ culprit" if (self._host_of(pid), key.pid) in accused else ""
            self._write(_name("thread_name", pid, tid, f"rank {tid - 1}{mark}" if tid <= 1 << 22 else f"pid {key.pid}{mark}"))
        if self._groups:
            self._write(_name("process_name", GROUPS_PID, 0, "communicators"))
        for comm_hash, tid in self._groups.items():
            self._write(_name("thread_name", GROUPS_PID, tid, f"{comm_hash:016x}"))
        self._out.write("\n]}\n")

    # --- tracks --------------------------------------------------------------------------------------------------------

    def _host_of(self, pid: int) -> str:
        return next((host for host, number in self._hosts.items() if number == pid), "")

    def _thread(self, view: View, key: ProcessKey) -> tuple[int, int]:
        found = self._threads.get(key)
        if found is None:
            window = view.frame.windows[view.place_of[key]]
            pid = self._hosts.setdefault(window.process.host, FIRST_HOST_PID + len(self._hosts))
            # A rank's number, so that tracks come in order; a process without one, or a second of that rank, comes last.
            tid = window.rank + 1 if window.rank is not None else (1 << 23) + key.pid
            if (pid, tid) in self._threads.values():
                tid = (1 << 23) + len(self._threads)
            found = self._threads[key] = (pid, tid)
        return found

    def _group(self, comm_hash: int, view: View) -> int:
        return self._groups.setdefault(comm_hash, len(self._groups) + 1)

    # --- slices --------------------------------------------------------------------------------------------------------

    def _step(self, pid: int, tid: int, depth: int, name: str, time: float, more: Mapping[str, Any], cut: str = "") -> None:
        """The track is in ``name`` now (nothing when empty). A slice inside another ends where that one ends."""
        key = (pid, tid, depth)
        known = self._open.get(key)
        if known is not None and known[0] == name and known[2].get("_cut", "") == cut:
            return
        if known is not None:
            self._end(key, time)
        if name:
            self._open[key] = (name, time, {**more, "_cut": cut})

    def _end(self, key: tuple[int, int, int], time: float) -> None:
        name, begin, more = self._open.pop(key)
        event: Event = {"ph": "X", "pid": key[0], "tid": key[1], "ts": self._us(begin), "name": clean(name, 200)}
        event["dur"] = self._us(time) - event["ts"]
        event.update({k: v for k, v in more.items() if k != "_cut" and v is not None})
        self._write(event)

    def _us(self, time: float) -> int:
        """Microseconds since the beginning of the recording."""
        return max(round((time - self._begin) * 1e6), 0)

    def _write(self, event: Event) -> None:
        self._out.write(("\n" if self._first else ",\n") + json.dumps(event, ensure_ascii=False, separators=(",", ":")))
        self._first = False


# Names of colours that the viewers know.
_COLOURS = {"X": "terrible", "D": "black", "T": "terrible", "w": "bad", "s": "bad", "r": "good", "i": "grey"}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": clean(name, 120)}}


def check(trace: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a trace: slices of a track that overlap without nesting, tracks without a name."""
    slices: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    named = set()
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"], event["name"]))
        elif event["ph"] == "M" and event["name"] == "thread_name":
            named.add((event["pid"], event["tid"]))
    for track, found in slices.items():
        if track not in named:
            yield f"track {track} has no name"
        stack: list[int] = []
        for begin, minus, name in sorted(found):
            end = begin - minus
            while stack and stack[-1] <= begin:
                stack.pop()
            if stack and end > stack[-1]:
                yield f"{name} on {track} ends at {end}, after what it lies in ({stack[-1]})"
            stack.append(end)
