"""WebDataset tars: 64-bit offsets, resumes and indexes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from federation.model.chunk import RecordStatus
from msd_daemon.sources.index_build import build_index
from tests.support.sources import (
    DATA,
    IN_ORDER,
    compress,
    make_loader,
    make_spec,
    read_stream,
    texts_of,
)
from tests.support.tars import (
    END,
    WHOLE,
    few,
    file,
    header,
    read_blocks,
    sample,
    stream_spec,
)

OK = RecordStatus.OK
UNREADABLE = RecordStatus.UNREADABLE
WDS = DATA / "shards"
BROKEN = DATA / "broken" / "derived"


def test_h19_offsets_keep_64_bits(tmp_path: Path) -> None:
    """First member 4 GiB + 1 MiB of holes on disk; the second one's data at 4,296,016,896."""
    import resource

    path = tmp_path / "big.tar"
    size = (4 << 30) + (1 << 20)
    content = b'{"second": true}'
    with path.open("wb") as opened:
        opened.write(header("a.bin", size))
        opened.truncate(512 + size)
        opened.seek(512 + size)
        opened.write(file("b.json", content) + END)
        assert opened.tell() - len(END) - 512 == 4_296_016_896
    assert os.stat(path).st_blocks * 512 <= 64 * 1024
    spec = stream_spec(path, "webdataset", shuffle=few(1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index_dir in (tmp_path / "index", tmp_path / "index", None):
        (first,), (second,) = read_blocks(spec, 0, index_dir)
        assert first.status == RecordStatus.TOO_LARGE
        assert first.fault == f"sample 'a': {size} bytes, record_bytes_max = {64 << 20}"
        assert second.place == 4_296_016_384
        assert second.fields == {"__key__": "b", "json": content}
        assert read_blocks(spec, 1, index_dir) == [[second]]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


def test_a_resume_reads_little_of_a_plain_tar(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(
        b"".join(sample(f"{n:05}", {"txt": b"t%d" % n, "bin": b"x" * 9000}) for n in range(600))
        + END
    )
    spec = make_spec([path], text_field="txt", shuffle=IN_ORDER, max_epochs=1)
    whole = read_stream(make_loader(spec, index_dir=tmp_path / "index"))
    assert texts_of(whole) == [f"t{n}" for n in range(600)]
    loader = make_loader(spec, index_dir=tmp_path / "index")
    loader.seek(whole[512].block_key, whole[512].index)
    assert read_stream(loader) == whole[512:]
    assert loader.statistics().read_bytes < 88 * 11_000 + (1 << 19)


@pytest.mark.parametrize("kind", ["", "gz", "zst"])
def test_an_index_that_lies_is_found_out(tmp_path: Path, kind: str) -> None:
    from msd_daemon.sources.index import IndexStore

    data = b"".join(sample(f"{n:03}", {"txt": b"%d" % n}) for n in range(64)) + END
    path = tmp_path / "a.tar"
    path.write_bytes(compress(data, kind, 4) if kind else data)
    spec = stream_spec(path, "webdataset", shuffle=few(8))
    folder = tmp_path / "index"
    whole = read_blocks(spec, 0, folder)
    (kept,) = folder.glob("*.msdindex")
    good = kept.read_bytes()
    index = IndexStore(folder, spec).load(spec.shards[0])
    assert index is not None
    for starts in (index.starts + 3, index.starts + 512, index.starts + 10**9):
        IndexStore(folder, spec).save(
            spec.shards[0], index.records, starts, list(index.seek_points)
        )
        assert read_blocks(spec, 3, folder) == whole[3:]
        assert kept.read_bytes() == good


def test_io_errors_of_the_machine_make_no_index(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"".join(WHOLE) + END)
    spec = stream_spec(path, "webdataset")
    path.unlink()
    (records,) = read_blocks(spec, 0, tmp_path / "index")
    assert [record.status for record in records] == [UNREADABLE] * 11
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("kind", ["", "gz"])
def test_an_index_built_ahead_is_the_one_that_reading_makes(tmp_path: Path, kind: str) -> None:
    data = (
        b"".join(sample(f"{n:03}", {"txt": b"%d" % n, "txt.gz": b"bad"}) for n in range(70)) + END
    )
    path = tmp_path / f"a.tar{kind and '.'}{kind}"
    path.write_bytes(compress(data, kind, 3) if kind else data)
    spec = make_spec([path], shuffle=few(8))
    read_blocks(spec, 0, tmp_path / "read")
    built = build_index(spec, 0, tmp_path / "built")
    assert built is not None
    assert (built.records, built.starts.tolist()[:3]) == (70, [0, 16384, 32768])
    (read_file,) = (tmp_path / "read").iterdir()
    (built_file,) = (tmp_path / "built").iterdir()
    assert read_file.name == built_file.name
    assert read_file.read_bytes() == built_file.read_bytes()
