"""What a probe costs the process that hits it, and what the agent that takes the records costs the machine.

    python tests/benchmarks/bench_probe_hit.py [--calls N] [--rounds N] [--json]

For each class of first instruction a small library is made whose ``ncclAllReduce`` begins with it, and a loop calls it with and
without probes in turn, in one run: the ratio is what counts, the ns depend on the machine. They are CPU time of the calling
thread, user and system, so that a busy machine does not distort them. Then an agent is started on the library: its memory, its
CPU share while nothing happens, and the time from its start to the first record. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ncclwatch.model.events import Function
from ncclwatch.probes.attach import Backend
from ncclwatch.probes.program import Compilation
from ncclwatch.probes.sites import find_sites
from ncclwatch.probes.tracer import CallTracer, Leave, TracedFile
from ncclwatch.target.elf import ElfFile

FIRST_INSTRUCTIONS = {
    "push": "push %rbp\n mov %rsp, %rbp",
    "5-byte nop": ".byte 0x0f, 0x1f, 0x44, 0x00, 0x00\n push %rbp",
    "lea": "lea 8(%rsp), %rax\n push %rbp",
}

LIBRARY = """
        .text
        .globl  ncclAllReduce
        .type   ncclAllReduce, @function
ncclAllReduce:
        {first}
        xor     %eax, %eax
        pop     %rbp
        ret
        .size   ncclAllReduce, .-ncclAllReduce
"""

LOOP = r"""
#include <stdio.h>
#include <time.h>
int ncclAllReduce(const void *, void *, unsigned long, int, int, void *, void *);
int main(void)
{
	long n;
	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (scanf("%ld", &n) == 1) {
		struct timespec a, b;
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
		for (long i = 0; i < n; i++)
			ncclAllReduce(0, 0, i, 7, 0, 0, 0);
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
		printf("%.3f\n", ((b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec)) / n);
	}
	return 0;
}
"""

AGENT = """
    import os, sys, time
    started = time.monotonic()
    from ncclwatch.probes.tracer import CallTracer, TracedFile
    tracer = CallTracer.start([TracedFile(sys.argv[1])], watch=[int(sys.argv[2])])
    print(f"attached {time.monotonic() - started:.3f}", flush=True)
    while not len(tracer.poll(1.0)):
        pass
    print(f"first {time.monotonic() - started:.3f}", flush=True)
    before, wall = sum(os.times()[:2]), time.monotonic()
    while time.monotonic() - wall < 5:
        tracer.poll(0.25)
    share = (sum(os.times()[:2]) - before) / (time.monotonic() - wall)
    memory = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
    print(f"idle {share:.5f} {memory / 1024:.1f}", flush=True)
"""


class Loop:
    """A process that calls the library in a loop on demand."""

    def __init__(self, folder: Path, library: Path) -> None:
        source, program = folder / "loop.c", folder / "loop"
        source.write_text(LOOP)
        subprocess.run(["gcc", "-O2", "-o", program, source, library, "-Wl,-rpath," + str(folder)], check=True)
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def measure(self, calls: int) -> float:
        """ns a call."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{calls}\n")
        self.process.stdin.flush()
        return float(self._read())


def make_library(folder: Path, first: str) -> Path:
    source, library = folder / "library.S", folder / "libnccl.so.2"
    source.write_text(LIBRARY.format(first=first))
    subprocess.run(["gcc", "-shared", "-nostdlib", "-Wl,-soname,libnccl.so.2", "-o", library, source], check=True)
    return library


@contextmanager
def attached(library: Path, pid: int, compilation: Compilation, mode: str) -> Iterator[CallTracer]:
    leave = Leave.ALL if "leave" in mode else Leave.NONE
    backend = Backend.PERF if "perf" in mode else None
    watch = os.getpid() if "other process" in mode else pid
    with CallTracer.start(
        [TracedFile(str(library))], watch=[watch], compilation=compilation, leave=leave, backend=backend
    ) as tracer:
        tracer.follow_children = "other process" not in mode
        if "gated" in mode:
            tracer.set_gate(Function.ALL_REDUCE, enter=False, leave=False)
        yield tracer


MODES = ("enter", "enter and leave", "enter, perf", "enter, gated", "enter, other process")


def measure_class(name: str, calls: int, rounds: int, compilation: Compilation) -> list[dict[str, Any]]:
    """Medians over rounds of with and without in turn, so that drift of the machine falls on both."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        library = make_library(folder, FIRST_INSTRUCTIONS[name])
        with ElfFile.open(library) as elf:
            cost = find_sites(elf)[0].entry.cost
        loop = Loop(folder, library)
        rows = []
        try:
            for mode in MODES:
                bare, probed = [], []
                for _ in range(rounds):
                    bare.append(loop.measure(calls * 20))
                    with attached(library, loop.process.pid, compilation, mode) as tracer:
                        loop.measure(10)
                        tracer.poll()  # a stranger is ruled out with its first record
                        probed.append(loop.measure(calls))
                without, with_probe = statistics.median(bare), statistics.median(probed)
                rows.append(
                    {
                        "first instruction": name,
                        "class": str(cost),
                        "mode": mode,
                        "ns without": round(without, 1),
                        "ns with": round(with_probe, 1),
                        "ns a hit": round(with_probe - without, 1),
                        "ratio": round(with_probe / without, 1),
                    }
                )
        finally:
            loop.process.kill()
            loop.process.wait()
        return rows


def measure_agent() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        library = make_library(folder, FIRST_INSTRUCTIONS["push"])
        loop = Loop(folder, library)
        command = [sys.executable, "-c", textwrap.dedent(AGENT), str(library), str(loop.process.pid)]
        try:
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
                assert agent.stdout is not None
                attach_s = float(agent.stdout.readline().split()[1])
                loop.measure(1)
                first_s = float(agent.stdout.readline().split()[1])
                _, share, memory = agent.stdout.readline().split()
        finally:
            loop.process.kill()
            loop.process.wait()
    return {
        "s to attached": attach_s,
        "s to first record": first_s,
        "idle CPU share": float(share),
        "resident MB": float(memory),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000, help="calls a measurement with probes (default 20000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    compilation = Compilation()
    started = time.monotonic()
    compilation.result()
    compile_s = time.monotonic() - started
    rows = [row for name in FIRST_INSTRUCTIONS for row in measure_class(name, arguments.calls, arguments.rounds, compilation)]
    agent = measure_agent() | {"s to compile": round(compile_s, 3)}
    if arguments.json:
        print(json.dumps({"hits": rows, "agent": agent}))
        return 0
    print(f"{'first':12}{'class':16}{'mode':24}{'ns without':>12}{'ns with':>10}{'ns a hit':>10}{'ratio':>8}")
    for row in rows:
        print(
            f"{row['first instruction']:12}{row['class']:16}{row['mode']:24}"
            f"{row['ns without']:>12}{row['ns with']:>10}{row['ns a hit']:>10}{row['ratio']:>8}"
        )
    print("agent: " + ", ".join(f"{name} {value}" for name, value in agent.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
