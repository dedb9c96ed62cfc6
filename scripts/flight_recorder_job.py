"""Jobs of four ranks over gloo in which something goes wrong; each rank dumps PyTorch's Flight Recorder at the end.

Started by ``make_flight_recorder_dumps.py``, with PyTorch on the path: ``flight_recorder_job.py FOLDER CASE...``. Ranks are
forked, so that PyTorch is loaded once. Even and odd ranks are a group each; a step is an AllGather there, an AllReduce and a
Broadcast of all.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, STEPS, FAULT_AT, VICTIM = 4, 8, 6, 2
TIMEOUT_S = 15
GIVE_UP_S = 2 * TIMEOUT_S


def step(number: int, rank: int, case: str, group: object) -> None:
    """One step of training."""
    faulty = number == FAULT_AT and rank == VICTIM
    dist.all_gather([torch.empty(256), torch.empty(256)], torch.ones(256), group=group)
    if faulty and case == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if faulty and case == "late":
        # Its program is busy elsewhere; what it has called can be dumped all the same.
        time.sleep(GIVE_UP_S)
        raise TimeoutError("it loads data")
    if not (faulty and case == "skipped"):
        dist.all_reduce(torch.ones(8192 if faulty and case == "size" else 4096))
    dist.broadcast(torch.ones(64), 0)


def dump(folder: Path, rank: int) -> None:
    """Write what PyTorch's own watchdog would write."""
    binding = torch._C._distributed_c10d
    if hasattr(binding, "_dump_fr_trace"):
        (folder / f"fr_rank_{rank}").write_bytes(binding._dump_fr_trace(True, True, False))
    if hasattr(binding, "_dump_fr_trace_json"):
        (folder / f"fr_rank_{rank}.json").write_bytes(binding._dump_fr_trace_json(True, False))


def train(folder: Path, case: str, rank: int) -> None:
    """Train until it ends, or fails."""
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", timeout=timeout)
    groups = [dist.new_group([0, 2], timeout=timeout), dist.new_group([1, 3], timeout=timeout)]
    try:
        for number in range(STEPS):
            step(number, rank, case, groups[rank % 2])
    except (RuntimeError, TimeoutError) as error:
        print(f"{case}, rank {rank}: {type(error).__name__}: {str(error)[:160]}", flush=True)
    dump(folder, rank)
    # A process that ends takes its peers' connections with it: they have their own timeout to meet.
    time.sleep(0 if case == "healthy" else GIVE_UP_S)


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def play(folder: Path, case: str) -> None:
    """One job to its end; who is frozen then is killed."""
    folder.mkdir(parents=True)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            os.environ.update({**place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            try:
                train(folder, case, rank)
            finally:
                os._exit(0)
        children.append(child)
    for rank, child in enumerate(children):
        if rank != VICTIM:
            os.waitpid(child, 0)
    if case == "frozen":
        os.kill(children[VICTIM], signal.SIGKILL)
    os.waitpid(children[VICTIM], 0)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        play(Path(sys.argv[1]) / name, name)
