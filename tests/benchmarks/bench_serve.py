"""The page under load: how far viewers are behind what an engine says, and whether a tab's memory grows.

    python tests/benchmarks/bench_serve.py [--updates 1000] [--jobs 20] [--viewers 100] [--minutes 30] [--ranks 16]

SIMULATED ranks; everything else is real: views are encoded as an engine encodes them and sent through its ZeroMQ hub to the
command `ncclwatch serve`, whose page is read by viewers over HTTP, one of them a tab of Chromium. Each view carries the time at
which the hub sent it (as the name of a silent node), so how far a viewer is behind is told by what it has been shown: its own
clock less that time, once a second. A job of an engine is judged, and shown, at most twice a second to one who looks: what is
behind by that much is not late.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ncclwatch.collect.windows import RankWindow
from ncclwatch.engine.session import Update
from ncclwatch.messaging.hub import Hub
from ncclwatch.messaging.keys import job_of
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.remote.job_view import ViewWriter
from unit.views import verdict_of, view

CHROMIUM = Path("/usr/bin/chromium")
SETTLE_S = 20.0
"""What is started has come to rest after that."""
_SENT = re.compile(r"sent (\d+\.\d+)")


class SimulatedJob:
    """Looks at a job that runs, and every half minute hangs for half a minute at another rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.views = ViewWriter("simulated")
        self._calm = view(ranks, samples=False).frame.windows
        self._looks = 0
        self._windows: dict[int, tuple[RankWindow, ...]] = {}

    def payload(self, viewers: list[bytes]) -> bytes:
        """The next view as an engine would send it."""
        self._looks += 1
        now = time.time()
        hung, turn = int(now / 30) % 2 == 1, int(now / 60) % self.ranks
        if hung:
            windows = self._windows.get(turn)
            if windows is None:
                self._windows = {turn: tuple(view(self.ranks, VerdictClass.STOPPED, culprit=turn, samples=False).frame.windows)}
                windows = self._windows[turn]
            verdict = replace(verdict_of(VerdictClass.STOPPED, turn, self.ranks), since=now // 30 * 30, time=now)
        else:
            # A few ranks move at every look.
            moved = {at % self.ranks for at in range(self._looks, self._looks + 4)}
            windows = tuple(
                replace(w, operations_per_s=300.0 + self._looks % 20) if at in moved else w for at, w in enumerate(self._calm)
            )
            verdict = verdict_of(VerdictClass.RUNNING, 0, self.ranks)
        node = SimpleNamespace(name=f"sent {time.time():.6f}", samples={}, silent=True, heard_ns=time.monotonic_ns(), missed=0)
        session = SimpleNamespace(
            samples={}, planes=(), overhead=lambda: None, nodes={"node": node}, roles={}, layout="SIMULATED",
            diagnosis=SimpleNamespace(judged=[]),
        )  # fmt: skip
        update = Update(time.monotonic_ns(), windows=list(windows))
        update.verdicts = [verdict]
        return self.views.encode(session, update, viewers, interval_s=1.0, behind_s=0.0)  # type: ignore[arg-type]


def engine(tokens: list[str], ranks: int, updates: float) -> None:
    """Hear viewers and send them views of all jobs, ``updates`` a second in all; a process of its own, ended from outside."""
    hub = Hub("tcp://127.0.0.1:*", lambda *_: None)
    print(hub.address, flush=True)
    jobs = [(job_of(token), SimulatedJob(ranks)) for token in tokens]
    due, sent, turn, told = time.monotonic(), 0, 0, time.monotonic()
    while True:
        hub.poll(max(0.0, min(due - time.monotonic(), 0.05)))
        if time.monotonic() < due:
            continue
        # What could not be sent in time is not made up for: then the rate is what this machine can do, and is told.
        due = max(due + 1.0 / updates, time.monotonic() - 0.1)
        turn = (turn + 1) % len(jobs)
        name, job = jobs[turn]
        if viewers := hub.viewers(name):
            hub.show(name, job.payload(list(viewers)))
            sent += 1
        if time.monotonic() - told >= 5.0:
            print(f"rate {sent / (time.monotonic() - told):.0f}", flush=True)
            sent, told = 0, time.monotonic()


class Child:
    """One of our own processes, its lines, and what it has used."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line.rstrip())

    def line(self, begin: str, seconds: float = 60.0) -> str:
        """The newest line that begins so."""
        limit = time.monotonic() + seconds
        while not (found := [line for line in list(self.lines) if line.startswith(begin)]):
            if time.monotonic() > limit or self.process.poll() is not None:
                raise RuntimeError(f"no line '{begin}' came")
            time.sleep(0.1)
        return found[-1]

    def cpu_s(self) -> float:
        """CPU time so far, of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        """Memory that is resident."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


class Viewer:
    """A connection that reads the stream of one job, and how far it was behind at worst in each second."""

    def __init__(self, port: int, job: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(f"GET /api/events?job={job} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        self._socket.settimeout(0.0)
        self._rest = b""
        self.newest = 0.0
        self.nbytes = 0

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def read(self) -> None:
        """Take what has come."""
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        if not data:
            raise RuntimeError("the page closed a stream")
        self.nbytes += len(data)
        found = _SENT.findall((self._rest + data).decode("utf-8", "replace"))
        if found:
            self.newest = max(self.newest, float(found[-1]))
        self._rest = data[-64:]


@contextmanager
def reading(viewers: list[Viewer]) -> Iterator[None]:
    """Read all streams in a thread while the context lasts."""
    import selectors

    chooser, ended = selectors.DefaultSelector(), threading.Event()
    for viewer in viewers:
        chooser.register(viewer, selectors.EVENT_READ, viewer)

    def run() -> None:
        while not ended.is_set():
            for key, _ in chooser.select(0.2):
                key.data.read()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def tab(address: str) -> Iterator[Any]:
    """A tab of Chromium on an address: (page, session of the DevTools protocol)."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        page = started.new_page()
        page.goto(address)
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable")
        yield page, devtools
        started.close()


def heap_mib(devtools: Any) -> tuple[float, int]:
    """What the tab's scripts hold after a collection, MiB, and how many nodes the document has."""
    devtools.send("HeapProfiler.collectGarbage")
    found = {one["name"]: one["value"] for one in devtools.send("Performance.getMetrics")["metrics"]}
    return found["JSHeapUsedSize"] / 2**20, int(found["Nodes"])


def started(arguments: argparse.Namespace, folder: Path) -> tuple[Child, Child, str, list[str]]:
    """The engine, the page on it, the page's address, and the names of the jobs."""
    tokens = [secrets.token_urlsafe(12) for _ in range(arguments.jobs)]
    (folder / "tokens").write_text("\n".join(tokens))
    source = Child(
        __file__, "--engine", str(folder / "tokens"), "--ranks", str(arguments.ranks), "--updates", str(arguments.updates)
    )
    where = source.line("tcp://")
    names = [f"simulated-{at}" for at in range(len(tokens))]
    rows = [
        f'[[job]]\nname = "{name}"\nengine = "{where}"\ntoken = "{token}"\n' for name, token in zip(names, tokens, strict=True)
    ]
    (folder / "jobs.toml").write_text("\n".join(rows))
    page = Child("-u", "-m", "ncclwatch", "serve", "--jobs", str(folder / "jobs.toml"), "--bind", ":0")
    return source, page, page.line("serving").split(" on ")[1].split()[0], names


def measure(arguments: argparse.Namespace, source: Child, page: Child, address: str, names: list[str]) -> None:
    """Watch for some minutes and tell what was seen."""
    port = int(address.rstrip("/").rpartition(":")[2])
    viewers = [Viewer(port, names[at % len(names)]) for at in range(arguments.viewers - 1)]
    lags: list[float] = []
    tab_lags: list[float] = []
    heaps: list[tuple[float, float, int]] = []
    with reading(viewers), tab(f"{address}?job={names[0]}") as (shown, devtools):
        time.sleep(SETTLE_S)
        if unshown := sum(viewer.newest == 0 for viewer in viewers):
            raise RuntimeError(f"{unshown} viewers were shown nothing in {SETTLE_S:.0f} s")
        began, cpu, seen = time.monotonic(), page.cpu_s(), sum(viewer.nbytes for viewer in viewers)
        memory = page.rss_mib()
        while (passed := time.monotonic() - began) < arguments.minutes * 60:
            lags.append(max(time.time() - viewer.newest for viewer in viewers))
            # The page draws with the next frame; what it shows is read from the document, as a person would.
            found = shown.evaluate("[document.getElementById('about').textContent, Date.now() / 1000]")
            sent = _SENT.search(found[0])
            if sent:
                tab_lags.append(found[1] - float(sent[1]))
            if not heaps or passed - heaps[-1][0] >= 10.0:
                heaps.append((passed, *heap_mib(devtools)))
            time.sleep(1.0)
        spent = time.monotonic() - began
        used = (page.cpu_s() - cpu) / spent
        rate = (sum(viewer.nbytes for viewer in viewers) - seen) / spent / 2**20
    rates = [float(line.split()[1]) for line in source.lines if line.startswith("rate")][-int(spent / 5) :]
    times, held = np.array([one[0] for one in heaps]) / 60, np.array([one[1] for one in heaps])
    slope = np.polyfit(times, held, 1)[0] if len(heaps) > 2 else float("nan")
    print(
        f"{len(viewers)} viewers and a tab, {arguments.jobs} jobs of {arguments.ranks} SIMULATED ranks, {spent / 60:.1f} minutes"
    )
    print(f"updates a second, sent by the engine      {statistics.mean(rates):.0f} (asked for: {arguments.updates:.0f})")
    for name, found in (("viewer that is most behind", lags), ("the tab, by what it shows", tab_lags)):
        cuts = statistics.quantiles(found, n=100, method="inclusive")
        print(f"{name:<41} median {statistics.median(found):.2f} s, 99 % {cuts[98]:.2f} s, worst {max(found):.2f} s")
    print(f"sent to all viewers                       {rate:.2f} MiB/s")
    print(
        f"page's server                             {used:.2f} cores, {memory:.0f} MiB at first, {page.rss_mib():.0f} MiB at last"
    )
    print(
        f"tab's heap after a collection            {held[0]:.1f} MiB at first, {held[-1]:.1f} at last, {held.max():.1f} at most; "
        f"slope {slope * 1024:+.1f} KiB a minute; nodes {heaps[0][2]} to {heaps[-1][2]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--updates", type=float, default=1000.0, help="views a second, of all jobs together")
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--viewers", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        engine(arguments.engine.read_text().split(), arguments.ranks, arguments.updates)
    with tempfile.TemporaryDirectory() as folder:
        source, page, address, names = started(arguments, Path(folder))
        try:
            measure(arguments, source, page, address, names)
        finally:
            for child in (page, source):
                child.process.terminate()
                child.process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
