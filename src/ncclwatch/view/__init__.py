"""What every surface shows: the view model of a job, the states of ranks, waits and verdicts in words."""
