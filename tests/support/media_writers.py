"""Writes the sources of `media_corpus`, each in a format of its own, with this file's own writers."""

from __future__ import annotations

import csv
import io
import itertools
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.media import encode, noise
from tests.support.media_corpus import (
    BLOCK_RECORDS,
    LINES_BLOCK_BYTES,
    TEMPLATE,
    Item,
    MadeSource,
    Maker,
    Part,
    Record,
    Turn,
    text_of,
    write_tokenizer,
)


def _shards(records: list[Record], count: int) -> list[list[Record]]:
    cuts = [len(records) * n // count for n in range(count + 1)]
    return [records[a:b] for a, b in itertools.pairwise(cuts)]


def runs(shards: list[list[Record]], most: int) -> tuple[tuple[int, ...], ...]:
    """Return the records of each block of each shard, where blocks hold so many."""
    return tuple(
        tuple(min(most, len(shard) - first) for first in range(0, len(shard), most))
        for shard in shards
    )


def _member(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def write_captions(folder: Path, maker: Maker, count: int = 120) -> MadeSource:
    """Tars of images with captions; `where` on a member; a broken image, one too large, no text."""
    records = []
    for number in range(count):
        item = maker.image()
        if number == 7:
            assert item.content is not None
            item = Item("image", item.content[: len(item.content) // 2])
        if number == 11:
            item = Item("image", encode(noise(160, 160, 5), "PNG"))
        records.append(Record(f"c{number:03d}", [item, maker.words(20)], number % 7 == 3))
    records[13].fault = "field_missing"
    shards = _shards(records, 3)
    for number, shard in enumerate(shards):
        with tarfile.open(folder / f"captions-{number}.tar", "w") as tar:
            for record in shard:
                item, words = record.parts
                assert isinstance(item, Item) and isinstance(words, tuple)
                members = {
                    "img": item.content or b"",
                    "json": json.dumps({"q": 0.1 if record.is_filtered else 0.9}).encode(),
                    "txt": text_of(words).encode(),
                }
                if record.fault:
                    del members["txt"]
                for extension, content in members.items():
                    _member(tar, f"{record.key}.{extension}", content)
                record.size_bytes = sum(map(len, members.values()))
    section = {
        "paths": str(folder / "captions-*.tar"), "image": "img", "text": "txt",
        "where": "json.q > 0.5",
    }  # fmt: skip
    return MadeSource("captions", section, shards, kind="stream")


def write_hub(folder: Path, maker: Maker, count: int = 120) -> MadeSource:
    """Parquet with image structs as the Hugging Face hub has it; `where`, and some held out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [
        Record(f"h{n}", [maker.image(), maker.words(25)], is_filtered=n % 5 == 2)
        for n in range(count)
    ]
    records[4].parts[0] = Item("image", b"no image at all")
    shards = _shards(records, 2)
    for number, shard in enumerate(shards):
        images = [{"bytes": r.parts[0].content, "path": None} for r in shard]  # type: ignore[union-attr]
        table = pa.table(
            {
                "id": [r.key for r in shard],
                "lang": ["xx" if r.is_filtered else "en" for r in shard],
                "image": pa.array(
                    images, pa.struct([("bytes", pa.binary()), ("path", pa.string())])
                ),
                "text": [text_of(r.parts[1]) for r in shard],  # type: ignore[arg-type]
            }
        )
        pq.write_table(table, folder / f"hub-{number}.parquet", row_group_size=11)
    section = {
        "paths": str(folder / "hub-*.parquet"), "image": "image", "key": "id", "hold_out": 0.15,
        "where": 'lang == "en"',
    }  # fmt: skip
    return MadeSource("hub", section, shards, block_counts=runs(shards, 11))


def write_mds(folder: Path, maker: Maker, count: int = 150) -> MadeSource:
    """MDS of texts, one shard of them packed with zstd; some have no word."""
    import zstandard

    records = [Record(f"m{n}", [maker.words(60, 0)]) for n in range(count)]
    shards = _shards(records, 3)
    (folder / "mds").mkdir()
    entries = []
    for number, shard in enumerate(shards):
        config = b'{"format": "mds"}'
        samples = []
        for record in shard:
            (words,) = record.parts
            text, key = text_of(words).encode(), record.key.encode()  # type: ignore[arg-type]
            samples.append(struct.pack("<II", len(key), len(text)) + key + text)
            record.size_bytes = len(samples[-1])
        first = 4 + 4 * (len(samples) + 1) + len(config)
        offsets = first + np.cumsum([0, *map(len, samples)])
        raw = struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes() + config
        raw += b"".join(samples)
        name = f"shard.{number:05d}.mds"
        packed = zstandard.ZstdCompressor().compress(raw) if number == 1 else None
        (folder / "mds" / (name if packed is None else f"{name}.zstd")).write_bytes(packed or raw)
        entry: dict[str, Any] = {
            "column_encodings": ["str", "str"], "column_names": ["id", "text"],
            "column_sizes": [None, None], "compression": "zstd" if packed else None,
            "format": "mds", "hashes": [], "samples": len(samples), "version": 2,
            "raw_data": {"basename": name, "bytes": len(raw), "hashes": {}}, "zip_data": None,
        }  # fmt: skip
        if packed:
            entry["zip_data"] = {
                "basename": f"{name}.zstd",
                "bytes": len(packed),
                "hashes": {},
            }
        entries.append(entry)
    (folder / "mds" / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    counts = list(runs(shards, BLOCK_RECORDS))
    counts[1] = (len(shards[1]),)  # what is packed is one block
    return MadeSource("mds", {"paths": str(folder / "mds")}, shards, block_counts=tuple(counts))


def write_saved(folder: Path, maker: Maker, count: int = 130) -> MadeSource:
    """A folder as save_to_disk leaves it, with a list of keys to leave out."""
    import pyarrow as pa

    records = [Record(f"s{n}", [maker.words(50)]) for n in range(count)]
    shards = _shards(records, 2)
    (folder / "saved").mkdir()
    files = []
    for number, shard in enumerate(shards):
        files.append({"filename": f"data-{number:05d}-of-00002.arrow"})
        schema = pa.schema([("id", pa.string()), ("text", pa.large_string())])
        with (
            (folder / "saved" / files[-1]["filename"]).open("wb") as out,
            pa.ipc.new_stream(out, schema) as writer,
        ):
            for first in range(0, len(shard), 9):
                part = shard[first : first + 9]
                texts = [text_of(r.parts[0]) for r in part]  # type: ignore[arg-type]
                writer.write_batch(pa.record_batch([[r.key for r in part], texts], schema=schema))
    (folder / "saved" / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "saved" / "dataset_info.json").write_text("{}")
    excluded = {record.key for record in records[3::11]}
    (folder / "leave-out.txt").write_text("".join(f"{key}\n" for key in sorted(excluded)))
    section = {
        "paths": str(folder / "saved"), "key": "id", "exclude": str(folder / "leave-out.txt"),
        "hold_out": 0.3,
    }  # fmt: skip
    batches = BLOCK_RECORDS // 9 * 9
    counts = runs(shards, batches)
    return MadeSource("saved", section, shards, excluded, block_counts=counts)


def write_chats(folder: Path, maker: Maker, count: int = 90) -> MadeSource:
    """JSONL of chats whose images lie in files beside it; one chat has no answer."""
    (folder / "chat").mkdir()
    records = []
    for number in range(count):
        turns: list[Part] = []
        for turn in range(maker.rng.choice([1, 1, 2])):
            asked: list[tuple[int, ...] | Item] = [maker.words(12)]
            if maker.rng.random() < 0.5:
                asked.insert(maker.rng.randint(0, 1), maker.image((16, 48)))
            turns.append(Turn(is_assistant=False, parts=tuple(asked)))
            if number != 9 or turn:
                turns.append(Turn(is_assistant=True, parts=(maker.words(30),)))
        records.append(Record(f"t{number}", turns))
    records[20].parts = records[20].parts[:1]
    lines = []
    for record in records:
        messages, images = [], []
        for turn in record.parts:
            assert isinstance(turn, Turn)
            content: Any = []
            for part in turn.parts:
                if isinstance(part, Item):
                    name = f"{record.key}-{len(images)}.bin"
                    (folder / "chat" / name).write_bytes(part.content or b"")
                    images.append(name)
                    content.append({"type": "image"})
                else:
                    content.append({"type": "text", "text": text_of(part)})
            if len(content) == 1 and content[0]["type"] == "text":
                content = content[0]["text"]
            role = "assistant" if turn.is_assistant else "user"
            messages.append({"role": role, "content": content})
        lines.append(json.dumps({"id": record.key, "messages": messages, "images": images}))
        record.size_bytes = len(lines[-1])
    (folder / "chat" / "chat.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "template.jinja").write_text(TEMPLATE)
    section = {
        "paths": str(folder / "chat" / "chat.jsonl"), "messages": "messages", "image": "images",
        "shuffle": {"block_bytes": LINES_BLOCK_BYTES},
    }  # fmt: skip
    return MadeSource("chats", section, [records], kind="jsonl")


def write_speech(folder: Path, maker: Maker, count: int = 90) -> MadeSource:
    """A NeMo manifest with sounds beside it; `where` on the length, a missing and a broken file."""
    (folder / "speech").mkdir()
    records, lines = [], []
    for number in range(count):
        is_long = number % 9 == 4
        item = maker.sound(0.7 if is_long else None)
        words = maker.words(15)
        name = f"{number}.wav"
        if number == 10:
            item = Item("audio", None)
        if number == 12:
            item = Item("audio", b"RIFF no sound")
        if item.content is not None:
            (folder / "speech" / name).write_bytes(item.content)
        line = {"audio_filepath": name, "duration": 0.7 if is_long else 0.3, "text": text_of(words)}
        lines.append(json.dumps(line) if number != 17 else "{no json")
        fault = "bad_syntax" if number == 17 else ""
        records.append(Record(f"a{number}", [item, words], is_long, fault, len(lines[-1])))
    (folder / "speech" / "manifest.jsonl").write_text("\n".join(lines) + "\n")
    section = {
        "paths": str(folder / "speech" / "manifest.jsonl"), "format": "nemo_manifest",
        "audio": "audio_filepath", "where": "duration < 0.65",
        "shuffle": {"block_bytes": LINES_BLOCK_BYTES},
    }  # fmt: skip
    return MadeSource("speech", section, [records], kind="jsonl")


def write_pages(folder: Path, maker: Maker, count: int = 45) -> MadeSource:
    """Interleaved documents, many longer than rows; some images are not there and left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "images").mkdir()
    records = []
    columns: dict[str, list[list[str | None]]] = {"texts": [], "images": []}
    for number in range(count):
        record = Record(f"p{number}", [])
        texts: list[str | None] = []
        images: list[str | None] = []
        for place in range(maker.rng.choice([1, 3, 6, 14])):
            if maker.rng.random() < 0.5:
                item, name = maker.image(), f"{number}-{place}.bin"
                if maker.rng.random() < 0.15:
                    item = Item("image", None)
                else:
                    (folder / "images" / name).write_bytes(item.content or b"")
                record.parts.append(item)
                texts.append(None)
                images.append(name)
            else:
                words = maker.words(90)
                record.parts.append(words)
                texts.append(text_of(words))
                images.append(None)
        columns["texts"].append(texts)
        columns["images"].append(images)
        records.append(record)
    schema = pa.schema([("texts", pa.list_(pa.string())), ("images", pa.list_(pa.string()))])
    pq.write_table(pa.table(columns, schema), folder / "pages.parquet", row_group_size=7)
    section = {
        "paths": str(folder / "pages.parquet"), "media_root": str(folder / "images"),
        "interleave": {"text": "texts", "image": "images", "missing": "leave_out"},
    }  # fmt: skip
    return MadeSource(
        "pages", section, [records], is_missing_left_out=True, block_counts=runs([records], 7)
    )


def write_qa(folder: Path, maker: Maker, count: int = 150) -> MadeSource:
    """CSV of questions and answers that a template joins, some held out, a row with too few fields."""
    records = [Record(f"q{n}", [maker.words(15), maker.words(15)]) for n in range(count)]
    shards = _shards(records, 2)
    for number, shard in enumerate(shards):
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(["id", "question", "answer"])
        for record in shard:
            question, answer = (text_of(part) for part in record.parts)  # type: ignore[arg-type]
            before = out.tell()
            if record.key == "q5":
                record.fault = "bad_syntax"
                writer.writerow([record.key])
            else:
                writer.writerow([record.key, question, answer])
            record.size_bytes = out.tell() - before - 2
        (folder / f"qa-{number}.csv").write_text(out.getvalue(), newline="")
    section = {
        "paths": str(folder / "qa-*.csv"), "template": "{question} {answer}", "key": "id",
        "hold_out": 0.2,
    }  # fmt: skip
    return MadeSource("qa", section, shards, kind="stream")


WRITERS: tuple[Callable[[Path, Maker], MadeSource], ...] = (
    write_captions, write_chats, write_hub, write_mds, write_pages, write_qa, write_saved,
    write_speech,
)  # fmt: skip


def write_corpus(folder: Path, seed: int) -> tuple[list[MadeSource], int]:
    """Write all sources; return them in the order of their names, and the vocabulary's size."""
    folder.mkdir(parents=True, exist_ok=True)
    maker = Maker(seed)
    sources = [write(folder, maker) for write in WRITERS]
    write_tokenizer(folder / "tokenizer.json", maker.vocabulary)
    return sources, maker.vocabulary
