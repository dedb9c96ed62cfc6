"""Fixtures of the wire plane's native tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ncclwatch.wire.kernel import WireKernel
from wire import standin


@pytest.fixture(scope="session")
def load_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None or not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("the stand-in provider needs gcc and libibverbs-dev")
    return standin.build(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="session")
def wire_kernel() -> Iterator[WireKernel]:
    if os.geteuid() != 0:
        pytest.skip("uprobes need root")
    with WireKernel() as kernel:
        yield kernel
