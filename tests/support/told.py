"""Lineage as people are told it, turned into what the ledger says of the same tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msd_client.msdctl import main
from tests.support.ledger import Corpus, Given
from tests.support.oracle import Piece, Source


class ToldPiece(NamedTuple):
    """A segment in its place."""

    step: int
    microbatch: int
    rank: int
    row: int
    column: int
    piece: Piece


class Documents:
    """Finds the document that a shard's place names.

    Args:
        sources: The oracle's, of a corpus.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self._numbers: dict[tuple[str, int, str, int], int] = {}
        for source in sources:
            for shard, documents in enumerate(source.shards):
                for place, document in enumerate(documents):
                    self._numbers[source.name, shard, "byte offset", document.begin_bytes] = (
                        document.number
                    )
                    self._numbers[source.name, shard, "document", place] = document.number

    def number(self, source: str, shard: str, place_name: str, place: int) -> int:
        """Return a document's number in its source."""
        at = int(Path(shard).name.split(".")[0].rpartition("-")[2])
        return self._numbers[source, at, place_name, place]


def told_pieces(rows: Iterable[Mapping[str, Any]], documents: Documents) -> set[ToldPiece]:
    """Return the segments of lineage rows, one for each rank that reads them; epochs are 0."""
    return {
        ToldPiece(
            row["step"], row["microbatch"], rank, row["row"], row["column"],
            Piece(
                row["source"], 0,
                documents.number(row["source"], row["shard"], row["place_name"], row["place"]),
                row["offset"], row["length"],
            ),
        )
        for row in rows
        for rank in row["ranks"]
    }  # fmt: skip


def given_pieces(given: Iterable[Given], corpus: Corpus) -> set[ToldPiece]:
    """Return the segments that ranks were given, as `told_pieces` does."""
    found = set()
    for one in given:
        width = one.tokens.shape[1]
        flat = one.tokens.reshape(-1)
        for _, start, end in one.segments():
            row, column = divmod(start, width)
            piece = corpus.piece_of(flat[start:end])
            found.add(ToldPiece(one.step, one.microbatch, one.rank, row, column, piece))
    return found


def run_msdctl(capsys: Any, *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Run a verb with `--json`; return its exit code, what it printed and its messages."""
    capsys.readouterr()
    code = main.run([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out.strip() else {}, err
