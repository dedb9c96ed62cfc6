"""The collector of a node: finds processes, looks at their memory, drains the probes, and says it in batches, without judging."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclwatch.collect import watched as watching
from ncclwatch.collect.aggregate import Aggregator
from ncclwatch.collect.batch import Change, NodeBatch, Overhead, PlaneState, ProcessChange
from ncclwatch.collect.calls import communicators_named, creating
from ncclwatch.collect.calls_plane import CallsPlane
from ncclwatch.collect.cost import OwnCost
from ncclwatch.collect.ease import Ease, all_go_on
from ncclwatch.collect.flows import FlowCollector
from ncclwatch.collect.look_times import next_time
from ncclwatch.collect.network import NetworkWatch
from ncclwatch.collect.probe_files import ProbeFiles
from ncclwatch.collect.ranks import ranks_of
from ncclwatch.collect.sampling import Sampling
from ncclwatch.collect.watched import Problem, Readable, Watched, nothing_read, sees_every_process
from ncclwatch.collect.windows import RankWindow
from ncclwatch.collect.work import WorkWatch
from ncclwatch.errors import NcclwatchError, TargetGoneError
from ncclwatch.model.failure import ProcessEnd
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.stopping import Stop
from ncclwatch.target.endings import Endings
from ncclwatch.target.held import check_all
from ncclwatch.target.process import boot_id
from ncclwatch.target.session import TargetProcess
from ncclwatch.wire.governor import DEFAULT_BUDGET, Mode
from ncclwatch.wire.orders import Order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ncclwatch.collect.paths import PathProbes
    from ncclwatch.collect.suspects import SuspectLooks

# The ring holds many times what a quarter of a second brings; waking more often costs the node and shows a person nothing.
WAKE_S = 0.25
# Every so often --all looks for processes that came; a process that loads NCCL late is found on a later round.
RESCAN_S = 2.0
# A process that could not be read is tried again, for it may just have been loading.
RETRY_S = 30.0
# Reading the hit counters of every probe costs a few system calls.
OVERHEAD_EVERY_S = 5.0
# While it starts, a collector says again what it does after so long.
TELL_S = 1.0

# A process that cannot be read any more may be ending for so long; then how it ended is not waited for.
ENDING_S = 5.0

# A ring that is fuller is emptied at once: it holds a quarter of a second of the busiest node at least.
FILLED = 0.125

PULSES = 2
"""Pulses an interval while looks are far apart: then a standstill is seen to begin no later than by looks."""

Choice = Callable[[ProcessInfo], bool]


@dataclass(slots=True)
class _Draft:
    """A batch in the making."""

    changes: list[ProcessChange] = field(default_factory=list)
    ends: tuple[ProcessEnd, ...] = ()
    notes: list[str] = field(default_factory=list)
    events: NDArray[Any] | None = None
    looked: bool = False


class NodeCollector:
    """Watches the processes of this node until they end, the duration is over, or ``stop`` is set.

    ``every`` takes up processes that come later as well; of these ``choose`` decides which. With ``sampling`` only a few are
    looked at while they move. ``common_ns`` is a clock that several nodes have in common: looks are taken at the same
    times of it, so that those of all nodes show one moment (who waits for whom in a running job can be told from no other).
    ``wire`` is how work requests are counted, and the share of any thread's time that it may cost; ``paths`` probes paths where
    that is allowed, ``stacks`` lets it look where processes stand.
    ``probe_files`` are of 'ncclwatch paths probe'. ``widest_s``: seconds between two looks while all is well, as
    far as :attr:`ease` is told so; 0: as ever.
    ``tell`` hears what is done while it starts, which on a crowded node takes long. ``patient``: records of
    calls wait in their ring for the next look, unless they fill it: one batch a look costs less, and is smaller, than four.
    """

    def __init__(
        self,
        *,
        every: bool,
        interval_s: float = 1.0,
        stop: Stop | None = None,
        choose: Choice | None = None,
        wake_s: float = WAKE_S,
        sampling: Sampling | None = None,
        common_ns: Callable[[], int] = time.monotonic_ns,
        wire: tuple[Mode, float] = (Mode.BURSTS, DEFAULT_BUDGET),
        paths: PathProbes | None = None,
        tell: Callable[[str], None] = lambda _: None,
        patient: bool = False,
        widest_s: float = 0.0,
        stacks: bool = True,
        probe_files: Sequence[Path] = (),
    ) -> None:
        self._patient = patient
        self.probe_files = ProbeFiles(probe_files)
        self.ease = Ease(widest_s)
        """Whether looks may be far apart; whoever judges allows it."""
        self._nudged = False
        self.tell = tell
        self.every = every
        self.sampling = sampling
        self.interval_s = interval_s
        self.wake_s = wake_s
        self.stop = stop or Stop()
        self.calls = CallsPlane(every=every)
        self.network: NetworkWatch | None = None
        self.work: WorkWatch | None = None
        self.paths = paths
        self._stacks = stacks
        self._suspects: SuspectLooks | None = None
        self._wire = wire
        self.aggregator = Aggregator()
        self.watched: dict[int, Watched] = {}
        self._endings = Endings(self.stop.wake)
        self.problems: list[Problem] = []
        self.complete = False
        """Whether every NCCL process of the host is watched."""
        self.begun_ns = time.monotonic_ns()
        self._choose = choose
        self._common_ns = common_ns
        self._host, self._boot_id = socket.gethostname(), boot_id()
        self._sequence = 0
        self._unreadable: dict[int, str] = {}
        self._given_up: dict[int, float] = {}
        self._next_look = 0.0
        self._backwards = False
        self._next_pulse = 0.0
        self._last_rescan = time.monotonic()
        self._next_rescan = self._last_rescan + RESCAN_S
        self._own = OwnCost()
        self._next_overhead = 0.0
        self._calls_later = False

    # --- beginning and end ---------------------------------------------------------------------------------------------

    def start(self, pids: Sequence[int], *, calls: bool = True, require: bool = True, network: bool = True) -> NodeBatch:
        """Open every process, read each once, and only then load the probes; returns the first batch.

        With ``network`` the NICs of the node are watched too, and the work requests of its processes counted.
        Raises when no process at all can be read, unless ``require`` is false: an agent waits for processes to come.
        """
        if calls:
            self.calls.prepare()
            if self.calls.compiles:
                self.tell("compiling probes")
        self.tell(f"finding NCCL in {len(pids)} process{'es' if len(pids) != 1 else ''}")
        told = time.monotonic()
        for number, pid in enumerate(pids):
            if time.monotonic() - told > TELL_S:
                told = time.monotonic()
                self.tell(f"reading structures of NCCL and memory: {number} of {len(pids)} processes done")
            self._open(pid)
        for watched in list(self.watched.values()):
            error = watched.look()
            if watched.last is None:
                self.problems.append(Problem(f"pid {watched.pid}", watched.pid, error or TargetGoneError("it ended")))
                self._drop(watched)
        if not self.watched and require:
            raise nothing_read(self.problems)
        infos = self.infos
        self.complete = self.every and self._choose is None and not self.problems and sees_every_process()
        if calls and infos:
            self.tell("attaching probes")
            self.calls.start(infos)
        # Without a process there is no library to attach to yet.
        self._calls_later = calls and not infos
        self.aggregator.calls_plane = self.calls.running
        now_ns = time.monotonic_ns()
        for watched in self.watched.values():
            self.aggregator.add_process(watched.target.info, now_ns)
            if watched.last is not None:
                self.aggregator.feed_sample(watched.last)
        if network:
            self.network = NetworkWatch(infos[0].host if infos else None, on_news=self.stop.wake, listens=False)
            self.work = WorkWatch(*self._wire)
            if self.paths is not None:
                self.paths.listen()
        self._next_look = self._look_after(time.monotonic())
        # The first samples count: the second look, an interval later, already tells running from standing still.
        return self._close(_Draft(looked=True), "")

    def close(self) -> None:
        """Detach the probes and let go of every process."""
        self._endings.close()
        self.calls.stop()
        if self.work is not None:
            self.work.close()
            self.work = None
        if self.paths is not None:
            self.paths.close()
        if self.network is not None:
            self.network.close()
            self.network = None
        for watched in self.watched.values():
            watched.close()

    @property
    def infos(self) -> list[ProcessInfo]:
        """The processes that are watched."""
        return [watched.target.info for watched in self.watched.values()]

    # --- one step ------------------------------------------------------------------------------------------------------

    def step(self, *, until: float | None = None) -> NodeBatch:
        """Sleep at most ``wake_s``, take what the probes recorded, and look at memory when it is time.

        ``until`` is the time of ``time.monotonic`` at which to end.
        """
        now = time.monotonic()
        sleep = max(self._next_look - now, 0.0)
        if not self._patient and not self.ease.is_wide(now):
            sleep = min(self.wake_s, sleep)
        if until is not None:
            sleep = min(sleep, max(until - now, 0.0))
        self._sleep(sleep)
        begun, draft = time.thread_time(), _Draft(ends=self._ends())
        if self.network is not None:
            self.network.listen()
        self._drain(draft)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = self._look_after(now)
            if self.ease.is_due(now, self._common_ns() / 1e9):
                self._look(draft)
        strangers = self.aggregator.strangers.take()
        if self.every and strangers:
            # Calls of a process that is not watched yet: look at once what it is.
            self._next_rescan = min(self._next_rescan, self._last_rescan + WAKE_S)
        if self.every and now >= self._next_rescan:
            self._last_rescan = now
            self._next_rescan = now + RESCAN_S
            self._rescan(draft)
        if draft.changes or (self.network is not None and self.network.has_news):
            self.ease.disturb(now)
        finished = ""
        if self.stop.is_set():
            finished = "interrupted"
        elif until is not None and time.monotonic() >= until:
            finished = "duration over"
        elif not self.every and not self._alive() and not any(map(self._is_ending, self.watched.values())):
            finished = "every watched process has ended"
        # Whom the look has found gone is heard of by now.
        draft.ends += self._ends()
        batch = self._close(draft, finished)
        if draft.looked:
            self.ease.looked(time.thread_time() - begun)
        return batch

    def _look_after(self, now: float) -> float:
        """When to look next: looks that were missed (the agent was stopped, the node is overloaded) are not made up for."""
        clock, interval = self._common_ns() / 1e9, self.ease.interval(now, self.interval_s)
        # A look that came a moment early, or a clock that was set, must not bring two at once.
        return now + next_time(clock + interval / 4, interval) - clock

    def _sleep(self, seconds: float) -> None:
        """Sleep, but not through news of the network nor a ring that fills, and not past ``stop``."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._nudged:
            if self.stop.wait(min(left, self.wake_s)) or (self.network is not None and self.network.has_news):
                break
            if self.calls.filled > FILLED:
                break
            if self._endings.has_news:
                # Its peers are looked at while they still tell what the end found them in.
                self.look_now()
                break
            if self._stumbles(time.monotonic()):
                self._next_look = 0.0
                break
        self._nudged = False

    def _stumbles(self, now: float) -> bool:
        """Whether a process of a node that is hardly looked at has come to stand."""
        if not self.ease.is_wide(now) or now < self._next_pulse:
            return False
        self._next_pulse = now + self.interval_s / PULSES
        if all_go_on(self._alive()):
            return False
        self.ease.disturb(now)
        return True

    def nudge(self) -> None:
        """End the sleep of :meth:`step`: something came from elsewhere. Any thread may call it."""
        self._nudged = True
        self.stop.wake()

    def _close(self, draft: _Draft, finished: str) -> NodeBatch:
        time_ns = time.monotonic_ns()
        batch = NodeBatch(
            host=self._host,
            boot_id=self._boot_id,
            sequence=self._sequence,
            time_ns=time_ns,
            wall_ns=time.time_ns(),
            interval_s=self.interval_s,
            looked=draft.looked,
            complete=self.complete,
            events=draft.events,
            lost=self.aggregator.lost,
            changes=tuple(draft.changes),
            ends=draft.ends,
            notes=tuple(draft.notes),
            planes=self.planes(),
            finished=finished,
        )
        self._sequence += 1
        if draft.looked:
            looks = (watched.last for watched in self.watched.values() if watched.last is not None)
            batch.samples = tuple(part for look in looks for part in ranks_of(look))
            batch.windows = self.aggregator.windows(time_ns)
            batch.problems = tuple(
                (w.target.info.key, self._unreadable[p]) for p, w in self.watched.items() if p in self._unreadable
            )
            batch.overhead = self._overhead()
            if batch.samples:
                # The name the target package gives this host, which is that of its processes' identities.
                batch.host = self._host = batch.samples[0].process.host
                batch.boot_id = self._boot_id = batch.samples[0].process.key.boot_id
        if self.network is not None and (draft.looked or self.network.has_news):
            self.network.host = self._host
            calm = self.ease.is_wide(time.monotonic())
            batch.network = self.network.look(batch.samples, self._running(), calm=calm) if draft.looked else self.network.news()
            batch.notes = (*batch.notes, *batch.network.notes)
            batch.all_flows = self.network.take_all()
        if draft.looked:
            batch.paths = self.probe_files.news(time.monotonic())
            batch.notes = (*batch.notes, *self.probe_files.notes())
        if self._suspects is not None and self._suspects.has_news:
            batch.looks, batch.gpus = self._suspects.take()
        if self.network is not None and self.work is not None:
            try:
                self._add_work(batch, self.network.flows, self.work)
            except Exception as error:
                # What lies in a target's memory can be anything: it must not end the session.
                if os.environ.get("NCCLWATCH_DEBUG") == "1":
                    raise
                self.work.give_up(f"{type(error).__name__}: {error}")
                batch.notes = (*batch.notes, f"work requests are counted no longer ({self.work.plane.reason})")
        return batch

    def _add_work(self, batch: NodeBatch, flows: FlowCollector, work: WorkWatch) -> None:
        if batch.looked:
            work.follow(flows, [target for target, _ in self._running()])
        batch.work = work.take(flows, self._host, looked=batch.looked)
        if batch.network is not None and batch.network.flows:
            records = work.joined(batch.network.flows, batch.time_ns)
            batch.network = replace(
                batch.network, flows=records if self.paths is None else self.paths.joined(records, batch.time_ns)
            )
        if batch.looked:
            batch.windows = [self._with_work(window) for window in batch.windows]

    def order(self, order: Order) -> bool:
        """Have work requests counted now, whatever the budget; the windows come with a later batch, under the order's number.
        Whether there is anything to count.
        """
        return self.work is not None and self.work.order(order)

    def probe_paths(self, pids: Collection[int]) -> int:
        """Probe the paths on which these processes stand still; how many probes were begun. The answers come with the flows."""
        return self.paths.order(self.network.flows.stuck(pids)) if self.paths is not None and self.network is not None else 0

    def look_at(self, pids: Sequence[int]) -> bool:
        """Look where these processes stand; what is seen comes with a later batch. Whether that is begun."""
        if self._stacks and self._suspects is None:
            from ncclwatch.collect.suspects import SuspectLooks

            self._suspects = SuspectLooks()
        if self._suspects is None:
            return False
        samples = {pid: one.last for pid in pids if (one := self.watched.get(pid)) is not None and one.last is not None}
        return self._suspects.order(pids, self._host, {pid: sample.proxy_threads for pid, sample in samples.items()})

    def _with_work(self, window: RankWindow) -> RankWindow:
        """A window with what its connections carried."""
        watched = self.watched.get(window.process.pid)
        if self.work is None or watched is None or watched.last is None:
            return window
        parts = ranks_of(watched.last)
        sample = next((part for part in parts if part.process.key == window.process.key), None)
        work = self.work.of_rank(window.process.key, sample, alone=len(parts) == 1)
        return replace(window, work=work) if work is not None else window

    def _running(self) -> list[tuple[TargetProcess, ProcessSample]]:
        """The newest look at every process that runs, with its target."""
        watched = ((one.target, one.last) for one in self._alive())
        return [(target, last) for target, last in watched if last is not None and isinstance(target, TargetProcess)]

    def planes(self) -> tuple[PlaneState, ...]:
        """What is looked at by which plane, and why by others not."""
        planes = (PlaneState("state", True), PlaneState("calls", self.calls.running, self.calls.reason), *self._device_plane())
        if self.network is None:
            return planes
        wire = () if self.work is None else (self.work.plane,)
        paths = () if self.paths is None else (self.paths.plane,)
        stacks = (PlaneState("stacks", True),) if self._stacks else ()
        return (*planes, PlaneState("nic", self.network.running, self.network.reason), *wire, *paths, *stacks)

    def _device_plane(self) -> tuple[PlaneState, ...]:
        """The counter shim, where any process has it: it is the user's choice, and no gap where nobody took it."""
        watches = [watched.device for watched in self._alive()]
        having = sum(watch.present for watch in watches)
        if not having:
            return ()
        problem = next((watch.problem for watch in watches if watch.problem), "")
        missing = f"{len(watches) - having} of {len(watches)} processes have not loaded the counter shim"
        return (PlaneState("device", not problem, problem or (missing if having < len(watches) else "")),)

    def _overhead(self) -> Overhead | None:
        now = time.monotonic()
        if now < self._next_overhead:
            return None
        self._next_overhead = now + OVERHEAD_EVERY_S
        hits, share = self.calls.cost()
        own, resident = self._own.share(), self._own.resident_bytes()
        bill = self.work.bill if self.work is not None else None
        overhead = Overhead(hits, share, own, resident, search_share=self.ease.search_share(self.interval_s))
        if bill is None:
            return overhead
        return replace(
            overhead, own_share=own + bill.own_share, rss_bytes=resident + bill.rss_bytes,
            wire_share=bill.worst_share or 0.0, wire_budget=bill.budget, wire_bursts=bill.bursts,
        )  # fmt: skip

    # --- parts of a step -----------------------------------------------------------------------------------------------

    def _drain(self, draft: _Draft) -> None:
        events = self.calls.poll()
        if events is not None and len(events):
            self.aggregator.feed_events(events)
            draft.events = events
            for pid in creating(events) & self.watched.keys():
                self.watched[pid].creation_begun()
                self.ease.disturb(time.monotonic())
            for pid, address in communicators_named(events):
                if pid in self.watched:
                    self.watched[pid].communicator_named(address)
        lost = self.calls.lost()
        draft.notes, self.calls.problems = self.calls.problems, []
        self.aggregator.calls_plane = self.calls.running
        self.aggregator.feed_losses(lost)

    def _look(self, draft: _Draft) -> None:
        draft.looked = True
        # What moved is told from a look on: a moment after it nothing need have.
        self._next_pulse = time.monotonic() + self.interval_s / PULSES
        wanted = [
            watched for watched in self.watched.values()
            if self.sampling is None or watched.last is None or self.sampling.wants(watched.target.info.key)
        ]  # fmt: skip
        # Who is read later seems to be ahead of who was read before: by turns each is.
        self._backwards = not self._backwards
        if self._backwards:
            wanted.reverse()
        check_all(watched.pid for watched in wanted if watched.gone is None)
        # A microsecond a word: all are of nearly one moment. To decode them takes thirty times as long, and on full cores longer.
        for watched in wanted:
            watched.fetch()
        looked = [(watched, watched.gone is not None, watched.look(keep=3)) for watched in wanted]
        for watched, was_gone, error in looked:
            info = watched.target.info
            if error is not None:
                self.aggregator.feed_problem(info.key, str(error))
                if watched.pid not in self._unreadable:
                    draft.changes.append(ProcessChange(Change.UNREADABLE, watched.pid, info, str(error), info.host))
                self._unreadable[watched.pid] = str(error)
                continue
            if watched.last is not None:
                self.aggregator.feed_sample(watched.last)
            if watched.pid in self._unreadable:
                del self._unreadable[watched.pid]
                draft.changes.append(ProcessChange(Change.READABLE, watched.pid, info, host=info.host))
            if watched.gone is not None and not was_gone:
                draft.changes.append(self._went(watched))
        if self.sampling is not None:
            self.sampling.looked(watched.last for watched in self.watched.values() if watched.last is not None)
        self._forget_ended_jobs()

    def look_now(self) -> None:
        """Look at everybody at the next step, without waiting for the interval to pass."""
        self._next_look = 0.0
        self.ease.disturb(time.monotonic())
        if self.sampling is not None:
            self.sampling.alarm()

    def _ends(self) -> tuple[ProcessEnd, ...]:
        """The ends that were heard of, each of every rank that the process was."""
        found: list[ProcessEnd] = []
        for (pid, _), end in self._endings.take().items():
            watched = self.watched.get(pid)
            if watched is None or watched.last is None:
                continue
            for part in ranks_of(watched.last):
                place = part.process.key, part.process.host, part.rank
                found.append(ProcessEnd(*place, end.time_ns, end.wall_ns, end.late_ns, end.order, end.wait_status))
            watched.how = found[-1].words
        return tuple(found)

    def _is_ending(self, watched: Watched) -> bool:
        """Whether a process is gone and how it ended may still be heard."""
        waited = self._endings.waits_for(watched.pid, watched.target.info.key.start_time)
        return watched.gone is not None and waited and time.monotonic() - watched.gone_s < ENDING_S

    def _went(self, watched: Watched) -> ProcessChange:
        """A process ended, or became another program; the latter is looked at anew."""
        info = watched.target.info
        self.calls.remove_process(info)
        if watching.lives_on(info):
            return ProcessChange(Change.REPLACED, watched.pid, info, "it runs another program now", info.host)
        return ProcessChange(Change.EXITED, watched.pid, info, watched.how, info.host)

    def _forget_ended_jobs(self) -> None:
        """A process that ended is kept while a live one shares a communicator with it: it may be whom that one waits for."""
        alive = {c.hash for w in self._alive() if w.last for c in w.last.communicators}
        for watched in list(self.watched.values()):
            if watched.gone is None or watched.last is None or len(watched.history) < 2:
                continue
            told = watched.history[-2].run_state == "X" and not self._is_ending(watched)
            if told and alive.isdisjoint(c.hash for c in watched.last.communicators):
                self._drop(watched)

    def _rescan(self, draft: _Draft) -> None:
        from ncclwatch.target.discover import find_processes

        try:
            found = find_processes()
        except NcclwatchError as error:
            draft.notes.append(f"cannot look for new processes: {error}")
            return
        for info in found:
            held = self.watched.get(info.pid)
            if held is not None and held.gone is None:
                continue
            if self._choose is not None and not self._choose(info):
                continue
            if held is not None:
                # Another process has the pid now, or the same one runs another program.
                self._drop(held)
            elif time.monotonic() < self._given_up.get(info.pid, 0.0):
                continue
            self._take_up(info, draft)

    def _take_up(self, info: ProcessInfo, draft: _Draft) -> None:
        watched = self._open(info.pid)
        error = watched.look() if watched is not None else self.problems[-1].error
        if watched is None or watched.last is None:
            if watched is not None:
                self._drop(watched)
            if not isinstance(error, TargetGoneError):
                self.complete = False
                if info.pid not in self._given_up:
                    draft.changes.append(ProcessChange(Change.UNREADABLE, info.pid, info, str(error), info.host))
                self._given_up = {p: t for p, t in self._given_up.items() if t > time.monotonic()}
                self._given_up[info.pid] = time.monotonic() + RETRY_S
            return
        if self._calls_later:
            self._calls_later = False
            self.calls.start([watched.target.info])
            self.aggregator.calls_plane = self.calls.running
        else:
            self.calls.add_process(watched.target.info)
        self.aggregator.add_process(watched.target.info, time.monotonic_ns())
        self.aggregator.feed_sample(watched.last)
        draft.changes.append(ProcessChange(Change.STARTED, info.pid, watched.target.info, host=info.host))

    # --- processes -----------------------------------------------------------------------------------------------------

    def _open(self, pid: int) -> Watched | None:
        try:
            target: Readable = TargetProcess.open(pid)
        except NcclwatchError as error:
            self.problems = [*self.problems[-99:], Problem(f"pid {pid}", pid, error)]
            return None
        self.watched[pid] = Watched(target)
        self._endings.watch(pid, target.info.key.start_time)
        return self.watched[pid]

    def _drop(self, watched: Watched) -> None:
        watched.close()
        self._endings.forget(watched.pid, watched.target.info.key.start_time)
        self.watched.pop(watched.pid, None)
        self._unreadable.pop(watched.pid, None)
        self.aggregator.remove_process(watched.target.info.key)

    def _alive(self) -> list[Watched]:
        return [watched for watched in self.watched.values() if watched.gone is None]
