"""The probing frame: the binary layout that the counter shim publishes.

Generated from kernel_counters/frame.h by scripts/generate_events.py: change the header, then run the script.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

FRAME_VERSION = 1
FRAME_MAGIC = 3552567502688437070
FRAME_COMMUNICATORS = 64
FRAME_CHANNELS = 64
FRAME_OPERATIONS = 32
FRAME_PROXY_OPERATIONS = 1024
FRAME_STEPS = 8
FRAME_WORDS = 1024
FRAME_NAME = 32


class Entry(IntEnum):
    """``enum nw_entry`` of frame.h."""

    NONE = 0
    """Not yet known."""
    PLUGIN = 1
    """NCCL loaded it as profiler plugin."""
    PRELOAD = 2
    """LD_PRELOAD: calls of NCCL's functions pass through it."""
    INJECTION = 3
    """CUDA_INJECTION64_PATH: the CUDA driver loaded it; only the sampler works."""


class Sampler(IntEnum):
    """``enum nw_sampler`` of frame.h."""

    OFF = 0
    """Switched off by NCCLWATCH_SAMPLER=0."""
    NO_DRIVER = 1
    """No CUDA driver in the process, or one without the functions needed."""
    IDLE = 2
    """Nothing is asked of it."""
    RUNNING = 3
    """It reads what is asked."""
    NO_CONTEXT = 4
    """Waits for a CUDA context."""
    FAILED = 5
    """The driver refused its stream or buffer: last_error."""
    GONE = 6
    """The process is exiting."""


class CommState(IntEnum):
    """``enum nw_comm_state`` of frame.h."""

    FREE = 0
    """The block holds nothing."""
    LIVE = 1
    """The communicator exists."""
    FINISHED = 2
    """It was destroyed or aborted; the block is kept until it is needed."""


class ProxyState(IntEnum):
    """``enum nw_proxy_state`` of frame.h."""

    FREE = 0
    """The slot holds nothing."""
    OPEN = 1
    """The operation is unfinished."""


class StepState(IntEnum):
    """``enum nw_step_state`` of frame.h."""

    NONE = 0
    """No transfer."""
    BEGUN = 1
    """Begun, nothing said about it yet."""
    SEND_GPU_WAIT = 2
    """The GPU has not produced the data."""
    SEND_PEER_WAIT = 3
    """The receiver has not given a buffer."""
    SEND_WAIT = 4
    """Handed to the network, not completed."""
    RECV_WAIT = 5
    """A buffer is posted, nothing has arrived."""
    RECV_FLUSH_WAIT = 6
    """Arrived, the flush to GPU memory runs."""
    RECV_GPU_WAIT = 7
    """The GPU has not consumed the data."""


class WordStatus(IntEnum):
    """``enum nw_word_status`` of frame.h."""

    NONE = 0
    """Not read yet."""
    OK = 1
    """Value and time_ns are good."""
    MALFORMED = 2
    """The request makes no sense: alignment, size, address 0."""
    NOT_HELD = 3
    """NCCL does not hold this address where the request says it does."""
    NOT_DEVICE = 4
    """The driver does not know the address as memory of a GPU."""
    FAILED = 5
    """The driver refused the copy: last_error."""
    IN_FLIGHT = 6
    """The copy was begun and has not returned."""


FRAME_HEADER_DTYPE = np.dtype(
    {
        "names": [
            "magic",
            "version",
            "size",  # bytes of the whole frame
            "pid",  # as the process itself sees it
            "entry",  # enum nw_entry
            "interface",  # version of NCCL's profiler interface in use; 0 without
            "events_wanted",  # activation mask given to NCCL
            "start_time",  # of the process, clock ticks since boot (/proc/PID/stat)
            "created_ns",
            "created_wall_ns",  # CLOCK_REALTIME
            "heartbeat_ns",  # the sampler's thread was last awake; 0 without one
            "events",  # events taken from NCCL
            "unmatched",  # events that belong to nothing here: another process's (PXN), or of a communicator refused
            "refused_communicators",  # more communicators at once than the frame holds
            "refused_operations",  # more unfinished proxy operations than the frame holds
            "contended",  # updates left out because another thread was writing the same record
            "proxy_begun",  # proxy operations
            "proxy_finished",
            "steps_begun",  # network transfers
            "steps_finished",
            "sampler",  # enum nw_sampler
            "last_error",  # CUresult of the last failure
            "copy_begun_ns",  # a round of copies is under way since; 0 when none is
            "copies",  # words copied
            "rounds",  # rounds of copies finished
            "round_duration_ns",  # of the last round
            "period_us",  # at which it reads now
            "words",  # addresses taken from the request
            "request_seen",  # seq of the request these words answer
            "malformed_requests",
            "reserved",
        ],
        "formats": [
            "<u8",
            "<u4",
            "<u4",
            "<u4",
            "<u4",
            "<u4",
            "<u4",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u4",
            "<i4",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u4",
            "<u4",
            "<u8",
            "<u8",
            ("<u8", (7,)),
        ],
        "offsets": [
            0,
            8,
            12,
            16,
            20,
            24,
            28,
            32,
            40,
            48,
            56,
            64,
            72,
            80,
            88,
            96,
            104,
            112,
            120,
            128,
            136,
            140,
            144,
            152,
            160,
            168,
            176,
            180,
            184,
            192,
            200,
        ],
        "itemsize": 256,
    }
)
"""``struct nw_frame_header``, 256 bytes."""


CHANNEL_DTYPE = np.dtype(
    {
        "names": [
            "seq",
            "reserved",
            "started",  # works begun by the GPU
            "finished",  # works finished by the GPU
            "operation",  # ordinal of the operation last begun
            "gpu_start",  # GPU time at which the last work began; 0 where the interface does not say (before v4)
            "gpu_stop",  # GPU time at which the last finished work ended
            "seen_start_ns",  # when NCCL's host thread saw it begin
            "seen_stop_ns",
        ],
        "formats": [
            "<u4",
            "<u4",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
        ],
        "offsets": [0, 4, 8, 16, 24, 32, 40, 48, 56],
        "itemsize": 64,
    }
)
"""``struct nw_channel``, 64 bytes."""


OPERATION_DTYPE = np.dtype(
    {
        "names": [
            "seq",  # of the host's part
            "function",  # enum nw_function of events.h; 0 unknown
            "ordinal",  # counts this communicator's operations from 1; the slot is ordinal % NW_FRAME_OPERATIONS
            "sequence",  # NCCL's seqNumber of this function; all bits set where unknown
            "count",  # elements
            "datatype",  # ncclDataType_t; all bits set where unknown
            "peer",  # root or peer, -1 where neither applies
            "channels",  # on how many channels it runs; 0 unknown
            "point_to_point",
            "launched_ns",  # the host began to launch it
            "device_seq",  # of the GPU's part
            "started",  # channels on which the GPU has begun it
            "finished",  # channels on which the GPU has finished it
            "device_known",  # 1 where start and finish are observed at all
            "gpu_start",  # earliest begin, GPU time; 0 unknown
            "gpu_stop",  # latest end, GPU time; 0 unknown
            "seen_start_ns",  # when the first begin was seen by the host
            "seen_stop_ns",
            "duration_ns",  # by the GPU's clock, once finished; 0 unknown
            "reserved",
        ],
        "formats": [
            "<u4",
            "<u4",
            "<u8",
            "<u8",
            "<u8",
            "<u4",
            "<i4",
            "<u4",
            "<u4",
            "<u8",
            "<u4",
            "<u4",
            "<u4",
            "<u4",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            ("<u8", (2,)),
        ],
        "offsets": [0, 4, 8, 16, 24, 32, 36, 40, 44, 48, 56, 60, 64, 68, 72, 80, 88, 96, 104, 112],
        "itemsize": 128,
    }
)
"""``struct nw_operation``, 128 bytes."""


COMMUNICATOR_DTYPE = np.dtype(
    {
        "names": [
            "seq",
            "state",  # enum nw_comm_state
            "hash",  # commHash; 0 unknown
            "address",  # an address inside this ncclComm (where NCCL keeps the plugin's context), or its own; 0 unknown
            "rank",  # -1 unknown
            "nranks",  # 0 unknown
            "nnodes",  # 0 unknown
            "generation",  # raised each time the block is used for another communicator
            "created_ns",
            "finished_ns",
            "operations",  # operations seen; the newest has this ordinal
            "collectives",
            "transfers",  # point-to-point operations
            "name",
            "reserved",
            "channels",
            "recent",
        ],
        "formats": [
            "<u4",
            "<u4",
            "<u8",
            "<u8",
            "<i4",
            "<i4",
            "<i4",
            "<u4",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            ("u1", (32,)),
            ("<u8", (2,)),
            (CHANNEL_DTYPE, (64,)),
            (OPERATION_DTYPE, (32,)),
        ],
        "offsets": [0, 4, 8, 16, 24, 28, 32, 36, 40, 48, 56, 64, 72, 80, 112, 128, 4224],
        "itemsize": 8320,
    }
)
"""``struct nw_communicator``, 8320 bytes."""


STEP_DTYPE = np.dtype(
    {
        "names": [
            "step",
            "state",  # enum nw_step_state
            "since_ns",  # CLOCK_MONOTONIC_COARSE
        ],
        "formats": [
            "<i4",
            "<u4",
            "<u8",
        ],
        "offsets": [0, 4, 8],
        "itemsize": 16,
    }
)
"""``struct nw_step``, 16 bytes."""


PROXY_OPERATION_DTYPE = np.dtype(
    {
        "names": [
            "seq",
            "state",  # enum nw_proxy_state
            "communicator",  # index of the block
            "generation",  # of the block
            "ordinal",  # of the operation it works for; 0 unknown
            "channel",
            "peer",
            "nsteps",  # transfers
            "chunk",  # bytes a transfer at most
            "is_send",
            "owner_pid",  # process on whose behalf it runs, as that process sees itself
            "begun_ns",
            "changed_ns",  # CLOCK_MONOTONIC_COARSE
            "bytes",  # of finished transfers, where the interface says so
            "steps_begun",
            "steps_finished",
            "steps",  # slot: step % NW_FRAME_STEPS
        ],
        "formats": [
            "<u4",
            "<u4",
            "<u4",
            "<u4",
            "<u8",
            "<u4",
            "<i4",
            "<i4",
            "<i4",
            "<u4",
            "<i4",
            "<u8",
            "<u8",
            "<u8",
            "<u4",
            "<u4",
            (STEP_DTYPE, (8,)),
        ],
        "offsets": [0, 4, 8, 12, 16, 24, 28, 32, 36, 40, 44, 48, 56, 64, 72, 76, 80],
        "itemsize": 208,
    }
)
"""``struct nw_proxy_operation``, 208 bytes."""


WORD_DTYPE = np.dtype(
    {
        "names": [
            "seq",
            "status",  # enum nw_word_status
            "address",
            "value",
            "time_ns",  # when the round of copies that read it had ended
            "changes",  # how often the value was another than at the round before
            "changed_ns",  # when it last was
        ],
        "formats": [
            "<u4",
            "<u4",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
            "<u8",
        ],
        "offsets": [0, 4, 8, 16, 24, 32, 40],
        "itemsize": 48,
    }
)
"""``struct nw_word``, 48 bytes."""


WANTED_WORD_DTYPE = np.dtype(
    {
        "names": [
            "address",  # of the word in GPU memory; a multiple of `size`
            "held_at",  # where in host memory NCCL keeps this address: it must hold exactly `address`
            "size",  # 4 or 8 bytes
            "reserved",
        ],
        "formats": [
            "<u8",
            "<u8",
            "<u4",
            "<u4",
        ],
        "offsets": [0, 8, 16, 20],
        "itemsize": 24,
    }
)
"""``struct nw_wanted_word``, 24 bytes."""


REQUEST_DTYPE = np.dtype(
    {
        "names": [
            "seq",
            "count",  # entries in use
            "period_us",  # between rounds; 1000 to 1000000
            "reader_pid",
            "expires_ns",  # after this nothing is read any more, unless asked anew: a dead reader costs nothing
            "reserved",
            "words",
            "padding",
        ],
        "formats": [
            "<u4",
            "<u4",
            "<u4",
            "<u4",
            "<u8",
            "<u8",
            (WANTED_WORD_DTYPE, (1024,)),
            ("u1", (4064,)),
        ],
        "offsets": [0, 4, 8, 12, 16, 24, 32, 24608],
        "itemsize": 28672,
    }
)
"""``struct nw_request``, 28672 bytes."""


FRAME_DTYPE = np.dtype(
    {
        "names": [
            "header",
            "communicators",
            "proxy",
            "words",
            "padding",
            "request",
        ],
        "formats": [
            FRAME_HEADER_DTYPE,
            (COMMUNICATOR_DTYPE, (64,)),
            (PROXY_OPERATION_DTYPE, (1024,)),
            (WORD_DTYPE, (1024,)),
            ("u1", (3840,)),
            REQUEST_DTYPE,
        ],
        "offsets": [0, 256, 532736, 745728, 794880, 798720],
        "itemsize": 827392,
    }
)
"""``struct nw_frame``, 827392 bytes."""
