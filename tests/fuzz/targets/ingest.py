"""Records of other tools: each parser, and what the engine makes of what it let through."""

from __future__ import annotations

import atexit
import json
import pickle
import shutil
import tempfile
from functools import cache
from pathlib import Path

from fuzz.harness import Target
from unit.ingest.dumps import Dumps


def targets() -> list[Target]:
    """One a format."""
    return [Target("flight-recorder", "a dump of PyTorch's Flight Recorder", _dumps, _judge_dump, quick=40)]


def _dumps() -> list[bytes]:
    job = Dumps(2, groups={"1": [0, 1]}, about={"1": "tp"})
    for _ in range(2):
        job.all_call("_all_gather_base", group="1")
        job.call(0, "send 0->1")
        job.call(1, "recv 1<-0")
    job.call(0, "coalesced", state="started")
    job.call(0, "all_to_all", state="scheduled")
    gloo = Dumps(2, backend="gloo", version="2.4")
    gloo.all_call(times=3, state="scheduled")
    whole = [job.dump(0), gloo.dump(1)]
    return [pickle.dumps(dump, protocol) for dump in whole for protocol in (2, 4)] + [json.dumps(dump).encode() for dump in whole]


@cache
def _folder() -> Path:
    """A job of which one rank is well."""
    folder = Path(tempfile.mkdtemp(prefix="ncclwatch-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    job = Dumps(2, groups={"1": [0, 1]}, about={"1": "tp"})
    job.all_call(times=2)
    (folder / "fr_0").write_bytes(pickle.dumps(job.dump(0), 2))
    return folder


def _judge_dump(data: bytes) -> None:
    from ncclwatch.cli.foreign import judge_ingested
    from ncclwatch.ingest.flight_recorder import FlightRecorder

    files = [_folder() / "fr_0", _folder() / "fr_1"]
    files[1].write_bytes(data)
    FlightRecorder().recognises(data[:4096], files[1])
    for ingested in FlightRecorder().read(files):
        for verdict in judge_ingested(ingested):
            verdict.to_json()
