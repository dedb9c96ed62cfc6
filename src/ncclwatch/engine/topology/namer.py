"""Learn a job from its calls while it runs, and say where in an iteration a rank or a call stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.model import Learned, Placed, Stage
from ncclwatch.model.state import ProcessSample


class StageNamer:
    """Feed it samples (who is which rank, which communicators) and calls (what is done on them); memory is bounded."""

    def __init__(self) -> None:
        self.learned: Learned | None = None
        """What is known so far; ``None`` before anything was inferred."""

    def note_samples(self, samples: Sequence[ProcessSample]) -> None:
        """Take who is which rank and what communicators there are; cheap when nothing changed."""

    def observe(self, events: NDArray[Any], lost: int = 0) -> Placed:
        """Take a batch of ``EVENT_DTYPE`` records in the order of their times and say where they stand, as far as is learned."""
        empty = np.zeros(0, np.int64)
        none = np.zeros(0, np.int32)
        return Placed(empty, none, none, none, empty, np.zeros(0, np.bool_))

    def stage_of(self, pid: int, comm: int = 0, *, calls_ago: int = 0) -> Stage | None:
        """Where the call that process ``pid`` made last stands (``calls_ago`` 0; 1: the one before; −1: the one it has yet to
        make), counted on the communicator at address ``comm``, or over all of them with ``comm`` 0.
        """
        return None
