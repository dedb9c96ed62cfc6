"""Verdicts and recordings for people and other tools: text, and later HTML, Perfetto and Prometheus."""
