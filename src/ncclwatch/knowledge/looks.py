"""What was seen of the processes and GPUs that a verdict names, put beside it: what they were doing, and what is wrong there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ncclwatch.gpu.trouble import troubles
from ncclwatch.knowledge.doing import doings
from ncclwatch.knowledge.match import with_looked
from ncclwatch.model.doing import Doing
from ncclwatch.model.gpu import GpuLook
from ncclwatch.model.looks import ProcessLook
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from ncclwatch.text import clean, duration

Looks = Mapping[tuple[str, int], ProcessLook]
"""By (host, pid)."""
SUSPECTS, PEERS = 4, 3
"""Of a verdict so many culprits and so many of those that wait are looked at."""
MEANWHILE = "meanwhile "
"""So begins the line of one that waits."""
FRAMES_SHOWN = 4


def doing_of(look: ProcessLook) -> tuple[Doing, ...]:
    """What a process does, most telling first."""
    frames = [(name, file) for name, file, _ in look.frames]
    return doings(look.state, look.thread_states, frames, gil_held=look.gil_held)


def with_stacks(verdict: Verdict, looks: Looks, peers: Iterable[ProcessLook], name: Callable[[ProcessLook], str]) -> Verdict:
    """A verdict with what its culprits were doing, and one of its ``peers`` meanwhile; ``name``: how people know a process."""
    seen = [look for one in verdict.culprits if (look := _look(one, looks)) is not None]
    lines = [_line(look, verdict, name(look)) for look in seen[:SUSPECTS]]
    lines += [f"{MEANWHILE}{_line(look, verdict, name(look))}" for look in list(peers)[:1]]
    culprits = tuple(_doing(one, looks) for one in verdict.culprits)
    return with_looked(replace(verdict, culprits=culprits, evidence=(*verdict.evidence, *lines)))


def _look(culprit: Culprit, looks: Looks) -> ProcessLook | None:
    return looks.get((culprit.host, culprit.pid)) if culprit.pid is not None else None


def _doing(culprit: Culprit, looks: Looks) -> Culprit:
    look = _look(culprit, looks)
    known = tuple(str(one) for one in doing_of(look) if one is not Doing.UNKNOWN) if look is not None else culprit.doing
    return replace(culprit, doing=known)


def _line(look: ProcessLook, verdict: Verdict, name: str) -> str:
    """``rank 2 waits for its data loader: _next_data (torch/…:628) < __next__ (…), main thread sleeping in … (0.4s later)``."""
    found = doing_of(look)
    what = found[0].words if found else Doing.UNKNOWN.words
    where = " < ".join(text for _, _, text in look.frames[:FRAMES_SHOWN])
    parts = [part for part in (where, look.kernel, look.problem if not look.frames else "") if part]
    return clean(f"{name} {what}{': ' if parts else ''}{'; '.join(parts)}{_age(look.time, verdict)}", 500)


def _age(time: float, verdict: Verdict) -> str:
    if verdict.time is None:
        return ""
    apart = time - verdict.time
    return f" ({duration(abs(apart))} {'before' if apart < 0 else 'after'} the last sample)"


# --- GPUs ------------------------------------------------------------------------------------------------------------------


def on_gpus_of(verdict: Verdict, hosts: Sequence[str] | None = None) -> list[Culprit]:
    """Culprits whose GPU is known, of these hosts. Of one that somebody has stopped it explains nothing, and costs time."""
    asked = verdict.verdict_class.accuses and verdict.verdict_class is not VerdictClass.STOPPED
    named = verdict.culprits if asked else ()
    return [one for one in named if (hosts is None or one.host in hosts) and one.ticket is not None and one.ticket.gpu_bus]


def with_gpus(verdict: Verdict, gpus: Mapping[str, GpuLook]) -> Verdict:
    """A verdict with what is wrong with the GPUs of its culprits, by what the drivers of their hosts say."""
    asked = on_gpus_of(verdict, list(gpus))
    if not asked:
        return verdict
    problems = dict.fromkeys(gpus[one.host].problem for one in asked if gpus[one.host].problem)
    found = {id(one): told for one in asked if (told := _troubles(one, gpus[one.host])) is not None}
    lines = [line for _, line in found.values()]
    culprits = tuple(replace(one, gpu_trouble=found[id(one)][0]) if id(one) in found else one for one in verdict.culprits)
    unobserved = (*verdict.unobserved, *(f"the state of GPUs: {clean(problem, 200)}" for problem in problems))
    said = replace(verdict, culprits=culprits, evidence=(*verdict.evidence, *lines), unobserved=unobserved)
    return with_looked(said) if found else said


def _troubles(culprit: Culprit, look: GpuLook) -> tuple[tuple[str, ...], str] | None:
    """What is wrong with the culprit's GPU, and a line of it; ``None`` where the driver does not know it."""
    bus = culprit.ticket.gpu_bus if culprit.ticket is not None else ""
    gpu = next((gpu for gpu in look.gpus if gpu.bus_id == bus), None)
    if gpu is None:
        return None
    wrong = troubles(gpu, look.gpus)
    what = "; ".join(one.text for one in wrong) or "nothing is wrong with it, as far as its driver says"
    line = clean(f"rank {culprit.rank}: GPU {gpu.index} ({gpu.bus_id}): {what}", 500)
    return tuple(one.trouble.value for one in wrong), line
