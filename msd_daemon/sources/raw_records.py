"""Reads chosen records of a shard again as they lie, by their place: for people, not for batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import CorruptRecordError, UsageError
from msd_daemon.sources.formats import SeekableFormat, format_of
from msd_daemon.sources.index import IndexStore
from msd_daemon.sources.jsonl import JsonlFormat
from msd_daemon.sources.lane import ShardRun, StreamReader
from msd_daemon.sources.record import RawRecord, ReadMeter, unreadable
from msd_daemon.sources.text import TextFormat


def find_records(
    spec: SourceSpec, shard: Shard, places: set[int], record_bytes_max: int
) -> Iterator[RawRecord]:
    """Yield the records at places of a shard, as they come in it; a place may have several.

    A line of JSONL comes as it lies, whatever is in it; records of other formats with all of their
    fields. Damage comes as a record without any content.

    Args:
        spec: The source.
        shard: One of its shards, read from its beginning to the last of the places.
        places: As `RawRecord.place` counts.
        record_bytes_max: Larger ones come without their content.

    Raises:
        UsageError: Records of this format have no content of their own.
    """
    spec = replace(spec, record_bytes_max=record_bytes_max)
    if spec.format == "jsonl":
        spec = replace(spec, recipe=None)  # lines, not what is in them
    left = set(places)
    records = _records(spec, shard)
    try:
        for record in records:
            if record.place in places:
                left.discard(record.place)
                yield record
            elif not left:
                return
    except (CorruptRecordError, OSError) as error:
        yield unreadable(min(left, default=0), error)


def _records(spec: SourceSpec, shard: Shard) -> Iterator[RawRecord]:
    meter = ReadMeter()
    if spec.order_class == "streaming":
        run = ShardRun(StreamReader(spec, IndexStore(None, spec), meter), shard, 0)
        try:
            while run.peek() is not None:
                yield from run.block()
        finally:
            run.close()
        return
    if spec.format == "megatron":
        raise UsageError("a document of a .bin is token ids: look at it with msdctl preview")
    if spec.format in ("jsonl", "text"):
        lines = JsonlFormat(spec, meter) if spec.format == "jsonl" else TextFormat(spec, meter)
        for block in range(lines.block_count(shard)):
            yield from lines.records(shard, block)
        return
    opened = cast(SeekableFormat, format_of(spec.format).open(spec, None, meter))
    for block in range(opened.measure(shard)[0]):
        yield from opened.records(shard, block)
