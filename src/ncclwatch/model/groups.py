"""Groups of calls (``ncclGroupStart`` to ``ncclGroupEnd``, src/group.cc), which may lie in one another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def group_depth(step: NDArray[np.int64], before: int) -> NDArray[np.int64]:
    """How many groups a thread is in after each of its records, by what each changes (1, -1, 0). An end without a start, which
    was lost or is of before we watched, ends nothing.
    """
    total = before + np.cumsum(step)
    return total - np.minimum(np.minimum.accumulate(total), 0)
