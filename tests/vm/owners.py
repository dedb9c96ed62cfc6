"""What a job's own memory says of its queue pairs."""

from __future__ import annotations

from ncclwatch.model.state import Direction
from ncclwatch.target.session import TargetProcess
from ncclwatch.wire.flows import owners_by_key
from ncclwatch.wire.nccl_connections import net_connections
from ncclwatch.wire.nccl_queues import QueueOwner, queue_owners
from testbed.job import Job

Owners = dict[tuple[int, int, int], QueueOwner]
"""By (pid, context, number) of the queue pair."""

Steps = dict[tuple[int, int, int, Direction], int]
"""By (pid, channel, peer, direction)."""


def connections_of(job: Job) -> tuple[Owners, Steps]:
    """Who owns each queue pair, and the step that each connection that was used has come to."""
    owners: Owners = {}
    steps: Steps = {}
    for pid in job.pids:
        with TargetProcess.open(pid) as target:
            target.sample()
            for state in target.communicator_states:
                found = queue_owners(target.decoder, state.record.hash, state.record.rank, state.connectors)
                owners |= owners_by_key(pid, found)
            for one in net_connections(target.decoder, target.load_bias, target.communicator_states):
                if one.step:
                    steps[pid, one.channel, one.peer, one.direction] = one.step
    return owners, steps
