"""Target processes: finding them, the layouts of their NCCL, and reading their memory from outside without touching them."""
