"""Records as rows of a history. Runs in the writer's thread, on records that nobody changes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ncclwatch.collect.windows import RankWindow
from ncclwatch.history.tables import MAX_DOCUMENT, Row
from ncclwatch.knowledge.match import cause_of, finding_of
from ncclwatch.model.network import FlowRecord, KernelLogLine, LinkChange, NicRecord

if TYPE_CHECKING:
    from ncclwatch.model.gpu import GpuLook

GPU_LINES = frozenset({"xid", "nvlink"})
"""Kinds of lines of the kernel's log (``KernelLogLine.kind``) that are about GPUs."""


class Run(NamedTuple):
    """A run of a job: its name, and what tells this run from the job's others."""

    job: str
    run: str


NOBODY = Run("", "")


class Paced(NamedTuple):
    """One iteration of the rank that paces a job: when it began (ns since the epoch), seconds, its number; and of how many ranks
    the newest iterations are known, their median and the slowest."""

    began_ns: int
    duration_s: float
    number: int
    rank: int | None
    node: str
    ranks: int
    median_s: float
    slowest_s: float
    slowest_rank: int | None


def event_id(job: str, kind: str, document: Mapping[str, Any]) -> str:
    """Stable over whoever tells it: the job, since when, class and culprits (the verdict's own id), and what happened to it."""
    since = document.get("since") or document.get("time") or 0
    epoch = int(since) if isinstance(since, (int, float)) and 0 <= since < 1 << 40 else 0
    text = json.dumps([job, epoch, str(document.get("id", ""))[:64], kind])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def verdict_row(of: Run, time_ns: int, kind: str, document: Mapping[str, Any], duration_s: float | None = None) -> Row:
    """A verdict (as of ``Verdict.to_json``; from a file it may be anything) that began to stand (``verdict``), ended because the
    job went on (``recovery``), or stands no longer for another reason (``over``)."""
    culprits = [one for one in _list(document.get("culprits")) if isinstance(one, dict)]
    tickets = [ticket if isinstance(ticket := one.get("ticket"), dict) else {} for one in culprits]
    places = [(ticket.get("node"), one.get("host")) for one, ticket in zip(culprits, tickets, strict=True)]
    reasons = [reason for one in culprits if isinstance(reason := one.get("reason"), str)]
    operation, communicator, since = document.get("operation"), document.get("communicator"), document.get("since")
    text = json.dumps(document, separators=(",", ":"))
    return Row("verdicts", time_ns, of.job, of.run, {
        "id": event_id(of.job, kind, document), "kind": kind, "verdict_id": document.get("id"), "class": document.get("class"),
        "summary": document.get("summary"), "confidence": document.get("confidence"), "since": nanoseconds(since),
        "duration_s": duration_s, "nodes": _once(name for place in places for name in place),
        "ranks": [rank for one in culprits if isinstance(rank := one.get("rank"), int)],
        "gpus": _once(ticket.get("gpu_uuid") for ticket in tickets),
        "causes": _once(cause_of(reason) or finding_of(reason) for reason in reasons),
        "operation": operation.get("name") if isinstance(operation, dict) else None,
        "communicator": communicator.get("hash") if isinstance(communicator, dict) else None,
        "victims": len(_list(document.get("victims"))), "document": text if len(text) <= MAX_DOCUMENT else None,
    })  # fmt: skip


def nanoseconds(seconds: Any) -> int | None:
    """Seconds since the epoch as nanoseconds; ``None`` for what is no time."""
    known = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 <= seconds < 1 << 33
    return int(seconds * 1e9) if known else None


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _once(texts: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if isinstance(text, str) and text))


def rate_rows(time_ns: int, windows: Sequence[RankWindow], run_of: Mapping[Any, Run]) -> Iterator[Row]:
    """A row a rank."""
    for window in windows:
        work, operation = window.work, window.operation
        values: dict[str, Any] = {
            "rank": window.rank, "node": window.process.host, "pid": window.process.pid, "gpu": window.gpu,
            "state": window.run_state, "operation": operation.name if operation is not None else None,
            "operations_per_s": _short(window.operations_per_s), "bytes_per_s": _short(window.bytes_per_s),
            "steps_per_s": _short(window.steps_per_s), "still_s": _short(window.still_s),
        }  # fmt: skip
        if work is not None:
            values |= {
                "sent_per_s": _short(work.bytes_per_s), "received_per_s": _short(work.received_per_s),
                "throughput": _short(work.throughput), "latency_p50_us": _short(work.latency_p50_ns, 1e3),
                "latency_p99_us": _short(work.latency_p99_ns, 1e3), "in_flight": work.in_flight, "errors": work.errors,
                "coverage": _short(work.coverage), "counting": str(work.counting),
            }  # fmt: skip
        of = run_of.get(window.process.key, NOBODY)
        yield Row("rates", time_ns, of.job, of.run, values)


def _short(value: float | None, unit: float = 1.0) -> float | None:
    """Five digits: more a rate over a second does not have, and they take twice the room."""
    return None if value is None else float(f"{value / unit:.5g}")


def iteration_rows(of: Run, paced: Iterable[Paced]) -> Iterator[Row]:
    """A row an iteration."""
    for one in paced:
        values = {name: value for name, value in one._asdict().items() if name != "began_ns"}
        yield Row("iterations", one.began_ns, of.job, of.run, values)


def flow_row(time_ns: int, of: Run, flow: FlowRecord, node: str) -> Row:
    """A connection; ``node`` is its rank's."""
    return Row("flows", time_ns, of.job, of.run, {
        "rank": flow.global_rank, "node": node, "pid": flow.pid, "peer": flow.peer, "channel": flow.channel,
        "direction": str(flow.direction) if flow.direction is not None else None, "device": flow.device, "port": flow.port,
        "kind": str(flow.kind), "role": flow.role, "state": str(flow.state), "reason": flow.reason,
        "bandwidth": _short(flow.bandwidth), "expected": _short(flow.expected), "retries": flow.retries,
        "delay_us": _short(flow.delay_us),
    })  # fmt: skip


def nic_row(time_ns: int, of: Run, nic: NicRecord) -> Row:
    """A NIC as it is."""
    return Row("nics", time_ns, of.job, of.run, {
        "node": nic.host, "nic": nic.label, "kind": nic.kind, "event": "seen", "up": nic.up, "state": nic.state,
        "rate_gbps": nic.rate_gbps, "receive_per_s": _short(nic.receive_rate), "send_per_s": _short(nic.send_rate),
        "errors": json.dumps(nic.errors) if nic.errors else None, "congestion": nic.congestion, "ranks": list(nic.used_by),
    })  # fmt: skip


def link_row(of: Run, link: LinkChange) -> Row:
    """A link that went up or down."""
    event = "up" if link.up else "down"
    values = {"node": link.host, "nic": link.label, "event": event, "up": link.up, "state": link.detail}
    return Row("nics", link.wall_ns, of.job, of.run, values)


def kernel_row(time_ns: int, of: Run, line: KernelLogLine) -> Row:
    """A line of the kernel's log, with the GPU or the NIC that it is about."""
    if line.kind not in GPU_LINES:
        said = {"node": line.host, "nic": line.device, "event": line.kind, "state": line.text}
        return Row("nics", line.wall_ns or time_ns, of.job, of.run, said)
    values: dict[str, Any] = {
        "node": line.host,
        "bus": line.device,
        "source": "kernel",
        "detail": line.text,
        "troubles": [line.kind],
    }
    return Row("gpus", line.wall_ns or time_ns, of.job, of.run, values | {"code": line.code})


def gpu_rows(node: str, look: GpuLook) -> Iterator[Row]:
    """A row a GPU, or one that says why none can be seen."""
    from ncclwatch.gpu.trouble import troubles

    if look.problem:
        yield Row("gpus", look.wall_ns or time.time_ns(), "", "", {"node": node, "source": "nvml", "detail": look.problem})
    for gpu in look.gpus:
        wrong = troubles(gpu, look.gpus)
        yield Row("gpus", look.wall_ns, "", "", {
            "node": node, "gpu": gpu.index, "bus": gpu.bus_id, "uuid": gpu.uuid, "model": gpu.name, "source": "nvml",
            "troubles": [str(one.trouble) for one in wrong], "detail": "; ".join(one.text for one in wrong) or None,
            "sm_clock": gpu.sm_clock, "power": gpu.power, "temperature": gpu.temperature,
            "ecc_uncorrected": gpu.ecc_uncorrected,
        })  # fmt: skip
