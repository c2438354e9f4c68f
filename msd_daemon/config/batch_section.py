"""Resolves `batch`: the shape of a step, its multiples, its schedules, the ids of padding."""

from __future__ import annotations

from federation.model.job import BatchRule, RampPoint, TokenizerSpec, varlen_rows
from msd_daemon.config.batch_file import NO_SCHEDULE, ROWS_KEYS, VARLEN_KEYS, BatchFile, ramp_start
from msd_daemon.config.faults import Fault
from msd_daemon.config.job_file import JobFile
from msd_daemon.config.tokenizer_section import VOCABULARY_UNKNOWN

STEP_TOKENS_MAX = 1 << 36
SEGMENTS_MIN_BEST_FIT = 64
SEGMENT_TOKENS_BEST_FIT = 8
"""A row of best_fit holds at most one segment for 8 of its tokens: bounds the boundary fields."""


def resolve_batch(
    file: JobFile, tokenizer: TokenizerSpec | None, faults: list[Fault]
) -> BatchRule | None:
    """Return the rule of a job's batches, None where a fault of it was found.

    Args:
        file: The job.
        tokenizer: Its tokenizer, None where it could not be resolved.
        faults: Receives what is wrong.
    """
    batch = file.batch
    count = len(faults)
    row_tokens, row_tokens_ramp = _ramp(batch.lengths)
    step_tokens, step_tokens_ramp = _ramp(batch.step_tokens) if batch.is_varlen else (0, ())
    rows, rows_ramp = _ramp(batch.rows or {NO_SCHEDULE: varlen_rows(step_tokens, row_tokens)})
    if batch.is_varlen:
        _check_varlen(file, faults)
    else:
        _check_microbatch(batch, faults)
    size_key = VARLEN_KEYS[0] if batch.is_varlen else ROWS_KEYS[0]
    most = batch_bounds(batch)[0]
    if most > STEP_TOKENS_MAX:
        faults.append(
            Fault(
                f"batch.{size_key}",
                max(getattr(batch, size_key).values()),
                f"a step of {most} tokens is over {STEP_TOKENS_MAX}",
                f"lower batch.{size_key} or batch.{batch.length_key}",
            )
        )
    segments_max = _segments_max(batch, faults)
    _check_multiples(batch, faults)
    _check_ids(file, tokenizer, faults)
    is_masked = file.ignore == "loss_mask"
    rule = BatchRule(
        rows=rows,
        row_tokens=row_tokens,
        rows_ramp=rows_ramp,
        row_tokens_ramp=row_tokens_ramp,
        step_tokens=step_tokens,
        step_tokens_ramp=step_tokens_ramp,
        microbatch_rows=batch.microbatch_rows,
        packing=batch.packing,
        long=batch.long,
        labels=file.labels,
        ignore="loss_mask" if is_masked else "label",
        ignore_label=batch.pad_id if isinstance(file.ignore, str) else file.ignore,
        documents=file.documents,
        pad_id=batch.pad_id,
        row_multiple=batch.row_multiple,
        segment_multiple=batch.segment_multiple,
        boundaries=batch.boundaries,
        cp_layout=batch.cp_layout,
        is_mtp=batch.mtp,
        positions=batch.positions,
        row_segments_max=segments_max,
        token_dtype=file.dtypes.tokens,
        label_dtype=file.dtypes.labels,
        microbatch_activation_bytes=batch.microbatch_activation_bytes or 0,
    )
    return rule if len(faults) == count else None


def batch_bounds(batch: BatchFile) -> tuple[int, int]:
    """Return the most tokens of a step, and of a segment."""
    longest = max(batch.lengths.values())
    if batch.is_varlen:
        return max(batch.step_tokens.values()) + longest, longest
    return max(batch.rows.values()) * longest, longest


def _check_microbatch(batch: BatchFile, faults: list[Fault]) -> None:
    faults += [
        Fault(
            "batch.microbatch_rows",
            batch.microbatch_rows,
            f"does not divide batch.rows {value}",
            f"write one of {_divisors(value, batch.microbatch_rows)}",
        )
        for value in batch.rows.values()
        if value % batch.microbatch_rows
    ]


def _check_varlen(file: JobFile, faults: list[Fault]) -> None:
    """Refuse what asks for rows: a varlen step has none before the mesh is known."""
    if file.batch.microbatch_rows != 1:
        faults.append(
            Fault(
                "batch.microbatch_rows",
                file.batch.microbatch_rows,
                "a microbatch of packing varlen is one row",
                "leave it out, microbatch_tokens says how large a microbatch is",
            )
        )
    if file.documents == "joined":
        faults.append(
            Fault(
                "documents",
                "joined",
                "packing varlen deals documents one by one, so none follows another",
                "write separate, or use packing concat",
            )
        )
    faults += [
        Fault(
            f"fields.{name}.per",
            field.per,
            "rows of packing varlen are microbatches, and differ from mesh to mesh",
            "write segment",
        )
        for name, field in file.fields.items()
        if field.per == "row"
    ]


def _ramp(values: dict[str, int]) -> tuple[int, tuple[RampPoint, ...]]:
    """Return the first value of a schedule and the later ones by ascending start."""
    points = sorted((ramp_start(key), value) for key, value in values.items())
    later = tuple(RampPoint(place.start, value, place.unit) for place, value in points[1:])
    return points[0][1], later


def _check_multiples(batch: BatchFile, faults: list[Fault]) -> None:
    faults += [
        Fault(
            f"batch.{key}",
            multiple,
            f"does not divide batch.{batch.length_key} {row_tokens}",
            f"make {batch.length_key} a multiple of it",
        )
        for key, multiple in (
            ("row_multiple", batch.row_multiple),
            ("segment_multiple", batch.segment_multiple),
        )
        for row_tokens in batch.lengths.values()
        if row_tokens % multiple
    ]
    if batch.packing == "concat" and batch.segment_multiple > 1:
        faults.append(
            Fault(
                "batch.segment_multiple",
                batch.segment_multiple,
                "packing concat leaves no place empty",
                "use packing best_fit, or leave it out",
            )
        )


def _segments_max(batch: BatchFile, faults: list[Fault]) -> int:
    row_tokens = max(batch.lengths.values())
    if batch.row_segments_max is None:
        if batch.packing == "concat":
            return row_tokens  # a plain concatenation may not leave a document out
        smallest = max(SEGMENTS_MIN_BEST_FIT, row_tokens // SEGMENT_TOKENS_BEST_FIT)
        return min(row_tokens, smallest)
    if batch.row_segments_max > row_tokens:
        faults.append(
            Fault(
                "batch.row_segments_max",
                batch.row_segments_max,
                f"a row of {row_tokens} tokens holds no more segments than tokens",
                "lower it or leave it out",
            )
        )
    elif batch.packing == "concat" and batch.row_segments_max < row_tokens:
        faults.append(
            Fault(
                "batch.row_segments_max",
                batch.row_segments_max,
                "packing concat can't keep a limit, it takes documents as they come",
                "leave it out, or use packing best_fit",
            )
        )
    return batch.row_segments_max


def _check_ids(file: JobFile, tokenizer: TokenizerSpec | None, faults: list[Fault]) -> None:
    largest = {"int32": (1 << 31) - 1, "int64": (1 << 63) - 1}
    ignore = file.ignore if isinstance(file.ignore, int) else -1
    if not -largest[file.dtypes.labels] - 1 <= ignore <= largest[file.dtypes.labels]:
        faults.append(
            Fault(
                "ignore",
                file.ignore,
                f"does not fit labels of {file.dtypes.labels}",
                "write -100 or another small negative number",
            )
        )
    if tokenizer is None or tokenizer.vocabulary_count == VOCABULARY_UNKNOWN:
        return
    count = tokenizer.vocabulary_count
    for dtype, what in ((file.dtypes.tokens, "tokens"), (file.dtypes.labels, "labels")):
        if count - 1 > min(largest[dtype], largest["int32"]):
            faults.append(
                Fault(
                    f"dtypes.{what}",
                    dtype,
                    f"ids of the tokenizer go up to {count - 1}, {dtype} up to {largest[dtype]} "
                    f"and the pool's int32 up to {largest['int32']}",
                    "use a tokenizer whose ids fit",
                )
            )
    if 0 <= ignore < count:
        faults.append(
            Fault(
                "ignore",
                file.ignore,
                f"is an id of the vocabulary (0..{count - 1}), that token would never be trained",
                "write -100 or another negative number",
            )
        )
    if file.batch.pad_id >= count:
        faults.append(
            Fault(
                "batch.pad_id",
                file.batch.pad_id,
                f"is outside the vocabulary (0..{count - 1})",
                "write an id that the model's embedding has",
            )
        )


def _divisors(number: int, near: int) -> str:
    """Return the divisors of a number around a value, for a remedy."""
    found = [d for d in range(1, min(number, 4096) + 1) if number % d == 0]
    below = [d for d in found if d < near][-2:]
    above = [d for d in found if d > near][:2]
    return ", ".join(str(d) for d in below + above)
