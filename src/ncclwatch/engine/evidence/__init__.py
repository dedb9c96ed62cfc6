"""Sources of evidence: one module each, listed in :mod:`ncclwatch.engine.evidence.registry`.

Sources read records only; they import neither each other nor anything that concludes from facts.
"""
