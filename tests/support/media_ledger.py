"""What ranks were given of jobs with media: every token, label, mask, item and place, copied out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msd_client.contract.state import (
    DELIVERED_TOKENS,
    DRAWN_TOKENS,
    DROPPED_COLUMNS,
    VALID_TOKENS,
    StreamState,
)
from msd_client.joined_job import Data
from msd_client.step import Step
from tests.support.media_oracle import IGNORED, PlacedItem, Segment, unit_digest
from tests.support.media_oracle_steps import row_digest
from tests.support.node import Node, run_ranks

MODALITIES = ("image", "audio")


@dataclass
class Microbatch:
    """One microbatch as one rank got it."""

    step: int
    number: int
    rank: int
    fields: dict[str, Any]
    """Arrays by name, as far as the rank reads them."""
    media: dict[str, dict[str, Any]]
    """By modality."""

    def digest(self) -> bytes:
        """Return what stands for every byte of it."""
        found = hashlib.blake2b(digest_size=16)
        for name, array in sorted(self.fields.items()):
            found.update(f"{name}{array.dtype}{array.shape}".encode() + array.tobytes())
        for modality, arrays in sorted(self.media.items()):
            for name, array in sorted(arrays.items()):
                if isinstance(array, np.ndarray):
                    found.update(f"{modality}{name}{array.dtype}{array.shape}".encode())
                    found.update(np.ascontiguousarray(array).tobytes())
        return found.digest()

    def items(self) -> list[tuple[int, PlacedItem]]:
        """Return (segment, item with its place in the flattened rows) of each item, checked."""
        found = []
        for modality, arrays in self.media.items():
            bounds, places = arrays["cu_seqlens"].tolist(), arrays["cu_places"].tolist()
            units, at = arrays["patches"], arrays["places"].tolist()
            assert bounds[0] == places[0] == 0
            assert bounds[-1] == len(units)
            assert places[-1] == len(at)
            assert len(bounds) == len(places) == len(arrays["segments"]) + 1
            assert arrays["max_seqlen"] == max(np.diff(bounds), default=0)
            assert at == sorted(at), "items do not lie in the order of their tokens"
            for number, segment in enumerate(arrays["segments"].tolist()):
                own = at[places[number] : places[number + 1]]
                assert own == list(range(own[0], own[0] + len(own))), "an item has a gap"
                data = units[bounds[number] : bounds[number + 1]]
                grids = arrays["grids"]
                grid = (len(data),) if grids is None else tuple(grids[number].tolist())
                assert np.prod(grid) == len(data)
                item = PlacedItem(modality, own[0], len(own), grid, unit_digest(data))
                found.append((segment, item))
        return sorted(found, key=lambda pair: pair[1].place)

    def segments(self, names: Sequence[str]) -> list[tuple[int, Segment]]:
        """Return (row, segment) of each segment; checks padding and boundaries on the way."""
        tokens, labels = self.fields["tokens"], self.fields["labels"].reshape(-1)
        row_tokens = tokens.shape[1]
        flat = tokens.reshape(-1)
        axes = self.fields["mrope_position_ids"].reshape(3, -1)
        plain = self.fields["position_ids"].reshape(-1)
        bounds = self.fields["cu_seqlens"].tolist()
        assert bounds[0] == 0
        assert bounds[-1] == flat.size
        own: dict[int, list[PlacedItem]] = {}
        for segment, item in self.items():
            assert bounds[segment] <= item.place < bounds[segment + 1]
            own.setdefault(segment, []).append(item._replace(place=item.place - bounds[segment]))
        found = []
        for number, source in enumerate(self.fields["segment_source"].tolist()):
            begin, end = bounds[number], bounds[number + 1]
            assert begin // row_tokens == (end - 1) // row_tokens, "a segment crosses rows"
            assert plain[begin:end].tolist() == list(range(end - begin))
            if source < 0:
                assert not flat[begin:end].any()
                assert (labels[begin:end] == IGNORED).all()
                assert number not in own
                continue
            segment = Segment(
                names[source],
                tuple(flat[begin:end].tolist()),
                tuple(labels[begin:end].tolist()),
                tuple(tuple(axis[begin:end].tolist()) for axis in axes),
                tuple(own.get(number, ())),
            )
            found.append((begin // row_tokens, segment))
        return found


@dataclass
class MediaLedger:
    """What the ranks of a run were given."""

    names: list[str]
    """Of the sources, by index."""
    microbatches: list[Microbatch] = field(default_factory=list)
    valid_tokens: dict[int, int] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)
    """By number of completed steps."""

    @property
    def steps(self) -> list[int]:
        return sorted(self.valid_tokens)

    def segments(self, before: int | None = None) -> Counter[Segment]:
        """Return how often each segment was delivered, before a step or at all."""
        return Counter(
            segment
            for one in self.microbatches
            if before is None or one.step < before
            for _, segment in one.segments(self.names)
        )

    def rows(self) -> dict[int, list[bytes]]:
        """Return each step's rows with all that lies in them, as a sorted multiset."""
        rows: dict[int, list[bytes]] = {}
        for one in self.microbatches:
            count = one.fields["tokens"].shape[0]
            held: list[list[Segment]] = [[] for _ in range(count)]
            for row, segment in one.segments(self.names):
                held[row].append(segment)
            rows.setdefault(one.step, []).extend(row_digest(row) for row in held)
        return {step: sorted(found) for step, found in rows.items()}

    def bytes_of(self) -> dict[tuple[int, int, int], bytes]:
        """Return what stands for every byte of each (step, rank, microbatch)."""
        return {(one.step, one.rank, one.number): one.digest() for one in self.microbatches}

    def check(self) -> None:
        """Check announced counts against labels, and each state's sums against what was given."""
        valid: Counter[int] = Counter()
        delivered: dict[int, Counter[str]] = {}
        trained: dict[int, Counter[str]] = {}
        for one in self.microbatches:
            valid[one.step] += int((one.fields["labels"] != IGNORED).sum())
            for _, segment in one.segments(self.names):
                tokens = delivered.setdefault(one.step, Counter())
                tokens[segment.source] += len(segment.tokens)
                labels = trained.setdefault(one.step, Counter())
                labels[segment.source] += sum(label != IGNORED for label in segment.labels)
        assert dict(valid) == self.valid_tokens
        assert self.steps == list(range(self.steps[0], self.steps[-1] + 1))
        before = StreamState.decode(self.states[self.steps[0]]) if self.steps[0] else None
        for step in self.steps:
            state = StreamState.decode(self.states[step + 1])
            was = np.zeros_like(state.progress) if before is None else before.progress
            for index, name in enumerate(self.names):
                given = state.progress[:, index] - was[:, index]
                assert given[DELIVERED_TOKENS] == delivered[step][name], (step, name)
                assert given[VALID_TOKENS] == trained[step][name], (step, name)
                carried = state.carried[4, state.carried[0] == index].sum()
                total = state.progress[:, index]
                assert total[DRAWN_TOKENS] == total[DELIVERED_TOKENS] + carried, (step, name)
            before = state

    def drops(self, step: int | None = None) -> dict[str, dict[str, int]]:
        """Return the drop counts of each source by reason, as a state has them."""
        state = StreamState.decode(self.states[max(self.states) if step is None else step])
        return {
            name: {
                reason: int(count)
                for reason, count in zip(DROPPED_COLUMNS, state.dropped[:, index], strict=True)
                if count
            }
            for index, name in enumerate(state.source_names)
        }

    def state(self, step: int) -> dict[str, bytes]:
        return {"msd": self.states[step]}


def copy_of(batch: Any, step: int, rank: int) -> Microbatch:
    """Copy all of a batch that the rank reads."""
    names = (
        "tokens", "labels", "position_ids", "mrope_position_ids", "cu_seqlens", "segment_source",
        "loss_weights",
    )  # fmt: skip
    fields = {name: np.array(batch[name]) for name in names if name in batch}
    media = {}
    for modality in MODALITIES:
        if f"{modality}_places" in batch:
            found = batch.media(modality)._asdict()
            media[modality] = {
                name: np.array(value) if isinstance(value, np.ndarray) else value
                for name, value in found.items()
            }
    return Microbatch(step, batch.microbatch, rank, fields, media)


def read_media(
    node: Node,
    job: Any,
    mesh: Mapping[str, int],
    steps: int | None,
    *,
    on_step: Any = None,
    **options: Any,
) -> MediaLedger:
    """Let one rank per DP group read and check what can be checked without an oracle.

    Args:
        node: A running daemon.
        job: Job map.
        mesh: Of dp alone, so that no row is counted twice.
        steps: How many, None for all.
        on_step: Called with (data, step) after each step.
        options: For `run_ranks`.
    """
    names = sorted(job["sources"])
    parts = [MediaLedger(names) for _ in range(mesh["dp"])]

    def read(data: Data, step: Step) -> None:
        part = parts[data.rank]
        for batch in step:
            part.microbatches.append(copy_of(batch, step.number, data.rank))
            del batch
        part.valid_tokens[step.number] = step.valid_tokens
        part.states[step.number + 1] = data.train.state_dict()["msd"]
        if on_step is not None:
            on_step(data, step)

    state = options.get("state")
    run_ranks(node, job, mesh, steps, read_step=read, **options)
    whole = parts[0]
    for part in parts[1:]:
        assert part.valid_tokens == whole.valid_tokens, "ranks had other steps"
        assert part.states == whole.states
        whole.microbatches += part.microbatches
    if state is not None:
        whole.states[StreamState.decode(state["msd"]).step] = state["msd"]
    whole.check()
    return whole
