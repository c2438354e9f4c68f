"""A reader of one's own, for `.sqlite` files with a table `samples`: register `ENTRY` as msd.sources."""

import sqlite3

from msd_client.errors import CorruptRecordError
from msd_daemon.sources.formats import FormatEntry
from msd_daemon.sources.record import RawRecord, unreadable


class SqliteRows:
    """Blocks are runs of row numbers, so any can be read first."""

    def __init__(self, spec, _columns, _meter):
        self.rows = spec.shuffle.block_records

    def measure(self, shard):
        last, count = next(self.select(shard, "max(rowid), count(*)", 0, 1 << 62))
        return max(1, -(-(last or 0) // self.rows)), count

    def records(self, shard, block):
        begin = block * self.rows
        try:
            for row in self.select(shard, "rowid, *", begin, begin + self.rows):
                fields = dict(zip(row.keys()[1:], tuple(row)[1:], strict=True))
                size_bytes = sum(
                    len(value) for value in fields.values() if hasattr(value, "__len__")
                )
                yield RawRecord(row[0], b"", fields=fields, fields_bytes=size_bytes)
        except CorruptRecordError as error:
            yield unreadable(begin, error)

    def select(self, shard, what, begin, end):
        base = sqlite3.connect(f"file:{shard.path}?mode=ro", uri=True)
        base.row_factory = sqlite3.Row
        query = f"SELECT {what} FROM samples WHERE rowid > ? AND rowid <= ? ORDER BY rowid"
        try:
            yield from base.execute(query, (begin, end))
        except sqlite3.DatabaseError as error:
            raise CorruptRecordError(f"{shard.path}: {error}: mend or remove it") from error
        finally:
            base.close()


ENTRY = FormatEntry("sqlite", (".sqlite",), "sqlite_rows:SqliteRows", place_name="row")
