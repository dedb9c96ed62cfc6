"""What every rank of a pipeline stage does in one iteration: compute, collectives, exchanges between stages, in program order.

The shape is Megatron-LM's without overlap: per layer and direction two tensor-parallel operations (AllReduce, or AllGather and
ReduceScatter with sequence parallelism), context- and expert-parallel operations where those dimensions exist; at the end of
the iteration the gradients' ReduceScatter, the optimizer, and the AllGather of parameters over the data-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass

from ncclwatch.simulate.scenario import Lookalike, LookalikeKind, Scenario
from ncclwatch.simulate.schedule import Exchange, Pass, merged, steps


@dataclass(frozen=True, slots=True)
class Compute:
    """Work of ``seconds`` at normal speed. ``host``: the host does it, after waiting for its GPU. ``copies``: begins with a
    copy to the device.
    """

    what: str
    seconds: float
    host: bool = False
    copies: bool = False


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on the rank's group of ``role``; ``nbytes`` as :func:`ncclwatch.simulate.geometry.cut` counts. ``label``
    says where in the job.
    """

    role: str
    function: str
    nbytes: int
    label: str
    element_bytes: int = 2


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """Sends and receives between pipeline stages in one group; every message has ``nbytes``."""

    exchange: Exchange
    nbytes: int
    label: str
    element_bytes: int = 2


Action = Compute | Collective | PointToPoint


def events_of(scenario: Scenario, kind: LookalikeKind, iteration: int) -> list[Lookalike]:
    """The scenario's harmless events of a kind that concern an iteration."""
    return [e for e in scenario.lookalikes if e.kind is kind and e.iteration <= iteration < e.iteration + e.count]


def iteration_program(scenario: Scenario, stage: int, iteration: int) -> list[Action]:
    """Actions of any rank of ``stage`` in ``iteration``, harmless events included, faults not."""
    layout, work = scenario.layout, scenario.workload
    evaluation = bool(events_of(scenario, LookalikeKind.EVALUATION, iteration))
    factor = _compute_factor(scenario, stage, iteration)
    waits = sum(e.duration_s for e in events_of(scenario, LookalikeKind.DATA_LOADING, iteration))
    pause = sum(e.duration_s for e in events_of(scenario, LookalikeKind.EMPTY_STEP, iteration))
    actions: list[Action] = [Compute("loader", work.loader_ms / 1e3 + waits + pause, host=True)]
    plan = steps(work.schedule, stage, layout.pp, work.micro_batches, work.virtual_stages, forward_only=evaluation)
    for step in merged(plan) if work.merge_exchanges else plan:
        if isinstance(step, Pass):
            actions += _pass(scenario, step, factor)
        else:
            way = "forward" if step.transfers[0].forward else "backward"
            actions.append(PointToPoint(step, work.pp_bytes, f"pipeline, {way}"))
    if not evaluation:
        actions += _update(scenario)
    for event in events_of(scenario, LookalikeKind.BARRIER, iteration):
        actions.append(Compute("barrier wait", event.duration_s, host=True))
        actions.append(Collective("world", "AllReduce", 4, "barrier", 4))
    for event in events_of(scenario, LookalikeKind.CHECKPOINT, iteration):
        actions.append(Compute("checkpoint", event.duration_s, host=True))
    return actions


def _compute_factor(scenario: Scenario, stage: int, iteration: int) -> float:
    # Caches warm up all at once: of several warm-ups the longest counts.
    factor = max((event.factor for event in events_of(scenario, LookalikeKind.WARMUP, iteration)), default=1.0)
    for event in scenario.lookalikes:
        if event.kind is LookalikeKind.UNEVEN_STAGES and event.stage == stage:
            factor *= event.factor
    return factor


def _pass(scenario: Scenario, step: Pass, factor: float) -> list[Action]:
    """One micro-batch through one chunk: ``layers`` times attention and feed-forward, each with its communication."""
    layout, work = scenario.layout, scenario.workload
    way = "forward" if step.forward else "backward"
    total = (work.forward_ms if step.forward else work.backward_ms) / 1e3 * factor
    label = f"{way}, micro-batch {step.micro_batch}" + (f", chunk {step.chunk}" if work.virtual_stages > 1 else "")
    half = total / (2 * work.layers)
    actions: list[Action] = []
    for layer in range(work.layers):
        for part in ("attention", "feed-forward"):
            first = layer == 0 and part == "attention"
            before = _tensor(scenario, label, before=True)
            actions += before
            if part == "attention" and layout.cp > 1:
                actions.append(
                    Collective("cp", "AllGather" if step.forward else "ReduceScatter", work.cp_bytes, f"context, {label}")
                )
            expert = part == "feed-forward" and layout.ep > 1
            if expert:
                actions.append(Collective("ep", "AlltoAll", work.ep_bytes, f"expert, {label}"))
            actions.append(Compute(way, half, copies=first and step.forward))
            if expert:
                actions.append(Collective("ep", "AlltoAll", work.ep_bytes, f"expert, {label}"))
            actions += _tensor(scenario, label, before=False)
    return actions


def _tensor(scenario: Scenario, label: str, *, before: bool) -> list[Action]:
    layout, work = scenario.layout, scenario.workload
    if layout.tp == 1:
        return []
    if work.sequence_parallel:
        function = "AllGather" if before else "ReduceScatter"
        return [Collective("tp", function, work.tp_bytes, f"tensor, {label}")]
    return [] if before else [Collective("tp", "AllReduce", work.tp_bytes, f"tensor, {label}")]


def _update(scenario: Scenario) -> list[Action]:
    layout, work = scenario.layout, scenario.workload
    optimizer = Compute("optimizer", work.optimizer_ms / 1e3)
    if layout.dp * layout.cp == 1:
        return [optimizer]
    gradients = Collective("dp", "ReduceScatter", work.dp_bytes, "data, gradients", 4)
    norm = [Collective("mp", "AllReduce", 4, "gradient norm", 4)] if work.grad_norm and layout.tp * layout.pp > 1 else []
    gather = "gather" if work.gather_communicator else "dp"
    return [gradients, *norm, optimizer, Collective(gather, "AllGather", work.dp_bytes, "data, parameters", 4)]


def roles(scenario: Scenario) -> list[str]:
    """Roles whose communicators a job of this scenario makes, in the order it makes them."""
    layout = scenario.layout
    sizes = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "dp": layout.dp * layout.cp, "pp": layout.pp}
    if scenario.workload.gather_communicator:
        sizes["gather"] = sizes["dp"]
    if scenario.workload.grad_norm:
        sizes["mp"] = layout.tp * layout.pp
    return ["world", *(role for role, size in sizes.items() if size > 1)]
