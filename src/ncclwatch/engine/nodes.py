"""Where a wait can begin or end: the nodes of the wait-for graph, and the subjects of facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ncclwatch.engine.job import Job


class RankNode(int):
    """An observed process, by its index in the job's input. An integer, for it is hashed more often than anything else."""

    __slots__ = ()

    @property
    def index(self) -> int:
        """The process's place in ``Job.members``."""
        return int(self)


class AbsentNode(NamedTuple):
    """A rank of a communicator that no observed process holds."""

    group_id: int
    comm_rank: int
    # Tuples of equal content are equal: the last field keeps the kinds of nodes apart.
    kind: str = "absent"


class LinkNode(NamedTuple):
    """The path between two ranks, when both sides have done their part."""

    group_id: int
    source: int
    destination: int
    kind: str = "link"


class HiddenNode(NamedTuple):
    """A wait that the planes at hand cannot see, inside a node."""

    group_id: int
    comm_rank: int
    kind: str = "hidden"


Node = RankNode | AbsentNode | LinkNode | HiddenNode


def node_of(job: Job, group_id: int, comm_rank: int) -> RankNode | AbsentNode:
    """The process that is a rank of a communicator, or that rank as one nobody observed."""
    group = job.groups.get(group_id)
    holder = group.holder(comm_rank) if group is not None else None
    return RankNode(holder.index) if holder is not None else AbsentNode(group_id, comm_rank)


class Nodes:
    """Nodes as numbers: an observed process is its index, everything else is negative."""

    def __init__(self) -> None:
        self._others: list[Node] = []
        self._numbers: dict[Node, int] = {}

    def number(self, node: Node) -> int:
        """The number of a node."""
        if isinstance(node, RankNode):
            return int(node)
        number = self._numbers.setdefault(node, -1 - len(self._others))
        if number == -1 - len(self._others):
            self._others.append(node)
        return number

    def node(self, number: int) -> Node:
        """The node with a number."""
        return RankNode(number) if number >= 0 else self._others[-1 - number]
