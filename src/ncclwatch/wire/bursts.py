"""Bursts of probes on the data path, as the governor plans them."""

from __future__ import annotations

from ncclwatch.wire.accounts import QueuePairAccount
from ncclwatch.wire.governor import Governor, hits_by_thread, mean_hit_ns
from ncclwatch.wire.plane import WirePlane, monotonic_ns


class Bursts:
    """Attaches and detaches a plane's probes when its governor says so."""

    def __init__(self, plane: WirePlane, governor: Governor) -> None:
        self.plane = plane
        self.governor = governor
        self._completed: dict[tuple[int, int, int], int] = {}

    def step(self) -> list[QueuePairAccount] | None:
        """Begin or end a burst if that is due; the accounts when one has just ended, else ``None``.

        Their windows, rates and latencies are of this burst; counts of requests and bytes are sums over all bursts so far and
        miss what happened in between: they are never differenced into "in flight".
        """
        now = monotonic_ns()
        if not self.governor.due(now):
            return None
        if not self.governor.attached:
            self._completed = {account.key: account.completed for account in self.plane.accounts()}
            self.governor.begin(now, hits_by_thread(self.plane.kernel, self.plane.processes))
            self.plane.attach()
            return None
        return self.stop()

    def stop(self) -> list[QueuePairAccount]:
        """End the burst that is on, whatever the plan was."""
        self.plane.detach()
        accounts = self.plane.accounts()
        completions = max((account.completed - self._completed.get(account.key, 0) for account in accounts), default=0)
        sites = [site for process in self.plane.processes.values() for site in process.sites.values()]
        hits = hits_by_thread(self.plane.kernel, self.plane.processes)
        self.governor.end(monotonic_ns(), hits, mean_hit_ns(self.governor.costs, sites), completions)
        return accounts
