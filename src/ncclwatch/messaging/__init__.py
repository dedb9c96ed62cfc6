"""Batches of a node as bytes, and how they travel from agents to an engine."""
