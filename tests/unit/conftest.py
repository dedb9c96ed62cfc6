"""Processes of these tests are made up, and when they began: what the kernel logged here since then is none of theirs."""

from __future__ import annotations

import pytest

from ncclwatch.collect.kernel_log import KernelNews
from ncclwatch.model.network import KernelLogLine


@pytest.fixture(autouse=True)
def no_kernel_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(news: KernelNews) -> tuple[KernelLogLine, ...]:
        del news
        return ()

    monkeypatch.setattr(KernelNews, "lines", nothing)
