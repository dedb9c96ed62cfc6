"""The UDP source port of a RoCE v2 queue pair, as its driver computes it from queue pair numbers.

NCCL leaves ``grh.flow_label`` at 0 (``ncclIbRtrQp``, src/transport/net_ib.cc of v2.18.3-1; net_ib/connect.cc of v2.30.7-1), so
the driver chooses. A rule is looked up by driver and kernel release; where none is known there is no prediction, and the reason
is said. A prediction is one: firmware, or a driver from outside the kernel's tree, may do otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

ROCE_PORT = 4791
"""UDP destination port of RoCE v2."""
LOWEST = 0xC000
"""``IB_ROCE_UDP_ENCAP_VALID_PORT_MIN`` and ``RXE_ROCE_V2_SPORT``."""
MAX_QUEUE_PAIR = (1 << 24) - 1
GOLDEN_RATIO_32 = 0x61C88647
"""include/linux/hash.h."""

Release = tuple[int, int]
"""(5, 17) of ``5.17.3-2-amd64``."""

_FLOW_LABEL = 0xFFFFF


def flow_label(local: int, remote: int) -> int:
    """``rdma_calc_flow_label`` (include/rdma/ib_verbs.h, 5.8): 20 bits, the same for both ends."""
    folded = local * remote
    folded ^= folded >> 20
    folded ^= folded >> 40
    return folded & _FLOW_LABEL


def label_to_port(label: int) -> int:
    """``rdma_flow_label_to_udp_sport`` (include/rdma/ib_verbs.h, 5.8)."""
    return (label & 0x3FFF) ^ ((label & 0xFC000) >> 14) | LOWEST


def label_of(port: int) -> int:
    """A flow label that gives this source port (:data:`LOWEST` and above). 0 would be none: then two bits that cancel out."""
    return port & 0x3FFF or 1 << 14 | 1


def of_both(local: int, remote: int) -> int:
    """``rdma_get_udp_sport`` with flow label 0: both ends send from the same port. A label that comes out as 0 stays 0."""
    return label_to_port(flow_label(local, remote))


def of_local(local: int, _remote: int | None = None) -> int:
    """``RXE_ROCE_V2_SPORT + (hash_32_generic(qp_num, 14) & 0x3fff)`` (drivers/infiniband/sw/rxe/rxe_qp.c, before 5.17)."""
    return LOWEST + ((local * GOLDEN_RATIO_32 & 0xFFFFFFFF) >> 18)


@dataclass(frozen=True, slots=True)
class PortRule:
    """How one driver computes the port, in kernels from ``since`` on and before ``until``.

    ``driver`` is the name of the device's driver in sysfs (of a software device its kind). ``needs_remote``: the number of the
    other end's queue pair goes in.
    """

    name: str
    driver: str
    compute: Callable[[int, int], int]
    needs_remote: bool
    since: Release
    until: Release | None
    source: str


RULES = (
    PortRule(
        "both-queue-pairs", "mlx5_core", of_both, True, (5, 8), None, "drivers/infiniband/hw/mlx5/qp.c, commit 2b880b2e5e03"
    ),
    PortRule("both-queue-pairs", "ice", of_both, True, (5, 17), None, "drivers/infiniband/hw/irdma/verbs.c, commit 69e609ba9662"),
    PortRule("both-queue-pairs", "hns3", of_both, True, (5, 17), None, "hns_roce_hw_v2.c, commit 93f8df548187"),
    PortRule("both-queue-pairs", "rxe", of_both, True, (5, 17), None, "sw/rxe/rxe_verbs.c, commit 104f062fd1b9"),
    PortRule("local-queue-pair", "rxe", of_local, False, (4, 8), (5, 17), "sw/rxe/rxe_qp.c, before commit 104f062fd1b9"),
)
"""Every rule that is known, with the place in the kernel that says so."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """``port`` and the rule it is from; or no port, and ``reason``."""

    port: int | None
    rule: str = ""
    reason: str = ""


def release(text: str) -> Release | None:
    """The first two numbers of a kernel's release (``uname -r``)."""
    found = re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", text, re.ASCII)
    return (int(found[1]), int(found[2])) if found else None


def rule_of(driver: str, kernel: str) -> PortRule | str:
    """The rule of a device, or why there is none; ``kernel`` is its host's release."""
    mine = [rule for rule in RULES if rule.driver == driver]
    if not mine:
        return f"no rule is known for the driver {driver}" if driver else "the driver of the NIC is not known"
    version = release(kernel)
    if version is None:
        return "the kernel's release is not known"
    # Red Hat's kernels bring RDMA drivers of later releases under an old number: which ones the number does not tell.
    if re.search(r"\.el\d", kernel) and any(version < edge for rule in mine for edge in (rule.since, rule.until or rule.since)):
        return f"kernel {kernel} has drivers of later releases: which rule holds is not known"
    fitting = [rule for rule in mine if rule.since <= version and (rule.until is None or version < rule.until)]
    return (
        fitting[0]
        if fitting
        else f"{driver} chose the port otherwise before Linux {'.'.join(map(str, min(r.since for r in mine)))}"
    )


def predict(driver: str, kernel: str, local: int, remote: int | None) -> Prediction:
    """The UDP source port of packets that queue pair ``local`` sends to queue pair ``remote`` (RC or UC, flow label 0)."""
    rule = rule_of(driver, kernel)
    if isinstance(rule, str):
        return Prediction(None, reason=rule)
    if not 0 < local <= MAX_QUEUE_PAIR or (remote is not None and not 0 < remote <= MAX_QUEUE_PAIR):
        return Prediction(None, reason="the number of a queue pair is out of range")
    if remote is None:
        if rule.needs_remote:
            return Prediction(None, reason="the queue pair at the other end is not known")
        remote = 0
    return Prediction(rule.compute(local, remote), rule.name)
