"""Captures and launches of CUDA graphs as the probes see them, where only the driver is there to be probed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ncclwatch.collect.replays import Replays
from ncclwatch.model.events import Flag, Function, Kind
from ncclwatch.probes.attach import Backend
from ncclwatch.probes.tracer import CallTracer, TracedFile
from testbed.calls.harness import calls, collect, compilation

pytestmark = [pytest.mark.attach, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

DRIVER = """
#define ANOTHER_PART __attribute__((noinline, noipa))
ANOTHER_PART int cuStreamBeginCapture_v2(void *stream, int mode) { return stream == 0 && mode; }
ANOTHER_PART int cuStreamEndCapture(void *stream, void **graph) { *graph = (void *)0x1000; return stream == 0; }
ANOTHER_PART int cuGraphInstantiateWithFlags(void **made, void *graph, unsigned long long flags)
{ *made = (char *)graph + 0x2000 + flags; return 0; }
ANOTHER_PART int cuGraphLaunch(void *graph, void *stream) { return graph == stream; }
ANOTHER_PART int cuGraphLaunch_ptsz(void *graph, void *stream) { return cuGraphLaunch(graph, stream) + 1; }
"""
PROGRAM = """
#include <stdio.h>
int cuStreamBeginCapture_v2(void *, int), cuStreamEndCapture(void *, void **);
int cuGraphInstantiateWithFlags(void **, void *, unsigned long long);
int cuGraphLaunch(void *, void *), cuGraphLaunch_ptsz(void *, void *);
int main(void)
{
	void *graph, *made, *stream = (void *)0x10;
	cuStreamBeginCapture_v2(stream, 0);
	cuStreamEndCapture(stream, &graph);
	cuGraphInstantiateWithFlags(&made, graph, 0);
	for (int i = 0; i < 5; i++)
		cuGraphLaunch(made, stream);
	for (int i = 0; i < 7; i++)
		cuGraphLaunch_ptsz(made, stream);
	cuGraphLaunch((void *)0x9999, stream);
	return getchar() != EOF;
}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A driver, and a program that uses it."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    (folder / "program.c").write_text(PROGRAM)
    library, program = folder / "libcuda.so.1", folder / "program"
    subprocess.run(["gcc", "-O1", "-fPIC", "-shared", str(folder / "driver.c"), "-o", str(library)], check=True)
    made = ["gcc", "-O1", str(folder / "program.c"), str(library), f"-Wl,-rpath,{folder}", "-o", str(program)]
    subprocess.run(made, check=True)
    return library, program


@pytest.mark.parametrize("backend", list(Backend))
def test_every_launch_counts_once_also_where_one_variant_calls_the_other(built: tuple[Path, Path], backend: Backend) -> None:
    library, program = built
    tracer = CallTracer.start([TracedFile(str(library))], watch=[os.getpid()], compilation=compilation(), backend=backend)
    with tracer, subprocess.Popen([program], stdin=subprocess.PIPE) as process:
        events = collect(tracer, lambda e: bool((e["sendbuff"] == 0x9999).any()))
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0
    launched = calls(events, Function.GRAPH_LAUNCH)
    assert launched["sendbuff"].tolist() == [0x3000] * 12 + [0x9999]
    assert calls(events, Function.STREAM_END_CAPTURE, Kind.LEAVE)["comm"].tolist() == [0x1000]
    assert calls(events, Function.GRAPH_INSTANTIATE)["sendbuff"].tolist() == [0x1000]
    assert calls(events, Function.GRAPH_INSTANTIATE, Kind.LEAVE)["comm"].tolist() == [0x3000]
    # What it captured is known, which is nothing; of the last graph it is not.
    seen = calls(Replays().expand(events), Function.GRAPH_LAUNCH)
    assert np.flatnonzero(seen["flags"] & np.uint16(Flag.UNKNOWN_GRAPH)).tolist() == [12]
