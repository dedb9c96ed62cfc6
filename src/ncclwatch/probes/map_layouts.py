"""Layout of the BPF maps by which the agent steers its programs.

Generated from bpftrace_probes/maps.h by scripts/generate_events.py: change the header, then run the script.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

MAX_SITES = 1024
MAX_BINARIES = 64
MAX_FUNCTIONS = 64
MAX_PROCESSES = 8192
MAX_CALLS = 8192
MAX_NAMESPACES = 4


class Counter(IntEnum):
    """``enum nw_counter`` of maps.h."""

    RECORDS = 0
    """Records put into the ring."""
    LOST = 1
    """Records lost because the ring was full."""
    FOREIGN = 2
    """Hits by processes that are not watched."""
    GATED = 3
    """Hits of functions that are switched off."""
    NESTED = 4
    """Calls that NCCL made to itself."""
    UNTRANSLATED = 5
    """Hits by processes of a pid namespace that the agent does not know."""
    UNMAPPED = 6
    """Hits of a site that has no entry: attached or detached this moment."""
    COUNTERS = 8


class SiteKind(IntEnum):
    """``enum nw_site_kind`` of maps.h."""

    NONE = 0
    ENTER = 1
    LEAVE = 2


class Numbering(IntEnum):
    """``enum nw_numbering`` of maps.h."""

    INIT = 0
    """The kernel's own numbers: /proc shows the initial pid namespace."""
    NAMESPACE = 1
    """Numbers of the namespaces listed in nw_config."""


FUNCTION_SPEC_DTYPE = np.dtype(
    {
        "names": [
            "enter_on",  # gate of ENTER records
            "leave_on",  # gate of LEAVE records
            "leave_seen",  # the leave is probed: remember the call
            "comm",  # ncclComm_t
            "comm_out",  # ncclComm_t* that the function fills
            "sendbuff",
            "recvbuff",
            "count",
            "datatype",
            "redop",
            "peer",
            "stream",
            "rank",
            "nranks",
            "color",
            "id_pointer",  # ncclUniqueId* read on entry
            "id_value",  # ncclUniqueId passed by value: its first word
            "id_out",  # ncclUniqueId* that the function fills
            "comm_freed",  # the communicator may be gone when the function returns
            "reserved",
        ],
        "formats": [
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            "u1",
            ("u1", (5,)),
        ],
        "offsets": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19],
        "itemsize": 24,
    }
)
"""``struct nw_function_spec``, 24 bytes."""


SITE_DTYPE = np.dtype(
    {
        "names": [
            "address",  # as linked: the load bias is the instruction pointer less this
            "function",  # enum nw_function
            "binary",
            "kind",  # enum nw_site_kind
            "reserved",
        ],
        "formats": [
            "<u8",
            "<u2",
            "<u2",
            "u1",
            ("u1", (3,)),
        ],
        "offsets": [0, 8, 10, 12, 13],
        "itemsize": 16,
    }
)
"""``struct nw_site``, 16 bytes."""


BINARY_DTYPE = np.dtype(
    {
        "names": [
            "code_begin",  # addresses as linked; a return address between them is a call NCCL made to itself
            "code_end",
            "magic",  # what ncclComm holds at magic_offset when it is alive
            "magic_offset",
            "hash_offset",
            "rank_offset",
            "nranks_offset",
            "op_count_offset",
            "reserved",
        ],
        "formats": [
            "<u8",
            "<u8",
            "<u8",
            "<i4",
            "<i4",
            "<i4",
            "<i4",
            "<i4",
            "<u4",
        ],
        "offsets": [0, 8, 16, 24, 28, 32, 36, 40, 44],
        "itemsize": 48,
    }
)
"""``struct nw_binary``, 48 bytes."""


NAMESPACE_DTYPE = np.dtype(
    {
        "names": [
            "device",  # of the namespace's inode, in the kernel's dev_t encoding
            "inode",
        ],
        "formats": [
            "<u8",
            "<u8",
        ],
        "offsets": [0, 8],
        "itemsize": 16,
    }
)
"""``struct nw_namespace``, 16 bytes."""


CONFIG_DTYPE = np.dtype(
    {
        "names": [
            "numbering",  # enum nw_numbering
            "namespaces",  # how many of the list are valid
            "all",  # watch every process
            "every_exec",  # EXEC records: 0 of watched processes only, 1 of every process
            "namespace_list",
        ],
        "formats": [
            "<u4",
            "<u4",
            "<u4",
            "<u4",
            (NAMESPACE_DTYPE, (4,)),
        ],
        "offsets": [0, 4, 8, 12, 16],
        "itemsize": 80,
    }
)
"""``struct nw_config``, 80 bytes."""


PROCESS_DTYPE = np.dtype(
    {
        "names": [
            "pid_namespace",
            "pid",
        ],
        "formats": [
            "<u4",
            "<u4",
        ],
        "offsets": [0, 4],
        "itemsize": 8,
    }
)
"""``struct nw_process``, 8 bytes."""


CALL_KEY_DTYPE = np.dtype(
    {
        "names": [
            "thread",  # bpf_get_current_pid_tgid
            "function",
            "reserved",
        ],
        "formats": [
            "<u8",
            "<u4",
            "<u4",
        ],
        "offsets": [0, 8, 12],
        "itemsize": 16,
    }
)
"""``struct nw_call_key``, 16 bytes."""


CALL_DTYPE = np.dtype(
    {
        "names": [
            "time_ns",
            "comm",  # or, when pending_out is set, the ncclComm_t* that is being filled
            "comm_hash",
            "op_count",
            "unique_id",  # or, when pending_id is set, the ncclUniqueId* that is being filled
            "rank",
            "nranks",
            "flags",
            "pending_out",
            "pending_id",
            "reserved",
        ],
        "formats": [
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<i4",
            "<i4",
            "<u2",
            "u1",
            "u1",
            "<u4",
        ],
        "offsets": [0, 8, 16, 24, 32, 40, 44, 48, 50, 51, 52],
        "itemsize": 56,
    }
)
"""``struct nw_call``, 56 bytes."""
