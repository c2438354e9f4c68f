"""Takes tokens that are not trained out of the labels of a gathered microbatch.

In the pool an id with UNTRAINED_BIT is such a token. A gather copies ids as they lie, into tokens
and, as targets, into labels: a label with the bit is one that is not trained, whatever the
convention of labels is. Runs over whole rows, before they are dealt to ranks.
"""

from __future__ import annotations

import numpy as np

from msd_daemon.gather.gather_rule import GatherOutputs
from msd_daemon.shm.chunk_layout import UNTRAINED_BIT

PLACES_AT_ONCE = 1 << 18
"""Bounds the memory that is needed beside the microbatch."""


def apply_masks(outputs: GatherOutputs, ignore_label: int, valid_tokens: int) -> int:
    """Clear the bit of all tokens, ignore the labels that have it, and weigh them 0.

    Args:
        outputs: What `gather_rows` wrote. There are labels; `loss_weights` too where sources weigh
            differently, or labels are not told apart by value.
        ignore_label: Label where nothing is trained; below UNTRAINED_BIT.
        valid_tokens: Trained labels as the gather counted them.

    Returns:
        Labels that are trained and weigh more than 0.

    Raises:
        ValueError: There are no labels.
    """
    if outputs.labels is None:
        raise ValueError("masks need the labels of a microbatch")
    labels = outputs.labels.reshape(-1)
    tokens = None if outputs.tokens is None else outputs.tokens.reshape(-1)
    weights = None if outputs.loss_weights is None else outputs.loss_weights.reshape(-1)
    masked = weighing = 0
    for first in range(0, len(labels), PLACES_AT_ONCE):
        part = slice(first, first + PLACES_AT_ONCE)
        is_masked = labels[part] >= UNTRAINED_BIT
        np.copyto(labels[part], ignore_label, where=is_masked)
        if tokens is not None:
            tokens[part] &= ~UNTRAINED_BIT
        if weights is None:
            masked += int(np.count_nonzero(is_masked))
        else:
            np.copyto(weights[part], 0, where=is_masked)
            weighing += int(np.count_nonzero(weights[part]))
    return valid_tokens - masked if weights is None else weighing
