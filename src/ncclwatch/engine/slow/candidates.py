"""Who may hold up a slow job: the candidates that compete, and the ranks and links that each consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.profile import Shares

Members = tuple[int, ...]
"""Ranks by their place in the profile's processes."""

PAIRED = 8
"""Bound: of so many ranks, those that most likely work in the lost time, each two are a candidate."""
SEVERAL = 0.1
"""Part of what the links of a NIC or a host hold up that must lie outside the worst of them, for it to be theirs in common. Unit:
share. From: chosen; of less than a tenth the samples cannot tell.
"""


class CandidateKind(StrEnum):
    """What a candidate is: which part of which ranks, or what lies between them."""

    RANK = "rank"
    """One rank's own work: its GPU, or its host thread."""
    TWO_RANKS = "two-ranks"
    """The work of two ranks, wherever they are, in the same lost time."""
    HOST = "host"
    """The work of all ranks of a host, a node, or a CPU limit."""
    PROXY = "proxy"
    """A rank's proxy thread."""
    LINK = "link"
    """The connection of two ranks."""
    NIC = "nic"
    """All connections of one rank."""
    HOST_NICS = "host-nics"
    """All connections that leave a host."""
    WHOLE_HOST = "whole-host"
    """The work of all ranks of a host and all its connections."""

    @property
    def computes(self) -> bool:
        """Whether it counts as slow computation (CCL-D's S1); the rest is communication (S2)."""
        return self in WORK

    @property
    def has_links(self) -> bool:
        """Whether links are part of it."""
        return self in (*NETWORKS, CandidateKind.WHOLE_HOST)


RANKS = (CandidateKind.RANK, CandidateKind.TWO_RANKS)
WORK = (*RANKS, CandidateKind.HOST, CandidateKind.WHOLE_HOST)
NETWORKS = (CandidateKind.LINK, CandidateKind.NIC, CandidateKind.HOST_NICS)
FROM_START = (CandidateKind.RANK, CandidateKind.HOST, CandidateKind.PROXY, CandidateKind.LINK)
"""Candidates also without a healthy past: a healthy job may well spend half of its time on its network, and at two ranks."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """All of one kind: the ranks that each is named by, and the links that are part of it, by number."""

    kind: CandidateKind
    members: list[Members]
    links: list[list[int]]


def of_ranks(works: Shares, places: Sequence[Members]) -> list[Candidates]:
    """Ranks, pairs, places and proxies. ``works``: how likely each rank is to work in the lost time; of the likeliest each two
    are a pair.
    """
    ranks: list[Members] = [(at,) for at in range(len(works))]
    likely = np.sort(np.argsort(-works, kind="stable")[:PAIRED]).tolist()
    pairs: list[Members] = [pair for pair in combinations(likely, 2) if pair not in places]
    kinds = (
        (CandidateKind.RANK, ranks), (CandidateKind.TWO_RANKS, pairs), (CandidateKind.HOST, list(places)),
        (CandidateKind.PROXY, ranks),
    )  # fmt: skip
    return [Candidates(kind, members, [[] for _ in members]) for kind, members in kinds]


def of_links(
    source: NDArray[np.int64], destination: NDArray[np.int64], grown: Shares, places: Sequence[Members]
) -> list[Candidates]:
    """Links, NICs, the links of hosts, and hosts as a whole. A link is told by its two ranks, whichever way data goes.

    ``source`` and ``destination`` are the ranks at the ends of each link (-1: not observed), ``grown`` by how much more others
    wait for it. What only one of several links shows is that link's.
    """
    known = np.flatnonzero((source >= 0) & (destination >= 0))
    pairs: dict[Members, list[int]] = {}
    nics: dict[Members, list[int]] = {}
    for link in known.tolist():
        one, other = sorted((int(source[link]), int(destination[link])))
        pairs.setdefault((one, other), []).append(link)
        for end in (one, other):
            nics.setdefault((end,), []).append(link)
    inside = [np.isin(source[known], place) != np.isin(destination[known], place) for place in places]
    leaving = {place: known[crossing].tolist() for place, crossing in zip(places, inside, strict=True) if crossing.any()}
    # Links between two hosts are those of the one as well as of the other. Which it is does not show; who has no link does.
    owners: dict[tuple[int, ...], list[Members]] = {}
    for place, links in leaving.items():
        owners.setdefault(tuple(links), []).append(place)
    hosts: dict[Members, list[int]] = {}
    for links, of in owners.items():
        ends = np.unique(np.concatenate([source[list(links)], destination[list(links)]]))
        hosts[of[0] if len(of) == 1 else tuple(ends.tolist())] = list(links)

    def several(links: list[int]) -> bool:
        return bool(grown[links].max() < (1.0 - SEVERAL) * grown[links].sum())

    kinds = ((CandidateKind.NIC, nics), (CandidateKind.HOST_NICS, hosts), (CandidateKind.WHOLE_HOST, leaving))
    found = [Candidates(CandidateKind.LINK, list(pairs), list(pairs.values()))]
    for kind, links_of in kinds:
        kept = {members: links for members, links in links_of.items() if several(links)}
        found.append(Candidates(kind, list(kept), list(kept.values())))
    return found
