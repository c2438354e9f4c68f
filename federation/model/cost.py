"""What a step's parts cost, as integers: the numbers that balance goes by, never what a step holds.

`federation.planning.costs` counts with them; `federation.planning.model_flops` makes them of a
model's shape. All factors of a spec are in one unit, so that sums over backbone and encoders mean
something; which unit that is does not matter to balance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from msd_client.contract.media_fields import Modality


@dataclass(frozen=True)
class WindowTerm:
    """Layers in which a token attends to the last `window_tokens` tokens of its segment.

    A segment of n tokens costs `quadratic` * n * n where n <= window, else
    `quadratic` * window * (2 * n - window): twice the pairs that the mask leaves.
    """

    window_tokens: int
    quadratic: int


@dataclass(frozen=True)
class SpanTerm:
    """Layers of an encoder in which a unit attends to `span_units` units: of its item or window.

    Media of u units cost `quadratic` * u * min(u, span_units).
    """

    span_units: int
    quadratic: int


@dataclass(frozen=True)
class EncoderCost:
    """Cost of media of one modality: `linear` * units, and each span term."""

    modality: Modality
    linear: int
    spans: tuple[SpanTerm, ...] = ()


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes that training keeps for the backward pass, of a model that is not split over ranks."""

    token: int = 0
    """Of a token, in all layers of the backbone and its output layer."""
    image: int = 0
    """Of a patch, in the encoder."""
    video: int = 0
    audio: int = 0
    """Of a frame."""

    def of_unit(self, modality: Modality) -> int:
        """Return the bytes of a unit of a modality."""
        units: dict[Modality, int] = {
            "image": self.image,
            "video": self.video,
            "audio": self.audio,
        }
        return units[modality]


@dataclass(frozen=True)
class CostSpec:
    """Cost of a segment of n tokens: linear * n + quadratic * n * n + each window term (integers).

    A row costs the sum of its segments and of the media in it, by `encoders`.
    """

    kind: Literal["transformer", "tokens"] = "tokens"
    linear: int = 1
    quadratic: int = 0
    windowed: tuple[WindowTerm, ...] = ()
    """One for each length of window."""
    encoders: tuple[EncoderCost, ...] = ()
    """One for each modality that the job has and the model encodes."""
    activations: ActivationBytes = ActivationBytes()

    @property
    def backbone(self) -> CostSpec:
        """The cost of the tokens alone, media as the tokens they stand at."""
        return replace(self, encoders=())


@dataclass(frozen=True)
class CalibrationRule:
    """When measured step times change the factors of a job's cost."""

    every_steps: int = 50
    """Steps between two fits."""
    window_steps: int = 200
    """The last steps that a fit looks at."""
    margin_ratio: float = 0.05
    """A fit is taken where it leaves so much less error than the factors in force."""
