"""Evidence: every source of facts about a job, one module each, behind one door."""
