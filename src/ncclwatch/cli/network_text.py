"""NICs, links and the kernel's log in words, one line each; what every surface says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ncclwatch.model.network import KernelLogLine, LinkChange, NicRecord
from ncclwatch.text import clean, ranges, size


def nic_line(nic: NicRecord, *, host: bool = False) -> str:
    """``mlx5_0:1 (eth0)  up  200 Gb/s  in 11 GiB/s  out 10 GiB/s  ranks 0-3  packet_seq_err 12``; ``host`` names it too."""
    parts = [f"{clean(nic.host, 64)} " * host + clean(nic.label, 60) + (f" ({clean(nic.netdev, 32)})" if nic.netdev else "")]
    parts.append("up" if nic.up else f"DOWN ({clean(nic.state, 40)})")
    if nic.rate_gbps:
        parts.append(f"{nic.rate_gbps:g} Gb/s")
    if nic.receive_rate is not None and nic.send_rate is not None:
        parts += [f"in {size(nic.receive_rate)}/s", f"out {size(nic.send_rate)}/s"]
    if nic.used_by:
        parts.append(f"{'rank' if len(nic.used_by) == 1 else 'ranks'} {ranges(nic.used_by)}")
    if nic.congestion:
        parts.append(f"{nic.congestion} congestion notifications")
    parts += [f"{clean(name, 40)} {count}" for name, count in sorted(nic.errors.items(), key=lambda item: -item[1])[:4]]
    return "  ".join(parts)


def worth_showing(nics: Iterable[NicRecord], most: int = 8) -> list[NicRecord]:
    """The NICs that the job uses, troubled ones first, and others only where they counted errors."""
    shown = [nic for nic in nics if nic.used_by or nic.errors]
    return sorted(shown, key=lambda nic: (not (nic.used_by and nic.is_trouble), not nic.used_by, nic.name, nic.namespace))[:most]


def link_line(change: LinkChange, nics: Sequence[NicRecord] = ()) -> str:
    """``link eth0 on node1 is DOWN (switched off), and mlx5_0:1 with it; ranks 0-1 use it``."""
    ports = [nic for nic in nics if nic.netdev and (nic.host, nic.namespace, nic.netdev) == change.key]
    users = sorted({rank for nic in nics if nic.key == change.key or nic in ports for rank in nic.used_by})
    used = (
        f"; {'rank' if len(users) == 1 else 'ranks'} {ranges(users)} {'uses' if len(users) == 1 else 'use'} it" if users else ""
    )
    detail = f" ({clean(change.detail, 60)})" if change.detail else ""
    detail += f", and {', '.join(clean(port.name, 40) for port in ports)} with it" if ports else ""
    return f"link {clean(change.label, 60)} on {clean(change.host, 64)} is {'up' if change.up else 'DOWN'}{detail}{used}"


def kernel_line(line: KernelLogLine) -> str:
    """``kernel log of node1, 2026-11-22 03:12:44: NVRM: Xid …``."""
    return f"kernel log of {clean(line.origin, 86)}: {clean(line.text, 300)}"
