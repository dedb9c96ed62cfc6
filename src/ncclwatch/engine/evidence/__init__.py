"""Sources of evidence, those that read the same records in one module; all stand in :mod:`ncclwatch.engine.case`.

Sources read records only; they import neither each other nor anything that concludes from facts.
"""
