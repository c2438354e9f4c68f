"""One shard of a source as a Megatron pair: the tokens that the source gives, in the file's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from federation.model.chunk import FAULT_STATUSES, IS_FAULT, RecordStatus
from federation.model.job import ResolvedJob, ShuffleRule, SourceSpec
from msd_client.contract.errors import ConfigError
from msd_daemon.sources.chunk_draft import ChunkDraft, TokenDtype
from msd_daemon.sources.index_build import check_shard
from msd_daemon.sources.loader import SourceLoader
from msd_daemon.sources.megatron_writer import MegatronWriter
from msd_daemon.transforms.tokenizer import Tokenizer

CHUNK_BYTES = 4 << 20
FAULTS_LISTED_MAX = 1000
"""Bad records of a shard that are named; all are counted."""


@dataclass
class TokenizedShard:
    """What became of a shard."""

    documents: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Records that are no document by the name of their status."""
    faults: list[str] = field(default_factory=list)
    """What is wrong with the first of those that are bad."""

    @property
    def faulty(self) -> int:
        """Records that are bad, not merely left out."""
        return sum(self.dropped[status.name.lower()] for status in FAULT_STATUSES)


def check_tokenizable(spec: SourceSpec) -> None:
    """Refuse a source whose samples are more than tokens, or differ from epoch to epoch.

    Raises:
        ConfigError: Which of them, and what to do.
    """
    if spec.has_masks:
        raise ConfigError(
            f"source {spec.name!r} has tokens that are not trained, or media: a .bin holds neither: "
            "read it as it is"
        )
    recipe = spec.recipe
    if recipe is None:
        return
    if recipe.fim is not None:
        raise ConfigError(
            f"source {spec.name!r} has fim, which is another one in each epoch: leave it out here "
            "and give it to the source that reads the .bin"
        )
    if recipe.transform is not None:
        raise ConfigError(
            f"source {spec.name!r} has a transform that is drawn anew in each epoch: leave it out"
        )


def token_dtype_of(spec: SourceSpec) -> TokenDtype:
    """Return what the pairs of a source hold."""
    return np.dtype(np.uint16) if spec.token_bytes == 2 else np.dtype(np.int32)


def write_tokenized(
    job: ResolvedJob,
    source_index: int,
    shard_number: int,
    tokenizer: Tokenizer,
    stem: Path,
    tell: Callable[[int, int], None],
) -> TokenizedShard:
    """Write the samples of a shard as a Megatron pair.

    Held-out and filtered records are left out as in training, and counted.

    Args:
        job: It is read of it what a loader reads: source, fields, seed.
        source_index: Which of its sources.
        shard_number: Which of the source's shards.
        tokenizer: Of the job.
        stem: Path of the pair without its extensions.
        tell: Called with records read and tokens written since the last call.

    Raises:
        CorruptRecordError: The shard cannot be opened at all.
        OSError: It cannot be read, or the pair cannot be written.
    """
    spec = job.sources[source_index]
    check_shard(spec, shard_number)
    one = replace(
        spec,
        shards=(spec.shards[shard_number],),
        shuffle=ShuffleRule(is_shuffled=False),
        max_epochs=1,
    )
    found = TokenizedShard()
    loader = SourceLoader(one, source_index, tokenizer, job.seed, 0, 1, None)
    try:
        with MegatronWriter(stem, token_dtype_of(spec)) as writer:
            while (draft := loader.next_chunk(CHUNK_BYTES)) is not None:
                writer.append(draft.payload, draft.meta.lengths)
                _count(found, draft)
                tell(len(draft.meta.lengths), draft.payload_tokens)
            writer.finish()
    finally:
        loader.close()
    found.documents, found.tokens = writer.documents, writer.tokens
    return found


def _count(found: TokenizedShard, draft: ChunkDraft) -> None:
    meta = draft.meta
    if not meta.status.any():
        return
    for code, count in enumerate(np.bincount(meta.status)):
        if code and count:
            found.dropped[RecordStatus(code).name.lower()] += int(count)
    bad = np.flatnonzero(IS_FAULT[meta.status])
    texts = {number: bad.text for number, bad in draft.bad}
    room = FAULTS_LISTED_MAX - len(found.faults)
    found.faults += [texts.get(number, "") for number in bad[:room].tolist()]
