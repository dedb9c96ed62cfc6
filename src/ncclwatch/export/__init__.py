"""Metrics and verdicts to an OpenTelemetry receiver (OTLP over HTTP), from a thread of their own.

Needs the extra ``ncclwatch[otlp]``.
"""
