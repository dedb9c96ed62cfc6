"""What a job looks like from its calls: groups and their roles, pipeline stages, the pattern of an iteration, and where in it a
rank is. Nothing is configured; a configuration only confirms and names.
"""
