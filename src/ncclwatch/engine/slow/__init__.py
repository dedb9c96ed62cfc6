"""Slowdowns: jobs that run, but slower than they should. A pure function of records and their times; see docs/slowdowns.md."""
