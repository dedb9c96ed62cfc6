"""SIMULATED rank logs: what MegaTrace's patched NCCL would have written of a simulated job by some moment.

Form of a line, ring and saving as in ``trace/megatrace_nccl.patch`` of github.com/sii-research/Megatrace: a ring of 10,000
lines a rank, saved once no call has come for ``SENSITIVE_S``; what comes after the last save is in no file. Shares no code with
what reads such logs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

from ncclwatch.simulate.layout import groups
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.timeline import Block, Timeline

RING_LINES = 9_999
"""Fact: lines that a ring of ``RING_BUFFER_SIZE`` 10,000 holds: one place stays free."""
SENSITIVE_S = 3.0
"""Fact: default of ``NCCL_MEGATRACE_SENSTIME``, 3,000 ms."""

_Line = tuple[float, str]


def write_rank_logs(
    timeline: Timeline, folder: Path, *, until_s: float = math.inf, group_hash: bool = False, config: bool = True,
    sensitive_s: float = SENSITIVE_S,
) -> list[Path]:  # fmt: skip
    """Write ``rank_N.log`` of every observed rank as they are at true time ``until_s``, and ``config.yaml`` if wanted; their
    paths.

    ``group_hash``: lines of newer versions, which name the communicator. A rank that has saved nothing has an empty file.
    """
    cast = Cast(timeline.scenario)
    lines: dict[int, list[_Line]] = defaultdict(list)
    for block in timeline.blocks:
        _lines_of(block, cast, until_s, group_hash, lines)
    paths = []
    for rank in range(timeline.scenario.layout.world):
        if cast.observed(rank):
            paths.append(folder / f"rank_{rank}.log")
            paths[-1].write_text(_saved(lines[rank], until_s, sensitive_s), "ascii")
    if config:
        layout = timeline.scenario.layout
        text = f"TP: {layout.tp}\nPP: {layout.pp}\nworld_size: {layout.world}\n"
        (folder / "config.yaml").write_text(text, "ascii")
    return paths


def _lines_of(block: Block, cast: Cast, until_s: float, group_hash: bool, lines: dict[int, list[_Line]]) -> None:
    """The lines of one operation on all its ranks."""
    size = groups(cast.scenario.layout, block.role).shape[1]
    for rank, called in zip(block.ranks.tolist(), block.called.tolist(), strict=True):
        if not (math.isfinite(called) and called <= until_s) or not cast.observed(rank):
            continue
        own = block.calling(rank)
        whole = own.function in ("AllReduce", "SendRecv")
        count = own.nbytes // own.element_bytes // (1 if whole else size)
        names = [own.function]
        if block.transfers:
            names = ["Send" if transfer.send else "Recv" for transfer in block.transfers]
        elif own.function == "AlltoAll":
            names = ["Send", "Recv"] * size
        stamp = cast.clock(rank).wall_ns(called)
        stream = 0x5580_0000_0000 + rank * 0x10_0000 + cast.roles.index(block.role) * 0x3490
        number = cast.membership(rank, block.role).hash
        suffix = f" groupHash {number - (1 << 64) if number >> 63 else number}" if group_hash else ""
        for at, name in enumerate(names):
            seconds, rest = divmod(stamp + 200 * at, 1_000_000_000)
            lines[rank].append(
                (
                    called,
                    f"[{seconds}.{rest:09d}] [Rank {rank}] Fun {name} Data {count} stream {stream:#x} "
                    f"opCount {0 if size == 1 else block.sequence}{suffix}",
                )
            )


def _saved(lines: list[_Line], until_s: float, sensitive_s: float) -> str:
    """What the thread has saved of a rank's lines: before each pause that is long enough the newest that the ring held."""
    lines.sort(key=lambda line: line[0])
    saved: list[str] = []
    ring: list[str] = []
    number = 1
    for at, (called, text) in enumerate(lines):
        ring.append(text)
        after = lines[at + 1][0] if at + 1 < len(lines) else until_s
        if after - called >= sensitive_s:
            saved += (f"[save_count {number}] {line}\n" for line in ring[-RING_LINES:])
            number, ring = number + 1, []
    return "".join(saved)
