"""System calls of a command of ours by which it can reach the network or change anything, as strace shows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

NETWORK = "%network"
CHANGING = (
    "adjtimex,capset,chmod,chown,clock_settime,fallocate,fchmod,fchmodat,fchown,fchownat,fsconfig,fsmount,ioperm,iopl,kexec_load,kill,"
    "lchown,link,linkat,mkdir,mkdirat,mknod,mknodat,mount,move_mount,open_tree,pidfd_getfd,pidfd_open,pidfd_send_signal,pivot_root,"
    "process_madvise,process_vm_writev,ptrace,reboot,rename,renameat,renameat2,rmdir,setns,setpriority,setrlimit,setxattr,swapon,"
    "symlink,symlinkat,tgkill,tkill,truncate,umount2,unlink,unlinkat,unshare,bpf,perf_event_open,init_module,finit_module"
)
"""Calls by which a process may change another one, the machine or names of files."""


def calls(
    trace: Path,
    words: list[str],
    popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
    *,
    more: str = "",
    most_s: float = 120,
) -> list[tuple[str, str]]:
    """(name, line) of each such call of a command, and of each that ``more`` names; started by ``popen``."""
    run = popen(
        ["strace", "-f", "-y", "--seccomp-bpf", "-qq", "-e", f"trace={NETWORK},poll,{CHANGING}{more}", "-e", "signal=none",
         "-o", str(trace), sys.executable, "-m", "ncclwatch", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    out, said = run.communicate(timeout=most_s)
    assert run.returncode == 0, (out, said)
    found = re.findall(r"^\d+ +((\w+)\(.*)$", trace.read_text(), re.MULTILINE)
    return [(name, line) for line, name in found]
