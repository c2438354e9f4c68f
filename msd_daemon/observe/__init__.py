"""Seeing what happens: looks at jobs, stall verdicts with a day of history, metrics, traces."""
