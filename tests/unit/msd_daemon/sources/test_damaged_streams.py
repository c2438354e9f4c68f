"""A damaged compressed shard: each complete line before the damage, then one fault, every time."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation.model.chunk import RecordStatus
from federation.model.job import ShuffleRule
from msd_client.contract.errors import CorruptRecordError
from msd_daemon.sources.byte_stream import ShardFile
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_stream
from tests.support.sources import compress, json_lines, make_loader, make_spec, read_stream

TEXTS = [f"{n} " + "".join(random.Random(n).choices("abcdef \n", k=n * 7 % 90)) for n in range(200)]
PLAIN = json_lines(TEXTS)
KINDS = ("gz", "zst", "xz")
RULE = ShuffleRule(stream_block_records=16, window_records=5)


def read_all(path: Path) -> tuple[bytes, int | None]:
    """Return what a file gives, and the byte offset of its damage."""
    file = ShardFile(path, ReadMeter())
    stream = open_stream(file)
    got = bytearray()
    try:
        while data := stream.read():
            got += data
    except CorruptRecordError as error:
        offset = error.attributes["byte_offset"]
        assert isinstance(offset, int)
        with pytest.raises(CorruptRecordError):
            stream.read()
        return bytes(got), offset
    finally:
        file.close()
    return bytes(got), None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [1, 4])
def test_cut_anywhere_gives_a_prefix_and_a_fault(tmp_path: Path, kind: str, pieces: int) -> None:
    whole = compress(PLAIN, kind, pieces)
    path = tmp_path / f"a.jsonl.{kind}"
    for cut in range(len(whole) - 1, 5, -max(1, len(whole) // 60)):
        path.write_bytes(whole[:cut])
        got, offset = read_all(path)
        assert PLAIN.startswith(got)
        assert offset is not None or len(got) in {len(PLAIN) * p // pieces for p in range(pieces)}
        assert offset is None or offset <= cut


@pytest.mark.parametrize("kind", KINDS)
def test_padding_after_the_end_is_no_damage_but_garbage_is(tmp_path: Path, kind: str) -> None:
    whole = compress(PLAIN, kind, 2)
    path = tmp_path / f"a.jsonl.{kind}"
    if kind != "zst":  # RFC 8878 knows no padding
        path.write_bytes(whole + bytes(1024))
        assert read_all(path) == (PLAIN, None)
    path.write_bytes(whole + b"garbage")
    assert read_all(path) == (PLAIN, len(whole))


def test_skippable_zstd_frames_are_skipped(tmp_path: Path) -> None:
    skippable = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(skippable + compress(PLAIN, "zst", 2) + skippable)
    assert read_all(path) == (PLAIN, None)
    path.write_bytes(compress(PLAIN, "zst", 2) + skippable[:-1])
    assert read_all(path)[0] == PLAIN
    assert read_all(path)[1] is not None


def test_output_of_a_bomb_is_bounded_a_call(tmp_path: Path) -> None:
    for kind in KINDS:
        path = tmp_path / f"bomb.{kind}"
        path.write_bytes(compress(bytes(32 << 20), kind))
        file = ShardFile(path, ReadMeter())
        stream = open_stream(file)
        total = 0
        while data := stream.read():
            assert len(data) <= 256 * 1024
            total += len(data)
        file.close()
        assert total == 32 << 20


@pytest.mark.parametrize("kind", KINDS)
@given(
    pieces=st.integers(1, 5),
    at=st.floats(0, 1, exclude_max=True),
    mask=st.integers(1, 255),
    cut=st.booleans(),
    seek=st.integers(0, 10**6),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_damage_is_one_stream_with_and_without_index_and_after_a_seek(
    kind: str, pieces: int, at: float, mask: int, cut: bool, seek: int
) -> None:
    data = bytearray(compress(PLAIN, kind, pieces))
    place = int(at * len(data))
    if cut:
        del data[place:]
    else:
        data[place] ^= mask
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.jsonl.{kind}"
        path.write_bytes(data)
        spec = make_spec([path], shuffle=RULE)
        index_dir = Path(folder) / "index"
        first = read_stream(make_loader(spec, 0, 1, index_dir))
        again = read_stream(make_loader(spec, 0, 1, index_dir))
        bare = read_stream(make_loader(spec))
        assert first == again == bare
        unreadable = [r for r in first if r.status == RecordStatus.UNREADABLE]
        assert len(unreadable) <= 1
        if not first:
            return
        start = first[seek % len(first)]
        for directory in (index_dir, None):
            loader = make_loader(spec, 0, 1, directory)
            loader.seek(start.block_key, start.index)
            assert read_stream(loader) == first[seek % len(first) :]
