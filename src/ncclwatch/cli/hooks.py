"""``--on-verdict``: a command that is run once a verdict, with the verdict as JSON on its standard input (docs/hooks.md).

It runs beside the watching, one at a time, within a time limit, and its output is bounded: one that hangs, fails or floods has no
effect beyond a line. Nothing is run unless it was asked for.
"""

from __future__ import annotations

import json
import queue
import shlex
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclwatch import bounded
from ncclwatch.cli.output import plain
from ncclwatch.errors import UsageError
from ncclwatch.model.verdict import Verdict
from ncclwatch.text import clean

if TYPE_CHECKING:
    from ncclwatch.cli.live import Session
    from ncclwatch.engine.session import Update

TIMEOUT_S = 30.0
"""A command that takes longer is ended, with all of its process group."""
KEPT, FLOOD = 4096, 1 << 20
"""Bytes of its output that are kept, and after which it is ended."""
MAX_WAITING, MAX_REMEMBERED, MAX_LINES = 8, 4096, 64
MAX_LOG = 16 << 20
"""Bytes of the log; then it is renamed to ``….1`` and begun anew."""

OnVerdictOption = Annotated[
    str | None,
    typer.Option(
        "--on-verdict", metavar="COMMAND", help="Run this once a verdict, with the verdict as JSON on its standard input."
    ),
]
HookFloorOption = Annotated[
    float, typer.Option("--hook-floor", min=0.0, max=1.0, help="Confidence from which on a verdict runs the command.")
]
HookCooldownOption = Annotated[
    float,
    typer.Option(
        "--hook-cooldown", min=0.0, max=1e7, help="Seconds between two runs for one class of verdict on the same hosts."
    ),
]
HookLogOption = Annotated[
    Path | None, typer.Option("--hook-log", metavar="FILE", help="Keep what was run, and what came of it, an object a line.")
]
HookDryRunOption = Annotated[bool, typer.Option("--hook-dry-run", help="Only say what --on-verdict would run.")]
HOOK_FLOOR, HOOK_COOLDOWN_S = 0.8, 600.0


@dataclass(frozen=True, slots=True)
class HookOptions:
    """What was asked for."""

    command: tuple[str, ...]
    floor: float = HOOK_FLOOR
    cooldown_s: float = HOOK_COOLDOWN_S
    log: Path | None = None
    dry_run: bool = False
    timeout_s: float = TIMEOUT_S


def hook_options(command: str | None, floor: float, cooldown_s: float, log: Path | None, *, dry_run: bool) -> HookOptions | None:
    """The options of the command line, ``None`` without a command; raises :class:`UsageError`."""
    if command is None:
        if dry_run or log is not None:
            raise UsageError("--hook-log and --hook-dry-run need --on-verdict", "add --on-verdict COMMAND")
        return None
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"--on-verdict cannot be taken apart: {error}", "quote it as a shell would want it") from None
    if not words or shutil.which(words[0]) is None:
        raise UsageError(
            f"--on-verdict: {clean(words[0] if words else command, 200)!r} is no command here", "name a file that is executable"
        )
    if log is not None and (log.is_dir() or not log.parent.is_dir()):
        raise UsageError(f"cannot write {clean(str(log))}", "name a file in a folder that exists")
    return HookOptions(words, floor, cooldown_s, log, dry_run)


def words(outcome: bounded.Outcome) -> str:
    """How a run ended, as a line says it."""
    last = outcome.output.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
    said = f": {clean(last[0], 160)}" if last[0] else ""
    if outcome.why:
        return f"{outcome.why}{said}"
    how = "done" if outcome.status == 0 else f"FAILED with status {outcome.status}"
    return f"{how} in {outcome.seconds:.1f} s{said}"


class Hook:
    """Runs the command of ``options`` for verdicts that :meth:`take` is shown; :meth:`lines` says what came of it."""

    def __init__(self, options: HookOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self._clock = clock
        self._done: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._last: OrderedDict[tuple[object, ...], float] = OrderedDict()
        self._held: OrderedDict[tuple[object, ...], None] = OrderedDict()
        """What the cooldown has held back since it ran last: said once."""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting: queue.Queue[tuple[str, Verdict] | None] = queue.Queue(MAX_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hook", daemon=True)
        self._thread.start()

    def take(self, verdicts: Sequence[Verdict], job: str = "") -> None:
        """Run the command for those that accuse, are sure enough and are new; ``verdicts`` are all that stand of a job now. Never
        waits, never raises. One that stood no longer and stands again is new, as far as the cooldown lets it.
        """
        standing = {verdict.id for verdict in verdicts}
        for known in [known for known in self._done if known[0] == job and known[1] not in standing]:
            del self._done[known]
        for verdict in verdicts:
            if not verdict.verdict_class.accuses or verdict.confidence < self.options.floor or (job, verdict.id) in self._done:
                continue
            _remember(self._done, (job, verdict.id), None)
            hosts = frozenset(culprit.host for culprit in verdict.culprits)
            subject, now = (job, verdict.verdict_class, hosts), self._clock()
            last = self._last.get(subject)
            if last is not None and now - last < self.options.cooldown_s:
                if subject not in self._held:
                    self._say(f"not run for {_name(verdict)}: it was for the same {now - last:.0f} s ago (--hook-cooldown)")
                _remember(self._held, subject, None)
                continue
            self._held.pop(subject, None)
            if self.options.dry_run:
                self._say(f"would run {shlex.join(self.options.command)} for {_name(verdict)} (dry run)")
                self._write(job, verdict, None)
            else:
                try:
                    self._waiting.put_nowait((job, verdict))
                except queue.Full:
                    self._say(f"not run for {_name(verdict)}: {MAX_WAITING} are waiting")
                    continue
            _remember(self._last, subject, now)

    def lines(self) -> list[str]:
        """What is to be said since the last time."""
        found: list[str] = []
        with suppress(queue.Empty):
            while len(found) < MAX_LINES:
                found.append(self._lines.get_nowait())
        return found

    def close(self) -> None:
        """Let a run that is under way end soon, and start no other."""
        self._closing.set()
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(3 * bounded.GRACE_S)

    def _work(self) -> None:
        while (wanted := self._waiting.get()) is not None and not self._closing.is_set():
            job, verdict = wanted
            outcome = run(self.options.command, verdict, job, self.options.timeout_s, self._closing)
            self._say(f"{_name(verdict)}: {words(outcome)}")
            self._write(job, verdict, outcome)

    def _say(self, text: str) -> None:
        self._lines.put(f"hook: {text}")

    def _write(self, job: str, verdict: Verdict, outcome: bounded.Outcome | None) -> None:
        """Add a line to the log; a log that cannot be written is said once a line, and no more."""
        if self.options.log is None:
            return
        result: dict[str, Any] | None = None
        if outcome is not None:
            ended = {"status": outcome.status, "seconds": round(outcome.seconds, 3), "why": outcome.why}
            result = ended | {"output": clean(" / ".join(outcome.output.decode("utf-8", "replace").splitlines()), KEPT)}
        line = {"time": time.time(), "job": job, "command": self.options.command, "dry_run": outcome is None, "result": result}
        try:
            if self.options.log.exists() and self.options.log.stat().st_size > MAX_LOG:
                self.options.log.replace(self.options.log.with_name(self.options.log.name + ".1"))
            with self.options.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, "verdict": plain(verdict.to_json())}) + "\n")
        except OSError as error:
            self._say(f"its log cannot be written: {error.strerror or error}")


def _remember(known: OrderedDict[Any, Any], key: object, value: object) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > MAX_REMEMBERED:
        known.popitem(last=False)


def _name(verdict: Verdict) -> str:
    return f"verdict {verdict.id} ({verdict.verdict_class}, {verdict.confidence:.0%})"


def document(verdict: Verdict) -> bytes:
    """What a command reads: the verdict in the shape ``ncclwatch.verdict/1``, its texts cleaned."""
    return json.dumps(plain(verdict.to_json()), allow_nan=False).encode() + b"\n"


def about(verdict: Verdict, job: str = "") -> dict[str, str]:
    """Environment variables of a command, beside those of ncclwatch itself."""
    return {
        "NCCLWATCH_VERDICT_ID": verdict.id, "NCCLWATCH_VERDICT_CLASS": str(verdict.verdict_class),
        "NCCLWATCH_VERDICT_CONFIDENCE": f"{verdict.confidence:.3f}", "NCCLWATCH_VERDICT_JOB": clean(job, 100),
    }  # fmt: skip


def run(command: Sequence[str], verdict: Verdict, job: str, timeout_s: float, closing: threading.Event) -> bounded.Outcome:
    """Run a command for a verdict."""
    return bounded.run(
        command, timeout_s=timeout_s, keep=KEPT, flood=FLOOD, data=document(verdict), extra=about(verdict, job), closing=closing
    )


@dataclass
class HookSurface:
    """A surface that runs a command for the verdicts of a session; what it has to say is told as a note."""

    hook: Hook

    def attached(self, session: Session) -> None:
        """Nothing is to be done."""

    def update(self, session: Session, update: Update) -> None:
        """Show the hook what stands, and tell what it says."""
        self.take(update)

    def take(self, update: Update, job: str = "") -> None:
        """The same of one job of several."""
        if update.windows is not None:
            # Without a look nothing was judged, and what stands is not told.
            self.hook.take(update.verdicts, job)
        update.notes += self.hook.lines()

    def end(self, session: Session, reason: str) -> None:
        """Nothing is to be done: :func:`hooked` closes it."""


@contextmanager
def hooked(options: HookOptions | None) -> Iterator[list[HookSurface]]:
    """The surface that runs the command, if any; closed at the end."""
    if options is None:
        yield []
        return
    hook = Hook(options)
    try:
        yield [HookSurface(hook)]
    finally:
        hook.close()
