"""What a NIC is: the driver of an RDMA device, and the members of a bonded network device. From sysfs, read afresh each time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ncclwatch.nic.rdma import SYS, text_of

MAX_MEMBERS = 64
"""Members of a bond that are looked at; hosts have two."""

_NAME = re.compile(r"[A-Za-z0-9_.@:-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Bond:
    """``members`` in the order in which the kernel lists them; ``active`` where one alone sends (mode active-backup)."""

    members: tuple[str, ...] = ()
    active: str = ""


def rdma_driver(device: str, sys: Path = SYS) -> str:
    """The driver of an RDMA device: that of its PCI device (``mlx5_core``), ``rxe`` for SoftRoCE; ``""`` where neither is told.

    SoftRoCE has no device of its own; it alone names the network device below it in ``parent`` (drivers/infiniband/sw/rxe/
    rxe_verbs.c, ``parent_show``).
    """
    folder = sys / "class/infiniband" / device
    try:
        name = (folder / "device/driver").resolve(strict=True).name
    except OSError:
        return "rxe" if text_of(folder / "parent") else ""
    return name if _NAME.fullmatch(name) else ""


def bond_of(netdev: str, sys: Path = SYS) -> Bond:
    """The bond that a network device is (Documentation/networking/bonding.rst); no members where it is none."""
    if not netdev or "/" in netdev:
        return Bond()
    folder = sys / "class/net" / netdev / "bonding"
    members = tuple(word for word in text_of(folder / "slaves").split()[:MAX_MEMBERS] if _NAME.fullmatch(word))
    if not members:  # most devices are no bond, and all are asked at each look
        return Bond()
    active = text_of(folder / "active_slave")
    return Bond(members, active if active in members else "")
