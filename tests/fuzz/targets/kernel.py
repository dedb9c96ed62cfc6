"""What the kernel says on somebody else's behalf: rings of BPF programs, ``/proc``, its log, netlink, sysfs of a container."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.harness import Target
from fuzz.mutate import of_bytes, of_lines, of_parts, pack, parts
from fuzz.targets.files import _folder
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.calls import communicators_named, creating
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.errors import NcclwatchError
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.events import EVENT_DTYPE
from ncclwatch.model.work import Counting
from ncclwatch.nic import kmsg, links, rdma, sockets
from ncclwatch.nic.namespaces import attributes
from ncclwatch.probes.ring import PAGE, RingDecoder
from ncclwatch.target import cgroup, maps, namespaces, process, traits
from ncclwatch.wire import layouts
from ncclwatch.wire.accounts import decode, merged_bandwidth
from ncclwatch.wire.windows import WorkWindows
from unit.fake_node import FakeNode, calls
from unit.synthetic import frozen_ring

RING = 4096


def targets() -> list[Target]:
    """All of this module."""
    return [
        Target("ring", "the pages of a BPF ring", _rings, _ring, of_bytes, RING + 64),
        Target("calls", "call records, as far as windows and the ledger", _calls, _call_records, of_bytes, 136 * 24, quick=80),
        Target("wire-records", "accounts of queue pairs", _accounts, _account, of_parts(of_bytes), 1 << 13, quick=60),
        Target("proc", "files of a process below /proc", _procs, _proc, of_parts(_of_named), 1 << 12, quick=80),
        Target("kmsg", "records of the kernel's log", _logs, _log, of_lines, 1 << 13),
        Target("netlink", "answers of sock_diag and rtnetlink", _answers, _answer, of_parts(of_bytes), 1 << 12),
        Target("sysfs", "RDMA ports in sysfs", _ports, _port, of_parts(_of_named), 1 << 12, quick=60),
    ]


# --- BPF ---------------------------------------------------------------------------------------------------------------


@cache
def _events() -> bytes:
    samples = [series[0] for series in FakeNode(frozen_ring(2, 4)).series]
    return bytes(calls(samples, 5, begin_ns=10**9).tobytes())


def _rings() -> list[bytes]:
    """Consumer's and producer's position, then the data pages."""
    slot = (136).to_bytes(4, "little") + bytes(4)
    size = EVENT_DTYPE.itemsize
    slots = b"".join(slot + _events()[at : at + size] for at in range(0, len(_events()), size))
    whole = struct.pack("<QQ", 0, len(slots)) + slots
    wrapped = struct.pack("<QQ", RING * 7, RING * 7 + 144 * 3) + slots
    busy = struct.pack("<QQ", 0, 144 * 2) + slots[:144] + (136 | 1 << 31).to_bytes(4, "little") + slots[148:]
    return [whole, wrapped, busy]


def _ring(data: bytes) -> None:
    positions = np.frombuffer(data[:16].ljust(16, b"\0"), np.uint64).copy()
    content = data[16 : 16 + RING].ljust(RING, b"\0")
    decoder = RingDecoder(positions[:1], positions[1:], np.frombuffer(content + content[:PAGE], np.uint8), EVENT_DTYPE, RING)
    decoder.pending()
    for _ in range(2):
        _taken(decoder.read())


def _taken(events: Any) -> None:
    creating(events)
    communicators_named(events)


def _calls() -> list[bytes]:
    return [_events(), _events()[: 136 * 4]]


def _call_records(data: bytes) -> None:
    events = np.frombuffer(data[: len(data) // 136 * 136], EVENT_DTYPE)
    _taken(events)
    node = FakeNode(frozen_ring(2, 4))
    node.aggregator.feed_events(events)
    batch = node.batch(events=events)
    for writer in (BatchWriter(calls="all"), BatchWriter(grouped=True)):
        decoded = BatchReader().decode(writer.encode(batch)).batch
        list(decoded.windows)
    diagnosis = LiveDiagnosis()
    diagnosis.update(batch.samples)
    diagnosis.add_calls(events, 0, batch.host)
    diagnosis.update(batch.samples)


def _accounts() -> list[bytes]:
    """Keys and values of one queue pair after the other."""
    source, found = random.Random("accounts"), []
    for _ in range(3):
        value = np.zeros((), layouts.QP)
        for name in ("posted", "completed", "retired", "samples", "tail", "posted_bytes"):
            value[name] = source.randrange(1, 300)
        value["head"] = int(value["tail"]) - 1
        value["first_ns"], value["last_completion_ns"] = 10**9, 2 * 10**9
        key = np.array((7, 1000, 5), layouts.QP_KEY)
        found.append(key.tobytes() + value.tobytes()[:2048])
    return [pack(found), pack([*found[:1], *found[:1]])]


def _account(data: bytes) -> None:
    windows = WorkWindows()
    key_size, size = layouts.QP_KEY.itemsize, layouts.QP.itemsize
    for number, part in enumerate(parts(data, 4)):
        keys = np.frombuffer(part[:key_size].ljust(key_size, b"\0"), layouts.QP_KEY)
        values = np.frombuffer(part[key_size : key_size + size].ljust(size, b"\0"), layouts.QP)
        accounts = list(decode(keys, values))
        for account in accounts:
            _ = account.in_flight, account.receives_waiting, account.oldest_pending_ns, account.opcodes, account.error_statuses
            _ = account.window, account.bandwidth(), account.mean_bandwidth(), account.latency_ns(0.5), account.role()
        merged_bandwidth(accounts)
        pids = {account.pid for account in accounts}
        now = (number + 1) * 10**9
        found = windows.take(
            accounts,
            {},
            {},
            pids=pids,
            counting=Counting.BURSTS,
            began_ns=now - 10**8,
            ended_ns=now,
            polls=dict.fromkeys(pids, number),
        )
        batch = NodeBatch(host="a", boot_id="b", sequence=number, time_ns=now, wall_ns=now, work=tuple(found))
        BatchReader().decode(BatchWriter().encode(batch))


# --- /proc -------------------------------------------------------------------------------------------------------------

_PROC = {
    "stat": b"7 (a) b) S 1 7 7 0 -1 4194304 1 0 0 0 12 34 0 0 20 0 3 0 4711 1000 100 18446744073709551615" + b" 0" * 19,
    "status": b"Name:\ta\nTracerPid:\t0\nUid:\t1000\t1000\t1000\t1000\nNSpid:\t7\t1\n"
    b"voluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t6\n",
    "schedstat": b"100 200 3\n",
    "maps": b"7f0000000000-7f0000001000 r-xp 00000000 08:01 42 /usr/lib/libnccl.so.2\n"
    b"7f0000002000-7f0000003000 rw-p 00000000 00:00 0 \n"
    b"55d0c0000000-55d0c0001000 rw-p 00000000 00:00 0 [heap]\n",
    "environ": b"RANK=3\0LOCAL_RANK=1\0WORLD_SIZE=8\0SLURM_PROCID=7\0MASTER_ADDR=a\0",
    "cmdline": b"python\0train.py\0",
    "cgroup": b"0::/kubepods/pod1/" + b"ab" * 32 + b"\n4:cpu,cpuacct:/a/b\n",
    "mountinfo": b"24 1 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n30 1 0:3 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n",
    "cpu.stat": b"usage_usec 7\nnr_periods 10\nnr_throttled 3\n",
    "children": b"8 9 10 \n",
}


def _procs() -> list[bytes]:
    """Parts: the name of a file, a zero byte and its content."""
    return [pack([name.encode() + b"\0" + text]) for name, text in _PROC.items()] + [
        pack(name.encode() + b"\0" + text for name, text in _PROC.items())
    ]


def _of_named(data: bytes, source: random.Random) -> bytes:
    name, zero, text = data.partition(b"\0")
    return name + zero + of_lines(text, source)


def _proc(data: bytes) -> None:
    folder = _folder() / "proc"
    task = folder / "7" / "task" / "7"
    task.mkdir(parents=True, exist_ok=True)
    (folder / "self").mkdir(exist_ok=True)
    given = {name: text for part in parts(data, 12) for name, zero, text in (part.partition(b"\0"),) if zero}
    for name, text in _PROC.items():
        for place in (folder / "7", task, folder / "self"):
            (place / name).write_bytes(given.get(name.encode(), text))
    cgroup._mounts.cache_clear()
    for call in (
        lambda: process.read_stat(7, folder),
        lambda: process.read_status(7, folder),
        lambda: process.ranks_from_environ(process.read_environ(7, folder)),
        lambda: process.read_command(7, folder),
        lambda: process.context_switches(7, folder),
        lambda: process.run_queue_wait_ns(7, folder),
        lambda: process.children(7, folder),
        lambda: maps.read_maps(7, folder),
        lambda: namespaces.container_id(7, folder),
        lambda: cgroup.cpu_limit(7, folder),
        lambda: cgroup.group_folders(7, folder),
        lambda: traits.cpu_group(7, folder),
        lambda: _limits(folder),
    ):
        try:
            call()
        except NcclwatchError:
            continue


def _limits(folder: Path) -> None:
    """The file of a group, where it is found: a hierarchy of our own below the folder."""
    limits = cgroup.CpuLimits(7, folder)
    limits._groups, limits._next = ((str(folder / "7" / "cpu.stat"), 1),), float("inf")
    limits.read()


# --- the log, netlink, sysfs -------------------------------------------------------------------------------------------


def _logs() -> list[bytes]:
    return [
        b"6,1234,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n SUBSYSTEM=pci\n",
        b"4,1235,5000001,-;mlx5_core 0000:86:00.0 ens1f0np0: Link down\n",
        b"4,1236,5000002,-;mlx5_core 0000:86:00.0: Port module event[error]: fail\n",
        b"3,1237,5000003,-;pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0\n",
        b"3,1238,5000004,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB\n",
        b"6,1239,5000005,-;python[4711]: segfault at 0 ip 0000 sp 0000 error 4 in a.so\n",
        b"3,1240,6,-;NVRM: NVLink link 3 on 0000:3b:00 SXid\n",
    ]


def _log(data: bytes) -> None:
    """Regular expressions included: text of 8 KiB must not take a second."""
    kmsg.parse(data)
    log = object.__new__(kmsg.KernelLog)
    log.lost, log._next, log._fd = 0, 1, -1
    log._count_lost(data)


class _Said:
    """A netlink socket that has said these datagrams, and then no more."""

    def __init__(self, datagrams: list[bytes]) -> None:
        self._left: Iterator[bytes] = iter(datagrams)

    def sendto(self, data: bytes, _address: object) -> int:
        return len(data)

    def recv(self, _size: int) -> bytes:
        found = next(self._left, None)
        if found is None:
            raise TimeoutError("timed out")
        return found


def _answers() -> list[bytes]:
    """A byte that says whom it is for, then datagrams."""
    identity = (
        struct.pack(">HH", 1234, 80)
        + socket.inet_aton("10.0.0.1").ljust(16, b"\0")
        + socket.inet_aton("10.0.0.2").ljust(16, b"\0")
        + bytes(12)
    )
    one = struct.pack("=BB2x48sIIIII", socket.AF_INET, 1, identity, 0, 1, 2, 0, 99)
    info = struct.pack("=HH", 4 + 232, 2) + bytes(range(232))
    message = struct.pack("=IHHII", 16 + len(one) + len(info), 20, 2, 1, 0) + one + info
    done = struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0)
    error = struct.pack("=IHHIIi", 20, 2, 2, 1, 0, -2)
    name = struct.pack("=HH8s", 12, 3, b"eth0\0\0\0\0") + struct.pack("=HHI", 8, 4, 1500) + struct.pack("=HHB3x", 5, 16, 6)
    totals = struct.pack("=HH", 4 + 200, 23) + bytes(200)
    link = struct.pack("=BxHiII", 0, 1, 2, 65, 0) + name + totals
    device = struct.pack("=IHHII", 16 + len(link), 16, 2, 1, 0) + link
    return [
        pack([b"\0", message + message, done]),
        pack([b"\0", error]),
        pack([b"\1", device + done]),
        pack([b"\1", device, error]),
        pack([b"\2", device]),
    ]


def _answer(data: bytes) -> None:
    tag, *datagrams = parts(data) or [b""]
    said: Any = _Said([datagram[: 1 << 16] for datagram in datagrams])
    if tag[:1] == b"\0":
        for family in (socket.AF_INET, socket.AF_INET6):
            for one in sockets._dump(_Said(datagrams), family, range(1 << 32), {}):  # type: ignore[arg-type]
                repr(one)
    elif tag[:1] == b"\1":
        try:
            for link in links._dump(said):
                links._device(link, None)
        except OSError:
            return  # read_devices makes one line of it
    else:
        for datagram in datagrams:
            list(links._link_messages(datagram))
            list(attributes(datagram))


_SYS = {
    "state": b"4: ACTIVE",
    "phys_state": b"5: LinkUp",
    "rate": b"200 Gb/sec (4X HDR)",
    "link_layer": b"Ethernet",
    "lid": b"0x0",
    "gids/0": b"fe80:0000:0000:0000:0ac0:ebff:fe00:0001",
    "gid_attrs/types/0": b"RoCE v2",
    "gid_attrs/ndevs/0": b"eth0",
    "counters/port_xmit_data": b"1000",
    "hw_counters/out_of_sequence": b"5",
}


def _ports() -> list[bytes]:
    return [pack([name.encode() + b"\0" + text]) for name, text in _SYS.items()]


def _port(data: bytes) -> None:
    root = _folder() / "sys"
    folder = root / "class/infiniband/mlx5_0/ports/1"
    given = {name: text for part in parts(data, 12) for name, zero, text in (part.partition(b"\0"),) if zero}
    for name, text in _SYS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(given.get(name.encode(), text))
    for port in rdma.read_ports(root):
        _ = port.is_up, port.sent_bytes, port.retries, port.congestion_notifications
    rdma.port_state("mlx5_0", 1, root)
