"""Play a scenario on the testbed: the job of real NCCL with the scenario's fault, and what its own lines say of how it went.

    with Play(plan(scenario)) as play:     # processes exist and have loaded NCCL, nothing is created yet
        ...                                # whoever watches attaches here
        play.begin()
        play.wait_onset(60)

Faults that a rank brings upon itself are options of the program; what comes from outside (signals, cgroups) is done by a thread.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ncclwatch.simulate.testbed import HarnessAction, TestbedPlan
from testbed.choices import LOG, chosen
from testbed.cpu_share import CpuShare
from testbed.job import Job, JobError
from testbed.netns import Network

_FAULT = re.compile(r"fault \w+ (begins|strikes)\b.* at ([\d.]+)$")
_STALLED = re.compile(r"gpu stalled (between|at-begin|inside)\b.* at [\d.]+$")
_POLL_S = 0.02
LINK_RATE = 25e6
"""Bytes a second of each host's link, where hosts have links: little enough that a fault of one shows."""
NOT_SHARED = {"NCCL_SHM_DISABLE": "1", "NCCL_P2P_DISABLE": "1"}
"""Ranks of one host use the network among themselves."""
ON_LINKS = frozenset({"link-down", "link-limit", "link-impair", "traffic"})


class HostLink(Protocol):
    """What faults of a link are played on: ``netns.Link``, or the guest's cable."""

    def down(self) -> None:
        """Take the carrier away."""

    def limit(self, bytes_per_s: float | None) -> None:
        """Limit the rate both ways."""

    def impair(self, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Delay every frame each way and lose a share of them."""


class Hosts(Protocol):
    """Hosts with links of their own: ``netns.Network``, or the guest's fabric."""

    @property
    def rate(self) -> float:
        """Bytes a second that a healthy link carries."""

    def job(self, nccl: str, ranks: int, **options: Any) -> Job:
        """A job across them, not started."""

    def link(self, host: int) -> HostLink:
        """The link of a host."""

    def background(self, source: int, destination: int) -> AbstractContextManager[None]:
        """Traffic of others meanwhile."""


class Play:
    """A job that plays a plan; times are CLOCK_MONOTONIC in seconds."""

    def __init__(
        self, made: TestbedPlan, *, extra: Sequence[str] = (), network: Hosts | None = None, gate_s: float = 60.0
    ) -> None:
        """``network`` are hosts that exist already; without it they are made where a fault needs them. ``gate_s`` is for how long
        the ranks may take to load NCCL.
        """
        self.made = made
        self._gate_s = gate_s
        self._stack = ExitStack()
        self._network = network
        if network is None and any(action.what in ON_LINKS for action in made.actions):
            self._network = self._stack.enter_context(Network(hosts=len(made.hosts), rate=LINK_RATE))
        self.job = (self._network.job if self._network else Job)(
            made.nccl,
            made.ranks,
            shape="training",
            hosts=made.hosts,
            count=made.count,
            iterations=made.iterations,
            extra=[*made.options, "--time", "--gate", *extra],
            nvlinks=made.nvlinks,
            as_nccl_likes=made.as_nccl_likes,
            env=(LOG if made.as_nccl_likes else {}) | ({} if made.shared_memory else NOT_SHARED),
            wait_for="nothing",
        )
        self.first_iteration: float | None = None
        self.actions_done: list[tuple[float, HarnessAction]] = []
        self.problem: Exception | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        with ExitStack() as started:
            started.enter_context(self._stack)
            started.callback(self.job.close)
            self.job.start()
            self.job.wait_gate(self._gate_s)
            self._stack = started.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._stack.close()

    def begin(self) -> None:
        """Let the ranks create their communicators and run; faults from outside take their course."""
        self.job.open_gate()
        self._thread = threading.Thread(target=self._act, daemon=True)
        self._thread.start()

    # --- what the job itself says --------------------------------------------------------------------------------------

    def onsets(self) -> list[float]:
        """When each fault that has begun so far began: what ranks say of themselves, and what was done from outside."""
        told = [
            float(found[2])
            for rank in range(self.made.ranks)
            for line in self.job.lines(rank)
            if (found := _FAULT.match(line)) is not None
        ]
        return sorted(told + [at for at, action in self.actions_done if action.what != "thaw"])

    def stalled(self) -> str:
        """Where the GPU that was made to stall did so, as its rank says: ``between`` two operations, ``at-begin`` of one, or
        ``inside`` one; empty where none stalled. Of several lines the last counts: streams come to stand one after another.
        """
        told = [
            found[1]
            for rank in range(self.made.ranks)
            for line in self.job.lines(rank)
            if (found := _STALLED.match(line)) is not None
        ]
        return told[-1] if told else ""

    def chosen(self) -> tuple[str, ...]:
        """What NCCL chose by itself, as its own log says: ``AllReduce Ring/LL``; empty where the plan left it no choice."""
        found = chosen(self.job.log(0)) if self.made.as_nccl_likes else []
        return tuple(sorted({f"{one.collective or '?'} {one.algorithm}/{one.protocol}" for one in found}))

    def iterations(self, rank: int) -> NDArray[np.float64]:
        """Of each finished iteration of a rank: seconds it took and when it ended; shape (n, 2)."""
        words = [line.split() for line in self.job.lines(rank) if line.startswith("iteration") and " at " in line]
        return np.array([(float(w[3]), float(w[5])) for w in words]).reshape(-1, 2)

    def durations(self) -> NDArray[np.float64]:
        """Seconds of each iteration that all ranks have finished, of its slowest rank."""
        took = [self.iterations(rank)[:, 0] for rank in range(self.made.ranks)]
        length = min(map(len, took))
        longest: NDArray[np.float64] = np.max([t[:length] for t in took], axis=0) if length else np.empty(0)
        return longest

    def last_moved(self) -> float:
        """When a rank last finished an iteration or ended."""
        ends = [self.iterations(rank)[:, 1] for rank in range(self.made.ranks)]
        return max((float(e[-1]) for e in ends if len(e)), default=0.0)

    def finished(self) -> bool:
        """Whether all ranks have ended."""
        return not any(self.job.alive(rank) for rank in range(self.made.ranks))

    def wait_standstill(self, since: float, timeout: float, still_s: float = 2.5) -> float | None:
        """When the job last moved, once it has not for a while, or ``None`` when it goes on; ``since`` the fault began."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and not self.finished():
            moved = max(since, self.last_moved())
            if time.monotonic() - moved >= still_s:
                return moved
            time.sleep(0.1)
        return None

    def wait_onset(self, timeout: float) -> float:
        """Wait until the first fault begins. Raises JobError when none does."""
        deadline = time.monotonic() + timeout
        while not (found := self.onsets()):
            if time.monotonic() > deadline or self.problem is not None:
                raise JobError(f"no fault began within {timeout:g} s: {self.problem}\n{self.job.logs()}")
            if self.finished():
                raise JobError(f"the job ended before any fault began\n{self.job.logs()}")
            time.sleep(0.05)
        return found[0]

    # --- what is done from outside -------------------------------------------------------------------------------------

    def _act(self) -> None:
        """Do what is due; stay until the play ends: cables and traffic started here die with this thread, not with the process
        (PR_SET_PDEATHSIG, prctl(2)).
        """
        pending = [a for a in self.made.actions if a.what != "thaw"]
        thaws = [a for a in self.made.actions if a.what == "thaw"]
        stopped: dict[int, float] = {}
        try:
            while not self._stop.wait(_POLL_S):
                if self.first_iteration is None:
                    # The ranks are ready together, but for microseconds; the first says when the scenario's clock begins.
                    if any(line.endswith("ready") for line in self.job.lines(0)[:5]):
                        self.first_iteration = time.monotonic()
                    continue
                now = time.monotonic()
                due = [a for a in pending if now >= self.first_iteration + a.after_s]
                for action in [a for a in due if not a.iterations or self.job.progress(0) >= a.iterations]:
                    pending.remove(action)
                    self._do(action)
                for action in list(thaws):
                    rank = action.ranks[0]
                    if rank not in stopped and _stopped(self.job.pid(rank)):
                        stopped[rank] = now
                    if rank in stopped and now >= stopped[rank] + action.after_s:
                        thaws.remove(action)
                        self._do(action)
                if not pending and not thaws:
                    self._stop.wait()
        except Exception as error:  # told by whoever waits for the fault
            self.problem = error

    def _do(self, action: HarnessAction) -> None:
        # Before it is done: on a busy machine a killed process is gone, and seen to be, before we hear of it.
        began = time.monotonic()
        if action.what == "limit":
            self._stack.enter_context(CpuShare([self.job.pid(rank) for rank in action.ranks], action.share))
        for rank in action.ranks:
            if action.what == "freeze":
                self.job.freeze(rank)
            elif action.what == "thaw":
                self.job.thaw(rank)
            elif action.what == "kill":
                self.job.kill(rank)
            elif action.what in ON_LINKS and self._network is not None:
                self._do_to_link(self._network, self.job.host(rank), action)
        self.actions_done.append((began, action))

    def _do_to_link(self, network: Hosts, host: int, action: HarnessAction) -> None:
        link = network.link(host)
        if action.what == "link-down":
            link.down()
        elif action.what == "link-limit":
            link.limit(network.rate * action.share)
        elif action.what == "link-impair":
            link.impair(delay_s=action.delay_s, loss=action.loss)
        else:
            self._stack.enter_context(network.background(host, (host + 1) % len(self.made.hosts)))


def _stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
