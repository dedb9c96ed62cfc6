"""Other tools' records (PyTorch's Flight Recorder, NCCL's RAS, logs, traces), read into the records that the engine judges.

One module a format; all stand in :mod:`ncclwatch.ingest.formats`.
"""
