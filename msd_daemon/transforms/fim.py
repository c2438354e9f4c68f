"""Fill-in-the-middle: a share of the documents is cut in three and put in another order.

As published (Bavarian and others, 2022), on token ids: both cuts fall between tokens, uniformly and
independently over the places of the document, so nothing is tokenized again and all tokens stay.

    PSM: prefix_id, prefix, suffix_id, suffix, middle_id, middle
    SPM: prefix_id, suffix_id, suffix, middle_id, prefix, middle
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.recipe import FimRule

Ids = npt.NDArray[Any]


def fim(ids: Ids, rule: FimRule, rng: np.random.Generator) -> Ids:
    """Return a document, cut and put in another order at the rule's rate.

    A document that has one of the rule's ids stays as it is: it could not be told back.

    Args:
        ids: Token ids without BOS and EOS. Shape (tokens,), any integer dtype.
        rule: Rates and ids.
        rng: Of this record alone; the same draws are made whatever the document is.

    Returns:
        The ids as they were, or those with three more, of the same dtype.
    """
    chosen, order, *cuts = rng.random(4).tolist()
    if chosen >= rule.rate or not len(ids) or _has_any(ids, rule):
        return ids
    first, second = sorted(min(int(cut * (len(ids) + 1)), len(ids)) for cut in cuts)
    prefix, middle, suffix = ids[:first], ids[first:second], ids[second:]
    own = np.array([rule.prefix_id, rule.suffix_id, rule.middle_id], dtype=ids.dtype)
    before, behind, between = own[:1], own[1:2], own[2:]
    if order < rule.spm_rate:
        return np.concatenate([before, behind, suffix, between, prefix, middle])
    return np.concatenate([before, prefix, behind, suffix, between, middle])


def undo_fim(ids: Ids, rule: FimRule) -> Ids:
    """Return the document that `fim` was given, whichever order it chose."""
    if not len(ids) or ids[0] != rule.prefix_id:
        return ids
    suffix_at = int(np.flatnonzero(ids == rule.suffix_id)[0])
    middle_at = int(np.flatnonzero(ids == rule.middle_id)[0])
    # In SPM nothing stands between the first two ids, and the prefix is in front of the middle.
    return np.concatenate([ids[1:suffix_at], ids[middle_at + 1 :], ids[suffix_at + 1 : middle_at]])


def _has_any(ids: Ids, rule: FimRule) -> bool:
    own = (rule.prefix_id, rule.suffix_id, rule.middle_id)
    return any(bool((ids == token_id).any()) for token_id in own)
