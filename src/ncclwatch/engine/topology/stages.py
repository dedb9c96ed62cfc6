"""The order of pipeline stages: who sends activations to whom, and which end is the first.

The neighbours follow from who sends to whom. Which end is the first shows at the end of an iteration, when nothing is under way:
from there on the first stage has sent more to its neighbour than it received back, the last one less. Where no end of an
iteration is seen, the communicator's own order is taken, with less confidence.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.jobmap import Facts
from ncclwatch.engine.topology.model import Role
from ncclwatch.engine.topology.roles import Opinion
from ncclwatch.engine.topology.specimen import POINT_TO_POINT, Specimen, Usage
from ncclwatch.model.events import Function


@dataclass(slots=True)
class StageOrder:
    """Stages of the ranks; arrays of shape (world,), −1 unknown. ``pipeline`` numbers the pipelines."""

    stages: int
    stage: NDArray[np.int32]
    pipeline: NDArray[np.int32]
    known: bool = True
    reversed: bool = False
    cyclic: bool = False
    """The last stage also sends to the first: model chunks are interleaved."""
    confidence: float = 1.0
    trouble: str = ""
    evidence: list[str] = field(default_factory=list)


def order_stages(
    world: int, groups: Sequence[Facts], specimens: Sequence[Specimen], opinions: Mapping[int, Mapping[int, Opinion]]
) -> StageOrder:
    """Put the ranks of all pipeline communicators in order. Without any there is one stage."""
    none = np.full(world, -1, np.int32)
    if not groups:
        return StageOrder(1, np.zeros(world, np.int32), np.arange(world, dtype=np.int32))
    used = [
        (specimen, specimen.usages[row])
        for specimen in specimens
        for row, opinion in opinions[specimen.process].items()
        if opinion.role is Role.PIPELINE
    ]
    sizes = {group.nranks for group in groups}
    if len(sizes) > 1 or _overlapping(groups):
        return _joined(world, groups, used)
    stages = sizes.pop()
    neighbours = _neighbours(used)
    if any((b - a) % stages not in (1, stages - 1) for a, b in neighbours):
        return StageOrder(
            stages, none, none, known=False, trouble="stages that are not neighbours in their communicator exchange data"
        )
    cyclic = stages > 2 and any(abs(b - a) == stages - 1 for a, b in neighbours)
    result = StageOrder(stages, none.copy(), none.copy(), cyclic=cyclic)
    _decide_direction(result, used)
    for number, ranks in enumerate(dict.fromkeys(tuple(group.ranks.tolist()) for group in groups)):
        for at, rank in enumerate(ranks):
            if rank >= 0:
                result.stage[rank] = stages - 1 - at if result.reversed else at
                result.pipeline[rank] = number
    return result


def _decide_direction(result: StageOrder, used: Sequence[tuple[Specimen, Usage]]) -> None:
    """Which end is the first, by most of the ends that tell."""
    votes = [_sign(specimen, usage) for specimen, usage in used]
    backwards, forwards = votes.count(-1), votes.count(1)
    if backwards + forwards and max(backwards, forwards) >= 0.8 * (backwards + forwards):
        result.reversed, result.confidence = backwards > forwards, 0.95
        result.evidence.append("which end is the first stage shows at the end of an iteration, when nothing is under way")
        return
    low = [_in_flight(specimen, usage) for specimen, usage in used if usage.comm_rank == 0]
    high = [_in_flight(specimen, usage) for specimen, usage in used if usage.comm_rank == result.stages - 1]
    deep, shallow = min(low, default=0), max(high, default=0)
    if deep > shallow > 0:
        result.confidence = 0.9
        result.evidence.append(f"the first stage has up to {deep} micro-batches under way, the last {shallow}")
        return
    deep, shallow = min(high, default=0), max(low, default=0)
    if deep > shallow > 0:
        result.reversed, result.confidence = True, 0.9
        result.evidence.append(f"the first stage has up to {deep} micro-batches under way, the last {shallow}")
        return
    result.confidence = 0.7
    result.evidence.append("the first stage is taken to be the communicator's rank 0: no end of an iteration was seen")


def _overlapping(groups: Sequence[Facts]) -> bool:
    """Whether ranks are in several pipeline communicators over different ranks (one for each pair of neighbours)."""
    sets = {tuple(group.ranks.tolist()) for group in groups}
    ranks = [rank for one in sets for rank in one if rank >= 0]
    return len(set(ranks)) < len(ranks)


def _neighbours(used: Sequence[tuple[Specimen, Usage]]) -> set[tuple[int, int]]:
    pairs = set()
    for _, usage in used:
        for peer in (*usage.exchanges.sends, *usage.exchanges.receives):
            pairs.add((usage.comm_rank, peer))
    return pairs


def _balance(specimen: Specimen, usage: Usage, begin: int) -> NDArray[np.int64] | None:
    """Sent minus received after each call of the word, from operation ``begin`` on; ``None`` unless it is the end of a chain."""
    peers = set(usage.exchanges.sends) | set(usage.exchanges.receives)
    if len(peers) != 1 or specimen.word is None:
        return None
    word = np.roll(specimen.word, -begin)
    point = np.isin(word["function"], POINT_TO_POINT) & (word["row"] == usage.row)
    change = np.where(point, np.where(word["function"] == Function.SEND, 1, -1), 0)
    if change.sum() != 0:
        return None
    # Only the ends of calls count: inside a grouped call the order means nothing.
    last = np.r_[word["call"][1:] != word["call"][:-1], True]
    result: NDArray[np.int64] = np.cumsum(change)[last]
    return result


def _sign(specimen: Specimen, usage: Usage) -> int:
    """+1 where higher ranks are later stages, −1 where lower ones are, 0 where this process does not tell.

    At the end of an iteration as much was sent as received; the side to which the balance goes from there tells the end.
    """
    boundary = rest_position(specimen)
    balance = _balance(specimen, usage, boundary) if boundary is not None else None
    if balance is None:
        return 0
    low, high = int(balance.min()), int(balance.max())
    direction = 1 if high > 0 and low >= 0 else -1 if low < 0 and high <= 0 else 0
    (peer,) = set(usage.exchanges.sends) | set(usage.exchanges.receives)
    return direction if peer > usage.comm_rank else -direction


def _in_flight(specimen: Specimen, usage: Usage) -> int:
    """How far the balance of sent and received swings in an iteration: in 1F1B widest at the first stage. 0 where unknown."""
    balance = _balance(specimen, usage, 0)
    return int(balance.max() - balance.min()) if balance is not None else 0


def rest_position(specimen: Specimen) -> int | None:
    """Index in the word of the first exchange of stages after the operations that occur once an iteration (gradients, norm)."""
    word = specimen.word
    if word is None:
        return None
    point = np.isin(word["function"], POINT_TO_POINT)
    at = np.flatnonzero(point)
    if not len(at):
        return None
    keys = word[["row", "function", "count", "datatype"]]
    _, inverse, numbers = np.unique(keys, return_inverse=True, return_counts=True)
    number = numbers[inverse]
    rare = ~point & (number <= 2) & (2 * number <= max(2, int(numbers.max())))
    between = Counter((np.searchsorted(at, np.flatnonzero(rare)) % len(at)).tolist())
    return int(at[max(between, key=lambda k: between[k])]) if between else None


def _joined(world: int, groups: Sequence[Facts], used: Sequence[tuple[Specimen, Usage]]) -> StageOrder:
    """Pipelines made of several communicators, one for each pair of neighbours: chains through shared ranks."""
    links: dict[int, set[int]] = defaultdict(set)
    none = np.full(world, -1, np.int32)
    for group in groups:
        ranks = [int(r) for r in group.ranks]
        if -1 in ranks or group.nranks != 2:
            return StageOrder(1, none, none, known=False, trouble="pipeline communicators of different sizes over the same ranks")
        links[ranks[0]].add(ranks[1])
        links[ranks[1]].add(ranks[0])
    chains = _chains(links)
    if chains is None or len({len(chain) for chain in chains}) != 1:
        return StageOrder(1, none, none, known=False, trouble="stages exchange data in no chain of one length")
    result = StageOrder(len(chains[0]), none.copy(), none.copy(), confidence=0.7)
    for number, chain in enumerate(chains):
        for at, rank in enumerate(chain):
            result.stage[rank], result.pipeline[rank] = at, number
    result.evidence.append("the first stage is taken to be the lowest rank of its pipeline")
    return result


def _chains(links: Mapping[int, set[int]]) -> list[list[int]] | None:
    """Paths through all ranks, each from its lower end; ``None`` where there is a fork or a circle."""
    if any(len(near) > 2 for near in links.values()):
        return None
    chains: list[list[int]] = []
    seen: set[int] = set()
    for end in sorted(rank for rank, near in links.items() if len(near) == 1):
        if end in seen:
            continue
        chain, before = [end], -1
        while True:
            following = [rank for rank in links[chain[-1]] if rank != before]
            if not following:
                break
            before = chain[-1]
            chain.append(following[0])
        seen.update(chain)
        chains.append(chain)
    return chains if len(seen) == len(links) else None
