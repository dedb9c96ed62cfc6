"""The calls plane: probe sites, BPF programs, their attachment and the records they write."""
