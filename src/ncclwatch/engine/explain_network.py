"""A port or a path that is down below a standstill is its cause, whoever the waits lead to; and who may still come through.

What is cut while nothing is under way on it leaves no trace in memory, and newer proxies drop what their transport reports as
failed: then the waits end at a rank that merely waits unseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from statistics import median_low
from typing import NamedTuple

from ncclwatch.engine.case import Case, Hypothesis, Suspect, naming, nobody, observed, one_of_each
from ncclwatch.engine.edges import told
from ncclwatch.engine.evidence.base import Fact, FactKind, RankNode
from ncclwatch.engine.evidence.kernel import HELD_BACK, HELD_TIMES
from ncclwatch.engine.evidence.nics import DeadPath, PortDown
from ncclwatch.engine.evidence.work_requests import BY_PROXY, Shows, WorkFact
from ncclwatch.engine.patience import LONGEST_PATIENCE_S
from ncclwatch.engine.stated import SHOWN, first_waits
from ncclwatch.model.cause import Cause
from ncclwatch.model.job import Group, Job, Member
from ncclwatch.model.network import NicRecord
from ncclwatch.model.state import Communicator, Direction, Transport
from ncclwatch.model.verdict import LinkRef, VerdictClass
from ncclwatch.text import first_of

BEFORE_S = 120.0
"""Unit: s; what happened so long before a job came to stand may be why: a port went down, a helper process was killed. From:
chosen, as data loaders are a few batches ahead, and what lies inside the nodes may go on for a while.
"""
UNORDERED_S = 5.0
"""Unit: s; which of two events came first is not known where they are nearer than this. From: chosen, as samples and listings of
NICs are a second or two old each, and wall clocks may differ.
"""
PLANES = {FactKind.PORT_DOWN: "nic", FactKind.PATH_DEAD: "nic", FactKind.WORK: "wire"}
"""By what each kind of proof is seen."""


# --- what is down ------------------------------------------------------------------------------------------------------


def network_down(case: Case) -> Iterator[Hypothesis]:
    """Ports that went down when the job came to stand, or else paths without an answer, where only ends of waits were named."""
    standing = case.standing
    if standing is None:
        return
    suspects, ranks, because = _of_ports(case, standing)
    if not suspects and standing.open_to_doubt:
        suspects, ranks, because = _of_paths(case, standing)
    if not suspects:
        return
    supports = [*standing.supports, *standing.beside]
    if standing.suspects:
        places = [one.place for one in one_of_each(standing.suspects)]
        names = first_of((f"rank {one.rank if one.rank is not None else one.comm_rank}" for one in places), SHOWN)
        what = "port" if suspects[0].cause is Cause.PORT else "path"
        supports.insert(0, told(f"the waits that can be seen end at {names}, which may itself wait for such a {what}"))
    yield naming(
        VerdictClass.HARDWARE, suspects, ranks, 0.8, supports, because=because, missing=standing.missing, planes=standing.planes,
        follows=(*standing.follows, standing.rule),
    ).seen_by("nic")  # fmt: skip


# --- links, and ranks that data neither reaches nor leaves --------------------------------------------------------------


def network_end(case: Case) -> Iterator[Hypothesis]:
    """Of links that carry no data, and of a rank that data neither reaches nor leaves, whose doing it is: the end's whose port is
    down, or whose proxy asks for no completions where the other does not ask in vain; else the network's, where a dead path ends
    at the rank, or it asks in vain.
    """
    standing = case.standing
    if standing is None or standing.verdict_class is not VerdictClass.HARDWARE:
        return
    job, doubtful = case.job, {one.index for one in standing.suspects if one.place.link or one.cause is Cause.CUT_OFF}
    proven = _proven(case, doubtful, {one.index for one in standing.suspects if one.cause is Cause.CUT_OFF}) if doubtful else {}
    kept: list[Suspect] = []
    because: dict[int, Fact] = {}
    for one in standing.suspects:
        if one.index in proven and one.index in doubtful:
            cause, detail, fact = proven[one.index]
            because[id(fact)] = fact
            place = replace(one.place, link=None) if cause is Cause.PROXY_STALLED else one.place
            kept.append(replace(one, cause=cause, detail=detail, place=place))
        elif _other_end(job, one) not in proven:
            kept.append(one)
    if because:
        causes, freed = {one.cause for one in kept}, standing.named - {one.index for one in kept}
        yield standing.amended(
            *(PLANES[fact.kind] for fact in because.values()), suspects=tuple(kept), victims=standing.victims | freed,
            cause=kept[0].cause if len(causes) == 1 else Cause.LINK, because=tuple(because.values()),
        )  # fmt: skip


def _proven(case: Case, doubtful: set[int | None], cut_off: set[int | None]) -> dict[int | None, tuple[Cause, str, Fact]]:
    """Of those named for links (``doubtful``) or ``cut_off``, whom something else says to be at fault: cause, words, fact."""
    found: dict[int | None, tuple[Cause, str, Fact]] = {}
    for path in _paths(case) if cut_off else ():
        indices = {member.index for member in path.ends.values() if member is not None} & cut_off
        found |= dict.fromkeys(indices, (Cause.PATH, "", path.fact))
    for port in _ports_down(case):
        using = [one.index for one in case.job.members if port.is_used_by(one.info.host, one.rank) and one.index not in cut_off]
        found |= dict.fromkeys(using, (Cause.PORT, f"{port.nic.label} {port.state}", port))
    work = [fact for fact in case.facts.of(FactKind.WORK, WorkFact) if fact.owner in doubtful]
    in_vain = [fact for fact in work if fact.shows is Shows.NOT_COMPLETED]
    asleep = [fact for fact in work if fact.shows in BY_PROXY] if not in_vain else []
    found |= {fact.owner: (Cause.PROXY_STALLED, "", fact) for fact in asleep}
    return found | {fact.owner: (Cause.PATH, "", fact) for fact in in_vain if fact.owner in cut_off}


# --- ports -------------------------------------------------------------------------------------------------------------

_Found = tuple[list[Suspect], set[int], tuple[Fact, ...]]
"""Whom to name, who waits for them (indices of processes, those named among them), and what is down."""


def _of_ports(case: Case, standing: Hypothesis) -> _Found:
    """Ranks whose port is down, and that have a connection over the network in a communicator that stands still."""
    job, down, places = case.job, _ports_down(case), [one.place for one in standing.suspects]
    # A GPU or proxy that "does not go on" may wait, unseen, for the port; of a rank that uses the port, that is told already.
    told = any(port.is_used_by(place.host, place.rank) for place in places for port in ports_in_use(case))
    inside = standing.verdict_class is VerdictClass.HARDWARE and not told and not any(place.link for place in places)
    if not down or not (standing.open_to_doubt or inside):
        return [], set(), ()
    first = next((one for one in standing.suspects if one.place.operation), next(iter(standing.suspects), None))
    numbers = case.waits.collectives() | ({first.group} if first else set())
    numbers = numbers & job.groups.keys() or {wait.key.group for wait in case.waits.first(64)} & job.groups.keys()
    groups = [job.groups[number] for number in sorted(numbers)]
    suspects: list[Suspect] = []
    because: list[Fact] = []
    for port in down:
        users: dict[int, tuple[Member, LinkRef]] = {}
        for member, own in (held for group in groups for held in group.members.values()):
            link = _link(own, port.nic) if port.is_used_by(member.info.host, member.rank) else None
            if link is not None:
                users.setdefault(member.index, (member, link))
        because += [port] if users else []
        for _, (member, link) in sorted(users.items()):
            suspect = observed(job, member, (), (), Cause.PORT, f"{port.nic.label} {port.state}", link=link)
            communicator = (first.place.communicator if first else None) or suspect.place.communicator
            place = replace(suspect.place, communicator=communicator, operation=first.place.operation if first else None)
            suspects.append(replace(suspect, place=place))
    return suspects, {index for group in groups for index in group.ranks}, tuple(because)


def ports_in_use(case: Case) -> list[PortDown]:
    """NICs that ranks use and that are or were down."""
    return [port for port in case.facts.of(FactKind.PORT_DOWN, PortDown) if port.nic.used_by]


def _ports_down(case: Case) -> list[PortDown]:
    """Those that may be why the job came to stand, also once they are up again: what was lost comes later."""
    began = case.time - case.still
    ended = [port for port in ports_in_use(case) if port.until is None or port.until >= began - UNORDERED_S]
    return [port for port in ended if port.since is None or -BEFORE_S <= port.since - began <= UNORDERED_S]


def _link(own: Communicator, nic: NicRecord) -> LinkRef | None:
    over = sorted((channel, peer, direction) for channel, peer, direction, kind in own.transports if kind is Transport.NET)
    if not over:
        return None
    _, peer, direction = over[0]
    channels = tuple(sorted({channel for channel, other, way in over if (other, way) == (peer, direction)}))
    source, destination = (own.rank, peer) if direction is Direction.SEND else (peer, own.rank)
    return LinkRef(source, destination, "net", channels, nic.name)


def _other_end(job: Job, suspect: Suspect) -> int | None:
    """The observed process at the other end of a suspect's link; -1 where there is none."""
    place, group = suspect.place, job.groups.get(suspect.group)
    link = place.link
    if link is None or group is None or place.comm_rank not in (link.source, link.destination):
        return -1
    other = group.holder(link.destination if place.comm_rank == link.source else link.source)
    return other.index if other is not None else -1


# --- paths -------------------------------------------------------------------------------------------------------------


class _Path(NamedTuple):
    """A dead path in a communicator of the job; ``ends``: address → who has it, as far as it was observed."""

    fact: DeadPath
    group: Group
    ends: dict[str, Member | None]


def _of_paths(case: Case, standing: Hypothesis) -> _Found:
    """Of paths without an answer the address that most share, then of the rest; of one alone both ends, if observed."""
    paths = left = _paths(case)
    named: dict[int, Suspect] = {}
    while left:
        common = Counter(address for path in left for address in path.ends).most_common(2)
        alone = common[0][1] > common[1][1]
        addresses = {common[0][0]} if alone else left[0].ends.keys()
        for path in (path for path in left if addresses <= path.ends.keys()):
            members = [member for address, member in path.ends.items() if address in addresses and member is not None]
            for member in members if len(members) == len(addresses) else ():
                link = None if alone else LinkRef(path.fact.subject.rank, path.fact.subject.peer, "net")
                suspect = observed(case.job, member, (), (), Cause.PATH if alone else Cause.PATH_END, link=link)
                place = replace(suspect.place, communicator=path.group.reference(), comm_rank=path.group.ranks.get(member.index))
                named.setdefault(member.index, replace(suspect, place=place, group=path.group.id))
        left = [path for path in left if not addresses <= path.ends.keys()]
    ranks = {index for path in paths for index in path.group.ranks} | standing.victims
    return list(named.values()), ranks, tuple(path.fact for path in paths)


def _paths(case: Case) -> list[_Path]:
    found = []
    for fact in sorted(case.facts.of(FactKind.PATH_DEAD, DeadPath), key=lambda fact: fact.subject):
        way = fact.subject
        for group in case.job.by_hash.get(way.comm_hash, ()) if fact.local != fact.remote else ():
            sender = group.holder(way.rank)
            if way.peer < group.nranks and sender is not None and fact.global_rank in (None, sender.rank):
                found.append(_Path(fact, group, {fact.local: sender, fact.remote: group.holder(way.peer)}))
                break
    return found


# --- too early to say --------------------------------------------------------------------------------------------------

CRAWL_TIMES = 6.0
"""Unit: times the patience with others; whoever is held back may stand still for so long. From: chosen. A process with a fiftieth
of a CPU was seen to get none for seven seconds (Linux 6.18), and one step of a transfer takes several such turns.
"""


def tcp_slow(case: Case) -> Iterator[Hypothesis]:
    """Links, or a port, that carry no data while their sockets wait to send again what was lost carry little: they are slow."""
    standing = case.standing
    if standing is None or case.still >= case.retries_s or standing.verdict_class is not VerdictClass.HARDWARE:
        return
    if all(one.place.link or one.cause is Cause.CUT_OFF for one in standing.suspects):
        suspects = [replace(one, cause=Cause.PORT_RETRIES) if one.cause is Cause.CUT_OFF else one for one in standing.suspects]
        yield standing.amended(
            verdict_class=VerdictClass.SLOW_COMMUNICATION, cause=suspects[0].cause, suspects=tuple(suspects), seconds=case.still,
            because=case.facts.of(FactKind.RETRYING),
        )  # fmt: skip


def crawls(case: Case) -> Iterator[Hypothesis]:
    """Too early: nobody is named but ranks that a CPU limit holds back, most others not, or links with such a rank at an end."""
    standing, longer = case.standing, min(CRAWL_TIMES * case.patience_s, LONGEST_PATIENCE_S)
    if standing is None or case.still >= longer:
        return
    if standing.verdict_class not in (VerdictClass.NOT_ENTERED, VerdictClass.HARDWARE):
        return
    shares: dict[int | None, float] = dict.fromkeys((member.index for member in case.job.members), 0.0)
    throttled = [(fact.subject, fact) for fact in case.facts.of(FactKind.THROTTLED) if isinstance(fact.subject, RankNode)]
    shares |= {index: fact.value or 0.0 for index, fact in throttled}
    least = max(HELD_BACK, HELD_TIMES * median_low(shares.values()))
    ends = [(suspect.index, _other_end(case.job, suspect)) for suspect in standing.suspects]
    held = [{index for index in pair if shares.get(index, 0.0) >= least} for pair in ends]
    if all(held):
        because = [fact for index, fact in throttled if index in set.union(*held)]
        follows = (*standing.follows, standing.rule)
        yield nobody(Cause.PAUSE, first_waits(case), seconds=longer, because=tuple(because), follows=follows)
