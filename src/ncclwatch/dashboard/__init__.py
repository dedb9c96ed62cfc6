"""The live terminal view."""
