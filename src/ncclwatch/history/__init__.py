"""What is kept of jobs beyond their end: verdicts, iterations, rates, flows, NICs and GPUs, as Parquet in a folder (docs/history.md)."""
