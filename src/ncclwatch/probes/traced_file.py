"""A file that carries NCCL, as it is given to the tracer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ncclwatch.probes.map_layouts import BINARY_DTYPE
from ncclwatch.target.layout import Layout, MissingMemberError


@dataclass(frozen=True, slots=True)
class CommunicatorOffsets:
    """Where ``ncclComm`` keeps what a record needs, in bytes; ``None`` when this build has no such member."""

    comm_hash: int | None = None
    rank: int | None = None
    nranks: int | None = None
    op_count: int | None = None
    magic: int | None = None

    MAGIC = 0x0280028002800280
    """``NCCL_MAGIC`` (src/include/comm.h, NCCL 2.21 and later)."""

    @classmethod
    def from_layout(cls, layout: Layout) -> CommunicatorOffsets:
        """The offsets of one build; members it lacks, or keeps in another width than we read, are ``None``."""

        def offset(name: str, size: int) -> int | None:
            try:
                member = layout.member(f"ncclComm.{name}")
            except MissingMemberError:
                return None
            return member.offset if member.size == size and member.offset < 1 << 31 else None

        return cls(offset("commHash", 8), offset("rank", 4), offset("nRanks", 4), offset("opCount", 8), offset("startMagic", 8))

    def pack(self, code: tuple[int, int]) -> bytes:
        """``struct nw_binary`` of a file whose own code lies between two addresses as linked."""
        row = np.zeros((), BINARY_DTYPE)
        row["code_begin"], row["code_end"] = code
        row["magic"] = self.MAGIC
        for name, value in (
            ("hash_offset", self.comm_hash),
            ("rank_offset", self.rank),
            ("nranks_offset", self.nranks),
            ("op_count_offset", self.op_count),
            ("magic_offset", self.magic),
        ):
            row[name] = -1 if value is None else value
        return row.tobytes()


@dataclass(frozen=True, slots=True)
class TracedFile:
    """A file that carries NCCL, as it is given to the tracer: any path that leads to it (``/proc/PID/root/…`` or
    ``/proc/PID/map_files/…`` for one in a container)."""

    path: str
    offsets: CommunicatorOffsets = field(default_factory=CommunicatorOffsets)
