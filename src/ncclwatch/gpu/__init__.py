"""The state of GPUs, read from their driver by NVML in a process of its own, and what is wrong with it."""
