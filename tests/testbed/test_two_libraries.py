"""A process that has loaded a second NCCL beside the one it uses, as inference servers do (their own and the framework's)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ncclwatch.target.discover import examine
from ncclwatch.target.session import TargetProcess
from testbed.job import Job, library

pytestmark = pytest.mark.attach

LOADER = """
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void load(void) {
  if (!dlopen(getenv("SECOND_NCCL"), RTLD_NOW | RTLD_LOCAL)) fprintf(stderr, "second NCCL: %s\\n", dlerror());
}
"""


def test_the_library_that_has_communicators_is_read(tmp_path: Path) -> None:
    """The second is loaded by a name of its own, and nobody uses it."""
    second = library("2.21.5").resolve()
    name = tmp_path / "libnccl-2.21.5.so"
    name.symlink_to(second)
    loader = tmp_path / "libload.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", str(loader), "-ldl"], input=LOADER, text=True, check=True)
    env = {"LD_PRELOAD": str(loader), "SECOND_NCCL": str(name)}
    with Job("2.27.5", 2, "allreduce", "shm", count=5000, env=env) as job:
        found = examine(job.pid(0))
        assert {Path(binary.path) for binary in (found.binary, *found.others)} == {second, job.library.resolve()}
        with TargetProcess.open(job.pid(0)) as target:
            sample = target.sample()
    assert (target.info.library, target.info.version) == (str(job.library.resolve()), (2, 27, 5))
    assert [own.nranks for own in sample.communicators] == [2]
    assert str(second) in sample.unavailable["communicators of other libraries"]
