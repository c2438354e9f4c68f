"""Images, sounds and videos of a job: how they are decoded, and what they take of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Modality = Literal["image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = ("image", "video", "audio")


@dataclass(frozen=True)
class MediaRule:
    """One modality of a job."""

    modality: Modality
    unit_values: int
    """Values of a unit: of a patch (image, video) or a frame (audio)."""
    unit_dtype: Literal["uint8", "float16", "float32"]
    row_units_max: int
    """Most units of a row; packing obeys it, so that slots have a known size."""
    placeholder_id: int
    begin_id: int | None = None
    end_id: int | None = None

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return self.unit_values * int(np.dtype(self.unit_dtype).itemsize)
