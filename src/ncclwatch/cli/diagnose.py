"""``ncclwatch diagnose``: one verdict on what can be read from outside right now, from snapshots, from other tools' records."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import (
    AllOption,
    AllowPauseOption,
    ExitCodeOption,
    JsonOption,
    PidOption,
    SlowModeOption,
    TBaseOption,
    ThetaOption,
)
from ncclwatch.cli.output import emit_json, note
from ncclwatch.cli.ras import RasOption, judge_ras
from ncclwatch.cli.sampling import Watch, load_files
from ncclwatch.cli.verdicts import print_verdicts
from ncclwatch.collect.ranks import series_of
from ncclwatch.collect.watched import Problem, nothing_read, sees_every_process
from ncclwatch.errors import ExitStatus, NcclwatchError
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass

if TYPE_CHECKING:
    from ncclwatch.collect.counting import WorkCount
    from ncclwatch.collect.network_memory import NetworkMemory
    from ncclwatch.slow_modes import SlowRule

# What the operating system or NCCL states outright needs no further waiting, and two samples near to each other are enough.
_EARLY_S = 0.2
_HARD_EVIDENCE = frozenset({VerdictClass.STOPPED, VerdictClass.DEAD, VerdictClass.ERROR})
_NOTHING_WRONG = frozenset({VerdictClass.RUNNING, VerdictClass.IDLE})
_MOVES = frozenset({VerdictClass.RUNNING})

Series = list[Sequence[ProcessSample]]
"""One sequence of samples, in time order, per process."""

Engine = Callable[[Series, float], list[Verdict]]
"""From samples, and the seconds for which nothing must have moved, to one verdict a job, worst first."""

Proxies = Mapping[int, Collection[int]]
"""By pid, the ids of the progress threads of NCCL's proxies (``ProcessSample.proxy_threads``)."""


def diagnose(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE | FOLDER | PID]...", help="Snapshots, recordings, other tools' records, or more pids."),
    ] = None,
    pid: PidOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
    exit_code: ExitCodeOption = False,
    wait: Annotated[
        float, typer.Option("--wait", min=0.0, max=3600.0, help="Seconds without progress before waiting alone accuses a rank.")
    ] = 5.0,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=60.0, help="Seconds between two samples.")] = 1.0,
    slow_mode: SlowModeOption = "ncclwatch",
    t_base: TBaseOption = None,
    theta: ThetaOption = 3.0,
    wire: Annotated[
        bool, typer.Option("--wire/--no-wire", help="Count RDMA requests for a quarter of a second where nothing moves.")
    ] = True,
    stacks: Annotated[
        bool,
        typer.Option("--stacks/--no-stacks", help="Look what culprits and a few peers do: threads, Python frames."),
    ] = True,
    allow_pause: AllowPauseOption = False,
    why: Annotated[
        bool, typer.Option("--why", help="Show which facts and rules led there, and what was weighed and lost.")
    ] = False,
    ras: RasOption = None,
) -> int:
    """Say which rank holds the job up. Reads each process at least twice: a job that makes progress accuses nobody."""
    if ras is not None:
        return judge_ras(ras, wait=wait, as_json=as_json, exit_code=exit_code, why=why)
    named, files = options.split_words(pid, words)
    options.require_slow_mode(slow_mode, t_base)
    if files:
        # Whoever asks about live processes need not wait until all that reads files is loaded.
        from ncclwatch.cli.recorded import with_folders

        files = with_folders(files)
        rule = options.slow_rule(slow_mode, t_base, theta)
        judged = _records(files, rule, alone=not named and not every, as_json=as_json, exit_code=exit_code, why=why)
        if judged is not None:
            return judged
    live = options.choose_pids(named, every) if named or every or not files else []
    verdicts, problems, proxies = judge(live, files, every=every, wait=wait, interval=interval, wire=wire)
    if live and any(verdict.verdict_class.accuses for verdict in verdicts):
        # Late: a verdict does not wait until that is loaded.
        from ncclwatch.cli.gpus import beside

        verdicts = beside(_with_stacks(verdicts, live, proxies, pause=allow_pause) if stacks else verdicts)
    if as_json:
        emit_json(verdicts[0].to_json())
    else:
        print_verdicts(verdicts, why=why)
    for problem in problems:
        note(problem.line)
    return ExitStatus.VERDICT if exit_code and verdicts[0].verdict_class.accuses else ExitStatus.OK


def _records(
    files: Sequence[Path], rule: SlowRule, *, alone: bool, as_json: bool, exit_code: bool, why: bool
) -> ExitStatus | int | None:
    """Judge other tools' records, or recordings, where that is what was named; ``None`` for snapshots."""
    from ncclwatch.cli.foreign import foreign_among, judge_foreign
    from ncclwatch.cli.recorded import judge_recordings, recordings_among

    foreign = foreign_among(files, alone=alone)
    if foreign is not None:
        return judge_foreign(foreign, as_json=as_json, exit_code=exit_code, slow=rule, why=why)
    options.require_files(files)
    recordings = recordings_among(files, alone=alone)
    if recordings:
        return judge_recordings(recordings, as_json=as_json, exit_code=exit_code, slow=rule, why=why)
    return None


def _with_stacks(verdicts: list[Verdict], pids: Sequence[int], proxies: Proxies, *, pause: bool) -> list[Verdict]:
    """The verdicts with what their culprits were doing."""
    from ncclwatch.cli.stacks import beside
    from ncclwatch.target.discover import inspect_process

    ranks: dict[int, int | None] = dict.fromkeys(pids)
    for pid in pids:
        with suppress(NcclwatchError):
            ranks[pid] = inspect_process(pid).rank
    return beside(verdicts, ranks, proxies, pause=pause)


def judge(
    pids: Sequence[int], files: Sequence[Path], *, every: bool, wait: float, interval: float, wire: bool = False
) -> tuple[list[Verdict], list[Problem], Proxies]:
    """One verdict a job, worst first, over live processes and snapshot files together, what could not be read, and the progress
    threads of NCCL's proxies.

    ``every`` says that ``pids`` are all NCCL processes of this node; ``wire`` has their work requests counted where they stand.
    Raises when nothing at all could be read.
    """
    loaded, problems = load_files(files) if files else ([], [])
    recorded = [series for samples in loaded for series in series_of(samples)]
    from ncclwatch.collect.network_memory import NetworkMemory

    network = NetworkMemory()
    count: WorkCount | None = None
    judged = False
    with Watch() as watch, ExitStack() as stack:
        watch.open(pids)
        watch.round()
        began = time.monotonic()
        if not recorded and not any(watched.last for watched in watch.watched):
            raise nothing_read(problems + watch.problems)

        def read() -> Series:
            nonlocal judged
            watch.round()
            judged = True
            if count is not None:
                for host, windows in count.look(watch.watched).items():
                    network.feed_work(host, windows, time.time_ns())
            return [*recorded, *watch.series()]

        def rest(seconds: float) -> None:
            nonlocal count
            # What two looks decide needs no counts, and loading the programs takes its time.
            if count is None and wire and judged:
                count = _counting(stack)
                count.look(watch.watched)
            if count is None:
                time.sleep(seconds)
            else:
                count.rest(seconds)

        engine = _engine(_hosts(watch) if every and not watch.problems else (), network)
        # Files hold all that will ever be seen: there is nothing to wait for.
        files_only = not watch.watched
        if files_only:
            return *_beside_unread(engine(list(recorded), 0.0), problems + watch.problems), {}
        counted = lambda: count is not None and count.answered  # noqa: E731
        verdicts = settle(
            engine, read, wait=wait, interval=interval, began=began, counted=counted, sleep=rest, shows_all=_shows_what_is_open
        )
        proxies = {one.last.process.pid: one.last.proxy_threads for one in watch.watched if one.last is not None}
        return *_beside_unread(verdicts, problems + watch.problems), proxies


def _beside_unread(verdicts: Sequence[Verdict], problems: list[Problem]) -> tuple[list[Verdict], list[Problem]]:
    """The verdicts that something is wrong with what could not be read of this node's processes, and the problems."""
    lines = tuple(problem.line for problem in problems if problem.pid is not None)
    told = [
        verdict if verdict.verdict_class in _NOTHING_WRONG else replace(verdict, unobserved=(*verdict.unobserved, *lines))
        for verdict in verdicts
    ]
    return told, problems


def _counting(stack: ExitStack) -> WorkCount:
    """What counts work requests, until the stack is left."""
    from ncclwatch.collect.counting import WorkCount

    count = WorkCount()
    stack.callback(count.close)
    return count


def _hosts(watch: Watch) -> Sequence[str]:
    """Hosts on which every NCCL process was looked at: this one, when we see them all."""
    return sorted({watched.target.info.host for watched in watch.watched}) if sees_every_process() else ()


def _engine(complete_hosts: Sequence[str], network: NetworkMemory) -> Engine:
    from ncclwatch.engine.case import Known
    from ncclwatch.engine.diagnose import NOTHING_OBSERVED, judge_jobs
    from ncclwatch.engine.patience import Patience
    from ncclwatch.engine.topology.namer import name_places
    from ncclwatch.knowledge.match import informed
    from ncclwatch.knowledge.tickets import by_place

    def engine(series: Series, patience_s: float) -> list[Verdict]:
        known = Known(patience=Patience(patience_s, adaptive=False), complete_hosts=frozenset(complete_hosts), network=network)
        processes = by_place(samples[-1] for samples in series if samples)
        found = name_places(judge_jobs(series, known)) or [NOTHING_OBSERVED]
        return [informed(verdict, processes) for verdict in found]

    return engine


def _shows_what_is_open(series: Series) -> bool:
    """Whether memory of the host shows every operation that is open: what GPUs write to each other directly it does not show."""
    from ncclwatch.model.joined import is_hidden

    return not any(is_hidden(own) for samples in series if samples for own in samples[-1].communicators)


def _is_counted(verdict: Verdict) -> bool:
    """Whether something is stuck in the middle of an operation, and its work requests show it."""
    return verdict.verdict_class is VerdictClass.HARDWARE and "wire" in verdict.planes


def settle(
    engine: Engine,
    read: Callable[[], Series],
    *,
    wait: float,
    interval: float,
    began: float | None = None,
    counted: Callable[[], bool] = lambda: False,
    shows_all: Callable[[Series], bool] = lambda _: True,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Verdict]:
    """Read again, soon and then every ``interval`` seconds, until every verdict is certain or ``wait`` seconds have passed.

    ``read`` reads once more and returns everything read so far; ``began``: when it was first read. Certain is: the culprit is
    stopped, dead or in error; from the second interval on also that progress was seen or nothing is open, since iterations pause.
    Without ``shows_all`` (what was read shows whatever is open) the latter says nothing.
    Standing still becomes an accusation only after ``wait``, or once requests were ``counted`` while it stands: that something is
    stuck in the middle of an operation need then not be taken from the time it takes. ``sleep`` may wake earlier.
    """
    began = clock() if began is None else began
    due = early = min(_EARLY_S, interval)
    while True:
        sleep(max(0.0, began + due - clock()))
        series = read()
        verdicts = engine(series, wait)
        whole = due >= interval
        well = _NOTHING_WRONG if shows_all(series) else _MOVES
        certain = _HARD_EVIDENCE | well if whole else _HARD_EVIDENCE
        if all(verdict.verdict_class in certain for verdict in verdicts):
            return verdicts
        if whole and clock() - began >= wait:
            return engine(series, 0.0)
        if whole and counted() and all(map(_is_counted, told := engine(series, 0.0))):
            return told
        due = (clock() - began if whole else due - early) + interval
