"""A process that plays NCCL to the counter shim: loads it as NCCL would, and does what its standard input says, line by line.

Run by ``shim_harness``; each line is answered by one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import struct
import sys
import threading
import time
from typing import Any

COLL, P2P, PROXY_OP, PROXY_STEP, KERNEL_CH = 2, 4, 8, 16, 64
SEND_GPU_WAIT, SEND_WAIT, RECV_WAIT, KERNEL_STOP = 8, 9, 10, 22

library = ctypes.CDLL(sys.argv[1])
_keep = [ctypes.c_char_p(text) for text in (b"AllReduce", b"ncclFloat32", b"Ring", b"Simple", b"Send")]
_text = {item.value: ctypes.cast(item, ctypes.c_void_p).value for item in _keep}


class Plugin:
    """The table of version 4 of NCCL's profiler interface, as NCCL calls it."""

    def __init__(self) -> None:
        table = (ctypes.c_void_p * 6).in_dll(library, "ncclProfiler_v4")
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._init = ctypes.CFUNCTYPE(
            number, pointer, pointer, ctypes.c_char_p, ctypes.c_uint64, number, number, number, pointer
        )(table[1] or 0)
        self._start = ctypes.CFUNCTYPE(number, pointer, pointer, pointer)(table[2] or 0)
        self._stop = ctypes.CFUNCTYPE(number, pointer)(table[3] or 0)
        self._record = ctypes.CFUNCTYPE(number, pointer, number, pointer)(table[4] or 0)
        self._finalize = ctypes.CFUNCTYPE(number, pointer)(table[5] or 0)

    def init(self, comm_hash: int, rank: int = 0, nranks: int = 4, name: bytes | None = None) -> int:
        context, mask = ctypes.c_void_p(), ctypes.c_int(-1)
        assert self._init(ctypes.byref(context), ctypes.byref(mask), name, comm_hash, 1, nranks, rank, None) == 0
        self.mask = mask.value
        return context.value or 0

    def start(self, context: int, event: bytes) -> int:
        handle, buffer = ctypes.c_void_p(), ctypes.create_string_buffer(event, 256)
        assert self._start(context, ctypes.byref(handle), buffer) == 0
        return handle.value or 0

    def coll(self, context: int, sequence: int = 0, channels: int = 2) -> int:
        body = struct.pack("<QQQQQiiQBB6x", sequence, _text[b"AllReduce"], 0, 0, 1024, 0, 0, _text[b"ncclFloat32"], channels, 8)
        return self.start(context, struct.pack("<QQii", COLL, 0, 0, 0) + body)

    def p2p(self, context: int, peer: int) -> int:
        body = struct.pack("<QQQQiB3x", _text[b"Send"], 0, _text[b"ncclFloat32"], 512, peer, 1)
        return self.start(context, struct.pack("<QQii", P2P, 0, 0, 0) + body)

    def proxy(self, context: int, parent: int, channel: int = 0, peer: int = 1, steps: int = 4, is_send: int = 1) -> int:
        body = struct.pack("<iB3xiiii", os.getpid(), channel, peer, steps, 524288, is_send)
        return self.start(context, struct.pack("<QQii", PROXY_OP, parent, 0, 0) + body)

    def step(self, context: int, parent: int, step: int) -> int:
        return self.start(context, struct.pack("<QQiii", PROXY_STEP, parent, 0, 0, step))

    def kernel(self, context: int, parent: int, channel: int, gpu_time: int) -> int:
        return self.start(context, struct.pack("<QQiiB7xQ", KERNEL_CH, parent, 0, 0, channel, gpu_time))

    def state(self, handle: int, state: int, argument: int = 0) -> int:
        return int(self._record(handle, state, ctypes.byref(ctypes.c_uint64(argument))))

    def stop(self, handle: int) -> int:
        return int(self._stop(handle))

    def finalize(self, context: int) -> int:
        return int(self._finalize(context))

    # --- whole pieces of work ------------------------------------------------------------------------------------------

    def whole(self, context: int, sequence: int, *, channels: int = 2, steps: int = 4, finish: bool = True) -> None:
        """One collective from launch to end: kernels of 1 ms by the GPU's time on each channel, one proxy operation each way."""
        operation = self.coll(context, sequence, channels)
        self.stop(operation)
        kernels = [self.kernel(context, operation, channel, 1000 + channel) for channel in range(channels)]
        for is_send in (0, 1):
            proxy = self.proxy(context, operation, steps=steps, is_send=is_send)
            for number in range(steps):
                handle = self.step(context, proxy, number)
                self.state(handle, SEND_WAIT if is_send else RECV_WAIT, 4096)
                if finish:
                    self.stop(handle)
            if finish:
                self.stop(proxy)
        for channel, kernel in enumerate(kernels):
            if finish:
                self.state(kernel, KERNEL_STOP, 1_001_000 + channel)
                self.stop(kernel)

    def fuzz(self, context: int, rounds: int, seed: int) -> int:
        """Anything in any order: handles of other processes and made-up ones, events of all kinds and none.

        Only what NCCL's interface promises is kept to: names in operations are strings or null.
        """
        chance = random.Random(seed)
        known = [0, 1, context, 0x7FFF00001234, (1 << 64) - 1]
        for _ in range(rounds):
            what = chance.randrange(6)
            handle = chance.choice(known) if chance.random() < 0.7 else chance.getrandbits(64)
            if what == 0:
                known.append(
                    self.start(handle, chance.choice(b"\0\1\3\x20\x80\xff").to_bytes(1, "little") + chance.randbytes(200))
                )
            elif what == 1:
                kind = chance.choice([COLL, P2P, PROXY_OP, PROXY_STEP, KERNEL_CH])
                # The names are pointers that NCCL guarantees; all else is anything.
                body = struct.pack("<QQQQQiiQ", 0, 0, 0, 0, chance.getrandbits(64), 0, 0, 0) + chance.randbytes(60)
                if kind in (PROXY_OP, PROXY_STEP, KERNEL_CH):
                    body = chance.randbytes(64)
                event = struct.pack("<QQii", kind, chance.choice(known), chance.randrange(-5, 5), 0) + body
                known.append(self.start(chance.choice([context, handle]), event))
            elif what == 2:
                self.stop(handle)
            elif what == 3:
                self.state(handle, chance.randrange(-3, 40), chance.getrandbits(63))
            elif what == 4:
                known.append(self.step(context, handle, chance.randrange(-(1 << 31), 1 << 31)))
            else:
                known.append(self.kernel(context, handle, chance.randrange(256), chance.getrandbits(64)))
            del known[40:-40]
        return len(known)


def hammer(plugin: Plugin, context: int, threads: int, rounds: int) -> int:
    """Several threads at once on one communicator."""

    def work_through() -> None:
        for number in range(rounds):
            plugin.whole(context, number)

    work = [threading.Thread(target=work_through) for _ in range(threads)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    return threads * rounds


def fork_and(action: Any) -> int:
    """Do something in a forked child; its exit status."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def frames_open() -> int:
    """How many descriptors of a frame this process has."""
    found = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found += "ncclwatch-frame" in os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue
    return found


class Words:
    """Words of made-up GPU memory, and host memory that holds their addresses, as NCCL's connections do."""

    def __init__(self, count: int) -> None:
        cuda = ctypes.CDLL("libcuda.so.1")
        device = ctypes.c_uint64()
        assert cuda.cuMemAlloc_v2(ctypes.byref(device), ctypes.c_size_t(8 * count)) == 0
        self.base = device.value
        self.held = (ctypes.c_uint64 * count)(*(self.base + 8 * index for index in range(count)))

    def places(self) -> list[tuple[int, int]]:
        return [(address, ctypes.addressof(self.held) + 8 * index) for index, address in enumerate(self.held)]

    def write(self, index: int, value: int) -> None:
        ctypes.c_uint64.from_address(self.base + 8 * index).value = value

    def let_go(self, index: int) -> None:
        self.held[index] = 0


def main() -> None:
    names: dict[str, Any] = {
        "plugin": Plugin(), "hammer": hammer, "fork_and": fork_and, "frames_open": frames_open, "Words": Words, "time": time,
        "os": os,
        "COLL": COLL, "SEND_GPU_WAIT": SEND_GPU_WAIT, "SEND_WAIT": SEND_WAIT, "RECV_WAIT": RECV_WAIT, "KERNEL_STOP": KERNEL_STOP,
    }  # fmt: skip
    for line in sys.stdin:
        try:
            answer = eval(line, names)  # noqa: S307 - our own test talks to us
        except SyntaxError:
            exec(line, names)  # noqa: S102
            answer = None
        print(json.dumps(answer if isinstance(answer, int | str | list | None) else str(answer)), flush=True)


if __name__ == "__main__":
    main()
