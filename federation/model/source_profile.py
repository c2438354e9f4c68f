"""What a source costs to read: counts of a measured stretch of it, by what its content is. Pure.

A profile holds totals, never ratios, so that all arithmetic on it is exact and two of them can be
joined. A probe measures a few records (msd_daemon.sources.probe), the loader workers of a running
job measure all of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Literal

from federation.model.job import ResolvedJob, source_digest
from msd_client.contract.errors import ConfigError
from msd_client.contract.plain import decode_plain, encode_plain

Origin = Literal["probe", "live"]
PAIR_UNKNOWN = 0
RECORDS_KEPT = 1 << 20
"""Of older measurements no more than so many count beside new ones: disks and data change."""
RECORDS_TRUSTED = 64
"""Live counts of fewer records say less than a probe of as many."""


@dataclass(frozen=True)
class SourceProfile:
    """Totals over the records that were measured. All are integers >= 0."""

    fingerprint: str
    """See `profile_fingerprint`."""
    origin: Origin
    records: int
    """Faults and filtered ones included."""
    samples: int
    """Records that became samples."""
    tokens: int
    """Of those samples."""
    read_bytes: int
    """Read from shards, as they lie."""
    chunk_bytes: int
    """Of the pool, that the samples take."""
    cpu_ns: int
    """CPU of the loader's thread: reading, decoding, tokenizing."""
    user_ns: int
    """Time in the user's own code, which runs in processes beside the loader."""
    wait_ns: int
    """Time that the loader's thread neither computed nor waited for a CPU: it waited for reads."""
    open_bytes: int
    """Private memory that one open loader of it takes."""
    pair_ppm: int = PAIR_UNKNOWN
    """Records a second of two loaders at once, in millionths of one's: 2,000,000 where reads do not
    hinder each other, 1,000,000 where a disk, network or store gives no more; 0: not measured."""

    @property
    def is_measured(self) -> bool:
        """True where it says what a token costs."""
        return self.tokens > 0

    @property
    def busy_ns(self) -> int:
        """Time that a loader took for the records."""
        return self.cpu_ns + self.user_ns + self.wait_ns

    @property
    def is_read_bound(self) -> bool:
        """True where most of the time went into waiting for reads."""
        return self.wait_ns > self.cpu_ns + self.user_ns

    def figures(self) -> dict[str, Any]:
        """Return what people and `--json` are shown: figures by sample and by token, rounded."""
        samples, tokens = max(self.samples, 1), max(self.tokens, 1)
        return {
            "origin": self.origin,
            "records": self.records,
            "samples": self.samples,
            "tokens": self.tokens,
            "cpu_s_per_sample": self.cpu_ns / samples / 1e9,
            "cpu_s_per_mtok": self.cpu_ns / tokens / 1e3,
            "user_s_per_sample": self.user_ns / samples / 1e9,
            "read_wait_s_per_sample": self.wait_ns / samples / 1e9,
            "tokens_per_sample": self.tokens / samples,
            "read_bytes_per_sample": self.read_bytes / samples,
            "chunk_bytes_per_sample": self.chunk_bytes / samples,
            "open_bytes": self.open_bytes,
            "two_readers": self.pair_ppm / 1e6 if self.pair_ppm else None,
            "bound": bound_of(self),
        }


def bound_of(profile: SourceProfile) -> str:
    """Return what a loader of the source does most of its time: `cpu`, `transform` or `read`."""
    if profile.is_read_bound:
        return "read"
    return "transform" if profile.user_ns > profile.cpu_ns else "cpu"


def joined(older: SourceProfile | None, newer: SourceProfile) -> SourceProfile:
    """Return two measurements of one source as one; the newer counts in full.

    Live counts take the place of a probe's, whose records are few and the first of their shards; what
    only the probe measures (memory, two readers at once) stays. Of older counts so many remain that
    they weigh no more than RECORDS_KEPT records.
    """
    if older is None or older.fingerprint != newer.fingerprint:
        return newer
    if older.origin == "live" and newer.origin == "probe":
        return replace(
            older, open_bytes=newer.open_bytes, pair_ppm=newer.pair_ppm or older.pair_ppm
        )
    kept = replace(newer, pair_ppm=newer.pair_ppm or older.pair_ppm)
    if not newer.open_bytes:
        kept = replace(kept, open_bytes=older.open_bytes)
    if not newer.chunk_bytes and older.tokens:
        kept = replace(kept, chunk_bytes=older.chunk_bytes * newer.tokens // older.tokens)
    if older.origin == "probe":
        return kept
    counted = min(older.records, RECORDS_KEPT)
    if not counted:
        return kept
    names = (
        "records", "samples", "tokens", "read_bytes", "chunk_bytes", "cpu_ns", "user_ns", "wait_ns",
    )  # fmt: skip
    return replace(
        kept,
        **{
            name: getattr(kept, name) + getattr(older, name) * counted // older.records
            for name in names
        },
    )


def profile_fingerprint(job: ResolvedJob, source_index: int) -> str:
    """Return 32 hex digits over all that the cost of a source depends on in a job.

    Its content (sizes and fingerprints of the shards), recipe, format and order, the tokenizer and the
    media rules; not its name, weights, epochs or where it lies.
    """
    spec = replace(
        job.sources[source_index],
        name="",
        was="",
        max_epochs=None,
        at_exhaustion="repeat",
        part="train",
        hold_out=0.0,
        growth=(),
    )
    tokenizer = replace(job.tokenizer, path="")
    digest = hashlib.sha256(source_digest(spec).encode())
    digest.update(repr(encode_plain(tokenizer)).encode())
    for rule in job.media if spec.has_media else ():
        digest.update(repr(encode_plain(replace(rule, step=None))).encode())
    return digest.hexdigest()[:32]


def encode_profile(profile: SourceProfile) -> dict[str, Any]:
    """Return the profile as a plain map."""
    plain: dict[str, Any] = encode_plain(profile)
    return plain


def decode_profile(plain: object) -> SourceProfile:
    """Return the profile from its plain form.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type or is below 0.
    """
    profile = decode_plain(SourceProfile, plain, "profile")
    for name, value in encode_plain(profile).items():
        if isinstance(value, int) and value < 0:
            raise ConfigError(f"profile.{name} is {value}: no count is below 0, measure it anew")
    return profile
