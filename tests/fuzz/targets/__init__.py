"""Every way in: what a target, a node, a viewer, an engine or a file can say to us."""

from __future__ import annotations

from functools import cache

from fuzz.harness import Target


@cache
def every() -> dict[str, Target]:
    """All targets by name."""
    from fuzz.targets import files, ingest, jobs, kernel, memory, messages, nccl, traces

    found = [
        *(*memory.targets(), *messages.targets(), *files.targets(), *kernel.targets()),
        *(*ingest.targets(), *jobs.targets(), *nccl.targets(), *traces.targets()),
    ]
    return {target.name: target for target in found}
