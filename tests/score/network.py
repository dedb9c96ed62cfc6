"""Faults of the network, played and judged with and without the wire plane: ``python -m score.network [--tries N] [--seed S]``.

Real NCCL plays each fault of :data:`FAULTS` over sockets between hosts of their own (network namespaces; root), with layout,
moment, place and strength drawn from the seed; ``--verbs`` plays them over NCCL's InfiniBand transport, with stand-ins for
adapters (testbed/adapters.py), ``--guest`` over SoftRoCE in the emulated guest (vm/README.md). Each try takes less than a minute,
some three in the guest; it is recorded once (``--save``) and then judged as :data:`VIEWS` say. ``--again FOLDER`` plays nothing
and judges what was recorded there.

The table says of each fault: how often it shows in the job's own iterations, right class, right place, both, the time from the
fault to the first verdict with the right place (median, 90th percentile), and how many jobs were at any moment named as slow
computation, or an innocent rank was: both must be none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.simulate.layout import groups
from ncclwatch.simulate.scenario import Expectation, Fault, FaultKind, Layout, Network, Scenario, ScoreClass, Workload
from ncclwatch.simulate.testbed import plan
from ncclwatch.slow_modes import SlowMode, SlowRule
from ncclwatch.store.replay import Recordings
from score.diagnosers import HANG_CLASSES
from score.exact import share
from score.real import (
    Attach,
    Outcome,
    OwnLines,
    Recording,
    Roster,
    Run,
    Saved,
    Transport,
    as_played,
    expected,
    network_of,
    record,
)
from score.scoring import Result, Tally
from score.table import grid
from score.visible import visibility
from testbed.adapters import stand_there
from testbed.job import ROOT, JobError

HANG_S = 12.0
"""For how long a hang is watched; a slow job half as long again."""
SLOW_S = 16.0
RELEASES = "2.25.1,2.27.5,2.29.2"
GUEST_RELEASE = "2.27.5"
LAYOUTS = ((2, 1, 2), (1, 2, 2), (1, 1, 4), (1, 1, 3))
"""(tp, pp, dp) of a drawn job: each rank has a host of its own."""


# --- what is played ------------------------------------------------------------------------------------------------------

_Make = Callable[[random.Random, int, float], Fault]


def _nic_limit(chance: random.Random, rank: int, at_s: float) -> Fault:
    return Fault(FaultKind.NIC_LIMIT, rank, start_s=at_s, strength=chance.uniform(5.0, 20.0))


def _late(chance: random.Random, rank: int, at_s: float) -> Fault:
    return Fault(FaultKind.SLOW_LINK, rank, start_s=at_s, strength=1.0, delay_ms=chance.uniform(15.0, 40.0))


def _lossy(chance: random.Random, rank: int, at_s: float) -> Fault:
    return Fault(FaultKind.LOSSY_LINK, rank, start_s=at_s, strength=chance.uniform(0.06, 0.15), delay_ms=200.0)


def _traffic(_: random.Random, rank: int, at_s: float) -> Fault:
    return Fault(FaultKind.BACKGROUND_TRAFFIC, rank, start_s=at_s, strength=20.0)


def _down(_: random.Random, rank: int, at_s: float) -> Fault:
    return Fault(FaultKind.LINK_DOWN, rank, start_s=at_s)


def _sleeps(chance: random.Random, rank: int, _: float) -> Fault:
    strength, period_s = chance.uniform(0.4, 1.0), chance.uniform(0.4, 1.0)
    return Fault(FaultKind.PROXY_SLEEP, rank, iteration=chance.randint(25, 40), strength=strength, period_s=period_s)


def _silent(chance: random.Random, rank: int, _: float) -> Fault:
    return Fault(FaultKind.PROXY_STALL, rank, iteration=chance.randint(12, 25), role="dp", offset_ms=2.0)


FAULTS: dict[str, tuple[ScoreClass, VerdictClass, _Make]] = {
    "nic-limit": (ScoreClass.S2, VerdictClass.SLOW_COMMUNICATION, _nic_limit),
    "late-link": (ScoreClass.S2, VerdictClass.SLOW_COMMUNICATION, _late),
    "lossy-link": (ScoreClass.S2, VerdictClass.SLOW_COMMUNICATION, _lossy),
    "other-traffic": (ScoreClass.S2, VerdictClass.SLOW_COMMUNICATION, _traffic),
    "sleeping-proxy": (ScoreClass.S2, VerdictClass.SLOW_COMMUNICATION, _sleeps),
    "link-down": (ScoreClass.H3, VerdictClass.HARDWARE, _down),
    "silent-receiver": (ScoreClass.H3, VerdictClass.HARDWARE, _silent),
}
"""By name: what it is scored as, the verdict that is right, and how it is drawn. A silent receiver's proxy thread stops."""

IN_GUEST = ("nic-limit", "sleeping-proxy", "silent-receiver", "link-down")
"""Those that the guest can play: RoCE there takes seconds to recover from a loss. A port that goes down may leave its kernel
spinning, and is the last."""

PREFIX = "network-"
"""How names of such scenarios begin."""
_NAME = re.compile(PREFIX + r"([a-z-]+)-(\d+)-(\d+)$")


def draw(fault: str, seed: int, number: int) -> Scenario:
    """The scenario of a try; the same for the same seed."""
    chance = random.Random(f"network/{fault}/{seed}/{number}")
    score, verdict, make = FAULTS[fault]
    tp, pp, dp = chance.choice(LAYOUTS)
    layout = Layout(tp, pp, dp, ranks_per_node=1)
    forward_ms = chance.choice((10.0, 20.0))
    # A job is watched from its start: the moment lies behind what an estimate needs of its past.
    struck = make(
        chance, chance.randrange(layout.world), chance.uniform(3.0, 6.0) if score in HANG_CLASSES else chance.uniform(9.0, 13.0)
    )
    work = Workload(
        iterations=2_000, micro_batches=chance.choice((2, 3)), layers=1, forward_ms=forward_ms, backward_ms=2 * forward_ms,
        dp_bytes=chance.choice((1, 2)) << 20, jitter=chance.choice((0.0, 0.02, 0.05)),
    )  # fmt: skip
    return Scenario(
        f"{PREFIX}{fault}-{seed}-{number}", f"drawn: {fault}", chance.randrange(1 << 30),
        Expectation(score, (verdict,), (struck.rank,)), layout, work, Network(intra_node="net", net="socket"), faults=(struck,),
    )  # fmt: skip


def wanted(scenario: Scenario) -> Scenario:
    """With what is expected: the rank that was struck is named, and besides it at most ranks at the other end of its links.

    Traffic of others goes to the next host, and fills its link too. A proxy that sleeps is its own rank's alone.
    """
    layout, (fault,) = scenario.layout, scenario.faults
    also: set[int] = set()
    for role in ("tp", "pp", "dp") if fault.kind is not FaultKind.PROXY_SLEEP else ():
        for ring in (members.tolist() for members in groups(layout, role)):
            if fault.rank in ring:
                place = ring.index(fault.rank)
                also |= {ring[place - 1], ring[(place + 1) % len(ring)]}
    if fault.kind is FaultKind.BACKGROUND_TRAFFIC:
        also.add((fault.rank + 1) % layout.world)
    expect = replace(scenario.expect, ranks=(fault.rank,), also=tuple(sorted(also - {fault.rank})), link=())
    return replace(scenario, expect=expect)


def scenario_of(name: str) -> Scenario:
    """The scenario of a name. Raises NcclwatchError for a name that is none."""
    found = _NAME.match(name)
    if found is None or found[1] not in FAULTS:
        raise NcclwatchError(f"'{name}' is no scenario of a network's fault", "was it recorded by score.network?")
    return draw(found[1], int(found[2]), int(found[3]))


def later(scenario: Scenario, seconds: float) -> Scenario:
    """The same with its faults of a moment so many seconds later: bursts of the wire plane begin short, and grow for a while."""
    faults = (
        replace(fault, start_s=fault.start_s + seconds) if fault.start_s is not None else fault for fault in scenario.faults
    )
    return replace(scenario, faults=tuple(faults))


def play(fault: str, nccl: str, seed: int, number: int, folder: Path, transport: Transport, before_s: float) -> Outcome:
    """Play one try here, and leave its recording in a folder. What went wrong is in the outcome's note."""
    scenario = later(as_played(draw(fault, seed, number), nccl, transport), before_s)
    hangs = scenario.expect.score_class in HANG_CLASSES
    run = Run(scenario, nccl, transport, (Attach.LIVE,), seed, 0, HANG_S if hangs else SLOW_S, str(folder))
    outcome, made = Outcome(run), plan(scenario, links=True)
    try:
        with network_of(transport, made) as network:
            record(run, scenario, made, outcome, network)
    except (JobError, NcclwatchError, OSError) as error:
        outcome.note = f"not played: {str(error).splitlines()[0]}"
    return outcome


# --- how it is judged ----------------------------------------------------------------------------------------------------


def without_windows(batch: NodeBatch) -> NodeBatch:
    """The batch as it would be without windows of work, and of what was joined from them."""
    network = batch.network
    if network is not None:
        flows = tuple(replace(flow, rdma=None, bandwidth=None) if flow.rdma is not None else flow for flow in network.flows)
        network = replace(network, flows=flows)
    windows = [replace(window, work=None) for window in batch.windows]
    return msgspec.structs.replace(batch, work=(), windows=windows, network=network)


def without_network(batch: NodeBatch) -> NodeBatch:
    """Nor anything of NICs, links and sockets: NCCL's memory and calls alone."""
    return msgspec.structs.replace(without_windows(batch), network=None)


def whole(batch: NodeBatch) -> NodeBatch:
    """All of it."""
    return batch


VIEWS: dict[str, tuple[Callable[[NodeBatch], NodeBatch], SlowMode]] = {
    "all": (whole, SlowMode.OWN),
    "no windows": (without_windows, SlowMode.OWN),
    "no network": (without_network, SlowMode.OWN),
    "MegaTrace": (whole, SlowMode.MEGATRACE),
}
"""What a diagnosis gets to see of a recording, and by which rule it judges jobs that run: all; not the windows of the wire plane;
nothing of NICs and sockets either; all, by MegaTrace's check. (CCL-D's windows of a minute are longer than a try.)"""


@dataclass(frozen=True, slots=True)
class Row:
    """One judgement of one recording. ``named_s`` is from the fault to the first verdict with the right place."""

    fault: str
    view: str
    result: Result
    computation: bool
    """Whether slow computation was said at any moment."""

    @property
    def named_s(self) -> float | None:
        """Seconds, where class and place are right in the end."""
        return self.result.location_s if self.result.right else None


def judge(path: Path) -> list[Row]:
    """A recording judged in every view."""
    saved = Saved.load(path)
    fault = _NAME.match(saved.scenario)
    scenario = wanted(expected(scenario_of(saved.scenario), saved))
    with Recordings([path]) as recordings:
        batches = [batch for _, _, batch in recordings.batches()]
    shown = visibility(scenario, saved.iterations, saved.since, batches[-1].time_ns / 1e9 if batches else None).visible
    hangs = scenario.expect.score_class in HANG_CLASSES
    rows = []
    for view, (see, mode) in VIEWS.items():
        recording = Recording([see(batch) for batch in batches], OwnLines(tuple(saved.iterations), saved.stalled))
        tally = Tally(scenario, Roster(scenario, recording), "ncclwatch", f"{saved.nccl} {saved.transport} {view}")
        computation = False
        for moment, verdicts in _said(recording.batches, mode):
            tally.hear(verdicts, moment - saved.since)
            computation |= any(verdict.verdict_class is VerdictClass.SLOW_COMPUTATION for verdict in verdicts)
        result = replace(tally.result(), visible=True if hangs else shown)
        rows.append(Row(fault[1] if fault else "", view, result, computation))
    return rows


def _said(batches: Iterable[NodeBatch], mode: SlowMode) -> Iterator[tuple[float, list[Verdict]]]:
    """What a session says at each look, as :meth:`score.real.Recording.said`."""
    session = DiagnosisSession(LiveDiagnosis(slow=SlowRule(mode).watch()))
    for batch in batches:
        session.feed(batch)
        if batch.looked:
            yield batch.time_ns / 1e9, list(session.judge(batch.time_ns).verdicts)


HEAD = ("fault", "seen", "tries", "shows", "class", "place", "right", "95 %", "median s", "p90 s", "computation", "innocents")


def table(rows: Iterable[Row], *, markdown: bool = False) -> str:
    """A line a fault and view, of the tries whose fault shows; ``shows`` says how many those are."""
    kept = list(rows)
    lines = []
    for fault in [*FAULTS, "all faults"]:
        for view in VIEWS:
            part = [row for row in kept if row.view == view and fault in (row.fault, "all faults")]
            if part:
                lines.append([fault, view, *_cells(part)])
    return "\n".join(grid(HEAD, lines, markdown=markdown)) + "\n"


def _cells(part: Sequence[Row]) -> list[str]:
    shown = [row for row in part if row.result.visible]
    right = sum(row.result.right for row in shown)
    bounds = share(right, len(shown)) if shown else None
    return [
        str(len(part)),
        str(len(shown)),
        str(sum(row.result.right_class for row in shown)),
        str(sum(row.result.located for row in shown)),
        str(right),
        f"{bounds.low:.0%} to {bounds.high:.0%}" if bounds else "-",
        *(_seconds([row.named_s for row in shown if row.named_s is not None], part) for part in (0.5, 0.9)),
        str(sum(row.computation for row in part)),
        str(sum(bool(row.result.innocents) for row in part)),
    ]  # fmt: skip


def _seconds(values: Sequence[float], quantile: float) -> str:
    ordered = sorted(values)
    return f"{ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]:.1f}" if ordered else "-"


def as_json(rows: Iterable[Row]) -> dict[str, Any]:
    """Every judgement as plain data."""
    return {
        "schema": "ncclwatch.network-score/1",
        "rows": [
            {"fault": r.fault, "seen": r.view, "computation": r.computation, "named_s": r.named_s, **asdict(r.result)}
            for r in rows
        ],
    }


# --- the command ---------------------------------------------------------------------------------------------------------


def play_all(options: argparse.Namespace) -> int:
    """Play what the options ask for, one after another; how many could not be played."""
    missing, releases = 0, options.nccl.split(",")
    transport = Transport.VERBS if options.verbs else Transport.SOCKET
    if options.verbs:
        stand_there()
    for number in range(options.first_try, options.first_try + options.tries):
        for place, fault in enumerate(options.faults):
            release = releases[(number + place) % len(releases)]
            outcome = play(fault, release, options.seed, number, options.save, transport, options.before)
            missing += bool(outcome.note)
            print(f"played {fault} try {number}: {outcome.pace} {outcome.note}", file=sys.stderr, flush=True)
    return missing


def inside_guest(options: argparse.Namespace) -> int:
    """The same over InfiniBand verbs; this machine is the guest."""
    from vm import slow
    from vm.fabric import Fabric, command

    os.nice(-slow.PRIORITY)
    command("mount -t cgroup2 none /sys/fs/cgroup")
    fabric, missing = Fabric.create(), 0
    for number in range(options.first_try, options.first_try + options.tries):
        for fault in (name for name in IN_GUEST if name in options.faults):
            outcome = slow.play(fabric, draw(fault, options.seed, number), options.nccl, options.seed, 0, options.inside)
            missing += bool(outcome.note)
            print(f"played {fault} try {number}: {outcome.pace} {outcome.note}", flush=True)
    return missing


def in_guest(options: argparse.Namespace) -> int:
    """Boot the guest, have it play, and bring the recordings here; 0 when all was played."""
    from ncclwatch.probes.image_cache import cache_folder
    from ncclwatch.probes.program import Compilation
    from ncclwatch.wire.kernel import SOURCE
    from vm.errors import GuestError
    from vm.guest import Guest
    from vm.initramfs import SHARE

    for source in ("", SOURCE):  # emulated, clang takes ten times as long: the guest finds them in this machine's cache
        (Compilation(source) if source else Compilation()).result()
    words = [sys.executable, "-m", "score.network", "--inside", SHARE, "--nccl", options.nccl, "--seed", str(options.seed)]
    words += ["--first-try", str(options.first_try), "--tries", str(options.tries), "--faults", *options.faults]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "XDG_CACHE_HOME": str(cache_folder().parent.parent)}
    tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    with Guest(words, cwd=ROOT, environment=environment, on_line=tell) as guest:
        try:
            return guest.wait(options.timeout)
        except GuestError as error:
            print(f"score.network: {error}", file=sys.stderr)
            return 1
        finally:
            for path in sorted([*guest.share.glob("*.ncclwatch"), *guest.share.glob("network-*.json")]):
                shutil.copy(path, options.save / path.name)


def main() -> int:
    """Exit status 0 when everything was played; what was judged is in the table."""
    parser = argparse.ArgumentParser(prog="score.network", description="Faults of the network, with and without the wire plane.")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--tries", type=int, default=1, help="of each fault")
    parser.add_argument("--first-try", type=int, default=0, help="number of the first of them: many tries can be made in parts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--nccl", default="", help=f"releases in turn, with commas between; {RELEASES}, in the guest {GUEST_RELEASE}"
    )
    parser.add_argument("--before", type=float, default=0.0, metavar="S", help="so many seconds more before the fault")
    parser.add_argument("--verbs", action="store_true", help="over InfiniBand verbs, with stand-ins for adapters")
    parser.add_argument("--guest", action="store_true", help="over InfiniBand verbs, in the emulated guest")
    parser.add_argument("--inside", type=Path, metavar="FOLDER", help="this machine is the guest; recordings go there")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for the guest, boot included")
    parser.add_argument("--save", type=Path, default=Path("build/network"), help="folder for the recordings")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="play nothing: judge what was recorded there")
    parser.add_argument("--json", type=Path, help="write every judgement here")
    parser.add_argument("--markdown", type=Path, help="write the table here as Markdown")
    options = parser.parse_args()
    if options.guest and (left := [name for name in options.faults if name not in IN_GUEST]):
        print(f"not in the guest: {', '.join(left)}", file=sys.stderr)
    options.nccl = options.nccl or (GUEST_RELEASE if options.guest or options.inside else RELEASES)
    if options.inside:
        return 1 if inside_guest(options) else 0
    if not options.again and os.geteuid() != 0:
        print("playing needs root: namespaces are made, and memory of other processes is read", file=sys.stderr)
        return 1
    missing, folder = 0, options.again or options.save
    if not options.again:
        folder.mkdir(parents=True, exist_ok=True)
        missing = in_guest(options) if options.guest else play_all(options)
    rows = [row for path in sorted(folder.glob("network-*.ncclwatch")) for row in judge(path)]
    for row in rows:
        if not row.result.right or row.computation or row.result.innocents:
            print(f"{row.result.case} ({row.view}): said {row.result.said} {row.result.named}, {row.result.summary}")
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(as_json(rows), indent=1) + "\n", "utf-8")
    if options.markdown:
        options.markdown.write_text(table(rows, markdown=True), "utf-8")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
