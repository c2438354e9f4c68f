"""Types of options that take numbers which messages, states and journals hold."""

from __future__ import annotations

import click

from msd_client.contract.step_numbers import STEP_MAX

STEP = click.IntRange(0, STEP_MAX)
"""Of the number of a step."""
GENERATION = click.IntRange(1, STEP_MAX)
"""Of the number of a generation of a journal."""
