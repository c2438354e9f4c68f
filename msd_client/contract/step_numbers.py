"""The numbers that a step may have."""

from __future__ import annotations

STEP_MAX = 1 << 62
"""The largest one: a sum of two stays within 63 bits, in states, journals and arrays."""
