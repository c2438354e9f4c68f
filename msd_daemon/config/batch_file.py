"""The section `batch` of a job file: how large a step is and how it is packed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from msd_daemon.config.section import Bytes, Count, Section
from msd_daemon.config.units import SchedulePoint, parse_schedule_key

ROWS_MAX = 1 << 20
ROW_TOKENS_MAX = 1 << 24
"""Longest row: 16 Mi tokens; a row of int64 labels is then 128 MiB, far beyond any context."""

SCHEDULE_KEY_PATTERN = r"^[0-9][0-9_]*(\.[0-9]+)? ?[MBT]?$"

ROWS_KEYS = ("rows", "row_tokens")
VARLEN_KEYS = ("step_tokens", "microbatch_tokens")
"""Keys that say how large a step is, by its packing; the second is the length of a row."""

NO_SCHEDULE = ""
"""Key of the one entry where `rows` or `row_tokens` is a plain number."""


def _as_ramp(value: object) -> object:
    return value if isinstance(value, dict) else {NO_SCHEDULE: value}


def ramp_start(key: str) -> SchedulePoint:
    """Return where an entry of `rows` or `row_tokens` begins.

    Raises:
        ValueError: The key is no step and no count of tokens.
    """
    return SchedulePoint(0, "steps") if key == NO_SCHEDULE else parse_schedule_key(key)


def _check_ramp_key(key: str) -> str:
    ramp_start(key)
    return key


def _check_ramp(ramp: dict[str, int]) -> dict[str, int]:
    points = [ramp_start(key) for key in ramp]
    starts = [point.start for point in points]
    if 0 not in starts:
        raise ValueError("no entry begins at 0; write `0: 768` for the first value")
    if len({point.unit for point in points if point.start}) > 1:
        raise ValueError("steps and tokens are mixed; write all entries after 0 in one of them")
    if len(set(starts)) != len(starts):
        raise ValueError("two entries begin at the same point; keep one")
    return ramp


def _ramp_schema(maximum: int, minimum: int = 1) -> dict[str, Any]:
    one = {"type": ["integer", "string"], "minimum": minimum, "maximum": maximum}
    schedule = {
        "type": "object",
        "patternProperties": {SCHEDULE_KEY_PATTERN: one},
        "additionalProperties": False,
    }
    return {"anyOf": [one, schedule]}


def _drop_default(schema: dict[str, Any]) -> None:
    """The default is that of a key that is missing, nobody may write it."""
    schema.pop("default", None)


NOT_GIVEN: Any = Field(None, validate_default=True, json_schema_extra=_drop_default)

Lengths = Annotated[
    dict[
        Annotated[str, AfterValidator(_check_ramp_key)],
        Annotated[Count, Field(ge=2, le=ROW_TOKENS_MAX)],
    ],
    BeforeValidator(_as_ramp),
    AfterValidator(_check_ramp),
    WithJsonSchema(_ramp_schema(ROW_TOKENS_MAX, 2)),
]


class BatchFile(Section):
    """Shape of a step: `rows` rows of `row_tokens` tokens, whatever the mesh.

    With `packing: varlen` a draw of `step_tokens`, in microbatches of up to `microbatch_tokens`.
    """

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": list(keys)} for keys in (ROWS_KEYS, VARLEN_KEYS)]}
    )

    packing: Literal["best_fit", "best_fit_even", "concat", "padded", "varlen"] = "best_fit"
    """`best_fit_even`: rows that are even in cost, where documents are shorter than rows."""
    rows: Annotated[
        dict[
            Annotated[str, AfterValidator(_check_ramp_key)],
            Annotated[Count, Field(le=ROWS_MAX)],
        ],
        BeforeValidator(_as_ramp),
        AfterValidator(_check_ramp),
        WithJsonSchema(_ramp_schema(ROWS_MAX)),
    ] = NOT_GIVEN
    """Rows of a global step; a number, or a schedule by step or tokens: {0: 768, 250B: 1536}."""
    row_tokens: Lengths = NOT_GIVEN
    """Tokens of a row; a number, or a schedule as `rows` takes."""
    step_tokens: Annotated[
        dict[Annotated[str, AfterValidator(_check_ramp_key)], Count],
        BeforeValidator(_as_ramp),
        AfterValidator(_check_ramp),
        WithJsonSchema(_ramp_schema(1 << 62)),
    ] = NOT_GIVEN
    """varlen: tokens of a global step, the segment that reaches them included; a number, or a
    schedule as `rows` takes."""
    microbatch_tokens: Lengths = NOT_GIVEN
    """varlen: most places of a microbatch, so the longest segment too; a number, or a schedule."""
    microbatch_rows: Annotated[Count, Field(le=ROWS_MAX)] = 1
    """Rows of a microbatch of one DP group."""
    long: Literal["split", "truncate", "skip"] = "split"
    """What becomes of a document longer than a row."""
    row_segments_max: Count | None = None
    """Most segments of a row; default by packing and row length, so that slots have a known size."""
    pad_id: Annotated[int, Field(ge=0)] = 0
    segment_multiple: Annotated[Count, Field(le=1 << 16)] = 1
    """Places that a segment takes are a multiple of it: 2 * cp for zigzag_document, 16 for FP8."""
    row_multiple: Annotated[Count, Field(le=1 << 16)] = 1
    """`row_tokens` has to be a multiple of it: 2 * cp for zigzag_row, 128 for FlexAttention."""
    boundaries: Literal["exact", "constant"] = "exact"
    """`constant`: cu_seqlens has the same shape in every microbatch, for CUDA graphs."""
    cp_layout: Literal["zigzag_row", "zigzag_document", "contiguous"] = "zigzag_row"
    """How rows are dealt to context-parallel ranks."""
    microbatch_patches: Count | None = None
    """Most patches of images and videos in a microbatch; each row has its equal part."""
    microbatch_frames: Count | None = None
    """Most frames of sounds in a microbatch; each row has its equal part."""
    microbatch_activation_bytes: Bytes | None = None
    """Most bytes that a microbatch keeps for the backward pass, of the whole model on one rank, as
    `model` tells them: varlen deals by it, rows have to keep it whatever they hold."""
    positions: Literal["plain", "mrope"] = "plain"
    """`mrope`: batches have positions of time, height and width too."""
    encode: Literal["home", "any"] | None = None
    """Which ranks encode media: those that hold their text (home), or any; default by strategy."""
    mtp: bool = False
    """Multi-token prediction: the last pipeline stage gets tokens too."""

    @field_validator(*ROWS_KEYS, *VARLEN_KEYS, mode="wrap")
    @classmethod
    def _check_size(
        cls, value: object, read: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        """Take the keys that say how large a step is, those of the packing and no others."""
        packing = info.data.get("packing")  # absent where it is none
        keys = VARLEN_KEYS if packing == "varlen" else ROWS_KEYS
        if packing is not None and info.field_name not in keys:
            if value is None:
                return {}
            raise ValueError(f"packing {packing} has no such size; write {' and '.join(keys)}")
        if value is None and packing is not None:
            raise PydanticCustomError("missing", "missing")
        return {} if value is None else read(value)

    @property
    def is_varlen(self) -> bool:
        """True where a step is a draw of tokens and not a number of rows."""
        return self.packing == "varlen"

    @property
    def length_key(self) -> str:
        """The key of `lengths`."""
        return VARLEN_KEYS[1] if self.is_varlen else ROWS_KEYS[1]

    @property
    def lengths(self) -> dict[str, int]:
        """Places of a row: a varlen microbatch is one."""
        return self.microbatch_tokens if self.is_varlen else self.row_tokens
