"""Refuses microbatches that may keep more activation bytes than the job allows (E3).

The caps of tokens and media of a row are fixed, so the most that a microbatch of rows keeps is known
before the first record is read. A varlen microbatch is dealt by the bytes of what it holds; there it
is enough that a segment of text alone, or of media alone, fits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from federation.model.cost import CostSpec
from federation.model.job import BatchRule
from federation.model.media import MediaRule
from federation.planning.costs import activation_bytes
from msd_daemon.config.faults import Fault

KEY = "batch.microbatch_activation_bytes"

_UNITS = {"image": "patches", "video": "patches", "audio": "frames"}


class _Part(NamedTuple):
    what: str
    held: int


def check_activations(
    batch: BatchRule, cost: CostSpec, media: tuple[MediaRule, ...], faults: list[Fault]
) -> None:
    """Check the cap of a resolved batch, with the sums in the fault.

    Args:
        batch: The job's batch.
        cost: Its cost, with the bytes of a token and of a unit.
        media: Its modalities, with the most units of a row.
        faults: Receives what is wrong.
    """
    most = batch.microbatch_activation_bytes
    if not most:
        return
    if not cost.activations.token:
        problem = "no model is given that tells what tokens keep"
        faults.append(Fault(KEY, most, problem, "give model.backbone, or leave it out"))
        return
    parts = _parts(batch, cost, media)
    is_dealt = batch.is_varlen and batch.encode == "home"
    for sums in [[part] for part in parts] if is_dealt else [parts]:
        total = sum(part.held for part in sums)
        if total > most:
            told = " + ".join(f"{part.held} of {part.what}" for part in sums)
            problem = f"a microbatch may keep {told} = {total} bytes"
            faults.append(Fault(KEY, most, problem, _remedy(batch, total)))
            return


def _parts(batch: BatchRule, cost: CostSpec, media: tuple[MediaRule, ...]) -> list[_Part]:
    """Return the most that a microbatch keeps of text and of each modality."""
    rows, row_tokens = batch.microbatch_rows, max(batch.row_tokens_values)
    nothing = np.zeros(1, np.int64)
    found = [
        _Part(
            f"{rows * row_tokens} tokens",
            int(activation_bytes(cost, nothing + rows * row_tokens)[0]),
        )
    ]
    for rule in media:
        units = rows * rule.row_units_max
        held = int(activation_bytes(cost, nothing, {rule.modality: nothing + units})[0])
        found.append(_Part(f"{units} {rule.modality} {_UNITS[rule.modality]}", held))
    return found


def _remedy(batch: BatchRule, total: int) -> str:
    shorter = "batch.microbatch_tokens" if batch.is_varlen else "batch.microbatch_rows"
    media = " or batch.microbatch_patches and microbatch_frames"
    return (
        f"lower {shorter}{media}, recompute (model.recompute: full), or write {total} or more; with "
        "tensor or context parallelism ranks share them, so write so many times what one may keep"
    )
