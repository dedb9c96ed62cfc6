"""The aggregator: records of the planes become per-rank windows. Pure classes with explicit clocks and bounded memory, no I/O."""
