"""ncclwatch: say which rank, which stage and which link holds up a live NCCL job, from outside."""

__version__ = "0.1.0"
