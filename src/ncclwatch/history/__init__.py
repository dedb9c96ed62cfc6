"""What is kept of jobs beyond their end: verdicts, iterations, rates, flows, NICs, GPUs, as Parquet files (docs/history.md)."""
