"""How much a journal keeps, where nobody says otherwise."""

STEPS_KEPT = 100_000
"""Steps of a generation."""
