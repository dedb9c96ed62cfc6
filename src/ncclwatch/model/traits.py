"""By what a process may differ from its peers, and what hardly changes while it lives: place, settings, CPUs, GPUs, NICs."""

from __future__ import annotations

import re
from dataclasses import dataclass

ADAPTIVE_ROUTING = "NCCL_IB_ADAPTIVE_ROUTING"
"""Since NCCL 2.16: data that may arrive in any order, and a write of no bytes behind it that says so (``net_ib``)."""
NCCLS_CHOICE = -2
"""Fact: the value of ``IB_ADAPTIVE_ROUTING`` that leaves it to the link layer (``net_ib``)."""
_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9]\d*)", re.ASCII)
"""As ``strtoll`` with base 0 reads it (NCCL, ``src/misc/param.cc``)."""


@dataclass(frozen=True, slots=True)
class GpuTrait:
    """A GPU of the node, as its driver lists it. ``bus_id`` is ``0000:07:00.0``, in lower case."""

    bus_id: str
    model: str = ""
    uuid: str = ""
    link: str = ""
    """PCIe now: ``16 lanes at 32.0 GT/s PCIe``."""


@dataclass(frozen=True, slots=True)
class NicTrait:
    """A network device of the node: ``name`` is that of the RDMA device, else of the network interface."""

    name: str
    rate: str = ""
    firmware: str = ""
    model: str = ""
    link: str = ""
    mtu: str = ""


@dataclass(frozen=True, slots=True)
class Traits:
    """What was found; an empty text or ``None`` means that it was not.

    ``node`` is the scheduler's name of the node, ``job`` the number of the Slurm job, ``namespace`` and ``pod`` of Kubernetes.
    ``settings`` are names and values of environment variables that steer NCCL, as they were at exec. ``cpus`` is the list of
    CPUs it may run on, ``cpu_group`` that of its control group's CPU set, ``cpu_quota`` how many CPUs a limit gives it: as they
    were when the first of them changed last. ``machine`` is ``x86_64``.
    """

    node: str = ""
    job: str = ""
    namespace: str = ""
    pod: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    cpus: str = ""
    cpu_group: str = ""
    cpu_quota: float | None = None
    machine: str = ""
    kernel: str = ""
    cpu_model: str = ""
    driver: str = ""
    python: str = ""
    gpus: tuple[GpuTrait, ...] = ()
    nics: tuple[NicTrait, ...] = ()

    @property
    def adaptive_routing(self) -> bool:
        """Whether ``NCCL_IB_ADAPTIVE_ROUTING`` is on, by the environment at exec. Left alone it is on over InfiniBand alone."""
        found = _NUMBER.match(dict(self.settings).get(ADAPTIVE_ROUTING, ""))
        if found is None:
            return False
        sign, digits = found.groups()
        base = 16 if digits.lower().startswith("0x") else 8 if digits.startswith("0") else 10
        return int(sign + digits, base) not in (0, NCCLS_CHOICE)
