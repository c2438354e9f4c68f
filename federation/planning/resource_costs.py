"""What a step asks of each source's loaders: shares, profiles and a step's length to loads. Pure.

All integers: loads are millionths of the step's time, rounded up, so that no source with a share has
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from federation.model.source_profile import SourceProfile

PPM = 1_000_000
TARGET_PPM = 800_000
"""Of a worker's time that is planned for: the rest is for what profiles did not see."""
FULL_PPM = 1_000_000
CONSTRUCTOR_NS_PER_TOKEN = 4
"""Gather, labels, positions, boundaries (measured: 3.5 ms per 10^6 tokens)."""
COPIED_BYTES_PER_NS = 4
"""Media and fields, from the pool into a slot."""
_AVERAGED_TOKENS = 1_000_000


class SourceNeed(NamedTuple):
    """What is known of a source before anything starts."""

    name: str
    share: int
    """Integer share of the mixture (federation.model.mixture); 0: never drawn."""
    profile: SourceProfile | None
    lanes: int = 1
    """Of a stream: how many loaders it can be dealt to."""
    is_streaming: bool = False
    is_critical: bool = False
    block_ns: int = 0
    """What one loader takes for a block, the unit that loaders of a source work ahead in; 0: not known."""

    @property
    def is_known(self) -> bool:
        """True where it was measured."""
        return self.profile is not None and self.profile.is_measured

    @property
    def pair_factor(self) -> str:
        """What two readers get of what one gets, for people."""
        return "?" if self.profile is None else f"{self.profile.pair_ppm / PPM:.1f}"


class SourceLoad(NamedTuple):
    """Of a source, in millionths of a step's time."""

    tokens: int
    """Of the source in a step."""
    cpu_ppm: int
    user_ppm: int
    wait_ppm: int

    @property
    def is_open(self) -> bool:
        """True where it is drawn."""
        return self.tokens > 0

    @property
    def busy_ppm(self) -> int:
        """Of one loader that does all of it."""
        return self.cpu_ppm + self.user_ppm + self.wait_ppm


def source_loads(
    needs: Sequence[SourceNeed], step_tokens: int, step_ns: int, unit: str
) -> list[SourceLoad]:
    """Return the load of each source.

    A source that was not measured costs what the measured ones cost on average, by token.

    Args:
        needs: Of all sources.
        step_tokens: Tokens of a step.
        step_ns: Its length.
        unit: `samples`: shares are of samples, so that tokens go by a sample's length too; else of
            tokens (trained ones are taken for all).
    """
    weights = [_weight(need, needs, unit) for need in needs]
    total = sum(weights) or 1
    spare = _average(needs)
    return [
        _load(need.profile if need.is_known else spare, -(-step_tokens * weight // total), step_ns)
        for need, weight in zip(needs, weights, strict=True)
    ]


def constructor_ppm(step_tokens: int, payload_bytes: int, step_ns: int) -> int:
    """Return the load of gathering a step's rows, in millionths of a CPU."""
    needed_ns = step_tokens * CONSTRUCTOR_NS_PER_TOKEN + payload_bytes // COPIED_BYTES_PER_NS
    return -(-needed_ns * PPM // max(step_ns, 1))


def _weight(need: SourceNeed, needs: Sequence[SourceNeed], unit: str) -> int:
    if unit != "samples" or need.share == 0:
        return need.share
    tokens, samples = _sample_length(need)
    if not tokens:
        lengths = [_sample_length(other) for other in needs if other.is_known]
        tokens = sum(length[0] for length in lengths) or 1
        samples = sum(length[1] for length in lengths) or 1
    return max(need.share * tokens // samples, 1)


def _sample_length(need: SourceNeed) -> tuple[int, int]:
    """Return (tokens, samples) of what was measured; (0, 1) of none."""
    profile = need.profile
    if profile is None or not profile.is_measured:
        return 0, 1
    return profile.tokens, max(profile.samples, 1)


def _average(needs: Sequence[SourceNeed]) -> SourceProfile | None:
    """Return what the measured sources cost on average, each as if it had the same tokens."""
    known = [
        need.profile for need in needs if need.profile is not None and need.profile.is_measured
    ]
    if not known:
        return None

    def mean(name: str) -> int:
        scaled: int = sum(getattr(it, name) * _AVERAGED_TOKENS // it.tokens for it in known)
        return scaled // len(known)

    return SourceProfile(
        fingerprint="",
        origin="probe",
        records=mean("records"),
        samples=mean("samples"),
        tokens=_AVERAGED_TOKENS,
        read_bytes=mean("read_bytes"),
        chunk_bytes=mean("chunk_bytes"),
        cpu_ns=mean("cpu_ns"),
        user_ns=mean("user_ns"),
        wait_ns=mean("wait_ns"),
        open_bytes=max(profile.open_bytes for profile in known),
    )


def _load(profile: SourceProfile | None, tokens: int, step_ns: int) -> SourceLoad:
    if not tokens or profile is None:
        return SourceLoad(tokens, 0, 0, 0)

    def ppm(spent_ns: int) -> int:
        return -(-tokens * spent_ns * PPM // (profile.tokens * max(step_ns, 1)))

    return SourceLoad(tokens, ppm(profile.cpu_ns), ppm(profile.user_ns), ppm(profile.wait_ns))
