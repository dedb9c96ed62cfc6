"""Identities, records and verdicts: plain data that every other package imports, and that imports none of them."""
