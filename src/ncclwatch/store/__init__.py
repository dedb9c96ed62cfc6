"""Recordings: a container of frames that survives being cut off anywhere, a writer that never holds anybody up, and replay."""
