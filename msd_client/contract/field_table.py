"""Every field of a batch for people: name, dtype, shape, meaning, pipeline stages.

docs/fields.md is made of it, and names of user fields are refused by it. Places and sizes are
`batch_spec`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL_STAGES = "all, first, middle, last"


@dataclass(frozen=True)
class FieldMeaning:
    """One line of the public field table."""

    name: str
    dtype: str
    shape: str
    stages: str
    """Pipeline stages whose batches have it; `all` is a job without pipeline stages."""
    meaning: str


FIELD_TABLE: tuple[FieldMeaning, ...] = (
    FieldMeaning(
        "tokens",
        "int32 (or int64)",
        "[rows, length]",
        "all, first (last: `batch.mtp`)",
        "Token ids; `pad_id` in padding.",
    ),
    FieldMeaning(
        "labels",
        "int64 (or int32)",
        "[rows, length]",
        "all, last",
        "`shifted`: the id of the next token; `aligned`: the id of this token, the model shifts (not "
        "over context-parallel slices, where the next place is not the next token: `shifted`). "
        "Where nothing is trained (joins of separate documents, padding): `ignore_label`, or with "
        "`ignore: loss_mask` `pad_id`.",
    ),
    FieldMeaning(
        "loss_weights",
        "float32",
        "[rows, length]",
        "all, last",
        "What the label here weighs: its source's `loss_weight` where it is trained, else 0. Only "
        "with `ignore: loss_mask` or where a source has a `loss_weight`.",
    ),
    FieldMeaning(
        "position_ids",
        "int32",
        "[rows, length]",
        "all, first, last; middle: made on first use",
        "Position inside the segment, from 0 in every segment. They run on through the padding "
        "inside a segment; what is left of a row counts from 0 again.",
    ),
    FieldMeaning(
        "mrope_position_ids",
        "int32",
        "[3, rows, length]",
        ALL_STAGES,
        "Only with `positions: mrope`: positions of time, height and width inside the segment. "
        "Text counts on all three alike; the placeholder tokens of an image or a video have the "
        "places of its patches, and the text behind it goes on after the largest of them.",
    ),
    FieldMeaning(
        "cu_seqlens",
        "int32",
        "[segments + 1]",
        ALL_STAGES,
        "Cumulative true lengths of the segments, 0 first; a boundary at every row, what is left "
        "of a row is a segment of its own. With `segment_multiple` 1 these are places in the "
        "flattened rows, rows * row_tokens last. With `boundaries: constant` always segments_max "
        "+ 1 entries, the last value repeated.",
    ),
    FieldMeaning(
        "cu_seqlens_padded",
        "int32",
        "[segments + 1]",
        ALL_STAGES,
        "Boundaries in places of the flattened rows, the padding inside segments included: 0 "
        "first, rows * row_tokens last. The same array as `cu_seqlens` with `segment_multiple` 1.",
    ),
    FieldMeaning(
        "segment_source",
        "int32",
        "[segments]",
        ALL_STAGES,
        "Index of the source that a segment comes from; -1 for what is left of a row, and behind "
        "the last segment with `boundaries: constant`.",
    ),
    FieldMeaning(
        "segment_group",
        "int32",
        "[segments]",
        ALL_STAGES,
        "Only in jobs with a source that has `group`: number of the group that a segment belongs to, "
        "0-based and rising in the microbatch; one that is in no group has a number of its own. -1 "
        "where `segment_source` is.",
    ),
    FieldMeaning(
        "segment_ids",
        "int32",
        "[rows, length]",
        ALL_STAGES + ": made on first use",
        "Number of the segment that a place belongs to, 0-based in the microbatch, padding "
        "included: the index into `segment_source`.",
    ),
    FieldMeaning(
        "cp_places",
        "int32",
        "[rows, length]",
        ALL_STAGES + ": made on first use",
        "Place of each token in the flattened rows of the whole microbatch; tells what this "
        "context-parallel rank was dealt.",
    ),
    FieldMeaning(
        "max_seqlen",
        "int",
        "",
        ALL_STAGES,
        "Places of the longest segment, padding included; row_tokens with `boundaries: constant`.",
    ),
    FieldMeaning(
        "segments", "int", "", ALL_STAGES, "Segments of this microbatch, those of padding included."
    ),
    FieldMeaning(
        "valid_tokens",
        "int",
        "",
        ALL_STAGES,
        "Labels of this microbatch that are trained (and weigh more than 0).",
    ),
    FieldMeaning("rows", "int", "", ALL_STAGES, "Rows of this microbatch."),
    FieldMeaning(
        "row_tokens",
        "int",
        "",
        ALL_STAGES,
        "Places of a whole row, all context-parallel ranks together: length * cp.",
    ),
    FieldMeaning(
        "used_tokens",
        "int",
        "",
        ALL_STAGES,
        "Places of the flattened rows up to the end of the last segment, the padding inside "
        "segments included, all context-parallel ranks together; 0 where there is none. What lies "
        "behind is padding: `batch.trimmed()` is the batch without it.",
    ),
    FieldMeaning(
        "used_max_seqlen",
        "int",
        "",
        ALL_STAGES,
        "Places of the longest segment that is not padding alone; 0 where there is none.",
    ),
    FieldMeaning("step", "int", "", ALL_STAGES, "The trainer's step number, dense from 0."),
    FieldMeaning(
        "plan_step", "int", "", ALL_STAGES, "The planner's step number; skips leave gaps in it."
    ),
    FieldMeaning(
        "microbatch",
        "int",
        "",
        ALL_STAGES,
        "Number of the microbatch in this rank's step, from 0.",
    ),
)
"""Names that a user field may not have."""

_MEDIA_STAGES = "all, first"

MEDIA_LINES: tuple[FieldMeaning, ...] = (
    FieldMeaning(
        "image_patches",
        "the rule's",
        "[patches, values]",
        _MEDIA_STAGES,
        "Patches of all images, one image behind the other. `video_patches`; of sounds "
        "`audio_frames` [frames, values].",
    ),
    FieldMeaning(
        "image_grids",
        "int32",
        "[images, 3]",
        _MEDIA_STAGES,
        "Patches of each image in time, height and width. `video_grids`; sounds have none.",
    ),
    FieldMeaning(
        "image_cu_seqlens",
        "int32",
        "[images + 1]",
        _MEDIA_STAGES,
        "Boundaries of the images in patches, 0 first. `video_cu_seqlens`, `audio_cu_seqlens`.",
    ),
    FieldMeaning(
        "image_places",
        "int32",
        "[placeholder tokens]",
        _MEDIA_STAGES,
        "Place of each placeholder token in the flattened rows of the whole microbatch, image by "
        "image; `batch.local_places` has those of a context-parallel rank. `video_places`, "
        "`audio_places`.",
    ),
    FieldMeaning(
        "image_cu_places",
        "int32",
        "[images + 1]",
        _MEDIA_STAGES,
        "Boundaries of the images in placeholder tokens, 0 first. `video_cu_places`, "
        "`audio_cu_places`.",
    ),
    FieldMeaning(
        "image_segments",
        "int32",
        "[images]",
        _MEDIA_STAGES,
        "Number of the segment that each image lies in: the index into `segment_source`. "
        "`video_segments`, `audio_segments`.",
    ),
    FieldMeaning(
        "image_max_seqlen",
        "int",
        "",
        _MEDIA_STAGES,
        "Patches of the largest image, 0 where there is none. `video_max_seqlen`, "
        "`audio_max_seqlen`.",
    ),
    FieldMeaning(
        "image_cu_sends",
        "int32",
        "[images + 1]",
        _MEDIA_STAGES,
        "Only with `batch.encode: any`, as the next three; patches, grids and `image_cu_seqlens` are "
        "then of the images to encode here. Boundaries of those in embeddings, 0 first. "
        "`video_cu_sends`, `audio_cu_sends`.",
    ),
    FieldMeaning(
        "image_send_counts",
        "int32",
        "[dp]",
        _MEDIA_STAGES,
        "Embeddings of the images encoded here for each data-parallel group. `video_send_counts`, "
        "`audio_send_counts`.",
    ),
    FieldMeaning(
        "image_recv_counts",
        "int32",
        "[dp]",
        _MEDIA_STAGES,
        "Embeddings that each data-parallel group sends here. `video_recv_counts`, "
        "`audio_recv_counts`.",
    ),
    FieldMeaning(
        "image_recv_places",
        "int32",
        "[placeholder tokens]",
        _MEDIA_STAGES,
        "Place of each embedding that arrives, in the flattened rows of the whole microbatch, in the "
        "order of arrival. `video_recv_places`, `audio_recv_places`.",
    ),
)
"""Of jobs with media; `media_fields` makes their names for each modality."""

USER_FIELD_LINES: tuple[FieldMeaning, ...] = (
    FieldMeaning(
        "(yours, per: token)",
        "as declared",
        "[rows, length]",
        "all, first, last",
        "The record's value of each token; `fill` in padding and where the record has none.",
    ),
    FieldMeaning(
        "(yours, per: segment)",
        "as declared",
        "[segments]",
        ALL_STAGES,
        "The value of each segment's record; `fill` for what is left of a row.",
    ),
    FieldMeaning(
        "(yours, per: row)",
        "as declared",
        "[rows]",
        ALL_STAGES,
        "The value of the record of each row's first segment; `fill` for an empty row.",
    ),
)


def field_table() -> str:
    """Return the table of all fields as Markdown, for the manual."""
    lines = ["| field | dtype | shape | stages | meaning |", "|---|---|---|---|---|"]
    lines += [
        f"| `{f.name}` | {f.dtype} | {f.shape} | {f.stages} | {f.meaning} |"
        for f in (*FIELD_TABLE, *MEDIA_LINES, *USER_FIELD_LINES)
    ]
    return "\n".join(lines) + "\n"
