"""What is said of a process that the kernel does not let us read: the thing that forbids it, not 'run as root' to root."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.target import forbidden

PTRACE = 1 << 19


def make_proc(folder: Path, *, caps: int = PTRACE, scope: int = 0, ids: str = "0 0 4294967295", seccomp: int = 0,
              profile: str = "unconfined", mounts: str = "proc /proc proc rw 0 0") -> Path:  # fmt: skip
    for name, text in {
        "sys/kernel/yama/ptrace_scope": f"{scope}\n",
        "self/status": f"Name:\tx\nCapEff:\t{caps:016x}\nSeccomp:\t{seccomp}\n",
        "self/uid_map": f"   {ids}\n",
        "self/attr/current": profile + "\n",
        "self/mounts": mounts + "\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("made", "euid", "said"),
    [
        ({"caps": 0}, 1000, "run as root, or with CAP_SYS_PTRACE"),
        ({"caps": 0, "scope": 1}, 1000, "ptrace_scope restricts the same user too"),
        ({"scope": 3}, 0, "ptrace_scope is 3"),
        ({"caps": 0}, 0, "--cap-add SYS_PTRACE"),
        ({"ids": "0 100000 65536"}, 0, "root of a user namespace"),
        ({"profile": "docker-default (enforce)"}, 0, "docker-default (enforce)"),
        ({"seccomp": 2}, 0, "seccomp"),
        ({"mounts": "proc /proc proc rw,hidepid=invisible 0 0"}, 0, "hidepid"),
        ({}, 0, "security module"),
    ],
)
def test_the_hint_names_what_forbids_it(tmp_path: Path, made: dict[str, object], euid: int, said: str) -> None:
    text = forbidden.hint(4711, make_proc(tmp_path, **made), euid=euid)  # type: ignore[arg-type]
    assert said in text
    assert euid != 0 or "run as root," not in text


def test_nothing_that_can_be_read_is_needed(tmp_path: Path) -> None:
    assert forbidden.hint(4711, tmp_path, euid=1000) == "run as root, or with CAP_SYS_PTRACE"
