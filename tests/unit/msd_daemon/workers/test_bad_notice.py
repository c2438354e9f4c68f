"""Bad records of a chunk on their way to the daemon."""

from __future__ import annotations

import numpy as np
import pytest

from federation.model.chunk import ChunkMeta, RecordStatus
from msd_client.contract.codec import unpack_map
from msd_client.contract.errors import ProtocolError
from msd_daemon.sources.bad_record import BadRecord
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.workers.bad_notice import (
    BRIEF_CHARACTERS_MAX,
    FULL_TEXTS_MAX,
    NAMED_MAX,
    TEXT_CHARACTERS_MAX,
    decode_bad,
    encode_bad,
)

NOTICE = {"source": 0, "block_key": 0, "first_index": 0, "more": [], "shards": ["/d"]}


def draft(statuses: list[int], **changes: str) -> ChunkDraft:
    lengths = np.zeros(len(statuses), np.int32)
    meta = ChunkMeta(2, 77, 100, lengths, np.array(statuses, np.uint8), False, 0)
    bad = [
        (number, BadRecord(**{"text": "t" * 5000, "shard": "/d/a", "place": number} | changes))
        for number, status in enumerate(statuses)
        if status
    ]
    return ChunkDraft(meta, np.dtype(np.int32), bad=bad)


def sent(one: ChunkDraft):
    return decode_bad(unpack_map(encode_bad(one)))


def test_every_fault_is_named_and_plain_drops_are_not():
    filtered, broken = int(RecordStatus.FILTERED), int(RecordStatus.BAD_SYNTAX)
    notice = sent(draft([0, broken, filtered, broken], text="x", key="k", place_name="row"))
    assert (notice.source, notice.block_key, notice.more) == (2, 77, {})
    assert [tuple(row) for row in notice.rows] == [
        (101, broken, "/d/a", "row", 1, "k", "x"),
        (103, broken, "/d/a", "row", 3, "k", "x"),
    ]


def test_texts_and_names_are_bounded_and_all_are_counted():
    notice = sent(draft([int(RecordStatus.UNDECODABLE)] * (NAMED_MAX + 7)))
    lengths = [len(row.text) for row in notice.rows]
    assert lengths == [TEXT_CHARACTERS_MAX] * FULL_TEXTS_MAX + [BRIEF_CHARACTERS_MAX] * (
        NAMED_MAX - FULL_TEXTS_MAX
    )
    assert notice.more == {int(RecordStatus.UNDECODABLE): 7}


def test_names_that_are_no_utf8_travel():
    (row,) = sent(draft([7], shard="/d/\udcff", text="\udcff")).rows
    assert (row.shard, row.text) == ("/d/?", "?")


@pytest.mark.parametrize(
    "body",
    [{}, {"source": 0, "block_key": 0, "first_index": 0, "more": [], "rows": [[1]], "shards": []}],
)
def test_a_malformed_notice_is_refused(body):
    with pytest.raises(ProtocolError):
        decode_bad(body)


def test_a_status_that_is_none_is_refused():
    row = [1, 99, 0, "", 0, "", ""]
    with pytest.raises(ProtocolError):
        decode_bad(NOTICE | {"rows": [row]})
    row[1] = 3
    assert decode_bad(NOTICE | {"rows": [row]}).rows[0].shard == "/d"
    row[2] = 1
    with pytest.raises(ProtocolError):
        decode_bad(NOTICE | {"rows": [row]})
