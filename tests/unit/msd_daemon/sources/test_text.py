"""Plain text: documents by file or by blank line, without marks and carriage returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from federation.model.chunk import RecordStatus
from federation.model.job import ShuffleRule
from tests.support.sources import (
    IN_ORDER,
    compress,
    make_loader,
    make_spec,
    read_stream,
    statuses_of,
    texts_of,
)

BOOK = b"\xef\xbb\xbf\r\none\r\ntwo\r\n\r\n \t\r\nthree\r\n\r\n\r\nfour\r\nfive"


@pytest.mark.parametrize("kind", ["", ".gz", ".zst", ".xz"])
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 8, 13, 1 << 20])
def test_blank_lines_part_documents(tmp_path: Path, kind: str, block_bytes: int) -> None:
    path = tmp_path / f"a.txt{kind}"
    path.write_bytes(compress(BOOK, kind[1:]) if kind else BOOK)
    rule = ShuffleRule(is_shuffled=False, block_bytes=block_bytes)
    spec = make_spec([path], text_document="blank_line", shuffle=rule)
    assert texts_of(read_stream(make_loader(spec))) == ["one\ntwo", "three", "four\nfive"]


@pytest.mark.parametrize("kind", ["", ".gz"])
def test_a_file_is_one_document(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.txt{kind}"
    path.write_bytes(compress(BOOK, "gz") if kind else BOOK)
    spec = make_spec([path], shuffle=IN_ORDER)
    text = BOOK[3:].decode().replace("\r\n", "\n")
    assert texts_of(read_stream(make_loader(spec))) == [text]


@pytest.mark.parametrize("document", ["file", "blank_line"])
@pytest.mark.parametrize("lines", ["x" * 500, "y\n" * 300])
def test_a_document_over_the_limit_is_counted(tmp_path: Path, document: str, lines: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(f"{lines}\n\nshort\n" if document == "blank_line" else lines)
    spec = make_spec([path], text_document=document, record_bytes_max=200, shuffle=IN_ORDER)
    counts = statuses_of(read_stream(make_loader(spec)))
    assert counts[RecordStatus.TOO_LARGE] == 1
    assert counts.get(RecordStatus.OK, 0) == (document == "blank_line")


def test_an_empty_file_has_no_record_but_a_block(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    spec = make_spec([tmp_path / "a.txt"])
    draft = make_loader(spec).next_chunk(100)
    assert draft is not None
    assert (len(draft.meta.lengths), draft.meta.is_block_end, draft.meta.window_blocks) == (
        0,
        True,
        1,
    )
