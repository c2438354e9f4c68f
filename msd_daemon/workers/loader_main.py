"""Main of a loader worker: reads, decodes, tokenizes and publishes chunks into the pool.

A worker hosts the source loaders it is told to open. It works on demand only: each GRANT lends a
piece of the pool for the next chunk of one source loader, so a full pool blocks it by silence.
It has neither an event loop nor ZeroMQ; one blocking loop over its link is all.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import socket
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from federation.model.job import ResolvedJob, decode_job
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import CorruptRecordError, InternalError, MsdError, encode_error
from msd_daemon.core.loader_costs import NO_COST, ReadCost
from msd_daemon.shm.chunk_layout import UNTRAINED_BIT, ChunkView, encode_chunk_columns
from msd_daemon.shm.mark_page import PAGE_BYTES, STACK_OFFSET, InFlight
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.sources.loader import SourceLoader, open_source_loader
from msd_daemon.sources.record_guard import Loss, LostPlace, SourceGuard
from msd_daemon.sources.shared_calls import SharedCalls
from msd_daemon.stores.options import configure_stores, decode_store_options
from msd_daemon.transforms import Tokenizer, open_tokenizer
from msd_daemon.workers.bad_notice import encode_bad
from msd_daemon.workers.frame_link import FrameLink
from msd_daemon.workers.messages import (
    CHUNK_BLOCK_END,
    CHUNK_FETCHED,
    CHUNK_HEAD,
    CHUNK_LANE_END,
    CHUNK_MARKED,
    GRANT,
    FromLoader,
    Grant,
    ToLoader,
)
from msd_daemon.workers.process_name import set_process_name
from msd_daemon.workers.stack_signal import STACK_SIGNAL


def run(sock: socket.socket) -> None:
    """Serve one daemon link until it closes.

    Raises:
        LinkClosed: The daemon is gone or wants this worker to leave.
    """
    LoaderWorker(FrameLink(sock)).serve()


class LoaderWorker:
    """One process; owns its source loaders, borrows pieces of the pool."""

    def __init__(self, link: FrameLink) -> None:
        self._link = link
        self._loaders: dict[int, SourceLoader] = {}
        self._drafts: dict[int, ChunkDraft] = {}
        """Chunk that did not fit its piece; goes out with the next, larger grant."""
        self._grants: deque[Grant] = deque()
        self._pool: memoryview | None = None
        self._job: ResolvedJob | None = None
        self._tokenizer: Tokenizer | None = None
        self._index_dir: Path | None = None
        self._in_flight = InFlight()
        self._calls = SharedCalls()
        self._guards: dict[int, SourceGuard] = {}
        self._put_off: deque[tuple[int, bytes, list[int]]] = deque()
        """Orders that came in the middle of a chunk and wait for its end."""

    def serve(self) -> None:
        """Alternate between orders, which are never left waiting, and one chunk at a time."""
        while True:
            while self._put_off or not self._grants or self._link.pending():
                order = self._put_off.popleft() if self._put_off else self._link.receive()
                self._handle(*order)
            self._make_chunk(self._grants.popleft())

    def _handle(self, kind: int, body: bytes, fds: list[int]) -> None:
        match ToLoader(kind):
            case ToLoader.GRANT:
                self._grants.append(Grant(*GRANT.unpack(body)))
            case ToLoader.SETUP:
                self._set_up(unpack_map(body, bytes_max=len(body)), fds)
            case ToLoader.OPEN:
                self._open(unpack_map(body))
            case ToLoader.SEEK:
                order = unpack_map(body)
                self._drafts.pop(order["loader"], None)
                self._return_grants(order["loader"])
                self._guarded(order["loader"], lambda: self._seek(order))
            case ToLoader.FETCH:
                order = unpack_map(body)
                self._guarded(order["loader"], lambda: self._fetch(order))
            case ToLoader.COPY:
                self._copy(unpack_map(body))
            case ToLoader.CLOSE:
                self._close(unpack_map(body)["loader"])
            case _:
                self._handle_rare(ToLoader(kind), body)

    def _handle_rare(self, kind: ToLoader, body: bytes) -> None:
        match kind:
            case ToLoader.RESET:
                for loader in list(self._loaders):
                    self._close(loader)
                self._return_grants(None)
                self._link.send(FromLoader.RESET_DONE, body)
            case ToLoader.STATISTICS:
                self._send_statistics()
            case ToLoader.QUARANTINE:
                order = unpack_map(body, bytes_max=len(body))
                self._guard(order["source"]).learn(order)
            case ToLoader.UNTIL:
                order = unpack_map(body)
                if order["loader"] in self._loaders:
                    self._loaders[order["loader"]].stop_before(order["block_key"])
            case ToLoader.AHEAD:
                order = unpack_map(body)
                if order["loader"] in self._loaders:
                    self._loaders[order["loader"]].fetch_ahead(order["blocks"])
            case ToLoader.BECOME:
                set_process_name(f"msd-{body.decode()}")

    def _return_grants(self, loader: int | None) -> None:
        """Send back what was granted before this order, of one source loader or of all.

        A chunk made for it would be refused as one of an older task, and its records lost.
        """
        kept: deque[Grant] = deque()
        for grant in self._grants:
            if loader in (None, grant.loader):
                self._link.send(FromLoader.DRY, GRANT.pack(*grant))
            else:
                kept.append(grant)
        self._grants = kept

    def _set_up(self, order: dict[str, Any], fds: list[int]) -> None:
        pool_fd, page_fd = fds
        self._in_flight = _open_page(page_fd)
        self._pool = memoryview(mmap.mmap(pool_fd, order["pool_bytes"]))
        os.close(pool_fd)
        self._job = decode_job(order["job"])
        self._index_dir = Path(order["index_dir"]) if order["index_dir"] else None
        try:
            configure_stores(decode_store_options(order["stores"]))
            self._tokenizer = open_tokenizer(self._job.tokenizer)
        except MsdError as error:
            self._link.send(FromLoader.FAILED, pack({"loader": -1, "error": encode_error(error)}))
            return
        self._link.send(FromLoader.READY, pack({"pid": os.getpid()}))

    def _open(self, order: dict[str, Any]) -> None:
        assert self._job is not None and self._tokenizer is not None
        job, tokenizer = self._job, self._tokenizer

        def open_and_seek() -> None:
            # Nothing is read ahead behind the last pass that may be drawn.
            loader = open_source_loader(
                job,
                order["source"],
                tokenizer,
                order["part"],
                order["parts"],
                self._index_dir,
                guard=self._guard(order["source"]),
                open_wait_s=job.limits.open_s,
                calls=self._calls,
            )
            self._loaders[order["loader"]] = loader
            loader.stop_before(order["until"])
            loader.seek(order["block_key"], order["index"])

        self._guarded(order["loader"], open_and_seek)

    def _seek(self, order: dict[str, Any]) -> None:
        self._loaders[order["loader"]].seek(order["block_key"], order["index"])

    def _guard(self, source: int) -> SourceGuard:
        assert self._job is not None
        guard = self._guards.get(source)
        if guard is None:
            shards = self._job.sources[source].shards
            numbers = {shard.path: number for number, shard in enumerate(shards)}
            guard = SourceGuard(
                source,
                self._in_flight,
                numbers,
                report=lambda place, loss: self._report(source, place, loss),
                hear=self._hear,
            )
            self._guards[source] = guard
        return guard

    def _hear(self) -> None:
        """Take in, in the middle of a chunk, which records are not to be touched any more."""
        while self._link.pending():
            kind, body, fds = self._link.receive()
            if kind == ToLoader.QUARANTINE:
                self._handle(kind, body, fds)
            else:
                self._put_off.append((kind, body, fds))

    def _report(self, source: int, place: LostPlace, loss: Loss) -> None:
        """Have the daemon note a loss, and wait until it did: what is planned by it comes after."""
        told = {"source": source} | place._asdict() | loss._asdict()
        self._link.send(FromLoader.LOST, pack(told))
        while place not in self._guards[source].losses:
            kind, body, fds = self._link.receive()
            if kind == ToLoader.QUARANTINE:
                self._handle(kind, body, fds)
            else:
                self._put_off.append((kind, body, fds))

    def _guarded(self, loader: int, action: Any) -> None:
        """Run an action; a typed error fails this source loader, not the worker."""
        try:
            action()
        except MsdError as error:
            self._fail(loader, error)
        except (
            OSError,
            ValueError,
            ArithmeticError,
            LookupError,
            TypeError,
            RuntimeError,
        ) as error:
            self._fail(
                loader, InternalError(f"source loader {loader}: {type(error).__name__}: {error}")
            )

    def _fail(self, loader: int, error: MsdError) -> None:
        self._in_flight.end()
        self._link.send(FromLoader.FAILED, pack({"loader": loader, "error": encode_error(error)}))

    def _make_chunk(self, grant: Grant) -> None:
        def make() -> None:
            draft = self._drafts.pop(grant.loader, None)
            if draft is None:
                loader = self._loaders.get(grant.loader)
                draft = None if loader is None else loader.next_chunk(grant.size_bytes * 7 // 8)
            if draft is None:
                self._link.send(FromLoader.DRY, GRANT.pack(*grant))
                return
            needed = draft.encoded_bytes()
            if needed > grant.size_bytes:
                self._drafts[grant.loader] = draft
                self._link.send(FromLoader.TOO_SMALL, GRANT.pack(*grant[:4], needed))
                return
            self._publish(grant, draft, needed, flags=0, cost=self._cost_of(grant.loader))

        self._guarded(grant.loader, make)

    def _cost_of(self, loader: int) -> ReadCost:
        """Return what a loader's work took since it was told last."""
        opened = self._loaders.get(loader)
        return NO_COST if opened is None else opened.take_cost()

    def _check_ids(self, source_index: int, chunk: memoryview) -> None:
        """Refuse ids beyond the vocabulary that a job declares for tokenized sources.

        Raises:
            CorruptRecordError: Such an id would read outside the trainer's embedding, or, in a job
                with masks, say that its token is not trained.
        """
        assert self._job is not None
        source = self._job.sources[source_index]
        if not source.is_tokenized:
            return
        count = self._job.tokenizer.vocabulary_count
        if self._job.has_masks:
            count = min(count, UNTRAINED_BIT)
        if count >= 1 << 31:
            return
        tokens = ChunkView(chunk).tokens  # in the pool they lie one after the other
        if source.has_masks:
            tokens = tokens & ~UNTRAINED_BIT
        largest = int(tokens.max()) if len(tokens) else 0
        if largest >= count:
            raise CorruptRecordError(
                f"source {source.name!r} holds the id {largest}, tokenizer.vocabulary is {count}: "
                "these shards were made with another tokenizer, or the number is wrong",
                source=source.name,
                seen=largest,
                limit=count,
            )

    def _publish(
        self,
        grant: Grant,
        draft: ChunkDraft,
        used: int,
        *,
        flags: int,
        tail: bytes = b"",
        cost: ReadCost = NO_COST,
    ) -> None:
        assert self._pool is not None
        piece = self._pool[grant.offset_bytes : grant.offset_bytes + used]
        draft.write_into(piece)
        meta = draft.meta
        self._check_ids(meta.source_index, piece)
        if draft.bad and not flags & CHUNK_FETCHED:
            self._link.send(FromLoader.BAD, encode_bad(draft))
        fault = meta.fault.encode("utf-8", "replace")[:2000]
        flags |= CHUNK_BLOCK_END if meta.is_block_end else 0
        flags |= CHUNK_LANE_END if meta.is_lane_end else 0
        columns = [meta.lengths.astype("<i4").tobytes(), meta.status.tobytes(), tail]
        if meta.marks is not None:
            flags |= CHUNK_MARKED
            columns += [
                part.astype("<i4").tobytes() for part in (meta.marks.counts, meta.marks.table)
            ]
        head = CHUNK_HEAD.pack(
            grant.loader,
            grant.task,
            grant.generation,
            grant.offset_bytes,
            used,
            meta.block_key,
            meta.first_index,
            len(meta.lengths),
            flags,
            meta.window_blocks,
            len(fault),
            meta.source_index,
            0 if meta.marks is None else len(meta.marks.table),
            *cost,
        )
        self._link.send(FromLoader.CHUNK, b"".join((head, fault, *columns)))

    def _fetch(self, order: dict[str, Any]) -> None:
        loader = self._loaders[order["loader"]]
        draft = loader.fetch(order["block_key"], order["indices"])
        if draft.meta.status.any():  # it was drawn as a sample: it must not become another record
            source = loader.name
            raise CorruptRecordError(
                f"source {source!r} no longer holds a sample that was drawn: {draft.meta.fault}; "
                "restore the shard, or begin with a state before it",
                source=source,
                block_key=order["block_key"],
            )
        needed = draft.encoded_bytes()
        grant = Grant(
            order["loader"], order["task"], order["generation"], order["offset"], order["bytes"]
        )
        if needed > grant.size_bytes:
            self._link.send(FromLoader.TOO_SMALL, GRANT.pack(*grant[:4], needed))
            return
        indices = np.asarray(order["indices"], "<i4").tobytes()
        cost = loader.take_cost()
        self._publish(grant, draft, needed, flags=CHUNK_FETCHED, tail=indices, cost=cost)

    def _copy(self, order: dict[str, Any]) -> None:
        """Copy carried fragments into small chunks of their own, so that the large ones can go."""
        for copy in order["copies"]:
            self._copy_fragment(*copy)
        self._link.send(FromLoader.READY, pack({"copied": order["task"]}))

    def _copy_fragment(
        self,
        source_offset: int,
        source_bytes: int,
        sample: int,
        token_offset: int,
        tokens: int,
        target: int,
        target_bytes: int,
    ) -> None:
        """Make a chunk of one record of a part of another chunk's record.

        Its values go with it, and the items that lie whole in it.
        """
        assert self._pool is not None and self._job is not None
        view = ChunkView(self._pool[source_offset : source_offset + source_bytes])
        first = int(view.offsets[sample]) + token_offset
        payload = view.tokens[first : first + tokens]
        fields = self._job.fields
        values = tuple(
            array[first : first + tokens] if rule.per == "token" else array[sample : sample + 1]
            for rule, array in zip(fields, view.values(fields), strict=False)  # none, or all
        )
        media = tuple(
            items.part(sample, token_offset, tokens) for items in view.media(self._job.media)
        )
        place = encode_chunk_columns(
            self._pool[target : target + target_bytes],
            token_bytes=payload.dtype.itemsize,
            source_index=view.header.source_index,
            block_key=view.header.block_key,
            first_index=0,
            flags=0,
            window_blocks=0,
            offsets=np.array([0, tokens], np.int64),
            status=np.zeros(1, np.uint8),
            values=values,
            media=media,
        )
        np.frombuffer(place, payload.dtype)[:] = payload

    def _close(self, loader: int) -> None:
        self._drafts.pop(loader, None)
        opened = self._loaders.pop(loader, None)
        if opened is not None:
            opened.close()

    def _send_statistics(self) -> None:
        body = {str(key): _plain(loader.statistics()) for key, loader in self._loaders.items()}
        self._link.send(FromLoader.STATISTICS, pack(body))


def _open_page(fd: int) -> InFlight:
    """Map the page that says what is worked on; stacks go behind it."""
    os.set_inheritable(fd, False)  # it stays open for stacks, and is no business of the user's code
    page = mmap.mmap(fd, PAGE_BYTES)
    os.lseek(fd, STACK_OFFSET, os.SEEK_SET)
    faulthandler.enable(fd, all_threads=False)
    faulthandler.register(STACK_SIGNAL, fd, all_threads=False)
    return InFlight(page)


def _plain(statistics: object) -> dict[str, Any]:
    import dataclasses

    assert dataclasses.is_dataclass(statistics) and not isinstance(statistics, type)
    return dataclasses.asdict(statistics)
