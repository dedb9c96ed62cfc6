"""What is told of a process that a verdict names: its main thread and its proxies, as the kernel shows them."""

from __future__ import annotations

import pytest

from ncclwatch.collect.suspects import process_look
from ncclwatch.target.stacks import ProcessStack
from ncclwatch.target.threads import ThreadRow

MAIN = ThreadRow(7, "python", "sleeping", "futex_do_wait", "futex")
PROXY = ThreadRow(9, "NCCL Progress", "running", "", "user code")
STUCK = ThreadRow(11, "x", "disk sleep", "nfs_wait", "read")


@pytest.mark.parametrize(
    ("proxies", "said"),
    [
        ((), ""),
        ((PROXY,), "; proxy thread running (user code)"),
        ((PROXY, PROXY, None), "; 2 proxy threads running (user code); proxy thread gone"),
    ],
)
def test_proxy_threads_are_told_after_the_main_thread(proxies: tuple[ThreadRow | None, ...], said: str) -> None:
    look = process_look(ProcessStack(7, "S", (MAIN, PROXY), proxies=proxies), "node0")
    assert look.kernel == "main thread sleeping in futex_do_wait (futex)" + said


def test_threads_in_disk_sleep_are_counted() -> None:
    look = process_look(ProcessStack(7, "S", (MAIN, STUCK, STUCK)), "node0")
    assert look.kernel.endswith("; 2 threads in disk sleep: nfs_wait")
