"""Flows: one line for each (rank, channel, peer, NIC port, queue pair), and what is wrong with it.

A stall (seen when counting exactly only: bursts are shorter) is work in flight without a completion for longer than 500 ms, or
than several times what completions of this flow usually take (VenusTrace 3.2.2); slow is a throughput more than 20 % below what
this flow has been seen to reach under load (MegaTrace III-C). A sender that fills its queue before it asks for the first
completion is given that time. Both thresholds adapt, so that a flow that always was slow is not
an alarm. Waiting receives, and a flow with nothing in flight, are idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ncclwatch.model.network import FlowState
from ncclwatch.model.state import Direction
from ncclwatch.wire.accounts import DEFAULT_WINDOW, QueuePairAccount
from ncclwatch.wire.nccl_queues import QueueOwner

__all__ = ["Flow", "FlowState", "FlowWatch", "owners_by_key"]

STALL_NS = 500_000_000
STALL_FACTOR = 20
"""A stall is also this many times the usual longest gap between completions, where that is more than 500 ms."""
STALL_MOST_NS = 10_000_000_000
"""Whatever was usual: after gaps of seconds (retransmissions) a wire that is dead would pass for a slow one for minutes."""
SLOW_SHARE = 0.2
LEARNING = 8
"""Loaded looks at a flow before its throughput is judged."""
BASELINE_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Flow:
    """One queue pair at one moment, with what it serves.

    ``rank``, ``channel``, ``peer`` and ``comm_hash`` are ``None`` where NCCL's structures do not tell (other programs' traffic
    too: that is what ``belongs_to_job`` is for). Rates are bytes a second, latencies ns. ``exact`` says whether counts are
    complete or of bursts; of bursts, ``in_flight`` is of the burst alone.
    """

    pid: int
    device: str
    port: int
    qp: int
    role: str
    posted: int
    completed: int
    in_flight: int
    bandwidth: float | None
    expected: float | None
    latency_p50_ns: float | None
    latency_p99_ns: float | None
    errors: Mapping[str, int]
    retries: int | None
    state: FlowState
    reason: str
    exact: bool
    comm_hash: int | None = None
    rank: int | None = None
    channel: int | None = None
    peer: int | None = None
    direction: Direction | None = None
    steps_per_second: float | None = None
    """Send or receive rate of this channel and peer from the proxy's steps, where the state plane has it."""

    @property
    def belongs_to_job(self) -> bool:
        """Whether a communicator of a watched job uses it."""
        return self.comm_hash is not None


@dataclass
class _History:
    """What is remembered of one queue pair between looks."""

    completed: int = 0
    progressed_ns: int = 0
    errors: int = 0
    longest_gap_ns: float = 0.0
    baseline: float | None = None
    looks: int = 0


@dataclass
class FlowWatch:
    """Judges flows from successive readings of the accounts. ``window`` is w of the sliding window in completions."""

    window: int = DEFAULT_WINDOW
    _histories: dict[tuple[int, int, int], _History] = field(default_factory=dict)

    def look(
        self,
        accounts: Iterable[QueuePairAccount],
        now_ns: int,
        *,
        exact: bool,
        owners: Mapping[tuple[int, int, int], QueueOwner] | None = None,
        devices: Mapping[tuple[int, int], tuple[str, int]] | None = None,
        retries: Mapping[str, int] | None = None,
        step_rates: Mapping[tuple[int, int, int, int, Direction], float] | None = None,
    ) -> list[Flow]:
        """The flows at ``now_ns`` (CLOCK_MONOTONIC).

        ``owners`` are by (pid, context, number), ``devices`` by (pid, context): RDMA device and port. ``retries`` are a port's
        signs of loss since the last look, by device; ``step_rates`` the state plane's, by (pid, comm_hash, channel, peer,
        direction).
        """
        flows = []
        for account in accounts:
            owner = (owners or {}).get(account.key)
            device, port = (devices or {}).get((account.pid, account.context), ("", 0))
            state, reason, expected = self._judge(account, now_ns, exact)
            key = (account.pid, owner.comm_hash, owner.channel, owner.peer, owner.direction) if owner else None
            flows.append(
                Flow(
                    pid=account.pid,
                    device=device,
                    port=port,
                    qp=account.number,
                    role=account.role(),
                    posted=account.posted,
                    completed=account.completed,
                    in_flight=account.in_flight,
                    bandwidth=account.bandwidth(self.window),
                    expected=expected,
                    latency_p50_ns=account.latency_ns(0.5),
                    latency_p99_ns=account.latency_ns(0.99),
                    errors=account.error_statuses,
                    retries=(retries or {}).get(device),
                    state=state,
                    reason=reason,
                    exact=exact,
                    comm_hash=owner.comm_hash if owner else None,
                    rank=owner.rank if owner else None,
                    channel=owner.channel if owner else None,
                    peer=owner.peer if owner else None,
                    direction=owner.direction if owner else None,
                    steps_per_second=(step_rates or {}).get(key) if key else None,
                )
            )
        return flows

    def forget(self, pid: int) -> None:
        """A process has ended."""
        self._histories = {key: past for key, past in self._histories.items() if key[0] != pid}

    def _judge(self, account: QueuePairAccount, now_ns: int, exact: bool) -> tuple[FlowState, str, float | None]:
        """State, the reason for it, and the throughput expected."""
        past = self._histories.setdefault(account.key, _History(progressed_ns=now_ns, errors=0))
        progressed = account.completed > past.completed
        past.completed = account.completed
        failed, past.errors = account.errors - past.errors, account.errors
        if progressed:
            past.progressed_ns = account.last_completion_ns or now_ns
            past.longest_gap_ns = max(past.longest_gap_ns * 0.99, _longest_gap(account))
        if failed > 0:
            names = ", ".join(f"{name} {count}" for name, count in account.error_statuses.items())
            return FlowState.ERROR, f"{failed} requests failed ({names})", past.baseline
        # What a burst left in flight says nothing: its completion came, or did not, when nobody looked.
        oldest = account.oldest_pending_ns if exact else None
        if oldest is not None:
            waited = now_ns - max(oldest, account.last_completion_ns)
            limit = min(max(STALL_NS, STALL_FACTOR * past.longest_gap_ns), STALL_MOST_NS)
            if waited > limit and not _fills_its_queue(account, now_ns, waited):
                return (
                    FlowState.STALLED,
                    f"{account.in_flight} requests in flight, no completion for {waited / 1e6:.0f} ms",
                    past.baseline,
                )
        if not progressed:
            if oldest is None:
                return FlowState.IDLE, "" if exact else "no completion during the last burst", past.baseline
            return FlowState.ACTIVE, "waiting for a completion", past.baseline
        return self._judge_throughput(account, past)

    def _judge_throughput(self, account: QueuePairAccount, past: _History) -> tuple[FlowState, str, float | None]:
        rate = account.bandwidth(self.window)
        # A window in which the sender paused measures the sender, not the wire: only a filled one without long gaps counts.
        if rate is None or rate <= 0 or account.samples <= self.window or not _is_loaded(account, self.window):
            return FlowState.ACTIVE, "", past.baseline
        expected = past.baseline
        if expected is not None and past.looks >= LEARNING and rate < expected * (1 - SLOW_SHARE):
            # A slow wire must not become the new normal: the baseline stays.
            return FlowState.SLOW, f"{rate / 1e9:.3f} GB/s where {expected / 1e9:.3f} is usual", expected
        past.looks += 1
        past.baseline = rate if expected is None else expected + BASELINE_WEIGHT * (rate - expected)
        return FlowState.ACTIVE, "", past.baseline


def _fills_its_queue(account: QueuePairAccount, now_ns: int, waited_ns: int) -> bool:
    """Whether a sender that was never seen to take a completion still posts: who fills a queue first asks afterwards."""
    newest = account.newest_pending_ns
    return not account.completed and newest is not None and now_ns - newest <= STALL_NS and waited_ns <= STALL_MOST_NS


def _longest_gap(account: QueuePairAccount) -> float:
    """The longest time between two neighbouring completions of the window, in ns."""
    times = account.window["time_ns"]
    return float((times[1:] - times[:-1]).max()) if len(times) > 1 else 0.0


def _is_loaded(account: QueuePairAccount, window: int) -> bool:
    """Whether something was in flight all through the window: no gap is much longer than a request takes."""
    times = account.window["time_ns"][-(window + 1) :]
    usual = account.latency_ns(0.99)
    return usual is not None and len(times) > 1 and float((times[1:] - times[:-1]).max()) <= 2 * usual


def owners_by_key(pid: int, owners: Iterable[QueueOwner]) -> dict[tuple[int, int, int], QueueOwner]:
    """Owners of one process by the key of the account of their queue pair."""
    return {(pid, owner.pair.context, owner.pair.number): owner for owner in owners}
