"""The wire plane's process as who collects sees it: started when it is needed, told and heard without ever waiting for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterable

from ncclwatch.errors import NcclwatchError
from ncclwatch.probes.capabilities import inherited
from ncclwatch.text import clean
from ncclwatch.wire import orders
from ncclwatch.wire.governor import DEFAULT_BUDGET, Mode
from ncclwatch.wire.orders import Bill, Follow, Order, Owner, Owners, Report, User

AGAIN_S = 30.0
"""Rest before it is started again after it ended by itself."""
MOST_STARTS = 3
MOST_WAITING = 8 << 20
"""Bytes that it may leave unread before it counts as stuck."""
END_S = 2.0


class WireProcess:
    """Starts :mod:`ncclwatch.wire.child` with the first process to follow. Nothing here blocks, and nothing raises."""

    def __init__(self, mode: Mode = Mode.BURSTS, budget: float = DEFAULT_BUDGET) -> None:
        self.mode = mode
        self.budget = budget
        self.running = False
        self.reason = "switched off" if mode is Mode.STATE else "no process uses RDMA; sockets are counted by the kernel"
        """Why nothing is counted; empty while it is."""
        self.reasons: dict[int, str] = {}
        """Why nothing is counted of one process."""
        self.bill: Bill | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._frames = orders.reports()
        self._unsent = bytearray()
        self._users: tuple[User, ...] = ()
        self._owners: tuple[Owner, ...] = ()
        self._starts = 0
        self._not_before = 0.0

    # --- what it is told -------------------------------------------------------------------------------------------------

    def follow(self, users: Iterable[User]) -> None:
        """Count for these processes and no others; they have RDMA devices open."""
        wanted = tuple(sorted(users, key=lambda user: user.pid))
        if self.mode is Mode.STATE or wanted == self._users:
            return
        self._users = wanted
        if wanted and self._child is None:
            self._start()
        else:
            self._tell(Follow(wanted))

    def own(self, owners: Iterable[Owner]) -> None:
        """Whose the queue pairs are."""
        found = tuple(sorted(owners, key=lambda owner: owner.key))
        if found != self._owners:
            self._owners = found
            self._tell(Owners(found))

    def order(self, order: Order) -> bool:
        """Have a burst run now; whether there is anybody to do it."""
        if self._child is None or not self.running:
            return False
        self._tell(order)
        return True

    def _tell(self, message: Follow | Owners | Order) -> None:
        if self._child is not None:
            self._unsent += orders.framed(message)
            self._push()

    def _push(self) -> None:
        child = self._child
        if child is None or child.stdin is None:
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                del self._unsent[: os.write(child.stdin.fileno(), self._unsent[: 1 << 16])]
        if len(self._unsent) > MOST_WAITING:
            self._gone("it does not listen")

    # --- what it says ----------------------------------------------------------------------------------------------------

    def reports(self) -> list[Report]:
        """What it has said since this was last asked."""
        if self._child is None:
            if self._users and self._starts and time.monotonic() >= self._not_before:
                self._start()
            return []
        self._push()
        found: list[Report] = []
        child = self._child
        assert child.stdout is not None  # noqa: S101 - a pipe was asked for
        try:
            while data := os.read(child.stdout.fileno(), 1 << 20):
                found += [message for message in self._frames.feed(data) if isinstance(message, Report)]
        except BlockingIOError:
            pass
        except NcclwatchError as error:
            self._gone(error.message)
        else:
            self._gone("it ended")
        for report in found:
            self.running, self.reason, self.reasons = report.running, report.reason, report.reasons
            self.bill = report.bill or self.bill
        if self._child is None:
            self.running = False
        return found

    def _start(self) -> None:
        if self._starts >= MOST_STARTS:
            return
        self._starts += 1
        self._not_before = time.monotonic() + AGAIN_S
        # -P: the current folder may be anybody's. A group of its own: Ctrl-C is for who started it, which then closes it. Why no
        # session: see collect.paths.
        command = [sys.executable, "-P", "-m", "ncclwatch.wire.child", str(self.budget), str(self.mode)]
        pipe = subprocess.PIPE
        try:
            with inherited():
                child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, process_group=0)
        except OSError as error:
            self.reason = f"its process cannot be started: {error.strerror}"
            return
        for stream in (child.stdin, child.stdout):
            assert stream is not None  # noqa: S101 - pipes were asked for
            fcntl.fcntl(stream, fcntl.F_SETFL, fcntl.fcntl(stream, fcntl.F_GETFL) | os.O_NONBLOCK)
        self._child, self._frames, self._unsent = child, orders.reports(), bytearray()
        self.reason = "it begins"
        self._tell(Owners(self._owners))
        self._tell(Follow(self._users))

    def _gone(self, why: str) -> None:
        """It is of no use any more: end it, and say so."""
        child = self._child
        self.close()
        status = child.returncode if child is not None else None
        again = f", it is started again in {AGAIN_S:.0f} s" if self._starts < MOST_STARTS else ""
        self.reason = clean(f"its process is gone: {why}" + (f" (status {status})" if status else "") + again, 200)

    def close(self) -> None:
        """End the process, and with it every probe."""
        child, self._child, self.running = self._child, None, False
        if child is None:
            return
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
