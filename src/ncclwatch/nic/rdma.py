"""RDMA ports as sysfs shows them: state, rate, GIDs, counters.

Files of ``/sys/class/infiniband`` are described in the kernel's Documentation/ABI/stable/sysfs-class-infiniband. Everything is
read afresh at each call; a file that is missing (not every driver has every counter) is left out, never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")

MAX_TEXT = 4096
"""Characters of a file of sysfs: a page."""
MAX_DIGITS = 20
"""Of a counter: 64 bits."""

MAX_GIDS = 256
"""GIDs looked at on one port; mlx5 has 256 slots, most of them empty."""

PORT_COUNTERS = {
    "port_xmit_data": "sent words",
    "port_rcv_data": "received words",
    "port_xmit_wait": "sends that waited for credits",
    "port_rcv_errors": "receive errors",
    "port_xmit_discards": "discarded sends",
    "symbol_error": "symbol errors",
    "link_error_recovery": "link recoveries",
    "link_downed": "times the link went down",
    "local_link_integrity_errors": "link integrity errors",
    "excessive_buffer_overrun_errors": "buffer overruns",
}
"""Counters of the InfiniBand specification (``counters/``); the two of data count 4-byte words."""

RETRY_COUNTERS = (
    "local_ack_timeout_err",
    "packet_seq_err",
    "out_of_sequence",
    "rnr_nak_retry_err",
    "implied_nak_seq_err",
    "req_transport_retries_exceeded",
    "roce_adp_retrans",
    "retry_exceeded_err",
    "retry_rnr_exceeded_err",
    "seq_nak_err",
    "completer_retry_err",
    "duplicate_request",
    "out_of_seq_request",
)
"""Signs of loss in ``hw_counters/`` (names of mlx5 and rxe): retransmissions and what makes for them."""

CONGESTION_COUNTERS = ("np_cnp_sent", "rp_cnp_handled", "rp_cnp_ignored", "np_ecn_marked_roce_packets", "rx_ecn_marked_pkts")
"""Congestion notification of RoCE (DCQCN) in ``hw_counters/``."""


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table: ``kind`` is ``IB/RoCE v1`` or ``RoCE v2``, ``netdev`` the network device it came from."""

    index: int
    value: str
    kind: str
    netdev: str


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device at one moment.

    ``state`` is the logical state (``active``, ``down``, ``init``, ``armed``), ``physical`` the physical one (``link-up``,
    ``disabled``, …). ``rate_gbps`` is the signalling rate. ``netdev`` is ``""`` for an InfiniBand port without a network device.
    ``counters`` and ``hw_counters`` are running totals by the kernel's names.
    """

    device: str
    port: int
    link_layer: str
    state: str
    physical: str
    rate_gbps: float | None
    netdev: str
    lid: int | None
    gids: tuple[Gid, ...]
    counters: dict[str, int]
    hw_counters: dict[str, int]

    @property
    def name(self) -> str:
        """``device:port``, as NCCL writes it."""
        return f"{self.device}:{self.port}"

    @property
    def is_up(self) -> bool:
        """Whether it can carry traffic."""
        return self.state == "active"

    @property
    def sent_bytes(self) -> int | None:
        """Bytes sent since the driver was loaded; ``None`` when the driver does not count them."""
        words = self.counters.get("port_xmit_data")
        return None if words is None else words * 4

    @property
    def retries(self) -> int:
        """The sum of all signs of loss this driver counts."""
        return sum(self.hw_counters.get(name, 0) for name in RETRY_COUNTERS)

    @property
    def congestion_notifications(self) -> int:
        """The sum of what this driver counts of RoCE congestion notification."""
        return sum(self.hw_counters.get(name, 0) for name in CONGESTION_COUNTERS)


def read_ports(sys: Path = SYS) -> list[RdmaPort]:
    """All ports of all RDMA devices below ``sys``, by name.

    For a target in another network namespace ``sys`` is its own ``/proc/PID/root/sys``. Empty on a host without RDMA.
    """
    devices = _children(sys / "class/infiniband")
    ports = [_read_port(device, folder) for device in devices for folder in _children(device / "ports") if _is_number(folder)]
    return sorted(ports, key=lambda port: (port.device, port.port))


def _is_number(folder: Path) -> bool:
    return re.fullmatch("[0-9]{1,3}", folder.name) is not None


def read_port(device: str, port: int = 1, sys: Path = SYS) -> RdmaPort | None:
    """One port, or ``None`` when there is no such one (any more)."""
    folder = sys / "class/infiniband" / device
    return _read_port(folder, folder / "ports" / str(port)) if (folder / "ports" / str(port) / "state").exists() else None


def port_state(device: str, port: int, sys: Path = SYS) -> str:
    """Only the logical state: what a watcher asks for many times a second; ``""`` when the port is gone."""
    return _state(text_of(sys / "class/infiniband" / device / "ports" / str(port) / "state"))


def _read_port(device: Path, folder: Path) -> RdmaPort:
    gids = tuple(_read_gids(folder))
    lid = text_of(folder / "lid")
    return RdmaPort(
        device=device.name,
        port=int(folder.name),
        link_layer=text_of(folder / "link_layer"),
        state=_state(text_of(folder / "state")),
        physical=_state(text_of(folder / "phys_state")),
        rate_gbps=_rate(text_of(folder / "rate")),
        netdev=next((gid.netdev for gid in gids if gid.netdev), ""),
        lid=int(lid, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", lid) else None,
        gids=gids,
        counters=_numbers(folder / "counters"),
        hw_counters=_numbers(folder / "hw_counters") or _numbers(device / "hw_counters"),
    )


def _read_gids(folder: Path) -> list[Gid]:
    found = []
    entries = [path for path in _children(folder / "gids") if _is_number(path)]
    for entry in sorted(entries, key=lambda path: int(path.name))[:MAX_GIDS]:
        value = text_of(entry)
        if value and value.strip("0:"):
            attributes = folder / "gid_attrs"
            kind, netdev = text_of(attributes / "types" / entry.name), text_of(attributes / "ndevs" / entry.name)
            found.append(Gid(int(entry.name), value, kind, netdev))
    return found


def _state(text: str) -> str:
    """``4: ACTIVE`` → ``active``; ``5: LinkUp`` → ``link-up``."""
    word = text.partition(":")[2].strip() or text
    if word.isupper():
        return word.lower()
    return "".join(f"-{char.lower()}" if char.isupper() and index else char.lower() for index, char in enumerate(word))


def _rate(text: str) -> float | None:
    """``100 Gb/sec (4X EDR)`` → 100.0."""
    try:
        return float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return None


def _numbers(folder: Path) -> dict[str, int]:
    result = {}
    for path in _children(folder):
        text = text_of(path)
        if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS and path.name != "lifespan":
            result[path.name] = int(text)
    return result


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def text_of(path: Path) -> str:
    """What a file of sysfs says; ``""`` where there is none. The kernel gives a page at most."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_TEXT).strip()
    except OSError:
        return ""
