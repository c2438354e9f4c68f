"""The bad records of a chunk on their way from a loader worker to the daemon: all counted, most named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from federation.model.chunk import FAULT_STATUSES, RecordStatus
from msd_client.contract.codec import pack
from msd_client.contract.errors import ProtocolError

if TYPE_CHECKING:
    from msd_daemon.sources.chunk_draft import ChunkDraft

FULL_TEXTS_MAX = 64
"""Bad records of a chunk that are told in full."""
NAMED_MAX = 4096
"""Those that are named, with the beginning of their text; the rest is counted."""
TEXT_CHARACTERS_MAX = 2000
BRIEF_CHARACTERS_MAX = 160
PATH_CHARACTERS_MAX = 4096


class BadRow(NamedTuple):
    """A bad record with its position in the source's order."""

    block_index: int
    """Index in the block's order."""
    status: int
    shard: str
    place_name: str
    place: int
    key: str
    text: str


class BadNotice(NamedTuple):
    """Decoded BAD frame."""

    source: int
    block_key: int
    rows: list[BadRow]
    more: dict[int, int]
    """Bad records of the chunk that are not named: count by status."""
    first_index: int


def encode_bad(draft: ChunkDraft) -> bytes:
    """Return the body of a BAD frame for a chunk."""
    meta = draft.meta
    statuses = meta.status.tolist()
    bad = [(number, record) for number, record in draft.bad if statuses[number] in FAULT_STATUSES]
    shards = list(dict.fromkeys(record.shard for _, record in bad[:NAMED_MAX]))  # one, mostly
    rows = [
        [
            meta.first_index + number,
            statuses[number],
            shards.index(record.shard),
            record.place_name,
            int(record.place),
            record.key,
            _plain(
                record.text[: TEXT_CHARACTERS_MAX if at < FULL_TEXTS_MAX else BRIEF_CHARACTERS_MAX]
            ),
        ]
        for at, (number, record) in enumerate(bad[:NAMED_MAX])
    ]
    more = Counter(statuses[number] for number, _ in bad[NAMED_MAX:])
    return pack(
        {
            "source": meta.source_index,
            "block_key": meta.block_key,
            "first_index": meta.first_index,
            "shards": [_plain(shard[:PATH_CHARACTERS_MAX]) for shard in shards],
            "rows": rows,
            "more": sorted(more.items()),
        }
    )


def _plain(text: str) -> str:
    """Return a text that can be packed: paths may hold surrogates."""
    return text.encode("utf-8", "replace").decode()


def decode_bad(body: Mapping[str, Any]) -> BadNotice:
    """Return the notice of a BAD frame.

    Raises:
        ProtocolError: It is malformed.
    """
    try:
        shards = body["shards"]
        rows = [BadRow(at, code, shards[shard], *rest) for at, code, shard, *rest in body["rows"]]
        for row in rows:
            RecordStatus(row.status)
        more = {int(status): int(count) for status, count in body["more"]}
        return BadNotice(body["source"], body["block_key"], rows, more, body["first_index"])
    except (LookupError, TypeError, ValueError) as error:
        raise ProtocolError(f"notice of bad records is malformed: {error}") from error
