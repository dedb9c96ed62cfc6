"""The scoreboard: run scenarios, show the records to diagnosers that know nothing of the scenario, and count who was right."""
