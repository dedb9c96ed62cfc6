"""InfiniBand on a machine without RDMA: hosts (netns.py) that have a stand-in for an adapter each.

    with AdapterNetwork(hosts=2) as network, network.job("2.27.5", ranks=2) as job: ...

Real NCCL runs its own InfiniBand transport on them. What stands in is libibverbs and the adapter behind it (verbs/library.c): its
queue pairs are connections over the host's link, so that a limit, a delay, a loss or a pulled cable acts on them as on sockets.

Who watches such a job looks for RDMA devices in ``/sys``, where this machine has none. So everything, the job as well, runs in a
mount namespace in which they stand there: ``python -m testbed.adapters -- COMMAND …`` (root) runs a command in one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from testbed.job import Job, build_folder
from testbed.netns import Network, NetworkError

FOLDER = Path("/run/ncclwatch-adapters")
"""The device files, and the machine's own ``/sys``."""
NODES = ((1, 3), (1, 5), (1, 7), (1, 8), (1, 9))
"""Devices of the kernel's memory driver, which anybody can open, and which differ in their numbers: a host each."""
MAX_HOSTS = len(NODES)
ADAPTERS = Path("/sys/class/infiniband")

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_FS = 0x20000, 0x200
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 1 << 18


def name_of(host: int) -> str:
    """The RDMA device of a host."""
    return f"sim{host}"


class AdapterNetwork(Network):
    """Hosts with an adapter each; only where :func:`are_there`."""

    def __init__(self, hosts: int = 2, **options: Any) -> None:
        if not are_there() or hosts > MAX_HOSTS:
            raise NetworkError(f"stand-ins for RDMA devices are for {MAX_HOSTS} hosts, below `python -m testbed.adapters`")
        super().__init__(hosts, **options)

    def job(self, nccl: str = "2.27.5", ranks: int = 2, *, hosts: Sequence[int] | None = None, **options: Any) -> Job:
        """A job (not started) over NCCL's InfiniBand transport, by each host's adapter."""
        library = {"LD_LIBRARY_PATH": str(build_folder().resolve() / "verbs"), "NCCL_NET": "IB", "NCCL_IB_GID_INDEX": "0"}
        options |= {"transport": "ib", "env": library | options.get("env", {})}
        return super().job(nccl, ranks, hosts=hosts, **options)

    def enter(self, host: int) -> list[str]:
        """What starts a rank's command on a host, where NCCL finds its adapter."""
        device = f"{name_of(host)}@{self.hosts[host].address()}@{self.link(host).nic}@{FOLDER}/uverbs{host}"
        return [*super().enter(host), "env", f"TESTBED_ADAPTERS={device}", f"NCCL_IB_HCA=={name_of(host)}"]


def are_there() -> bool:
    """Whether the stand-ins stand in ``/sys`` here."""
    return (ADAPTERS / name_of(0)).exists()


@contextlib.contextmanager
def standing() -> Iterator[None]:
    """Put them there for a while, for this thread and for what it starts. Raises OSError."""
    place, before = Path.cwd(), os.open("/proc/thread-self/ns/mnt", os.O_RDONLY)
    try:
        stand_there()
        try:
            yield
        finally:
            _call("folders of its own", _LIBC.unshare(_CLONE_FS))  # threads that were started since share them
            _call("back into the mount namespace", _LIBC.setns(before, _CLONE_NEWNS))
            os.chdir(place)
    finally:
        os.close(before)


def stand_there() -> None:
    """Put them there for good, in a mount namespace of this thread's own and of what it starts. Raises OSError."""

    def mount(source: str, target: Path, kind: str | None, flags: int) -> None:
        filesystem = kind.encode() if kind else None
        _call(f"mounting {target}", _LIBC.mount(source.encode(), str(target).encode(), filesystem, flags, None))

    _call("a mount namespace", _LIBC.unshare(_CLONE_NEWNS))
    mount("none", Path("/"), None, _MS_REC | _MS_PRIVATE)
    FOLDER.mkdir(exist_ok=True)
    mount("none", FOLDER, "tmpfs", 0)
    whole = FOLDER / "sys"
    whole.mkdir()
    mount("/sys", whole, None, _MS_BIND | _MS_REC)
    for folder in (Path("/sys/class"), Path("/sys/dev/char")):
        mount("none", folder, "tmpfs", 0)
        for entry in (whole / folder.relative_to("/sys")).iterdir():
            (folder / entry.name).symlink_to(entry)
    for host, (major, minor) in enumerate(NODES):
        os.mknod(FOLDER / f"uverbs{host}", 0o20666, os.makedev(major, minor))
        _device(host, Path("/sys/dev/char", f"{major}:{minor}"))


def _call(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _device(host: int, number: Path) -> None:
    name, gid = name_of(host), f"0000:0000:0000:0000:0000:ffff:0a4e:00{host + 1:02x}"
    uverbs = FOLDER / f"class/uverbs{host}"
    uverbs.mkdir(parents=True)
    (uverbs / "ibdev").write_text(f"{name}\n")
    number.unlink()
    number.symlink_to(uverbs)
    port = ADAPTERS / name / "ports/1"
    said = {
        "state": "4: ACTIVE", "phys_state": "5: LinkUp", "link_layer": "Ethernet", "rate": "100 Gb/sec (4X EDR)", "lid": "0x0",
        "gids/0": gid, "gid_attrs/types/0": "RoCE v2", "gid_attrs/ndevs/0": f"nic0h{host}",
    }  # fmt: skip
    for place, text in said.items():
        (port / place).parent.mkdir(parents=True, exist_ok=True)
        (port / place).write_text(text + "\n")


def main() -> int:
    """Run a command where the stand-ins are; its exit status."""
    parser = argparse.ArgumentParser(prog="testbed.adapters", description="Run a command beside stand-ins for RDMA devices.")
    parser.add_argument("command", nargs="+")
    command = parser.parse_args().command
    try:
        stand_there()
    except OSError as error:
        print(f"testbed.adapters: {error}", file=sys.stderr)
        return 1
    os.execvp(command[0], command)  # noqa: S606 - as asked for


if __name__ == "__main__":
    sys.exit(main())
