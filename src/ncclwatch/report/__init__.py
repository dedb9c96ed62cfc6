"""What is kept of a job for people and other tools: the page, the trace for Perfetto, metrics for Prometheus."""
