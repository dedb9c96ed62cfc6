"""Links, network interfaces and proxies that the job waits for: what several slow links have in common is blamed before each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import numpy as np

from ncclwatch.engine.slow.contention import sleeps
from ncclwatch.engine.slow.findings import FLOOR, QUIET_SIGMAS, Context, Finding, Kind, sigmas_needed, stands_out
from ncclwatch.engine.slow.looks import Part
from ncclwatch.engine.slow.profile import LinkKey, Profile
from ncclwatch.model.identity import ProcessKey

ELEVATED = 0.02
"""A link that holds the job up for less of the time is as good as any."""
ELEVATED_TIMES = 2.5
SMALL = 16
"""In jobs of so many ranks one rank's links are many of all."""
ALONE_TIMES = 2.5
ALL_LINKS = 0.25
"""A whole host is blamed for its links only if they hold the job up for this share of the time: many small shares are noise."""


def network_findings(profile: Profile, context: Context) -> list[Finding]:
    """Slow proxies, interfaces and links, each rank in one of them at most."""
    index = {key: at for at, key in enumerate(profile.processes)}
    shares = dict(profile.links)
    if context.before is not None and context.before.looks >= 4:
        past = {key: share / context.stretch for key, share in context.before.links.items()}
        shares = {key: max(0.0, share - past.get(key, 0.0)) for key, share in shares.items()}
    findings = _proxies(profile, context, shares, index) or _delayed(profile, context, shares, index)
    touched = {at for finding in findings for at in finding.members}
    size = len(profile.processes)
    usual = _usual_link(shares, index)
    least = max(ELEVATED, ELEVATED_TIMES * usual)
    elevated = {key: share for key, share in shares.items() if share >= least and profile.link_looks[key] >= 2}
    ends: dict[int, list[LinkKey]] = defaultdict(list)
    for key in elevated:
        for end in _ends(key, index):
            ends[end].append(key)
    for members in _interfaces(elevated, ends, index, context):
        keys = {key for at in members for key in ends[at]}
        share = sum(shares[key] for key in keys)
        looks = max((profile.link_looks[key] for key in keys), default=0)
        chance = float(np.sqrt(sum(profile.link_scatter.get(key, 0.0) ** 2 for key in keys)))
        certain = share - len(keys) * _mean_other(shares, keys, size) >= sigmas_needed(context) * chance
        if not certain or touched.intersection(members):
            continue
        if stands_out(share, looks, usual, context, _shown(share, keys, shares, profile)):
            findings.append(Finding(Kind.NIC, members, share, looks, usual, keys=tuple(keys)))
            touched.update(members)
    for key, share in sorted(elevated.items(), key=lambda item: -item[1]):
        members = tuple(index[end] for end in (key[0], key[1]) if end in index)
        chance = profile.link_scatter.get(key, 0.0)
        certain = share - _mean_other(shares, {key}, size) >= sigmas_needed(context) * chance
        # Without a healthy past a job may well wait for its links, but hardly for one alone.
        compared = usual if context.lost is not None else max([usual, *(s for other, s in shares.items() if other != key)])
        if not certain or touched.intersection(members):
            continue
        if not stands_out(share, profile.link_looks[key], compared, context, _shown(share, {key}, shares, profile)):
            continue
        findings.append(Finding(Kind.LINK, members, share, profile.link_looks[key], usual, profile.places[key], (key,)))
        touched.update(members)
    largest = max((f.share for f in findings), default=0.0)
    return [f for f in findings if f.share >= 0.3 * largest]


def _shown(share: float, keys: Collection[LinkKey], shares: Mapping[LinkKey, float], profile: Profile) -> float:
    """The part of all waits whose ends show, for links that hold the job up much more than each other one; else they have to
    explain what is lost as if all showed.
    """
    rest = max((other for key, other in shares.items() if key not in keys), default=0.0)
    return profile.shown() if share >= ALONE_TIMES * rest else 1.0


def _ends(key: LinkKey, index: Mapping[ProcessKey, int]) -> set[int]:
    """The observed processes at the ends of a link."""
    return {index[end] for end in (key[0], key[1]) if end is not None and end in index}


def _proxies(
    profile: Profile, context: Context, shares: Mapping[LinkKey, float], index: Mapping[ProcessKey, int]
) -> list[Finding]:
    proxies = profile.hold[Part.PROXY]
    # The second largest stands for the rest when one is asked about; the third quartile does not care about one value.
    usual = float(np.quantile(proxies, 0.75)) if len(proxies) > 1 else 0.0
    findings = []
    for at in np.flatnonzero(proxies >= FLOOR).tolist():
        looks = int(profile.looks_held[Part.PROXY][at])
        incident = sum(share for key, share in shares.items() if at in _ends(key, index))
        share = float(proxies[at] + incident)
        others = float(np.delete(proxies, at).mean()) if len(proxies) > 1 else 0.0
        sigmas = QUIET_SIGMAS if sleeps(profile, context, [at]) else sigmas_needed(context)
        certain = proxies[at] - others >= sigmas * profile.proxy_scatter[at]
        alone = proxies[at] >= ALONE_TIMES * float(np.delete(proxies, at).max(initial=0.0))
        shown = profile.shown() if alone else 1.0
        if certain and stands_out(share, looks, usual, context, shown) and proxies[at] >= 0.3 * incident:
            findings.append(Finding(Kind.PROXY, (at,), share, looks, usual, keys=(profile.processes[at],)))
    return findings


def _delayed(
    profile: Profile, context: Context, shares: Mapping[LinkKey, float], index: Mapping[ProcessKey, int]
) -> list[Finding]:
    """The interface, or the link, of which the wire says that it has become slow, where the job waits for it."""
    ends = [{index[end] for end in pair if end in index} for pair in context.delayed]
    common = set.intersection(*ends) if ends else set()
    keys = [key for key in shares if (key[0], key[1]) in context.delayed]
    share, looks = sum(shares[key] for key in keys), sum(profile.link_looks[key] for key in keys)
    if not common or not stands_out(share, looks, 0.0, context, profile.shown(), measured=True):
        return []
    one_link = len(common) == 2
    place = profile.places[keys[0]] if one_link else None
    return [Finding(Kind.LINK if one_link else Kind.NIC, tuple(sorted(common)), share, looks, 0.0, place, tuple(keys))]


def _usual_link(shares: Mapping[LinkKey, float], index: Mapping[ProcessKey, int]) -> float:
    """What a link usually holds up: the median over links, of which there are twice as many as ranks at least (a ring of the
    gradients and something else); those that nobody waited for count as nothing.

    In small jobs the links of one rank are half of all: the least that is left without any one rank's counts.
    """
    least = [_median(list(shares.values()), len(index))]
    for at in range(len(index)) if len(index) <= SMALL else ():
        others = [share for key, share in shares.items() if at not in _ends(key, index)]
        least.append(_median(others, len(index) - 1))
    return min(least)


def _median(shares: list[float], processes: int) -> float:
    values = [0.0] * max(0, 2 * processes - len(shares)) + shares
    return float(np.median(values)) if values else 0.0


def _mean_other(shares: Mapping[LinkKey, float], keys: set[LinkKey], processes: int) -> float:
    """The mean of all other links, of which there are as many as ranks at least."""
    rest = [share for key, share in shares.items() if key not in keys]
    return sum(rest) / max(len(rest), processes - len(keys), 1)


def _interfaces(
    elevated: Mapping[LinkKey, float],
    ends: Mapping[int, list[LinkKey]],
    index: Mapping[ProcessKey, int],
    context: Context,
) -> list[tuple[int, ...]]:
    """Ranks (or all ranks of a host) whose links to several neighbours are slow: what they have in common is theirs.

    Where all slow links lie between the same hosts nothing tells at which end they are slow: then the ranks of all of these.
    """
    found: list[tuple[float, tuple[int, ...]]] = []
    total = sum(elevated.values())
    for inside in _places(context):
        keys = [key for key in elevated if _ends(key, index) & inside]
        covered = {at for key in keys for at in _ends(key, index) & inside}
        largest = max((elevated[key] for key in keys), default=0.0)
        part = sum(elevated[key] for key in keys)
        if covered == inside and part >= 0.7 * total and largest <= 0.5 * part and len(keys) >= len(inside) and part >= ALL_LINKS:
            found.append((part, tuple(sorted(inside))))
    if len(found) > 1 and len({part for part, _ in found}) == 1 and found[0][0] == total:
        return [tuple(sorted({at for _, inside in found for at in inside}))]
    if not found:
        for at, keys in ends.items():
            neighbours = {end for key in keys for end in _ends(key, index)} - {at}
            part = sum(elevated[key] for key in keys)
            largest = max(elevated[key] for key in keys)
            if len(neighbours) >= 2 and part >= 0.6 * total and largest <= 0.7 * part:
                found.append((part, (at,)))
    # Neighbours share links; what has most of them is what they have in common.
    return [max(found)[1]] if found else []


def _places(context: Context) -> list[set[int]]:
    """Hosts, and nodes of a host, with two ranks and more, but not all: sets of places in the profile.

    None of two where nothing is known of a healthy past: their links are all that there are, and a job may well spend half of its
    time on them.
    """
    if context.lost is None and len(np.unique(context.nodes)) < 3:
        return []
    found: dict[frozenset[int], None] = {}
    for numbers in (context.host, context.nodes):
        for number in np.unique(numbers).tolist():
            inside = np.flatnonzero(numbers == number).tolist()
            if 2 <= len(inside) < len(numbers):
                found[frozenset(inside)] = None
    return [set(inside) for inside in found]
