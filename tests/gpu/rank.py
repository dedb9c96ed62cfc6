"""One rank of a job on a real GPU, without PyTorch: NCCL and the CUDA runtime by ctypes.

    RANK=0 WORLD_SIZE=2 NCCL_LIBRARY=... CUDART_LIBRARY=... python rank.py RUN_DIR [--count N] [--iterations N] [--graph]

Says a line for each iteration. ``--graph`` captures one AllReduce into a CUDA graph and replays it; ``--hold`` stays after the
last. Faults: ``--skip-at N`` calls NCCL no more after N iterations, as a rank that never enters; ``--omit N`` leaves one
iteration out; ``--stall-at N`` puts a kernel that does not end before the next AllReduce. Before each AllReduce the host sleeps
for ``--late-ms``, and the GPU computes for ``--compute-ms``; from iteration ``--slow-at N`` on ``--slow-ms`` and
``--slow-compute-ms`` longer.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from pathlib import Path

FLOAT32, SUM = 7, 0
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
CAPTURE_GLOBAL = 0
SPIN = b"""
.version 7.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 span)
{
    .reg .u64 %begin, %now, %span;
    .reg .pred %on;
    ld.param.u64 %span, [span];
    mov.u64 %begin, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %on, %now, %span;
    @%on bra again;
    ret;
}
"""
"""A kernel that runs for ``span`` nanoseconds: the driver compiles it (PTX ISA, 9.7.12 and 10.24)."""
FOR_EVER_S = 1e9


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = [("internal", ctypes.c_char * 128)]


def must(result: int, what: str) -> None:
    """Every function of both libraries returns 0 on success."""
    if result != 0:
        raise SystemExit(f"{what} failed with {result}")


class Rank:
    """A communicator with one buffer and one stream."""

    def __init__(self, folder: Path, count: int) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.count = count
        self.cuda = ctypes.CDLL(os.environ["CUDART_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
        self.nccl = ctypes.CDLL(os.environ["NCCL_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
        if os.environ.get("NCCL_BY_PRELOAD"):
            self.nccl = ctypes.CDLL(None)  # by name alone, as a linked program would: what was preloaded comes first
        self.stream, self.buffer, self.comm = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.spin: ctypes.c_void_p | None = None
        must(self.cuda.cudaSetDevice(int(os.environ.get("GPU", "0"))), "cudaSetDevice")
        must(self.cuda.cudaStreamCreateWithFlags(ctypes.byref(self.stream), 1), "cudaStreamCreateWithFlags")
        must(self.cuda.cudaMalloc(ctypes.byref(self.buffer), ctypes.c_size_t(4 * count)), "cudaMalloc")
        self.fill(1.0)
        unique = self._meet(folder)
        must(self.nccl.ncclCommInitRank(ctypes.byref(self.comm), self.world, unique, self.rank), "ncclCommInitRank")

    def _meet(self, folder: Path) -> UniqueId:
        path = folder / "unique-id"
        unique = UniqueId()
        if self.rank == 0:
            must(self.nccl.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
            path.with_suffix(".new").write_bytes(bytes(unique))
            path.with_suffix(".new").rename(path)
            return unique
        deadline = time.monotonic() + 60
        while not path.exists():
            if time.monotonic() > deadline:
                raise SystemExit("rank 0 did not come")
            time.sleep(0.02)
        return UniqueId.from_buffer_copy(path.read_bytes())

    def fill(self, value: float) -> None:
        """Set every element."""
        host = (ctypes.c_float * self.count)(*([value] * self.count))
        must(self.cuda.cudaMemcpy(self.buffer, host, ctypes.c_size_t(4 * self.count), HOST_TO_DEVICE), "cudaMemcpy")

    def values(self) -> tuple[float, float]:
        """First and last element."""
        host = (ctypes.c_float * self.count)()
        must(self.cuda.cudaMemcpy(host, self.buffer, ctypes.c_size_t(4 * self.count), DEVICE_TO_HOST), "cudaMemcpy")
        return host[0], host[self.count - 1]

    def all_reduce(self) -> None:
        """In place."""
        size = ctypes.c_size_t(self.count)
        must(self.nccl.ncclAllReduce(self.buffer, self.buffer, size, FLOAT32, SUM, self.comm, self.stream), "ncclAllReduce")

    def compute(self, seconds: float) -> None:
        """One kernel of one thread on the stream that runs so long."""
        driver, span, none = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(int(seconds * 1e9)), ctypes.c_void_p()
        if self.spin is None:
            module, self.spin = ctypes.c_void_p(), ctypes.c_void_p()
            must(driver.cuModuleLoadData(ctypes.byref(module), SPIN), "cuModuleLoadData")
            must(driver.cuModuleGetFunction(ctypes.byref(self.spin), module, b"spin"), "cuModuleGetFunction")
        given = (ctypes.c_void_p * 1)(ctypes.addressof(span))
        must(driver.cuLaunchKernel(self.spin, 1, 1, 1, 1, 1, 1, 0, self.stream, given, none), "cuLaunchKernel")

    def synchronize(self) -> None:
        """Wait for the stream."""
        must(self.cuda.cudaStreamSynchronize(self.stream), "cudaStreamSynchronize")

    def capture(self) -> ctypes.c_void_p:
        """One AllReduce as a graph, captured in the strictest mode: a forbidden call of any thread would break it."""
        graph, made = ctypes.c_void_p(), ctypes.c_void_p()
        must(self.cuda.cudaStreamBeginCapture(self.stream, CAPTURE_GLOBAL), "cudaStreamBeginCapture")
        self.all_reduce()
        time.sleep(0.2)  # a sampler at a kilohertz runs through it many times
        must(self.cuda.cudaStreamEndCapture(self.stream, ctypes.byref(graph)), "cudaStreamEndCapture")
        must(self.cuda.cudaGraphInstantiate(ctypes.byref(made), graph, ctypes.c_ulonglong(0)), "cudaGraphInstantiate")
        must(self.cuda.cudaGraphDestroy(graph), "cudaGraphDestroy")
        return made

    def end(self, graph: ctypes.c_void_p | None) -> None:
        """Graph first: NCCL ends no communicator that one still refers to (commDestroySync, init.cc of 2.27.5)."""
        if graph is not None:
            must(self.cuda.cudaGraphExecDestroy(graph), "cudaGraphExecDestroy")
        must(self.nccl.ncclCommDestroy(self.comm), "ncclCommDestroy")


def say(text: str) -> None:
    """One line, at once."""
    print(text, flush=True)


def main() -> None:
    """Run until the last iteration or for ever."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=1 << 16)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--burst", type=int, default=1, help="AllReduces between two waits")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--gate", action="store_true", help="begin when the folder has a file named open")
    parser.add_argument("--skip-at", type=int)
    parser.add_argument("--omit", type=int)
    parser.add_argument("--stall-at", type=int)
    parser.add_argument("--late-ms", type=float, default=0.0)
    parser.add_argument("--compute-ms", type=float, default=0.0)
    parser.add_argument("--slow-at", type=int)
    parser.add_argument("--slow-ms", type=float, default=0.0)
    parser.add_argument("--slow-compute-ms", type=float, default=0.0)
    parser.add_argument("--hold", action="store_true")
    options = parser.parse_args()
    rank = Rank(options.folder, options.count)
    graph = rank.capture() if options.graph else None
    say("ready")
    while options.gate and not (options.folder / "open").exists():
        time.sleep(0.02)
    number = 0
    while options.iterations is None or number < options.iterations:
        if number == options.skip_at:
            say("skips")
            time.sleep(3600)
        if number == options.omit:
            say(f"iteration {number} is left out")
            number += 1
            continue
        if number == options.stall_at:
            rank.compute(FOR_EVER_S)
            say("stalls")
        if number == options.slow_at:
            options.late_ms += options.slow_ms
            options.compute_ms += options.slow_compute_ms
            say("slows")
        time.sleep(options.late_ms / 1e3)
        if number % 50 == 0:
            rank.fill(1.0)  # sums would leave the range of the type
        if options.compute_ms:
            rank.compute(options.compute_ms / 1e3)
        for _ in range(options.burst):
            if graph is not None:
                must(rank.cuda.cudaGraphLaunch(graph, rank.stream), "cudaGraphLaunch")
            else:
                rank.all_reduce()
        rank.synchronize()
        number += 1
        if options.burst == 1 and number % 50 == 1 and rank.values() != (float(rank.world),) * 2:
            raise SystemExit(f"wrong sum {rank.values()} after iteration {number}")
        say(f"iteration {number} at {time.monotonic():.6f}")
    if options.hold:
        time.sleep(3600)
    rank.end(graph)
    say("done")


if __name__ == "__main__":
    main()
