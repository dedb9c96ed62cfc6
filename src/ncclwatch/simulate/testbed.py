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
LARGEST_ACTIVATION_BYTES = 1 << 16
LARGEST_GRADIENT_BYTES = 1 << 24
"""Of all ranks together; each may have a mebibyte in any case."""
INPUT_BYTES = 1 << 18
"""What a micro-batch copies to the device where a copy is slow."""
LONGEST_PAST = 12
"""Healthy iterations that a job has behind it at most when it is made slow from outside: two cores may take seconds for each."""
NVLINKS = 4
"""So many NCCL takes for fast enough to choose LL128 for some sizes, and not for so fast that two cores play many channels."""
LIMITED_SHARE = 0.02
"""Share of one CPU that limited ranks have together: little enough to show beside ranks that mostly sleep."""


@dataclass(frozen=True, slots=True)
class HarnessAction:
    """What the harness does to ranks from outside: ``freeze``, ``thaw``, ``kill``, or ``limit`` (a share of one CPU, by cgroup).

    Where hosts have links of their own, to the link of the ranks' host: ``link-down``, ``link-limit`` (to a ``share`` of its
    rate), ``link-impair`` (``delay_s`` each way, ``loss`` of frames), ``traffic`` (somebody else's, through it).
    ``after_s`` seconds after the job's first iteration began, and after so many ``iterations``; of ``thaw`` after the rank was
    stopped.
    """

    what: str
    ranks: tuple[int, ...]
    after_s: float
    share: float = 1.0
    delay_s: float = 0.0
    loss: float = 0.0
    iterations: int = 0


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
    nvlinks: int = 0
    """How many join each GPU to an NVSwitch of its host; 0: shared memory joins them."""
    as_nccl_likes: bool = False
    """Whether NCCL chooses algorithm and protocol, not the scenario."""
    shared_memory: bool = True
    """Whether ranks of one host may share memory; else they use the network among themselves as well."""


def fitted(scenario: Scenario) -> Scenario:
    """The scenario with messages that many ranks on two cores can move: there bytes cost processor time, not bandwidth."""
    work = scenario.workload
    small = min(work.tp_bytes, work.pp_bytes, LARGEST_ACTIVATION_BYTES)
    experts = min(work.ep_bytes, LARGEST_ACTIVATION_BYTES)
    gradients = min(work.dp_bytes, max(1 << 20, LARGEST_GRADIENT_BYTES // scenario.layout.world))
    sized = replace(work, tp_bytes=small, pp_bytes=small, cp_bytes=small, ep_bytes=experts, dp_bytes=gradients)
    return replace(scenario, workload=sized)


def _unplayable(scenario: Scenario) -> list[str]:
    """What of a scenario's job the testbed's job cannot be, a line each."""
    layout, work, net = scenario.layout, scenario.workload, scenario.network
    unsupported = []
    if net.net != "socket":
        unsupported.append("InfiniBand: over sockets on the testbed, over SoftRoCE only in the guest")
    if net.algorithm != "Ring" or net.protocol != "Simple":
        unsupported.append(f"{net.algorithm}/{net.protocol}: the testbed plays Ring/Simple")
    if layout.dp % layout.ep:
        unsupported.append("expert groups that hold context-parallel ranks: simulation only")
    if work.tp_bytes != work.pp_bytes or (layout.cp > 1 and work.cp_bytes != work.pp_bytes):
        unsupported.append("activations of tensor, context and pipeline parallelism have one size on the testbed")
    return unsupported


def plan(scenario: Scenario, *, links: bool = False) -> TestbedPlan:
    """Map a scenario to the testbed. Hosts are the scenario's nodes where those use shared memory or P2P, or where a fault is one
    of a whole host, which neither NCCL nor anybody else would know of otherwise. Else each rank is a host.

    ``links`` says that hosts have links of their own (network namespaces): then faults of a link or a NIC are played on that of
    the rank's host, both ways and with everybody.
    Times of faults that the harness brings about are of the scenario's clock and begin with the first iteration.
    """
    layout, work, net = scenario.layout, scenario.workload, scenario.network
    unsupported = _unplayable(scenario)
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
        if links and fault.kind in ON_A_LINK:
            actions.append(_on_link(fault, scenario))
        else:
            options += _fault(fault, scenario, actions, unsupported)
    hosts, shared = (1,) * layout.world, net.intra_node in ("shm", "p2p")
    if shared or any(fault.kind in ON_A_HOST for fault in scenario.faults):
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
        nvlinks=NVLINKS if net.intra_node == "p2p" else 0,
        shared_memory=shared or set(hosts) == {1},
    )


def as_testbed_runs(scenario: Scenario) -> Scenario:
    """The scenario with the habits of the testbed's job: norm of gradients, a communicator for the gather, merged exchanges.

    Its backward pass takes twice its forward pass.
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
    kind, rank = fault.kind, fault.rank
    node = ranks_of_node(scenario.layout, rank // scenario.layout.ranks_per_node)
    at = fault.iteration if fault.iteration is not None else _iteration_at(scenario, fault.start_s or 0.0)
    start_s = fault.start_s if fault.start_s is not None else at * _iteration_s(scenario)
    if kind is FaultKind.STOP and math.isfinite(fault.duration_s):
        actions.append(HarnessAction("thaw", (rank,), fault.duration_s))
    if kind in (FaultKind.STOP, FaultKind.KILL) and fault.iteration is None:
        actions.append(HarnessAction("freeze" if kind is FaultKind.STOP else "kill", (rank,), start_s))
        return []
    if kind in (FaultKind.CPU_LIMIT, FaultKind.FEW_CPUS):
        limited = (rank,) if kind is FaultKind.CPU_LIMIT else tuple(node)
        past = _past(scenario, start_s)
        actions.append(HarnessAction("limit", limited, start_s, LIMITED_SHARE * len(limited), iterations=past))
        return []
    if kind is FaultKind.SWAP and scenario.layout.dp * scenario.layout.cp == 1:
        unsupported.append("swap: the testbed swaps operations of the data-parallel group, of which there is none")
    length = max(1, round(fault.duration_s / _iteration_s(scenario))) if math.isfinite(fault.duration_s) else None
    lasting = f"rank={rank},at={at}" + ("" if length is None or kind in _ENDLESS else f",for={length}")
    call = f"rank={rank},at={at}" + (f",group={fault.role},nth={fault.occurrence}" if fault.role else "")
    us = f"us={_number(fault.strength * 1e6)}"
    watchdog = ["--watchdog", _number(fault.duration_s)] if kind is FaultKind.CRASH and length is not None else []
    texts: dict[FaultKind, list[str]] = {
        FaultKind.STOP: [f"stop:{call}{_delay(fault)}"],
        FaultKind.KILL: [f"crash:{call}{_delay(fault)},signal=9"],
        FaultKind.CRASH: [f"crash:{call}{_delay(fault)},signal=11"],
        FaultKind.SKIP: [f"skip:{call}"],
        FaultKind.NEVER_ENTERS: [f"stuck:{call}"],
        FaultKind.OTHER_OPERATION: [f"other_op:{call}"],
        FaultKind.OTHER_SIZE: [f"other_size:{call},factor={_number(fault.strength)}"],
        FaultKind.OTHER_TYPE: [f"other_type:{call}"],
        FaultKind.SWAP: [f"swap:rank={rank},at={at},for=1"],
        FaultKind.GPU_STALL: [f"stall_gpu:{call}{_delay(fault)}"],
        FaultKind.PROXY_STALL: [f"stall_proxy:{call}{_delay(fault)}"],
        FaultKind.SLOW_GPU: [f"slow_gpu:{lasting},factor={_number(fault.strength)}"],
        # On a GPU that other work shares kernels take longer, each a little differently.
        FaultKind.HOST_LOAD: [f"slow_gpu:rank={r},at={at},factor={_number(fault.strength)}" for r in node],
        FaultKind.GC_PAUSE: [f"pause:{lasting},{us},every={max(1, round(fault.period_s / _iteration_s(scenario)))}"],
        FaultKind.SLOW_LOADER: [f"loader:{lasting},{us}"],
        FaultKind.SLOW_COPY: [f"slow_copy:{lasting},rate={_number(INPUT_BYTES / max(fault.strength, 1e-6))}"],
        FaultKind.PROXY_SLEEP: [f"slow_proxy:{lasting},{us},every_us={_number(fault.period_s * 1e6)}"],
        FaultKind.INIT_MISSING: [f"no_init:rank={rank}"],
    }
    if kind not in texts:
        unsupported.append(f"{kind}: needs a network that can be disturbed (tc)")
        return []
    copies = ["--input", str(INPUT_BYTES)] if kind is FaultKind.SLOW_COPY else []
    return [word for text in texts[kind] for word in ("--fault", text)] + watchdog + copies


ON_A_HOST = frozenset({FaultKind.HOST_LOAD, FaultKind.FEW_CPUS})
"""Faults of all ranks of a host together."""
ON_A_LINK = frozenset(
    {FaultKind.LINK_DOWN, FaultKind.SLOW_LINK, FaultKind.LOSSY_LINK, FaultKind.NIC_LIMIT, FaultKind.BACKGROUND_TRAFFIC}
)


def _on_link(fault: Fault, scenario: Scenario) -> HarnessAction:
    start_s = fault.start_s if fault.start_s is not None else (fault.iteration or 0) * _iteration_s(scenario)
    start_s += fault.offset_ms / 1e3
    delay_s = fault.delay_ms / 1e3
    if fault.kind is FaultKind.LINK_DOWN:
        return HarnessAction("link-down", (fault.rank,), start_s)
    past = _past(scenario, start_s)
    if fault.kind is FaultKind.LOSSY_LINK:
        return HarnessAction("link-impair", (fault.rank,), start_s, loss=fault.strength, iterations=past)
    if fault.kind is FaultKind.BACKGROUND_TRAFFIC:
        return HarnessAction("traffic", (fault.rank,), start_s, iterations=past)
    if fault.kind is FaultKind.SLOW_LINK and fault.strength <= 1:
        return HarnessAction("link-impair", (fault.rank,), start_s, delay_s=delay_s, iterations=past)
    return HarnessAction("link-limit", (fault.rank,), start_s, share=1 / max(fault.strength, 1.0), iterations=past)


def _past(scenario: Scenario, start_s: float) -> int:
    """Iterations that lie before a fault in the scenario's own time: a slow job has them behind it however long they take.

    One in any case: connections are made in the first, and a host without CPUs would be minutes about that.
    """
    return max(1, min(LONGEST_PAST, _iteration_at(scenario, start_s)))


_ENDLESS = frozenset({FaultKind.CRASH, FaultKind.KILL, FaultKind.STOP})
"""Faults whose ``duration_s`` is not how long they last in the job's own words."""


def _delay(fault: Fault) -> str:
    """The moment inside the call: ``offset_ms`` later. Without a call to wait for, none."""
    return f",delay_us={_number(fault.offset_ms * 1e3)}" if fault.role and fault.offset_ms > 0 else ""


def _iteration_s(scenario: Scenario) -> float:
    """A rough iteration time: micro-batches plus the pipeline's fill, forward and backward, loader and optimizer."""
    work = scenario.workload
    turns = work.micro_batches + scenario.layout.pp - 1
    return (turns * (work.forward_ms + work.backward_ms) + work.loader_ms + work.optimizer_ms) / 1e3


def _iteration_at(scenario: Scenario, start_s: float) -> int:
    return min(scenario.workload.iterations - 1, int(start_s / _iteration_s(scenario)))
