"""Which switch, and which port of it, a NIC is plugged into, as switches say by themselves (LLDP, IEEE 802.1AB).

Switches send a frame to each port every 30 s by default. Frames are read by a packet socket, which needs CAP_NET_RAW; nothing is
sent. The multicast address is asked for on that socket alone and given back with it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ncclwatch.errors import PrivilegeError

ETHERTYPE = 0x88CC
"""Fact: LLDP (IEEE 802.1AB, 7)."""
NEAREST_BRIDGE = bytes.fromhex("0180c200000e")
"""Fact: the address that no bridge forwards (802.1AB, 7.1)."""
MAX_TEXT = 64
"""Bound: characters of a name."""
MAX_NICS = 64
"""Bound: NICs that are listened on."""
_SOL_PACKET, _ADD_MEMBERSHIP, _MR_MULTICAST = 263, 1, 0
"""Fact: include/uapi/linux/if_packet.h."""
_END, _CHASSIS, _PORT, _SYSTEM = 0, 1, 2, 5
_BY_MAC, _PORT_BY_MAC = 4, 3
"""Subtypes of the identity that hold a MAC address (802.1AB, 8.5.2 and 8.5.3)."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The other end of a cable. ``switch`` is its name, or its chassis where it gives none."""

    switch: str
    port: str


def parse(frame: bytes) -> Neighbour | None:
    """The neighbour that an Ethernet frame tells of; None for any other frame, and for a damaged one."""
    if len(frame) < 14 or struct.unpack_from("!H", frame, 12)[0] != ETHERTYPE:
        return None
    found: dict[int, str] = {}
    for kind, value in _parts(frame[14:]):
        if kind in (_CHASSIS, _PORT) and len(value) > 1:
            found[kind] = _identity(value, _BY_MAC if kind == _CHASSIS else _PORT_BY_MAC)
        elif kind == _SYSTEM:
            found[kind] = _text(value)
    switch = found.get(_SYSTEM) or found.get(_CHASSIS, "")
    return Neighbour(switch, found.get(_PORT, "")) if switch else None


def _parts(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and value of each part; seven bits of type and nine of length stand before it (802.1AB, 8.4)."""
    at = 0
    while at + 2 <= len(data):
        (head,) = struct.unpack_from("!H", data, at)
        kind, length = head >> 9, head & 0x1FF
        if kind == _END or at + 2 + length > len(data):
            return
        yield kind, data[at + 2 : at + 2 + length]
        at += 2 + length


def _identity(value: bytes, by_mac: int) -> str:
    return value[1:7].hex(":") if value[0] == by_mac and len(value) == 7 else _text(value[1:])


def _text(value: bytes) -> str:
    shown = value.decode("utf-8", "replace")[:MAX_TEXT]
    return "".join(letter for letter in shown if letter.isprintable()).strip()


def listen(nics: Sequence[str], seconds: float) -> dict[str, Neighbour]:
    """NIC → its neighbour, for those that told within so many seconds. Raises :class:`PrivilegeError`; a NIC that is not there is
    left out."""
    found: dict[str, Neighbour] = {}
    try:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETHERTYPE)) as end:
            for nic in nics[:MAX_NICS]:
                with contextlib.suppress(OSError):
                    wanted = struct.pack("=iHH8s", socket.if_nametoindex(nic), _MR_MULTICAST, 6, NEAREST_BRIDGE)
                    end.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, wanted)
            ends = time.monotonic() + seconds
            while len(found) < len(set(nics)) and (left := ends - time.monotonic()) > 0:
                end.settimeout(left)
                try:
                    frame, (nic, *_) = end.recvfrom(2048)
                except TimeoutError:
                    break
                if nic in nics and (neighbour := parse(frame)) is not None:
                    found[nic] = neighbour
    except PermissionError:
        raise PrivilegeError("packets of LLDP may not be read", "run as root, or with CAP_NET_RAW; or leave --lldp out") from None
    return found
