"""What one microbatch holds: the fields, their types, and where they lie in a slot's payload.

Pure. The daemon derives ring sizes from it before anything starts, a data constructor writes by it,
and a reader learns the convention of labels from it. It never knows jobs, meshes or segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from msd_client.contract.context_parallel import CP_LAYOUTS, CpLayout, check_layout
from msd_client.contract.errors import ConfigError
from msd_client.contract.media_fields import MediaField, check_media, media_arrays
from msd_client.contract.plain import decode_plain, encode_plain
from msd_client.contract.slot_fields import (
    Extent,
    FieldSpec,
    ScratchField,
    WantedField,
    check_table,
    place_fields,
)
from msd_client.contract.user_fields import UserField, check_user_fields

Labels = Literal["shifted", "aligned"]
Ignore = Literal["label", "loss_mask"]
Boundaries = Literal["exact", "constant"]
Stage = Literal["all", "first", "middle", "last"]
Documents = Literal["separate", "joined"]
Positions = Literal["plain", "mrope"]

PAYLOAD_BYTES_MAX = (4 << 30) - 4096
"""A slot holds at most 4 GiB, its header page included (RINGS.md 6d)."""
MROPE_NAME = "mrope_position_ids"
MROPE_AXES = 3
"""Time, height, width."""
MASKED_IDS_MAX = 1 << 30
"""Where a job has masks, ids are below it: a pool's ids say by this bit that they are not trained."""


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """Fields of a microbatch and the conventions behind them; build it with `for_rule`."""

    rows: int
    row_tokens: int
    """Places of a whole row, all context-parallel ranks together."""
    row_segments_max: int
    """Most segments that packing puts in a row, without its padding."""
    token_dtype: str
    label_dtype: str
    labels: Labels
    documents: Documents
    ignore: Ignore
    ignore_label: int
    pad_id: int
    segment_multiple: int
    boundaries: Boundaries
    cp_count: int
    cp_layout: CpLayout
    stage: Stage
    is_mtp: bool
    source_weights: tuple[float, ...]
    """Loss weight of each source, by its index; empty where batches have no `loss_weights`."""
    user_fields: tuple[UserField, ...]
    has_masks: bool
    """True where some tokens of the pool are marked as not trained."""
    media: tuple[MediaField, ...]
    """Modalities of the job; batches of the first stage carry them."""
    positions: Positions
    encode_dp_count: int = 0
    """Data-parallel groups that may encode a microbatch's media; 0: that of its text alone."""
    has_groups: bool = False
    """True where samples of some source stay together: batches say which, by `segment_group`."""
    fields: tuple[FieldSpec, ...] = field(init=False)
    """Token fields first."""
    segments_max: int = field(init=False)
    """Most segments of a microbatch, one padding segment a row included."""
    payload_bytes_max: int = field(init=False)

    def __post_init__(self) -> None:
        """Check the rule and place the fields.

        Raises:
            ConfigError: See `for_rule`.
        """
        _check_numbers(self)
        _check_names(self)
        _check_weights(self)
        check_user_fields(self.user_fields)
        check_media(self.media, self.rows)
        check_layout(
            self.cp_layout,
            self.cp_count,
            row_tokens=self.row_tokens,
            segment_multiple=self.segment_multiple,
        )
        # A full row has no padding, so a row of n places never has more than n / multiple segments.
        places = self.row_tokens // self.segment_multiple
        segments_max = self.rows * min(self.row_segments_max + 1, places)
        object.__setattr__(self, "segments_max", segments_max)
        placed = place_fields(_wanted_fields(self))
        payload_bytes_max = placed[-1].offset_bytes + placed[-1].nbytes_max
        if payload_bytes_max > PAYLOAD_BYTES_MAX:
            raise ConfigError(
                f"a microbatch of {self.rows} rows x {self.row_tokens} tokens takes "
                f"{payload_bytes_max} bytes, more than the {PAYLOAD_BYTES_MAX} of a slot: "
                "lower batch.microbatch_rows"
                + (", or the patches and frames of a row" if self.media else ""),
                needed_bytes=payload_bytes_max,
                available_bytes=PAYLOAD_BYTES_MAX,
            )
        check_table(placed)
        object.__setattr__(self, "fields", placed)
        object.__setattr__(self, "payload_bytes_max", payload_bytes_max)

    @classmethod
    def for_rule(
        cls,
        *,
        rows: int,
        row_tokens: int,
        row_segments_max: int,
        token_dtype: str = "int32",  # noqa: S107 - a dtype, no password
        label_dtype: str = "int64",
        labels: Labels = "shifted",
        documents: Documents = "separate",
        ignore: Ignore = "label",
        ignore_label: int = -100,
        pad_id: int = 0,
        segment_multiple: int = 1,
        boundaries: Boundaries = "exact",
        cp_count: int = 1,
        cp_layout: CpLayout = "zigzag_row",
        stage: Stage = "all",
        is_mtp: bool = False,
        source_weights: tuple[float, ...] = (),
        user_fields: tuple[UserField, ...] = (),
        has_masks: bool = False,
        media: tuple[MediaField, ...] = (),
        positions: Positions = "plain",
        encode_dp_count: int = 0,
        has_groups: bool = False,
    ) -> BatchSpec:
        """Return the spec of a microbatch of `rows` rows.

        Args:
            rows: Rows of a microbatch, at least 1.
            row_tokens: Places of a row, at least 1; a multiple of `segment_multiple`.
            row_segments_max: Most segments that packing puts in a row, without its padding.
            token_dtype: int32 or int64.
            label_dtype: int32 or int64.
            labels: shifted or aligned.
            documents: separate or joined.
            ignore: label, or loss_mask: labels are ids everywhere and `loss_weights` is the mask.
            ignore_label: Label where nothing is trained; with loss_mask that is `pad_id`.
            pad_id: Token id of padding.
            segment_multiple: A segment takes a multiple of so many places.
            boundaries: exact, or constant: as many entries in every microbatch.
            cp_count: Context-parallel ranks that a microbatch is dealt to.
            cp_layout: How; see `context_parallel`.
            stage: Pipeline stage that reads it: all, first, middle or last.
            is_mtp: True gives the last stage tokens, too.
            source_weights: Loss weight of each source; non-empty = there are `loss_weights`.
            user_fields: Columns of the records.
            has_masks: Some tokens are marked as not trained.
            media: Modalities of the job.
            positions: plain, or mrope: there are `mrope_position_ids`, too.
            encode_dp_count: Data-parallel groups that may encode its media, 0 for its own alone.
            has_groups: Samples of some source stay together.

        Raises:
            ConfigError: A number or name is out of range, or a slot would exceed 4 GiB.
            MeshMismatchError: `cp_count` does not fit `row_tokens` or `segment_multiple`.
        """
        return cls(
            rows=rows,
            row_tokens=row_tokens,
            row_segments_max=row_segments_max,
            token_dtype=token_dtype,
            label_dtype=label_dtype,
            labels=labels,
            documents=documents,
            ignore=ignore,
            ignore_label=pad_id if ignore == "loss_mask" else ignore_label,
            pad_id=pad_id,
            segment_multiple=segment_multiple,
            boundaries=boundaries,
            cp_count=cp_count,
            cp_layout=cp_layout,
            stage=stage,
            is_mtp=is_mtp,
            source_weights=tuple(map(float, source_weights)),
            user_fields=tuple(user_fields),
            has_masks=has_masks or bool(media),
            media=tuple(media),
            positions=positions,
            encode_dp_count=encode_dp_count,
            has_groups=has_groups,
        )

    @property
    def scratch_fields(self) -> tuple[ScratchField, ...]:
        """Arrays beside the slot: to deal rows to ranks from, and to count trained labels in."""
        lines = {"token": self.rows, "axis_token": MROPE_AXES * self.rows}
        wanted = [
            ScratchField(field.name, field.dtype, lines[field.extent])
            for field in self.fields
            if self.cp_count > 1 and field.extent in lines
        ]
        if self.has_masks and self.stage in ("first", "middle"):
            wanted.append(ScratchField("labels", "int32", self.rows))
            if self.source_weights:
                wanted.append(ScratchField("loss_weights", "float32", self.rows))
        return tuple(wanted)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of `scratch_fields`."""
        return sum(
            int(np.dtype(scratch.dtype).itemsize) * scratch.lines * self.row_tokens
            for scratch in self.scratch_fields
        )

    def at(self, row_tokens: int) -> BatchSpec:
        """Return the same rule for another row length; keep it, it is not made for every batch.

        Raises:
            ConfigError: Segments or ranks cannot cut rows of that length.
        """
        return self if row_tokens == self.row_tokens else replace(self, row_tokens=row_tokens)

    def field(self, name: str) -> FieldSpec:
        """Return the field of that name.

        Raises:
            KeyError: The microbatch has no such field.
        """
        for spec in self.fields:
            if spec.name == name:
                return spec
        raise KeyError(name)

    def encode(self) -> dict[str, Any]:
        """Return the spec as plain maps, lists and scalars (what `decode` reads)."""
        plain = {name: encode_plain(getattr(self, name)) for name in _RULE_NAMES}
        return plain | {"payload_bytes_max": self.payload_bytes_max}

    @classmethod
    def decode(cls, plain: object) -> BatchSpec:
        """Return the spec from its plain form; the places of the fields are computed, not believed.

        Raises:
            ConfigError: A key is missing or unknown, a value has the wrong type or range, or the
                sender lays the fields out differently (`payload_bytes_max` differs).
        """
        keys = {*_RULE_NAMES, "payload_bytes_max"}
        if not isinstance(plain, dict) or set(plain) != keys:
            raise ConfigError(f"batch spec: expected the keys {sorted(keys)}")
        spec = decode_plain(cls, {name: plain[name] for name in _RULE_NAMES}, "batch spec")
        if spec.payload_bytes_max != plain["payload_bytes_max"]:
            raise ConfigError(
                f"batch spec: the sender's payload has {plain['payload_bytes_max']} bytes, "
                f"ours {spec.payload_bytes_max}: client and daemon differ in version"
            )
        return spec


_FLOAT32 = np.finfo(np.float32)
_RULE_NAMES = tuple(line.name for line in fields(BatchSpec) if line.init)


def _wanted_fields(spec: BatchSpec) -> list[WantedField]:
    """Say which arrays a stage's microbatches have, in the order of the payload."""
    is_first, is_last = spec.stage in ("all", "first"), spec.stage in ("all", "last")
    has_tokens = is_first or is_last
    users = spec.user_fields
    lines: list[tuple[bool, str, str, Extent]] = [
        (is_first or (is_last and spec.is_mtp), "tokens", spec.token_dtype, "token"),
        (is_last, "labels", spec.label_dtype, "token"),
        (has_tokens, "position_ids", "int32", "token"),
        (is_last and bool(spec.source_weights), "loss_weights", "float32", "token"),
        *((has_tokens, user.name, user.dtype, user.per) for user in users if user.per == "token"),
        # No stage can make them of boundaries alone, and the attention of each one needs them.
        (spec.positions == "mrope", MROPE_NAME, "int32", "axis_token"),
        (True, "cu_seqlens", "int32", "boundary"),
        (spec.segment_multiple > 1, "cu_seqlens_padded", "int32", "boundary"),
        (True, "segment_source", "int32", "segment"),
        (spec.has_groups, "segment_group", "int32", "segment"),
        *((True, user.name, user.dtype, user.per) for user in users if user.per != "token"),
    ]
    length = spec.row_tokens // spec.cp_count
    ranks = () if spec.cp_count == 1 else (spec.cp_count,)
    shapes: dict[Extent, tuple[int, ...]] = {
        "token": (*ranks, spec.rows, length),
        "axis_token": (*ranks, MROPE_AXES, spec.rows, length),
        "boundary": (spec.segments_max + 1,),
        "segment": (spec.segments_max,),
        "row": (spec.rows,),
    }
    wanted = [
        WantedField(name, dtype, extent, shapes[extent])
        for is_wanted, name, dtype, extent in lines
        if is_wanted
    ]
    if is_first:
        wanted += [
            WantedField(*array)
            for array in media_arrays(spec.media, spec.rows, spec.row_tokens, spec.encode_dp_count)
        ]
    return wanted


def _check_numbers(spec: BatchSpec) -> None:
    for key in ("rows", "row_tokens", "row_segments_max", "segment_multiple", "cp_count"):
        value = getattr(spec, key)
        if value < 1:
            raise ConfigError(f"batch spec: {key} is {value}, must be at least 1")
    if spec.encode_dp_count < 0:
        raise ConfigError(
            f"batch spec: encode_dp_count is {spec.encode_dp_count}, must not be below 0"
        )
    if spec.rows * spec.row_tokens > np.iinfo(np.int32).max:
        raise ConfigError(
            f"batch spec: {spec.rows} rows x {spec.row_tokens} tokens exceed the int32 range of "
            "cu_seqlens: lower batch.microbatch_rows"
        )
    if spec.row_tokens % spec.segment_multiple:
        raise ConfigError(
            f"batch spec: row_tokens {spec.row_tokens} is no multiple of segment_multiple "
            f"{spec.segment_multiple}: make it one"
        )
    if spec.has_masks and max(spec.ignore_label, spec.pad_id) >= MASKED_IDS_MAX:
        raise ConfigError(
            f"batch spec: ignore_label {spec.ignore_label} or pad_id {spec.pad_id} is not below "
            f"{MASKED_IDS_MAX}, as ids of a job with masks are: choose another one"
        )


def _check_names(spec: BatchSpec) -> None:
    for key, known in (
        ("token_dtype", ("int32", "int64")),
        ("label_dtype", ("int32", "int64")),
        ("labels", ("shifted", "aligned")),
        ("documents", ("separate", "joined")),
        ("ignore", ("label", "loss_mask")),
        ("boundaries", ("exact", "constant")),
        ("cp_layout", CP_LAYOUTS),
        ("stage", ("all", "first", "middle", "last")),
        ("positions", ("plain", "mrope")),
    ):
        value = getattr(spec, key)
        if value not in known:
            raise ConfigError(f"batch spec: {key} {value!r} is none of {', '.join(known)}")


def _check_weights(spec: BatchSpec) -> None:
    for source, weight in enumerate(spec.source_weights):
        # One that float32 rounds to 0 would be trained in the plan and not in the batch.
        if weight != 0 and not _FLOAT32.tiny <= weight <= _FLOAT32.max:
            raise ConfigError(
                f"batch spec: loss weight {weight} of source {source} is neither 0 nor within "
                f"{_FLOAT32.tiny:.1e} to {_FLOAT32.max:.1e}: choose another one"
            )
    if spec.ignore == "loss_mask" and not spec.source_weights:
        raise ConfigError("batch spec: ignore loss_mask needs the loss weight of every source")
