"""Offsets are bytes, 64 bits wide (H17, H19): what lies far away or beside odd bytes reads exactly."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard

from federation.model.chunk import RecordStatus
from federation.model.job import ShuffleRule
from tests.support.sources import (
    IN_ORDER,
    compress,
    make_loader,
    make_spec,
    placed,
    read_chunks,
    read_stream,
    texts_of,
)

GIB = 1 << 30
MEMORY_BYTES_MAX = 64 << 20

CHARACTERS = ("a", "é", "中", "😀")
COUNT = 24


def line_of(number: int) -> bytes:
    """Return a record with characters of 1 to 4 bytes in every second one."""
    text = f"{number}"
    if number % 2:
        text += "".join(CHARACTERS[(number // 2 + at) % 4] * at for at in range(1, 9))
    return json.dumps({"text": text}, ensure_ascii=False).encode()


def variant_of(name: str) -> tuple[bytes, dict[int, int]]:
    """Return a file and the status of the records that are not good, by number."""
    lines = [line_of(number) for number in range(COUNT)]
    bad: dict[int, int] = {}
    if name == "invalid byte":
        lines[7] = b'{"text": "7 \xe6A"}'
        bad[7] = int(RecordStatus.BAD_ENCODING)
    if name == "lone surrogate":
        lines[8] = b'{"text": "8 \\ud83d x"}'
        bad[8] = int(RecordStatus.BAD_ENCODING)
    ends = {"crlf": b"\r\n", "blank lines": b"\n\n \n\r\n"}.get(name, b"\n")
    data = ends.join(lines) + (b"" if name == "no final newline" else ends)
    return (b"\xef\xbb\xbf" + data if name == "mark" else data), bad


VARIANTS = (
    "plain", "mark", "crlf", "no final newline", "blank lines", "invalid byte", "lone surrogate",
)  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", ["", ".gz", ".zst"])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_random_access_equals_the_sequential_read(
    tmp_path: Path, name: str, kind: str, is_shuffled: bool
) -> None:
    data, bad = variant_of(name)
    path = tmp_path / f"a.jsonl{kind}"
    path.write_bytes(compress(data, kind[1:], 5) if kind else data)
    rule = ShuffleRule(
        is_shuffled=is_shuffled, block_bytes=200, stream_block_records=7, window_records=5
    )
    index_dir = tmp_path / "index"
    spec = make_spec([path], shuffle=rule, max_epochs=1)
    stream = read_stream(make_loader(spec, index_dir=index_dir))
    want = [json.loads(line_of(number))["text"] for number in range(COUNT)]
    assert sorted(texts_of(stream)) == sorted(
        text for number, text in enumerate(want) if number not in bad
    )
    assert sorted(record.status for record in stream if record.status) == sorted(bad.values())
    if not is_shuffled:
        assert {at: r.status for at, r in enumerate(stream) if r.status} == bad
    loader = make_loader(spec, index_dir=index_dir)
    for at in reversed(range(len(stream))):
        record = stream[at]
        assert placed(loader.fetch(record.block_key, [record.index])) == [record]
        resumed = make_loader(spec, index_dir=index_dir)
        resumed.seek(record.block_key, record.index)
        assert read_stream(resumed, 100) == stream[at:]


@pytest.mark.parametrize("name", ["invalid byte", "lone surrogate"])
def test_a_record_of_bad_bytes_is_named_with_its_byte_offset(tmp_path: Path, name: str) -> None:
    data, bad = variant_of(name)
    (tmp_path / "a.jsonl").write_bytes(data)
    (number,) = bad
    offset = sum(len(line_of(before)) + 1 for before in range(number))
    assert data[offset:].startswith(f'{{"text": "{number} '.encode())
    chunks = read_chunks(make_loader(make_spec([tmp_path / "a.jsonl"], shuffle=IN_ORDER)))
    assert chunks[0].meta.fault.startswith(f"{tmp_path}/a.jsonl: record at byte offset {offset}: ")


@pytest.mark.parametrize(("dtype", "width"), [("<u2", 2), ("<i4", 4)])
def test_documents_beyond_2_to_the_31_and_32_read_exactly(
    tmp_path: Path, dtype: str, width: int
) -> None:
    """Documents at every border that a 32-bit offset of bytes or tokens could wrap at."""
    starts = [2**31 // width - 2, 2**31 - 2, 2**32 // width + 8, 2**32 - 2, 2**32 + 5]
    starts = sorted(set(starts))
    tokens = [list(range(11 + 10 * number, 15 + 10 * number)) for number in range(len(starts))]
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        for start, own in zip(starts, tokens, strict=True):
            file.seek(start * width)
            file.write(np.array(own, dtype).tobytes())
    assert path.stat().st_blocks * 512 < 1 << 20  # sparse
    write_index(path.with_suffix(".idx"), starts, width)
    spec = make_spec([path], shuffle=IN_ORDER, max_epochs=1)
    loader = make_loader(spec)
    tracemalloc.start()
    records = read_stream(loader)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [list(record.tokens) for record in records] == tokens
    assert peak < MEMORY_BYTES_MAX
    assert loader.statistics().read_bytes < 1000
    for record in records:
        assert placed(make_loader(spec).fetch(record.block_key, [record.index])) == [record]


def write_index(path: Path, starts: list[int], width: int) -> None:
    """Write the idx of documents of 4 tokens each, with holes between them."""
    count = len(starts)
    head = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes((8 if width == 2 else 4,))
    head += count.to_bytes(8, "little") + (count + 1).to_bytes(8, "little")
    sizes = np.full(count, 4, "<i4").tobytes()
    pointers = (np.array(starts, "<i8") * width).tobytes()
    path.write_bytes(head + sizes + pointers + np.arange(count + 1, dtype="<i8").tobytes())


@pytest.mark.parametrize("kind", ["", ".zst"])
def test_a_line_beyond_2_gib_is_too_large_by_name_and_the_rest_is_read(
    tmp_path: Path, kind: str
) -> None:
    first, last = b'{"text": "before"}\n', b'"}\n{"text": "behind"}\n'
    hole_bytes = 2 * GIB + (64 << 20)
    path = tmp_path / f"a.jsonl{kind}"
    with path.open("wb") as file:
        if kind:
            pack = zstandard.ZstdCompressor().compress
            hole = pack(bytes(64 << 20))
            file.write(pack(first + b'{"text": "'))
            for _ in range(hole_bytes >> 26):
                file.write(hole)
            file.write(pack(last))
        else:
            file.write(first + b'{"text": "')
            file.seek(hole_bytes, 1)
            file.write(last)
    assert path.stat().st_blocks * 512 < 1 << 20
    rule = ShuffleRule(is_shuffled=False, block_bytes=GIB)
    spec = make_spec([path], shuffle=rule, max_epochs=1)
    loader = make_loader(spec)
    tracemalloc.start()
    chunks = read_chunks(loader)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    records = [record for chunk in chunks for record in placed(chunk)]
    assert texts_of(records) == ["before", "behind"]
    assert [record.status for record in records] == [0, RecordStatus.TOO_LARGE, 0]
    fault = next(chunk.meta.fault for chunk in chunks if chunk.meta.fault)
    limit = spec.record_bytes_max
    assert fault == (
        f"{path}: record at byte offset {len(first)}: longer than record_bytes_max = {limit}"
    )
    assert peak < MEMORY_BYTES_MAX + limit
