"""What a loader worker tells of a chunk: its columns, and marks where there are some."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from federation.model.chunk import ChunkMeta, Marks
from federation.model.job import BatchRule
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.workers.loader_main import LoaderWorker
from msd_daemon.workers.messages import CHUNK_FETCHED, FromLoader, Grant, decode_chunk
from tests.support.metadata import make_job, make_spec

MARKS = Marks(
    np.array([2, 1], np.int32),
    np.array([[-1, 0, 1, 0], [0, 1, 2, 8], [-2, 1, 0, 0]], np.int32),
)


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []

    def send(self, kind: int, body: bytes) -> None:
        self.sent.append((int(kind), body))


@pytest.fixture
def worker() -> LoaderWorker:
    link: Any = FakeLink()
    made = LoaderWorker(link)
    made._pool = memoryview(bytearray(1 << 14))
    made._job = make_job([make_spec("web")], BatchRule(2, 16))
    return made


def publish(worker: LoaderWorker, marks: Marks | None, *, flags: int = 0, tail: bytes = b"") -> Any:
    lengths = np.array([4, 3], np.int32)
    meta = ChunkMeta(
        0, 9, 5, lengths, np.zeros(2, np.uint8), True, 1, fault="a.jsonl: bad", marks=marks
    )
    draft = ChunkDraft(meta, np.dtype(np.int32), [np.arange(7, dtype=np.int32)])
    worker._publish(
        Grant(7, 1, 2, 0, 1 << 12), draft, draft.encoded_bytes(), flags=flags, tail=tail
    )
    link: Any = worker._link
    kind, body = link.sent[-1]
    assert kind == FromLoader.CHUNK
    return SimpleNamespace(body=body, notice=decode_chunk(body))


def test_a_notice_carries_marks(worker: LoaderWorker) -> None:
    notice = publish(worker, MARKS).notice
    assert (notice.loader, notice.task, notice.generation, notice.fault) == (
        7,
        1,
        2,
        "a.jsonl: bad",
    )
    assert notice.lengths.tolist() == [4, 3]
    assert notice.marks.counts.tolist() == MARKS.counts.tolist()
    assert notice.marks.table.tolist() == MARKS.table.tolist()
    assert notice.indices is None


def test_the_planner_is_told_what_the_loader_knew(worker: LoaderWorker) -> None:
    meta = publish(worker, MARKS).notice.meta
    assert (meta.source_index, meta.block_key, meta.first_index) == (0, 9, 5)
    assert (meta.is_block_end, meta.window_blocks, meta.is_lane_end) == (True, 1, False)
    assert (meta.lengths.tolist(), meta.status.tolist()) == ([4, 3], [0, 0])
    assert meta.fault == "a.jsonl: bad"
    assert meta.marks.table.tolist() == MARKS.table.tolist()


def test_a_notice_without_marks_is_no_longer(worker: LoaderWorker) -> None:
    plain, none = (
        publish(worker, None),
        publish(worker, Marks(np.zeros(2, np.int32), np.zeros((0, 4), np.int32))),
    )
    assert plain.notice.marks is None
    assert none.notice.marks.table.shape == (0, 4)
    assert len(none.body) == len(plain.body) + 8


def test_fetched_records_have_indices_and_marks(worker: LoaderWorker) -> None:
    indices = np.array([11, 2], np.int32)
    notice = publish(worker, MARKS, flags=CHUNK_FETCHED, tail=indices.tobytes()).notice
    assert notice.is_fetched
    assert notice.indices.tolist() == [11, 2]
    assert notice.marks.table.tolist() == MARKS.table.tolist()


def test_a_notice_cut_short_is_no_notice(worker: LoaderWorker) -> None:
    body = publish(worker, MARKS).body
    with pytest.raises(ValueError, match="buffer"):
        decode_chunk(body[:-4])
