"""A scenario as the CPU testbed's job takes it: the command line of the training shape, and what the harness does to it
meanwhile.

One description drives both: options are those of the testbed program (``tests/testbed/program``: ``options.h``, ``training.h``,
``fault.h``). What the program cannot do (faults of a network between hosts need ``tc`` in the guest) is listed in
``unsupported``, never left out in silence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ncclwatch.simulate.layout import ranks_of_node
from ncclwatch.simulate.scenario import Fault, FaultKind, LookalikeKind, Scenario, Schedule

ELEMENT_BYTES = 4
"""The job's messages are 32-bit floats unless told otherwise."""


@dataclass(frozen=True, slots=True)
class HarnessAction:
    """What the harness does to a rank once it has finished ``iteration`` iterations: ``freeze``, ``thaw`` or ``kill``.

    ``after_s`` seconds later (for ``thaw``: after the freeze).
    """

    what: str
    rank: int
    iteration: int
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TestbedPlan:
    """How to run a scenario on the testbed: arguments of ``testbed.job.Job`` and of the program."""

    __test__ = False

    nccl: str
    ranks: int
    hosts: tuple[int, ...]
    count: int
    iterations: int
    options: tuple[str, ...]
    actions: tuple[HarnessAction, ...] = ()
    unsupported: tuple[str, ...] = ()


def plan(scenario: Scenario) -> TestbedPlan:
    """Map a scenario to the testbed. Hosts are the scenario's nodes where it goes over shared memory, else one rank a host."""
    layout, work, net = scenario.layout, scenario.workload, scenario.network
    unsupported: list[str] = []
    if net.intra_node == "p2p":
        unsupported.append("NVLink: the testbed has network and shared memory only")
    if net.net != "socket":
        unsupported.append("InfiniBand: over sockets on the testbed, over SoftRoCE only in the guest")
    if net.algorithm != "Ring" or net.protocol != "Simple":
        unsupported.append(f"{net.algorithm}/{net.protocol}: the testbed plays Ring/Simple")
    if work.tp_bytes != work.pp_bytes or (layout.cp > 1 and work.cp_bytes != work.pp_bytes):
        unsupported.append("activations of tensor, context and pipeline parallelism have one size on the testbed")
    count = work.pp_bytes // ELEMENT_BYTES
    names = {Schedule.INTERLEAVED: "interleaved", Schedule.GPIPE: "gpipe", Schedule.ONE_F_ONE_B: "1f1b"}
    values = {
        "--tp": layout.tp,
        "--cp": layout.cp,
        "--pp": layout.pp,
        "--ep": layout.ep,
        "--schedule": names[work.schedule],
        "--micro-batches": work.micro_batches,
        "--chunks": work.virtual_stages,
        "--layers": work.layers,
        "--gradients": work.dp_bytes // ELEMENT_BYTES,
        "--tokens": max(1, work.ep_bytes // ELEMENT_BYTES // layout.ep),
        "--forward-us": _number(work.forward_ms * 1e3 / work.layers),
        "--optimizer-us": _number(work.optimizer_ms * 1e3),
        "--loader-us": _number(work.loader_ms * 1e3),
        "--jitter": _number(work.jitter),
    }
    options = [text for key, value in values.items() for text in (key, str(value))]
    if work.sequence_parallel:
        options.append("--sequence-parallel")
    options += _lookalikes(scenario, unsupported)
    actions: list[HarnessAction] = []
    for fault in scenario.faults:
        options += _fault(fault, scenario, actions, unsupported)
    hosts = (1,) * layout.world
    if net.intra_node == "shm":
        nodes = -(-layout.world // layout.ranks_per_node)
        hosts = tuple(len(ranks_of_node(layout, node)) for node in range(nodes))
    return TestbedPlan(
        nccl=net.nccl,
        ranks=layout.world,
        hosts=hosts,
        count=count,
        iterations=work.iterations,
        options=tuple(options),
        actions=tuple(actions),
        unsupported=tuple(unsupported),
    )


def as_testbed_runs(scenario: Scenario) -> Scenario:
    """The scenario with the habits of the testbed's job: norm of gradients, a communicator for the gather, merged exchanges.

    Its backward pass takes twice its forward pass, and inside a node it goes over network or shared memory.
    """
    work = replace(
        scenario.workload,
        grad_norm=True,
        gather_communicator=True,
        merge_exchanges=True,
        backward_ms=2 * scenario.workload.forward_ms,
    )
    return replace(scenario, workload=work)


def _number(value: float) -> str:
    return f"{value:.6g}"


def _lookalikes(scenario: Scenario, unsupported: list[str]) -> list[str]:
    options: list[str] = []
    for event in scenario.lookalikes:
        if event.kind is LookalikeKind.CHECKPOINT:
            options += ["--checkpoint-every", str(event.iteration + 1), "--checkpoint-us", _number(event.duration_s * 1e6)]
        elif event.kind is LookalikeKind.EVALUATION:
            options += ["--evaluate-every", str(event.iteration + 1)]
        elif event.kind is LookalikeKind.WARMUP:
            extra = (event.factor - 1) * scenario.workload.micro_batches * scenario.workload.forward_ms * 3 * event.count
            options += ["--warm-up-us", _number(extra * 1e3)]
        elif event.kind is LookalikeKind.UNEVEN_STAGES:
            scale = ["1"] * scenario.layout.pp
            scale[event.stage] = _number(event.factor)
            options += ["--stage-scale", ",".join(scale)]
        elif event.kind is LookalikeKind.BARRIER:
            options += ["--checkpoint-every", str(event.iteration + 1), "--checkpoint-us", _number(event.duration_s * 1e6)]
        else:
            pause = f"us={_number(event.duration_s * 1e6)}"
            for rank in range(scenario.layout.world):
                options += ["--fault", f"loader:rank={rank},at={event.iteration},for={event.count},{pause}"]
    del unsupported  # every harmless event has an option
    return options


def _fault(fault: Fault, scenario: Scenario, actions: list[HarnessAction], unsupported: list[str]) -> list[str]:
    """``--fault`` options of one fault, or what the harness does instead."""
    at = fault.iteration if fault.iteration is not None else _iteration_at(scenario, fault.start_s or 0.0)
    kind, rank = fault.kind, fault.rank
    if kind in (FaultKind.STOP, FaultKind.KILL):
        actions.append(HarnessAction("freeze" if kind is FaultKind.STOP else "kill", rank, at, fault.offset_ms / 1e3))
        if kind is FaultKind.STOP and math.isfinite(fault.duration_s):
            actions.append(HarnessAction("thaw", rank, at, fault.duration_s))
        return []
    lasting = "" if not math.isfinite(fault.duration_s) else f",for={max(1, round(fault.duration_s / _iteration_s(scenario)))}"
    common = f"rank={rank},at={at}{lasting}"
    once = f"rank={rank},at={at},for=1" + (f",group={fault.role}" if fault.role else "")
    us = f"us={_number(fault.strength * 1e6)}"
    texts: dict[FaultKind, str] = {
        FaultKind.SKIP: f"skip:{once}",
        FaultKind.OTHER_OPERATION: f"other_op:{once}",
        FaultKind.OTHER_SIZE: f"other_size:{once}",
        FaultKind.OTHER_TYPE: f"other_type:{once}",
        FaultKind.SWAP: f"swap:rank={rank},at={at},for=1",
        FaultKind.GPU_STALL: f"stall_gpu:{common}",
        FaultKind.PROXY_STALL: f"stall_proxy:{common}",
        FaultKind.SLOW_GPU: f"slow_gpu:{common},factor={_number(fault.strength)}",
        FaultKind.GC_PAUSE: f"pause:{common},{us},every={max(1, round(fault.period_s / _iteration_s(scenario)))}",
        FaultKind.SLOW_LOADER: f"loader:{common},{us}",
        FaultKind.NEVER_ENTERS: f"pause:rank={rank},at={at},for=1,us=3.6e9",
        FaultKind.SLOW_COPY: f"slow_copy:{common},rate=1e8",
        FaultKind.CPU_LIMIT: f"one_cpu:{common}",
        FaultKind.PROXY_SLEEP: f"slow_proxy:{common},{us},p=0.01",
        FaultKind.INIT_MISSING: f"no_init:rank={rank}",
        FaultKind.CRASH: f"crash:rank={rank},at={at},signal=11",
    }
    if kind in texts:
        watchdog = (
            ["--watchdog", _number(fault.duration_s)] if kind is FaultKind.CRASH and math.isfinite(fault.duration_s) else []
        )
        return ["--fault", texts[kind], *watchdog]
    if kind in (FaultKind.HOST_LOAD, FaultKind.FEW_CPUS):
        node = ranks_of_node(scenario.layout, rank // scenario.layout.ranks_per_node)
        what = "load:rank={},at={},threads=2" if kind is FaultKind.HOST_LOAD else "one_cpu:rank={},at={}"
        return [text for r in node for text in ("--fault", what.format(r, at))]
    if kind is FaultKind.SLOW_LINK:
        slow_us = fault.delay_ms * 1e3 or 1e3 * fault.strength
        unsupported.append("a slow link is played as slow communication kernels of its sender; a slow path needs tc in the guest")
        return ["--fault", f"slow_link:{common},us={_number(slow_us)}"]
    unsupported.append(f"{kind}: needs tc in the guest")
    return []


def _iteration_s(scenario: Scenario) -> float:
    """A rough iteration time: micro-batches plus the pipeline's fill, forward and backward, loader and optimizer."""
    work = scenario.workload
    turns = work.micro_batches + scenario.layout.pp - 1
    return (turns * (work.forward_ms + work.backward_ms) + work.loader_ms + work.optimizer_ms) / 1e3


def _iteration_at(scenario: Scenario, start_s: float) -> int:
    return min(scenario.workload.iterations - 1, int(start_s / _iteration_s(scenario)))
