"""Paths of elephant flows through the network: five-tuples and ports, who shares a bottleneck. Reads records and nothing else."""
