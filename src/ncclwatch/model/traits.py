"""By what a process may differ from its peers, and what hardly changes while it lives: place, settings, CPUs, GPUs, NICs."""

from __future__ import annotations

from dataclasses import dataclass


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
