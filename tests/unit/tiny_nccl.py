"""Small stand-ins for a libnccl, built by gcc when a test asks: the same structures, names and version text, a few kilobytes."""

from __future__ import annotations

import subprocess
from pathlib import Path

BUILD_ID = "00112233445566778899aabbccddeeff01234567"

# Names, shapes and source files as in NCCL; offsets are checked by the compiler itself, so that the tests compare with its word.
COMM = r"""
#include <cstddef>
#include <cstdint>
#include <sys/types.h>
#include <atomic>
typedef enum { ncclSuccess = 0, ncclUnhandledCudaError = 1, ncclInProgress = 7 } ncclResult_t;
typedef enum : uint8_t { ncclFuncBroadcast = 0, ncclFuncReduce = 1, ncclFuncAlias = 1, ncclFuncAllReduce = 4 } ncclFunc_t;
typedef struct ncclConfig_v21700 { size_t size; const char* commName; } ncclConfig_t;
struct ncclRing { int prev; int next; int* userRanks; int index; };
struct ncclProxyState;
struct alignas(64) ncclChannel { void** peers; struct ncclRing ring; int id; };
struct ncclConnFifo { int mode; int offset; ssize_t size; void* ptr; };
struct ncclRecvMem {
  union {
    struct { uint64_t tail; char pad1[120]; struct ncclConnFifo connFifo[8]; int flush; };
    char pad4[4096];
  };
};
struct ncclTaskColl { struct ncclTaskColl* next; int32_t nWarps:8, algorithm:8; uint32_t isNvls:1, devFuncId:31; };
struct ncclComm {
  uint64_t startMagic;
  struct ncclChannel channels[4];
  int rank;
  bool aborted;
  ncclResult_t asyncResult;
  ncclFunc_t func;
  float latencies[2][3];
  struct ncclComm** siblings;
  void (*callback)(void*);
  std::atomic<uint32_t> counter;
  ncclConfig_t config;
  struct { uint32_t sendMem; uint32_t buffs[3]; } offsets;
  struct ncclProxyState* proxyState;
  uint64_t endMagic;
};
static_assert(sizeof(ncclChannel) == 64 && sizeof(ncclRecvMem) == 4096);
static_assert(offsetof(ncclComm, channels) == 64 && offsetof(ncclComm, rank) == 320);
static_assert(offsetof(ncclComm, latencies) == 336 && offsetof(ncclComm, counter) == 376);
static_assert(offsetof(ncclComm, offsets.buffs) == 404 && offsetof(ncclComm, endMagic) == 424);
"""

NET = r"""
typedef int (*progress_t)(void*);
struct ncclNetThing { int a; };
#ifdef COLL
struct sendResources { long first; int netDev; };
#else
struct sendResources { int netDev; };
#endif
struct sendResources PREFIX(resources);
static __attribute__((noinline)) int sendProxyProgress(void* args) { return *(int*)args + WHICH; }
progress_t PREFIX(progress)[1] = { sendProxyProgress };
"""

API = r"""
extern "C" {
extern const char tinyMarker[];
const char tinyMarker[] = "tiny constant";
const char* tinyVersion() { return VERSION; }
__attribute__((noinline)) int pncclAllReduce() { return 7; }
int ncclAllReduce() __attribute__((weak, alias("pncclAllReduce")));
}
int ncclNIbDevs = 3;
struct ncclComm** ncclComms = nullptr;
ncclComm theComm; ncclRecvMem theRecvMem; ncclTaskColl theTask;
#ifdef BULK
__asm__(".text\n.fill 0x120000, 1, 0x90\n");
#endif
"""


def compile_tiny(
    folder: Path,
    name: str = "libnccl.so.2",
    *,
    version: str = "NCCL version 2.21.5+cuda12.4",
    build_id: str = "0x" + BUILD_ID,
    strip: bool = False,
    bulk: bool = False,
    program: bool = False,
) -> Path:
    """Build one in ``folder``: a shared library, or a program that sleeps; ``bulk`` adds a megabyte of code."""
    source = folder / f"{name}.src"
    (source / "transport").mkdir(parents=True)
    (source / "init.cc").write_text(COMM + API + ("#include <unistd.h>\nint main() { pause(); }\n" if program else ""))
    for file, which in (("net.cc", 1), ("coll_net.cc", 2)):
        prefix = file.removesuffix(".cc")
        text = NET.replace("PREFIX(", f"PASTE({prefix}_,").replace("WHICH", str(which))
        define = "#define COLL\n" if which == 2 else ""
        (source / "transport" / file).write_text(f"#define PASTE(a, b) PASTE2(a, b)\n#define PASTE2(a, b) a##b\n{define}{text}")
    output = folder / name
    common = ["g++", "-std=c++17", "-g", "-O1", "-fPIC", f'-DVERSION="{version}"', *(["-DBULK"] if bulk else [])]
    objects = []
    for file in ("init.cc", "transport/net.cc", "transport/coll_net.cc"):
        objects.append(str(source / Path(file).with_suffix(".o").name))
        subprocess.run([*common, "-c", file, "-o", objects[-1]], check=True, cwd=source)
    link = ["-pie", "-rdynamic"] if program else ["-shared"]
    identity = f"-Wl,--build-id={build_id}" if build_id else "-Wl,--build-id=none"
    subprocess.run(["g++", *link, identity, "-o", str(output), *objects], check=True)
    if strip:
        subprocess.run(["strip", str(output)], check=True)
    return output
