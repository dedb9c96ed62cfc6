"""Records of other tools: each parser, and what the engine makes of what it let through."""

from __future__ import annotations

import atexit
import bz2
import gzip
import io
import json
import lzma
import pickle
import shutil
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path

from fuzz.harness import Target
from unit.ingest.dumps import Dumps


def targets() -> list[Target]:
    """One a format."""
    return [
        Target("flight-recorder", "a dump of PyTorch's Flight Recorder", _dumps, _judge_dump, quick=220),
        Target("packed", "an archive of records", _archives, _unpack, quick=1000),
    ]


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
    from ncclwatch.ingest.flight_recorder import FlightRecorder, ingested_of
    from ncclwatch.ingest.flight_recorder_file import read_dump
    from ncclwatch.ingest.flight_recorder_job import FlightJob
    from ncclwatch.ingest.flight_recorder_rank import read_rank

    files = [_folder() / "fr_0", _folder() / "fr_1"]
    files[1].write_bytes(data)
    FlightRecorder().recognises(data[:4096], files[1])
    # In this process, whose coverage guides: by default dumps are read by another one.
    ranks = [read_rank(read_dump(file), rank) for rank, file in enumerate(files)]
    for verdict in judge_ingested(ingested_of(FlightJob(ranks, set()), "fr_")):
        verdict.to_json()


def _archives() -> list[bytes]:
    line = b"[save_count 2] [1755590106.364857579] [Rank 0] Fun AllReduce Data 1 stream 0x55919d27b4b0 opCount 2\n"
    found = [gzip.compress(line * 3), lzma.compress(line * 3), bz2.compress(line * 3)]
    for mode in ("w", "w:gz"):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode=mode) as archive:
            member = tarfile.TarInfo("logs/rank_0.log")
            member.size = len(line)
            archive.addfile(member, io.BytesIO(line))
        found.append(out.getvalue())
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("logs/rank_0.log", line * 3)
    return [*found, out.getvalue()]


def _unpack(data: bytes) -> None:
    from ncclwatch.ingest.packed import Unpacking, kind_of

    archive = _folder() / "archive"
    archive.write_bytes(data)
    unpacking = Unpacking()
    if kind_of(data[:512]):
        for file in unpacking.files(archive):
            assert file.resolve().is_relative_to(unpacking.place)
