"""`.msd-tokenize.json`: which pairs of a folder are finished, of which shards and tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from federation.model.job import ResolvedJob, Shard, SourceSpec
from msd_client.contract.errors import ConfigError
from msd_client.contract.plain import encode_plain
from msd_daemon.sources.index import sync_folder
from msd_daemon.sources.manifest import describe_shard
from msd_daemon.sources.tokenized_manifest import (
    FORMER_NAME,
    MANIFEST_NAME,
    SCHEMA,
    read_manifest,
)
from msd_daemon.sources.tokenized_shard import TokenizedShard, token_dtype_of

_FREE_SOURCE_KEYS = (
    "name", "shards", "manifest_digest", "shuffle", "on_error", "at_exhaustion", "max_epochs",
    "loss_weight", "is_critical",
)  # fmt: skip
"""What of a source changes nothing in its pairs."""
WRITE_EVERY_S = 2.0


class TokenizeManifest:
    """The manifest of one source in one folder.

    Args:
        folder: Where the pairs lie; it is there.
        job: The job.
        source: One of its sources.
        is_rewritten: True: pairs of another tokenizer or source are made anew, not refused.

    Raises:
        ConfigError: The folder holds pairs of another tokenizer or source, or a damaged manifest.
    """

    def __init__(
        self, folder: Path, job: ResolvedJob, source: SourceSpec, *, is_rewritten: bool = False
    ) -> None:
        self.path = folder / MANIFEST_NAME
        self.notes: list[str] = []
        self._folder = folder
        self._source = source
        tokenizer = encode_plain(job.tokenizer)
        tokenizer.pop("path")
        self._head = {
            "schema": SCHEMA,
            "source": source.name,
            "source_digest": _digest(source),
            "tokenizer": tokenizer,
            "dtype": token_dtype_of(source).name,
        }
        self._shards: dict[int, dict[str, Any]] = {}
        self._written_s = 0.0
        found = read_manifest(folder)
        if found is not None:
            self._take(found[1], is_rewritten)

    def _take(self, found: dict[str, Any], is_rewritten: bool) -> None:
        own, other = dict(self._head["tokenizer"]), dict(found["tokenizer"])
        versions = own.pop("library"), other.pop("library", "")
        differing = [f"tokenizer {key}" for key in own if own[key] != other.get(key)]
        if found["source_digest"] != self._head["source_digest"]:
            differing.append(f"source (then {found.get('source')!r})")
        if found["dtype"] != self._head["dtype"]:
            differing.append(f"dtype (then {found['dtype']})")
        if differing and not is_rewritten:
            raise ConfigError(
                f"{self._folder} holds pairs of another {', '.join(differing)}: name another --out, "
                "or give --rewrite to make them anew"
            )
        if versions[0] != versions[1]:
            self.notes.append(f"finished shards were made by {versions[1]}, this is {versions[0]}")
        entries = {entry["number"]: entry for entry in found["shards"]}
        for number, shard in enumerate(self._source.shards):
            entry = entries.get(number)
            if entry is None or differing or not self._is_finished(entry, number, shard):
                continue
            self._shards[number] = entries.pop(number)
        self._remove({entry["bin"] for entry in entries.values()})

    def _is_finished(self, entry: Mapping[str, Any], number: int, shard: Shard) -> bool:
        stem = self.stem(number)
        if entry["fingerprint"] != shard.fingerprint or entry["bin"] != f"{stem.name}.bin":
            return False
        try:
            pair = describe_shard(self._folder / entry["bin"], "megatron", "none")
        except (ConfigError, OSError):
            return False
        return bool(pair.fingerprint == entry["bin_fingerprint"])

    def _remove(self, names: set[str]) -> None:
        """Remove pairs of shards that are no longer there, or have changed."""
        for name in names:
            if Path(name).name != name or not name.endswith(".bin"):
                continue
            for file in (self._folder / name, (self._folder / name).with_suffix(".idx")):
                file.unlink(missing_ok=True)

    def stem(self, number: int) -> Path:
        """Return the path of a shard's pair without extensions; names sort as shards do."""
        own = Path(self._source.shards[number].path).name.split(".")[0][:100]
        digits = max(5, len(str(len(self._source.shards) - 1)))
        return self._folder / f"{number:0{digits}d}-{own or 'shard'}"

    @property
    def finished(self) -> dict[int, dict[str, Any]]:
        """What is known of finished shards, by number."""
        return self._shards

    def add(self, number: int, result: TokenizedShard) -> None:
        """Take note of a finished shard; written soon, and by `write` at the end."""
        shard, stem = self._source.shards[number], self.stem(number)
        pair = describe_shard(stem.with_name(stem.name + ".bin"), "megatron", "none")
        self._shards[number] = {
            "number": number,
            "path": shard.path,
            "fingerprint": shard.fingerprint,
            "size_bytes": shard.size_bytes,
            "bin": Path(pair.path).name,
            "bin_fingerprint": pair.fingerprint,
            "bin_bytes": pair.size_bytes,
            "documents": result.documents,
            "tokens": result.tokens,
            "dropped": dict(result.dropped),
            "faulty": result.faulty,
            "faults": result.faults,
        }
        # All shards stand in it, so not at each of tens of thousands.
        if time.monotonic() - self._written_s >= WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Write the manifest so that it is there whole or as it was."""
        shards = [self._shards[number] for number in sorted(self._shards)]
        text = json.dumps(self._head | {"shards": shards}, indent=1, ensure_ascii=True)
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
            (self._folder / FORMER_NAME).unlink(missing_ok=True)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self._folder)
        self._written_s = time.monotonic()


def _digest(source: SourceSpec) -> str:
    plain = encode_plain(source)
    for key in _FREE_SOURCE_KEYS:
        plain.pop(key)
    packed = msgpack.packb(sorted(plain.items()), use_bin_type=True)
    return hashlib.sha256(packed).hexdigest()[:32]
