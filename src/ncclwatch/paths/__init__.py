"""Paths of elephant flows through a fabric: what hashing makes of them, and what a plan would gain, in a model."""
