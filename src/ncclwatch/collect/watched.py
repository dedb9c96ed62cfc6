"""One process looked at again and again: what was read of it, and how it ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ncclwatch.errors import ExitStatus, NcclwatchError, TargetError, TargetGoneError
from ncclwatch.model.progress import progressed
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.target.held import WHY, HeldError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that was asked for and could not be read: ``what`` names it (``pid 12``, a file name)."""

    what: str
    pid: int | None
    error: NcclwatchError

    def __post_init__(self) -> None:
        # It is kept for long, and the frames it came through hold what was read of the process.
        self.error.__traceback__ = self.error.__cause__ = self.error.__context__ = None

    @property
    def line(self) -> str:
        """One line that names the thing once: messages of the target package mostly do already."""
        text = str(self.error)
        return text if self.what in text else f"{self.what}: {text}"


def sees_every_process() -> bool:
    """Whether a process that is not found is not there: we are root in the initial pid namespace.

    Its inode number is fixed (``PROC_PID_INIT_INO``, include/linux/proc_ns.h).
    """
    try:
        return os.geteuid() == 0 and Path("/proc/self/ns/pid").stat().st_ino == 0xEFFFFFFC
    except OSError:
        return False


class Readable(Protocol):
    """What is needed of a target process: one look at a time."""

    @property
    def info(self) -> ProcessInfo:
        """Identity."""

    def sample(self) -> ProcessSample:
        """Read once; raises ``NcclwatchError``."""

    def close(self) -> None:
        """Let go of everything held for the process."""


@runtime_checkable
class Creating(Protocol):
    """A target that can be told of communicators that calls show."""

    def creation_begun(self) -> None:
        """One has begun to be made."""

    def hint_communicator(self, address: int) -> bool:
        """One is at this address; whether a live one is found there."""


@runtime_checkable
class Fetching(Protocol):
    """A target whose memory can be read before it is made sense of."""

    def fetch(self) -> None:
        """Read what the next look needs; raises ``NcclwatchError``."""


@runtime_checkable
class Beating(Protocol):
    """A target of which a few words tell whether it moves."""

    def moved(self) -> bool:
        """Whether it has since it was looked at, or asked, last; raises ``NcclwatchError``."""


class Watched:
    """One process and what was read of it. After it ended its last sample is repeated with run state ``X``."""

    def __init__(self, target: Readable) -> None:
        # numpy comes with it, which the commands that only print help need not wait for.
        from ncclwatch.collect.device import DeviceWatch, Looked

        self.target = target
        self.pid = target.info.pid
        self.history: list[ProcessSample] = []
        self._stood: tuple[ProcessSample, bool] | None = None
        self.gone: NcclwatchError | None = None
        self.gone_s = 0.0
        """When it was found gone, of time.monotonic."""
        self.how = ""
        """How it ended, in words; empty where that was not heard of."""
        self.device = DeviceWatch(self.pid)
        self._looked = target if isinstance(target, Looked) else None
        self._beating = target if isinstance(target, Beating) else None

    @property
    def last(self) -> ProcessSample | None:
        """The newest sample."""
        return self.history[-1] if self.history else None

    @property
    def stands(self) -> bool:
        """Whether it made no progress between its last two samples; one that was sampled once may have."""
        if len(self.history) < 2:
            return False
        if self._stood is None or self._stood[0] is not self.history[-1]:
            self._stood = self.history[-1], not progressed(self.history[-2], self.history[-1])
        return self._stood[1]

    def goes_on(self) -> bool:
        """Whether a few words say that it does what it did between the last two looks: it moves on, or stands as it stood. Where
        that cannot be told it does not: of a process whose GPU reports operations, of which a frame keeps but a few.
        """
        if self.gone is not None or self._beating is None or self.device.present or len(self.history) < 2:
            return False
        try:
            return self._beating.moved() is not self.stands
        except (NcclwatchError, OSError):
            return False

    def fetch(self) -> None:
        """Read what the next look needs, so that looks at several processes are of one moment; what fails the look will tell."""
        if self.gone is None and isinstance(self.target, Fetching):
            with contextlib.suppress(NcclwatchError, OSError):
                self.target.fetch()

    def look(self, *, keep: int = 64) -> NcclwatchError | None:
        """Read once more. A process that ended yields a sample with run state ``X``; any other error is returned.

        At most ``keep`` samples are held: the first and the newest, so that progress since the beginning still shows.
        """
        if self.gone is None:
            try:
                sample = self.target.sample()
                self._add(self.device.look(sample, self._looked), keep)
                return None
            except TargetGoneError as error:
                self.gone, self.gone_s = error, time.monotonic()
                self.target.close()
            except HeldError as error:
                if self.last is not None and self.last.run_state != "X":
                    self._add(as_held(self.last), keep)
                return error
            except NcclwatchError as error:
                return error
            except Exception as error:
                # What lies in a target's memory can be anything: one process that breaks our reading must not end the others'.
                if os.environ.get("NCCLWATCH_DEBUG") == "1":
                    raise
                kind = type(error).__name__
                return TargetError(
                    f"process {self.pid} could not be read ({kind}: {error})", "run with NCCLWATCH_DEBUG=1 and report it"
                )
        if self.last is None:
            return self.gone
        # The frame outlives the process that wrote it, as long as we hold it.
        self._add(self.device.look(as_gone(self.last)) if self.device.present else as_gone(self.last), keep)
        return None

    def creation_begun(self) -> None:
        """The process has begun to make a communicator: the next looks search for it."""
        if self.gone is None and isinstance(self.target, Creating):
            self.target.creation_begun()

    def communicator_named(self, address: int) -> None:
        """A call has named a communicator: it is read from the next look on."""
        known = {own.address for own in self.last.communicators} if self.last is not None else set()
        if address in known or self.gone is not None or not isinstance(self.target, Creating):
            return
        # What goes wrong shows in the next look.
        with contextlib.suppress(NcclwatchError):
            self.target.hint_communicator(address)

    def close(self) -> None:
        """Let go of the process and its frame."""
        self.target.close()
        self.device.close()

    def _add(self, sample: ProcessSample, keep: int) -> None:
        self.history.append(sample)
        if len(self.history) > keep:
            del self.history[1]


def as_gone(last: ProcessSample) -> ProcessSample:
    """What is known of a process that has ended by now."""
    return last.ended(time.monotonic_ns(), time.time_ns())


def as_held(last: ProcessSample) -> ProcessSample:
    """What is known of a process whose memory map is held: what was under way when it was read last need not be so now."""
    from ncclwatch.target.process import read_stat

    state = last.run_state
    with contextlib.suppress(NcclwatchError):
        state = read_stat(last.process.pid).state
    return last.not_read(time.monotonic_ns(), time.time_ns(), state, f"cannot be read now, {WHY}; what is told of it is older")


def nothing_read(problems: Sequence[Problem]) -> NcclwatchError:
    """The error to end with when every target failed: the one error itself, or the first with the number of the others."""
    if not problems:
        return TargetError("nothing could be read", "see 'ncclwatch ps' for the processes that can be")
    # A missing privilege explains the rest and is what the user can mend.
    worst = next((p for p in problems if p.error.status is ExitStatus.PRIVILEGE), problems[0])
    if len(problems) == 1:
        return worst.error
    failure = type(worst.error)(f"none of {len(problems)} targets could be read; {worst.error.message}", worst.error.hint)
    failure.status = worst.error.status
    return failure


def lives_on(info: ProcessInfo) -> bool:
    """Whether the process itself is still there, so that it must have become another program."""
    from ncclwatch.target.process import read_stat

    try:
        stat = read_stat(info.pid)
    except NcclwatchError:
        return False
    return stat.start_time == info.key.start_time and stat.state not in "ZX"
