"""What a process was doing, from its state, its threads and its frames; and what is like it and is not that."""

from __future__ import annotations

import pytest

from ncclwatch.knowledge.doing import doings, of_frames, patterns
from ncclwatch.knowledge.rows import rows
from ncclwatch.model.doing import Doing

SITE = "/opt/venv/lib/python3.11/site-packages/"
TRAIN = ("train", "/home/user/train.py")
LOADER = ("_MultiProcessingDataLoaderIter._next_data", SITE + "torch/utils/data/dataloader.py")
WAIT = ("wait", "/usr/lib/python3.11/threading.py")


@pytest.mark.parametrize(
    ("frames", "doing"),
    [
        ([WAIT, ("_try_get_data", SITE + "torch/utils/data/dataloader.py"), LOADER, TRAIN], Doing.DATA_LOADER),
        (
            [("all_reduce", SITE + "torch/distributed/distributed_c10d.py"), ("wrapper", SITE + "torch/x.py"), TRAIN],
            Doing.IN_NCCL,
        ),
        ([("save", SITE + "torch/serialization.py"), ("save_checkpoint", "/home/user/train.py")], Doing.CHECKPOINT),
        ([("write", "/home/user/io.py"), ("Trainer.save_checkpoint", "/home/user/train.py")], Doing.CHECKPOINT),
        ([("compile_fx_inner", SITE + "torch/_inductor/compile_fx.py"), TRAIN], Doing.COMPILING),
        ([("_call_with_frames_removed", "<frozen importlib._bootstrap>"), TRAIN], Doing.IMPORTING),
        ([("synchronize", SITE + "torch/cuda/__init__.py"), TRAIN], Doing.GPU_WAIT),
        ([("sched_yield", "/usr/lib/libc.so.6"), ("ncclLocalOpAppend", "/opt/nccl/libnccl.so.2.27.5"), TRAIN], Doing.IN_NCCL),
        ([("0x7f00", "/usr/lib/libcuda.so.1"), ("cudaStreamSynchronize", "/usr/lib/libcudart.so.12"), TRAIN], Doing.GPU_WAIT),
        ([TRAIN], Doing.USER_CODE),
        ([], Doing.UNKNOWN),
        # A barrier within a checkpoint: it waits for others in NCCL, and is not what they wait for.
        (
            [("barrier", SITE + "torch/distributed/distributed_c10d.py"), ("save_checkpoint", "/home/user/train.py")],
            Doing.IN_NCCL,
        ),
        # Near misses: a function of that name elsewhere, a file of that name of the user's own.
        ([("synchronize", "/home/user/clock.py"), TRAIN], Doing.USER_CODE),
        ([("wait", "/usr/lib/python3.11/threading.py"), TRAIN], Doing.USER_CODE),
        ([("is_available", SITE + "torch/cuda/__init__.py"), TRAIN], Doing.USER_CODE),
    ],
)
def test_frames_tell(frames: list[tuple[str, str]], doing: Doing) -> None:
    assert of_frames(frames) is doing


@pytest.mark.parametrize(
    ("state", "threads", "held", "found"),
    [
        ("T", ["stopped"], False, (Doing.STOPPED, Doing.USER_CODE)),
        ("Z", [], False, (Doing.ZOMBIE, Doing.USER_CODE)),
        ("S", ["sleeping", "disk sleep"], False, (Doing.DISK_WAIT, Doing.USER_CODE)),
        ("S", ["sleeping"], True, (Doing.GIL_HELD, Doing.USER_CODE)),
        ("R", ["running"], False, (Doing.USER_CODE,)),
    ],
)
def test_state_and_threads_come_first(state: str, threads: list[str], held: bool, found: tuple[Doing, ...]) -> None:
    assert doings(state, threads, [TRAIN], gil_held=held) == found


def test_nothing_known_is_unknown_alone() -> None:
    assert doings("S", ["sleeping"], [], gil_held=False) == (Doing.UNKNOWN,)
    assert doings("T", ["stopped"], [], gil_held=False) == (Doing.STOPPED,)


def test_everything_frames_tell_of_that_explains_has_a_row() -> None:
    told = {pattern.doing for pattern in patterns()} - {Doing.IN_NCCL}
    with_row = {doing for row in rows() for doing in row.when.lists.get("doing", ())}
    assert {str(doing) for doing in told} <= with_row
    assert {str(doing) for doing in (Doing.GIL_HELD, Doing.DISK_WAIT, Doing.USER_CODE)} <= with_row
