"""Images, sounds and videos of a chunk's records: items of them, and their units side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ITEM_COLUMNS = ("token_offset", "tokens", "units", "t", "h", "w")
TOKEN_OFFSET, TOKENS, UNITS, GRID_T, GRID_H, GRID_W = range(6)


@dataclass
class MediaColumn:
    """All items of one modality that consecutive records hold."""

    counts: npt.NDArray[np.int32]
    """Items of each record. Shape (records,)."""
    items: npt.NDArray[np.int32]
    """ITEM_COLUMNS of each item: first placeholder token in its record, placeholder tokens, units
    (patches or frames), grid (of a sound: frames, 1, 1). Shape (items, 6)."""
    data: list[npt.NDArray[Any]]
    """Units of each item, of the rule's dtype. Shapes (units, unit_values)."""
