"""Which release of NCCL a test runs with that is written for several."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from zlib import crc32

ALL_VARIABLE = "NCCLWATCH_ALL"
"""Set to run each of these tests with every release (`make test-all`)."""

_RELEASE = re.compile(r"\b2\.\d+\.\d+\b")


def other_releases(nodes: Sequence[str]) -> frozenset[str]:
    """Of tests (by node id) that differ in nothing but the release, all but one: which one depends on the test's name alone."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for node in nodes:
        test, bracket, parameters = node.partition("[")
        alike[test + bracket + _RELEASE.sub("*", parameters)].append(node)
    return frozenset(
        node for name, same in alike.items() for at, node in enumerate(same) if at != crc32(name.encode()) % len(same)
    )
