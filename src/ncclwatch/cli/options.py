"""Options that several commands share, and how the processes or files a command is about are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncclwatch.errors import TargetError, UsageError
from ncclwatch.text import clean

if TYPE_CHECKING:
    from ncclwatch.slow_modes import SlowRule

# 2^22 is the kernel's PID_MAX_LIMIT on 64-bit machines (include/linux/threads.h).
PID_MAX = 1 << 22

PidOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pid", "-p", metavar="PID", help="Process to look at; repeat it, or give several: --pid 11,12 or --pid 11 12."
    ),
]
AllOption = Annotated[bool, typer.Option("--all", "-a", help="Every NCCL process of this node.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON for scripts instead of text for people.")]
ExitCodeOption = Annotated[bool, typer.Option("--exit-code", help="End with status 10 when a verdict accuses somebody.")]
AllowPauseOption = Annotated[
    bool, typer.Option("--allow-pause", help="Native frames too: py-spy stops each process for some milliseconds.")
]
SampleOption = Annotated[
    int | None, typer.Option("--sample", metavar="RANKS", min=1, max=4096, help="While all is well, read only so many ranks.")
]
CalmIntervalOption = Annotated[
    float,
    typer.Option(
        "--calm-interval",
        metavar="SECONDS",
        min=0.0,
        max=60.0,
        help="Seconds between two samples once all has been well for a minute, four times as many after ten; a pulse twice "
        "a second tells when it is not. 0: always --interval. A dashboard that somebody watches always keeps to --interval.",
    ),
]
IntervalOption = Annotated[
    float, typer.Option("--interval", min=0.1, max=60.0, help="Seconds between two samples of a process's memory.")
]
DurationOption = Annotated[float | None, typer.Option("--duration", "-d", min=0.1, max=1e8, help="Seconds after which to end.")]
LookOption = Annotated[
    float | None, typer.Option("--duration", "-d", min=0.2, max=1e6, help="Seconds to watch; by default what is needed.")
]
BudgetOption = Annotated[
    float,
    typer.Option(
        "--budget", min=0.0, max=100.0, metavar="PERCENT", help="Share of a thread's time that probes may cost; 0: no probes."
    ),
]
ProbesOption = Annotated[
    bool, typer.Option("--probes/--no-probes", help="Trace calls with uprobes; without, only memory is read.")
]

WIRE = "0.1"
"""What :data:`WireOption` is by default."""
WireOption = Annotated[
    str,
    typer.Option(
        "--wire",
        metavar="PERCENT",
        help="Count RDMA requests in bursts that cost this share of a thread's time; 'exact': all, at any cost; 'off': none.",
    ),
]
OrderBudgetOption = Annotated[
    float,
    typer.Option(
        "--order-budget",
        min=0.0,
        max=100.0,
        metavar="PERCENT",
        help="Share of a thread's time that counting RDMA requests may cost while a job stands; 0: not beyond --wire.",
    ),
]
ProbePathsOption = Annotated[
    str,
    typer.Option(
        "--probe-paths",
        metavar="tcp|TOKEN_FILE|off",
        help="Probe paths on which a job stands still, when the engine asks: zero payload, own sockets and queue pairs. "
        "'tcp': whether the far end answers at all. A file has a secret that the nodes share, by which they answer one another "
        "on TCP port 28050.",
    ),
]
StacksOption = Annotated[
    bool,
    typer.Option(
        "--stacks/--no-stacks",
        help="Look what culprits and a few peers do when a verdict names them: threads, Python frames, the GPUs' state. "
        "Nothing is stopped.",
    ),
]
ORDER_BUDGET = 5.0
"""Percent, what :data:`OrderBudgetOption` is by default."""

PathsFilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--paths",
        metavar="FILE",
        help="What 'ncclwatch paths probe -o FILE' told: verdicts say what it shows; read when it changes.",
    ),
]
KeysOption = Annotated[
    Path | None,
    typer.Option("--keys", metavar="FOLDER", help="Folder made by 'ncclwatch keys make'; needed beyond this machine."),
]
BusOption = Annotated[
    str | None,
    typer.Option("--bus", metavar="ADDRESS", help="Hear agents through a NATS server instead of listening: tls://HOST:PORT."),
]
JobOption = Annotated[
    str | None,
    typer.Option(
        "--job",
        metavar="TOKEN",
        envvar="NCCLWATCH_JOB",
        help="Token of the job ('ncclwatch keys token'): jobs see nothing of each other.",
    ),
]

MetricsOption = Annotated[
    str | None,
    typer.Option("--metrics", metavar="[ADDRESS]:PORT", help="Serve Prometheus metrics, on 127.0.0.1 if no address is given."),
]


def pids(options: Sequence[str] | None) -> list[int]:
    """The pids of ``--pid`` options, each a number or a comma-separated list, in order and without repetition."""
    found: dict[int, None] = {}
    for option in options or ():
        for word in option.replace(",", " ").split():
            if not (word.isascii() and word.isdigit()) or not 0 < int(word[:12]) <= PID_MAX:
                raise UsageError(f"'{clean(word, 40)}' is not a pid", "give the number that 'ncclwatch ps' shows")
            found[int(word)] = None
    return list(found)


def split_words(options: Sequence[str] | None, words: Sequence[str] | None) -> tuple[list[int], list[Path]]:
    """What was named: pids from ``--pid`` and from bare numbers, files from every other word.

    ``--pid 11 12 13`` leaves 12 and 13 as bare words; a word of digits is a pid unless a file of that name exists.
    """
    numbers, files = [], []
    for word in words or ():
        if word.isascii() and word.isdigit() and not Path(word).exists():
            numbers.append(word)
        else:
            files.append(Path(word))
    return pids([*(options or ()), *numbers]), files


def only_pids(options: Sequence[str] | None, words: Sequence[str] | None, hint: str) -> list[int]:
    """What was named, of a command that takes pids alone; ``hint`` says what files are for."""
    named, files = split_words(options, words)
    if files:
        raise UsageError(f"'{clean(str(files[0]), 80)}' is not a pid", hint)
    return named


def require_files(files: Sequence[Path]) -> None:
    """Refuse names of files that cannot be read, before any work is done."""
    for file in files:
        if not file.is_file():
            raise UsageError(f"no such file: {clean(str(file))}", "name a file written by 'ncclwatch snapshot', or use --pid")


def choose_pids(named: Sequence[int], every: bool) -> list[int]:
    """The processes a command is about: the named ones, or with ``--all`` every NCCL process of the node.

    Raises ``UsageError`` when neither or both were asked for, ``TargetError`` when the node has no NCCL process.
    """
    if named and every:
        raise UsageError("--pid and --all exclude each other", "give one of them")
    if named:
        return list(named)
    if not every:
        raise UsageError("nothing to look at", "give --pid PID, or --all; 'ncclwatch ps' lists the NCCL processes of this node")
    from ncclwatch.target.discover import find_processes

    found = [process.pid for process in find_processes()]
    if not found:
        raise TargetError(
            "no NCCL process found on this node",
            "start the job first, or run as root to see the processes of other users and containers",
        )
    return found


HANG_FLOOR_S = 5.0
"""``engine.patience.HANG_FLOOR_S``; repeated so that ``--help`` need not load the engine (a test compares them)."""

HangAfterOption = Annotated[
    float,
    typer.Option(
        "--hang-after",
        metavar="SECONDS",
        min=0.5,
        max=86400.0,
        help="Nothing must move for so long before waits accuse a rank; longer where a like standstill ended by itself.",
    ),
]
SLOW_MODES = ("ncclwatch", "ccl-d", "megatrace")
"""``slow_modes.SlowMode``, and T_base and theta as there; repeated for the same reason."""

SlowModeOption = Annotated[
    str,
    typer.Option(
        "--slow-mode",
        metavar="|".join(SLOW_MODES),
        help="By which rule a job that runs is slow: ours, CCL-D's equations 1-4 (one-minute windows), or MegaTrace's check of "
        "the network.",
    ),
]
TBaseOption = Annotated[
    float | None,
    typer.Option(
        "--t-base",
        metavar="SECONDS",
        min=1e-6,
        max=86400.0,
        help="With --slow-mode ccl-d: T_base(init), how long an operation lasts at most in a healthy job, until that is learned.",
    ),
]
ThetaOption = Annotated[
    float, typer.Option("--theta", min=0.01, max=1000.0, help="With --slow-mode ccl-d: the threshold of R; theirs is close to 3.")
]


def require_slow_mode(mode: str, t_base_s: float | None) -> None:
    """Raise UsageError for a mode that is none, or an option of another."""
    if mode not in SLOW_MODES:
        raise UsageError(f"--slow-mode {clean(mode, 40)} is not known", f"it is {' or '.join(SLOW_MODES)}")
    if t_base_s is not None and mode != "ccl-d":
        raise UsageError("--t-base belongs to --slow-mode ccl-d", "add it, or leave --t-base out")


def slow_rule(mode: str, t_base_s: float | None, theta: float) -> SlowRule:
    """The rule that was asked for."""
    require_slow_mode(mode, t_base_s)
    from ncclwatch.slow_modes import SlowMode, SlowRule

    return SlowRule(SlowMode(mode), t_base_s, theta)


FixedOption = Annotated[bool, typer.Option("--fixed", help="Keep to --hang-after, whatever was learned (CCL-D: 300).")]
