"""Diagnosis: a pure function from records and clock to verdicts; it does the same live, over the network and on a recording."""
