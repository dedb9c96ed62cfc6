"""Paths of elephant flows: five-tuples, ports, shared bottlenecks, and in a model what a plan would gain. Reads records only."""
