"""Record what real NCCL says of known faults: ``record_ras_answers.py [NAME ...]``, on the CPU testbed (root not needed).

Answers of RAS (JSON where the release gives it, and text) and debug logs of every rank become
``tests/fixtures/nccl/VERSION-FAULT.{json,txt}`` and ``VERSION-FAULT.log.xz``; rank 1 is the culprit of each fault. Names of this
machine are taken out.
"""

from __future__ import annotations

import lzma
import os
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from ncclwatch.ingest.ras_client import Address, ask  # noqa: E402
from testbed.job import Job  # noqa: E402
from testbed.ras import environment, free_address  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures" / "nccl"
VERSIONS = ("2.27.5", "2.29.2", "2.32.3")
JSON_FROM = (2, 28, 7)
RANKS, VICTIM = 4, 1
SUBSYSTEMS = "INIT,COLL,P2P,NET,GRAPH,RAS,BOOTSTRAP"
"""Of the debug logs: not each allocation, which would be most of them."""
DEAD_AFTER_S = 70.0
"""RAS considers a process dead that was out of reach for 60 s (RAS_PEER_DEAD_TIMEOUT)."""
FAULTS = {
    "healthy": (),
    "frozen": (),
    "killed": (),
    "dead": (),
    "stuck": ("--fault", f"stuck:rank={VICTIM},at=20"),
    "skipped": ("--fault", f"skip:rank={VICTIM},at=20"),
    "other": ("--fault", f"other_op:rank={VICTIM},at=20"),
    "smaller": ("--fault", f"other_size:rank={VICTIM},at=20,factor=0.5"),
    "init": ("--fault", f"no_init:rank={VICTIM}"),
}
"""What is done to rank 1, with the job's options: frozen or killed from outside a moment ago (``dead``: for over a minute), or by
itself never enters, leaves one out, calls another collective or size, or never creates its communicator (RAS is not asked then:
nccl#1669)."""
LOGGED = ("healthy", "stuck", "other", "smaller", "init")
"""Faults of which the debug logs are kept."""


def main() -> int:
    wanted = set(sys.argv[1:])
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for version in VERSIONS:
        for fault, extra in FAULTS.items():
            name = f"{version}-{fault}"
            if not wanted or name in wanted or fault in wanted:
                record(name, version, fault, extra)
    return 0


def record(name: str, version: str, fault: str, extra: tuple[str, ...]) -> None:
    """One job: broken, asked, ended."""
    address, creating = free_address(), fault == "init"
    with tempfile.TemporaryDirectory() as folder:
        # To standard output the newest lines would be held back: a file is line-buffered (src/debug.cc).
        env = {
            **environment(address), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": SUBSYSTEMS, "NCCL_DEBUG_FILE": f"{folder}/%p.log",
        }  # fmt: skip
        options = {"shape": "allreduce", "transport": "socket", "count": 1 << 16, "wait_for": "nothing" if creating else "ready"}
        answers: dict[str, bytes] = {}
        with Job(nccl=version, ranks=RANKS, env=env, extra=("--pause-us", "50000", *extra), **options) as job:  # type: ignore[arg-type]
            if creating:
                time.sleep(4.0)
            else:
                answers = ask_broken(job, fault, address, version)
        logs = {path.name: path.read_text() for path in sorted(Path(folder).iterdir())}
    for ending, answer in answers.items():
        (FIXTURES / f"{name}.{ending}").write_bytes(without_names(answer))
        print(f"{name}.{ending}: {len(answer)} bytes", flush=True)
    if fault in LOGGED:
        text = "".join(logs.values())
        packed = lzma.compress(without_names(text.encode()), preset=9)
        (FIXTURES / f"{name}.log.xz").write_bytes(packed)
        print(f"{name}.log.xz: {len(packed)} bytes of {len(text)}", flush=True)


def ask_broken(job: Job, fault: str, address: Address, version: str) -> dict[str, bytes]:
    """What RAS answers once the job is broken, by the ending of its file."""
    job.wait_progress(5, timeout=60)
    if fault == "frozen":
        job.freeze(VICTIM)
    elif fault in ("killed", "dead"):
        job.kill(VICTIM)
    elif fault != "healthy":
        job.wait_progress(12, timeout=60)
    time.sleep(DEAD_AFTER_S if fault == "dead" else 2.0)
    answers = {"txt": ask(address, as_json=False)}
    if tuple(map(int, version.split("."))) >= JSON_FROM:
        answers["json"] = ask(address, as_json=True)
    if fault == "frozen":
        job.thaw(VICTIM)
    return answers


def without_names(data: bytes) -> bytes:
    """Without names and folders of this machine."""
    data = re.sub(rb"\b" + re.escape(os.uname().nodename.encode()) + rb"\b", b"node", data)
    return re.sub(rb"(/[\w.+-]+){2,}/(?=[\w.+-]+)", b"/opt/", data)


if __name__ == "__main__":
    sys.exit(main())
