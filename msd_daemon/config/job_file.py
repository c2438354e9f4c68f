"""Models of `job.yaml` as a user writes it; every unknown key is refused.

What a key means and its default stand here, in the one place that `msdctl schema` prints. Checks
that need the file system, the tokenizer or two sections together are in `resolve.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from federation.model.job import OPEN_S
from msd_client.contract.media_fields import Modality
from msd_daemon.config.batch_file import NO_SCHEDULE, ROWS_MAX, SCHEDULE_KEY_PATTERN, BatchFile
from msd_daemon.config.faults import Fault, faults_of_validation
from msd_daemon.config.media_steps import AudioSteps, ImageSteps, Placeholders, VideoSteps
from msd_daemon.config.recipe_file import ChatFile, RecipeFile
from msd_daemon.config.section import Bytes, Count, Name, Section, Text, as_list
from msd_daemon.config.transform_file import NAME_TAG, OWN_TAG, Hook, Schedule, Strategy
from msd_daemon.config.units import SchedulePoint, parse_schedule_key
from msd_daemon.sources.formats import all_formats

WEIGHT_TAG, GROUP_TAG = "=weight", "=group"
"""Tell the two kinds of entries of a mixture apart; nobody wrote them."""

_MIXTURE_KEYS = ("unit", "interpolate", "every", "schedule", "hook")
"""Keys of a mixture beside its points."""

SPREAD = "*"
"""The name in a mixture that spreads its weight over the sources not named."""


def _check_schedule_key(key: str) -> str:
    parse_schedule_key(key)
    return key


def check_weight(value: object) -> object:
    """Return a weight as it is.

    Raises:
        ValueError: It is no finite number >= 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(
            f"a weight is a number, this is {type(value).__name__}; write a number >= 0"
        )
    if math.isnan(value) or math.isinf(value) or value < 0:
        raise ValueError("a weight is finite and not negative; write a number >= 0")
    return value


def _check_token_around(value: object) -> object:
    is_valid = (isinstance(value, int) and value >= 0) or (isinstance(value, str) and value != "")
    if isinstance(value, bool) or not is_valid:
        raise ValueError("neither a token nor an id; write none, end, start, '<|token|>' or an id")
    return value


def _check_format(name: str) -> str:
    formats = all_formats()
    if name not in formats:
        raise ValueError(
            f"no reader has this name; write one of {', '.join(sorted(formats))}, or install it"
        )
    return name


def _as_source(value: object) -> object:
    return {"paths": value} if isinstance(value, (str, list)) else value


def _as_shuffle(value: object) -> object:
    return {"is_shuffled": value} if isinstance(value, bool) else value


def _as_on_error(value: object) -> object:
    return {"policy": value} if isinstance(value, str) else value


def _as_backbone(value: object) -> object:
    return {"config": value} if isinstance(value, str) else value


def _as_calibration(value: object) -> object:
    if isinstance(value, bool):
        return {} if value else None
    return value


def _as_slow_sources(value: object) -> object:
    if value == "wait":
        return None
    if value == "substitute":
        return {}
    if value is not None and not isinstance(value, (dict, SlowSourcesFile)):
        raise ValueError(
            "neither wait nor substitute, nor a map such as {after_s: 5, at_most: 0.5}"
        )
    return value


def _check_ignore(value: object) -> object:
    is_label = isinstance(value, int) and not isinstance(value, bool)
    if not is_label and value != "loss_mask":
        raise ValueError("neither a label nor loss_mask; write -100, or loss_mask")
    return value


def _as_field(value: object) -> object:
    return {"from": value} if isinstance(value, str) else value


def _as_mixture(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if not value:
        raise ValueError("gives no weights; write 0: {web: 6, code: 2}, or a schedule")
    own = {key: value[key] for key in _MIXTURE_KEYS if key in value}
    points = {key: item for key, item in value.items() if key not in own}
    if points and not any(isinstance(item, dict) for item in points.values()):
        raise ValueError(
            "weights stand under the step or token count that they hold from; "
            "write 0: {web: 6, code: 2}"
        )
    return own | {"points": points}


def _check_every(value: object) -> object:
    every = parse_schedule_key(value)
    if every.start < 1:
        raise ValueError("is no width; write steps (100) or tokens (1B)")
    return every


def _weight_tag(value: object) -> str:
    return GROUP_TAG if isinstance(value, dict) else WEIGHT_TAG


TokenAround = Annotated[
    int | str, BeforeValidator(_check_token_around, json_schema_input_type=int | str)
]
Weight = Annotated[float, BeforeValidator(check_weight, json_schema_input_type=float)]


class TokenizerFile(Section):
    """Which tokenizer, and what stands around a document: one of file, dir, tiktoken, bytes.

    Where every source is tokenized already, `vocabulary` alone says how many ids there are.
    """

    file: Text | None = None
    """A Hugging Face `tokenizer.json`, a SentencePiece `.model`, a `.tiktoken` rank file, a
    `*vocab.json` with its `*merges.txt` beside it, or CLIP's `bpe_simple_vocab_16e6.txt.gz`."""
    dir: Text | None = None
    """A folder that holds one of them: `tokenizer.json`, else `tokenizer.model`, else
    `vocab.json` and `merges.txt`."""
    tiktoken: Text | None = None
    """A tiktoken rank file under any name; give `pattern` where the name does not tell it."""
    pattern: Literal["o200k_base", "cl100k_base", "p50k_base", "r50k_base", "gpt2"] | None = None
    bytes: Literal[True] | None = None
    """UTF-8 bytes as ids 0..255; `eos: end` is then 256 and `bos: start` 257."""
    vocabulary: Annotated[Count, Field(lt=1 << 31)] | None = None
    bos: TokenAround = "none"
    """`none`, `start` (the tokenizer's own), a token or an id, put before each document."""
    eos: TokenAround = "none"
    """`none`, `end` (the tokenizer's own), a token or an id, put after each document."""

    @model_validator(mode="after")
    def _check_one_kind(self) -> TokenizerFile:
        kinds = ("file", "dir", "tiktoken", "bytes", "vocabulary")
        given = [key for key in kinds if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(
                f"gives {' and '.join(given) or 'no tokenizer'}; give one of file, dir, tiktoken, bytes"
            )
        if self.pattern is not None and given[0] not in ("file", "tiktoken"):
            raise ValueError("a pattern belongs to a tiktoken file; remove pattern")
        return self


class ShuffleFile(Section):
    """The order of a source; `shuffle: false` is the order of the files."""

    is_shuffled: bool | None = None
    window_shards: Annotated[Count, Field(le=1 << 20)] | None = None
    window_records: Annotated[Count, Field(le=1 << 20)] | None = None
    window_bytes: Annotated[Bytes, Field(le=1 << 30)] | None = None
    interleave: Annotated[Count, Field(le=256)] | None = None
    block_bytes: Annotated[Bytes, Field(le=1 << 30)] | None = None
    block_records: Annotated[Count, Field(le=1 << 24)] | None = None
    stream_block_records: Annotated[Count, Field(le=1 << 24)] | None = None


class ErrorFile(Section):
    """What a bad record costs: `skip` within a budget, `quarantine` without, or `fail` at the draw."""

    policy: Literal["skip", "fail", "quarantine"] | None = None
    budget_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    window_records: Annotated[Count, Field(le=1 << 24)] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.policy == "quarantine" and self.budget_ratio is not None:
            raise ValueError("quarantine has no budget; remove budget_ratio, or write policy: skip")
        return self


class LimitsFile(Section):
    """What one sample or shard may cost."""

    sample_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 60.0
    """Seconds that a loader worker may be at one record, which is quarantined then; the user's code
    has a limit of its own."""
    open_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = OPEN_S
    """Seconds that a shard which can't be opened is tried again before all its records are lost."""


Shuffle = Annotated[
    ShuffleFile, BeforeValidator(_as_shuffle, json_schema_input_type=bool | ShuffleFile)
]
OnError = Annotated[
    ErrorFile,
    BeforeValidator(
        _as_on_error, json_schema_input_type=Literal["skip", "fail", "quarantine"] | ErrorFile
    ),
]


class DefaultsFile(RecipeFile):
    """Keys that all sources share unless they give their own."""

    text: Text | None = None
    """Field that holds the text; default `text`."""
    tokens: Text | None = None
    """Field that holds a list of token ids, taken as they are, in place of `text`."""
    key: Text | None = None
    """Field that names a record; default: its content."""
    hold_out: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = None
    """Share of the records, chosen by hash of the key, that is kept for validation."""
    loss_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What a trained label of the source weighs; others than 1 add the field `loss_weights`."""
    critical: bool | None = None
    """`true`: a second loader reads it in another process and takes over at once where one dies."""
    format: Annotated[str, AfterValidator(_check_format)] | None = None
    """Name of a reader; default: told by the file extension, or by what lies in the folder."""
    document: Literal["file", "blank_line"] | None = None
    """Plain text: one document a file (default), or one per block between blank lines."""
    record_tokens: Annotated[Count, Field(le=1 << 24)] | None = None
    """Format token_file: tokens of a record; default 2048."""
    eot_id: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Format token_file: the id that ends a document."""
    token_bytes: Literal[2, 4] | None = None
    """Format token_file: bytes of an id in files without a header; default: what the vocabulary
    needs. nanoGPT writes 2, whatever the vocabulary."""
    shuffle: Shuffle | None = None
    on_error: OnError | None = None
    at_exhaustion: Literal["repeat", "stop", "drop"] | None = None
    """At the end of an epoch: the next one (default), the end of the stream, or leave the mixture."""
    max_epochs: Annotated[Count, Field(le=(1 << 15) - 1)] | None = None
    """Most passes over a source, then `stop` or `drop`."""
    record_bytes_max: Annotated[Bytes, Field(le=(1 << 31) - 1)] | None = None
    """A larger record is a counted fault; default 64Mi."""


class SourceFile(DefaultsFile):
    """A source: a glob, a list of globs, or a map with `paths` and what differs from `defaults`."""

    paths: Annotated[
        list[Text],
        BeforeValidator(as_list, json_schema_input_type=str | list[str]),
        Field(min_length=1),
    ]
    was: Name | None = None
    """Former name, of a source that was renamed: it goes on in its order."""


Source = Annotated[
    SourceFile, BeforeValidator(_as_source, json_schema_input_type=str | list[str] | SourceFile)
]


class GroupFile(Section):
    """Sources, or further groups, that share one weight: `{weight: 3, of: {web: 2, code: 1}}`."""

    weight: Weight
    of: Annotated[dict[Name, WeightOrGroup], Field(min_length=1)]
    """Weights inside the group, relative to each other."""


WeightOrGroup = Annotated[
    Annotated[Weight, Tag(WEIGHT_TAG)] | Annotated[GroupFile, Tag(GROUP_TAG)],
    Discriminator(_weight_tag),
]


class MixtureFile(Section):
    """Weights by source from a step or token count on; `*` spreads over the sources not named."""

    unit: Literal["tokens", "samples", "trained"] = "tokens"
    """What shares are shares of; `trained`: tokens that are trained."""
    interpolate: Literal["none", "linear", "cosine"] = "none"
    """How shares go from one point to the next; in pieces, each with the share of its middle."""
    every: Annotated[
        SchedulePoint | None, BeforeValidator(_check_every, json_schema_input_type=int | str)
    ] = None
    """Length of a piece, of interpolation or of `schedule`: 100 steps, or tokens as 1B; default: a
    hundredth of the way."""
    schedule: Schedule | None = None
    """The user's own function of the step, in place of points."""
    hook: Hook | None = None
    """The user's own function of the losses that trainers report."""
    points: dict[Annotated[str, AfterValidator(_check_schedule_key)], dict[str, WeightOrGroup]]

    @model_validator(mode="after")
    def _check_kinds(self) -> Self:
        if self.schedule is not None and (self.points or self.interpolate != "none"):
            raise ValueError(
                "gives a schedule and points or interpolate; give the function alone, or points"
            )
        if self.schedule is None and not self.points:
            raise ValueError("gives no weights; write 0: {web: 6, code: 2}, or a schedule")
        if self.every is not None and self.schedule is None and self.interpolate == "none":
            raise ValueError("gives every, nothing is interpolated; write interpolate: linear")
        return self


GroupFile.model_rebuild()

_WEIGHT_SCHEMA: dict[str, Any] = {"type": "number", "minimum": 0}
_GROUP_SCHEMA = {
    "type": "object",
    "description": GroupFile.__doc__,
    "properties": {"weight": _WEIGHT_SCHEMA, "of": {"type": "object", "minProperties": 1}},
    "required": ["weight", "of"],
    "additionalProperties": False,
}
_MIXTURE_SCHEMA = {
    "type": "object",
    "description": MixtureFile.__doc__,
    "properties": {
        "unit": {"enum": ["tokens", "samples", "trained"], "default": "tokens"},
        "interpolate": {"enum": ["none", "linear", "cosine"], "default": "none"},
        "every": {"type": ["integer", "string"]},
        "schedule": {"type": ["string", "object"]},
        "hook": {"type": ["string", "object"]},
    },
    "patternProperties": {
        SCHEDULE_KEY_PATTERN: {
            "type": "object",
            "additionalProperties": {"anyOf": [_WEIGHT_SCHEMA, _GROUP_SCHEMA]},
        }
    },
    "additionalProperties": False,
}
Mixture = Annotated[MixtureFile, BeforeValidator(_as_mixture), WithJsonSchema(_MIXTURE_SCHEMA)]


class BackboneFile(Section):
    """Shape of a transformer under Hugging Face's key names, or `config`: a file that holds them."""

    config: Text | None = None
    hidden_size: Count | None = None
    num_hidden_layers: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    intermediate_size: Count | None = None
    vocab_size: Count | None = None
    sliding_window: Count | None = None
    """Tokens that every layer attends to; leave it out where all layers attend to all."""
    num_experts: Count | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    """Width of an expert; default: intermediate_size."""
    gated: bool = True
    """True for SwiGLU-like layers with three matrices, False for two."""


class ModelFile(Section):
    """The model that is trained; only its costs are used, for balance."""

    backbone: Annotated[
        BackboneFile, BeforeValidator(_as_backbone, json_schema_input_type=str | BackboneFile)
    ]
    encoder: Text | dict[Modality, Text] | None = None
    """A config.json, or one by modality; default: the encoders that the backbone's config has."""
    item_units: dict[Modality, Count] = Field({})
    """Patches (frames) of a typical item by modality; default: what resize and window allow."""
    recompute: Literal["none", "full"] = "none"
    """Whether activations are recomputed in the backward pass; only the memory estimate uses it."""


class CalibrationFile(Section):
    """Cost factors refitted from the step times that trainers report; placement only."""

    every: Annotated[Count, Field(le=1 << 20)] = 50
    """Steps between two fits."""
    window: Annotated[Count, Field(le=1 << 12)] = 200
    """Last steps that a fit looks at."""
    margin: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.05
    """A fit is taken where it leaves so much less error than the factors in force: 0.05 is 5 %."""


class SlowSourcesFile(Section):
    """Others take a part of the share of a source that can't keep up, until it can again."""

    after_s: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = 5.0
    """Seconds that ranks wait for the source before its share is halved."""
    at_most: Annotated[float, Field(gt=0, le=0.95, allow_inf_nan=False)] = 0.5
    """Most of its share that others take; beyond that ranks wait."""


class FieldFile(Section):
    """A column of the records that travels with their tokens into the batch."""

    from_field: Text | None = Field(None, alias="from")
    """Its name in the records; default: its name here."""
    per: Literal["token", "segment", "row"] = "token"
    """token: a list with a value per token; segment and row: one value a record."""
    dtype: Literal["float32", "float64", "int32", "int64"] = "float32"
    fill: float = 0.0
    """Value of padding, of added BOS and EOS, and of sources without fields."""


class LoaderFile(Section):
    """A validation stream."""

    sources: Annotated[
        list[Name] | None,
        BeforeValidator(as_list, json_schema_input_type=str | list[str]),
    ] = Field(None, alias="from")
    """Source or sources it reads."""
    part: Literal["held_out", "all"] | None = None
    """Default: held_out where the sources hold records out, else all; `all` of sources that the
    mixture trains on has to be written."""
    rows: Annotated[Count, Field(le=ROWS_MAX)] | None = None
    """Rows of a step; default: as many as the first training step."""
    step_tokens: Count | None = None
    """varlen: tokens of a step; default: as many as the first training step."""
    steps: Count | None = None
    """Most steps of a pass; default: all records once."""


UserField = Annotated[FieldFile, BeforeValidator(_as_field, json_schema_input_type=str | FieldFile)]


class DtypesFile(Section):
    """Element types of what trainers receive."""

    tokens: Literal["int32", "int64"] = "int32"
    labels: Literal["int32", "int64"] = "int64"


class JobFile(Section):
    """A job: sources, tokenizer, mixture and the shape of a step; never a mesh or a node count."""

    schema_version: Literal[1] = Field(1, alias="schema")
    """Version of this file's keys."""
    stream: Literal[1] = 1
    """Version of the stream: which sample stands where."""
    name: Name | None = None
    """Default: the file's name without `.yaml`."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    tokenizer: TokenizerFile | None = None
    """May be left out where every source is tokenized already (megatron)."""
    documents: Literal["separate", "joined"] = "separate"
    """`separate`: labels never cross documents; `joined`: as one long GPT text."""
    labels: Literal["shifted", "aligned"] = "shifted"
    """`shifted`: label i is token i + 1; `aligned`: label i is token i, the model shifts."""
    ignore: Annotated[int | Literal["loss_mask"], BeforeValidator(_check_ignore)] = -100
    """Label of positions without a loss; `loss_mask`: ids everywhere, and `loss_weights` says."""
    dtypes: DtypesFile = DtypesFile()
    batch: BatchFile
    defaults: DefaultsFile = DefaultsFile()
    sources: Annotated[dict[Name, Source], Field(min_length=1)]
    mixture: Mixture | None = None
    """Default: all sources weigh the same."""
    model: ModelFile | None = None
    calibration: Annotated[
        CalibrationFile | None,
        BeforeValidator(_as_calibration, json_schema_input_type=bool | CalibrationFile),
    ] = None
    """Default: off, and `false`; `true` takes the defaults."""
    slow_sources: Annotated[
        SlowSourcesFile | None,
        BeforeValidator(_as_slow_sources, json_schema_input_type=str | SlowSourcesFile),
    ] = None
    """`wait` (default): ranks wait for a source that can't keep up; `substitute`, or its keys: others
    take a part of its share, in journalled events."""
    strategy: Strategy = "balanced"
    """How a step's rows go to ranks: a built-in one by name, or the user's own function,
    `module:function`, `fn(graph, step) -> graph`."""
    balance_objective: Literal["step", "microbatch", "pipeline"] = "step"
    steps: Count | None = None
    """End after this many steps."""
    tokens: Count | None = None
    """End after this many tokens placed in rows."""
    epochs: Count | None = None
    """End when every source was passed this many times."""
    end: Literal["pad", "drop", "wrap"] = "pad"
    """A last step that is not full: padded, not served, or filled from the next epoch."""
    chat: ChatFile | None = None
    """Template of sources with `messages`, and which turns are trained."""
    image: ImageSteps | None = None
    """Steps of images: decode, resize, your own, patchify."""
    video: VideoSteps | None = None
    """Steps of videos: decode, sample, resize, your own, patchify."""
    audio: AudioSteps | None = None
    """Steps of sounds: decode, resample, window, your own, mel or frames."""
    placeholder: Placeholders = Placeholders()
    """Tokens that stand for media, by modality."""
    limits: LimitsFile = LimitsFile()
    fields: dict[Name, UserField] = Field({}, max_length=64)
    """Columns of the records by their name in the batch."""
    loaders: dict[Name, LoaderFile] = Field({})
    """`train`, and validation streams by name."""


@dataclass(frozen=True)
class ParsedJob:
    """A job file with the sections that could be read, and the faults of the others."""

    file: JobFile
    faults: tuple[Fault, ...]
    broken: frozenset[str]
    """Sections (`batch`), sources (`sources.web`) that are absent from `file` for a fault."""


_HIDDEN = frozenset({"points", NO_SCHEDULE, WEIGHT_TAG, GROUP_TAG, NAME_TAG, OWN_TAG})
"""Parts of places in the models that no file has."""

# Stand in for broken sections, so that the others are still checked; never resolved.
_PLACEHOLDER_BATCH = {"rows": 1, "row_tokens": 2}
_PLACEHOLDER_SOURCES = {"placeholder": "placeholder"}


def parse_job_file(data: dict[str, Any]) -> ParsedJob:
    """Return the model of a job; faulty sections are left out and reported together.

    Args:
        data: Plain maps as `yaml_text.read_yaml` gives them.
    """
    try:
        return ParsedJob(JobFile.model_validate(data), (), frozenset())
    except ValidationError as error:
        found = faults_of_validation(error, JobFile, hidden=_HIDDEN)
    broken = frozenset(_section_of(place) for place, _ in found)
    kept = {key: value for key, value in data.items() if key not in broken}
    if "sources" in kept:
        kept["sources"] = {
            name: source
            for name, source in data["sources"].items()
            if f"sources.{name}" not in broken
        } or _PLACEHOLDER_SOURCES
    kept.setdefault("sources", _PLACEHOLDER_SOURCES)
    kept.setdefault("batch", _PLACEHOLDER_BATCH)
    return ParsedJob(JobFile.model_validate(kept), tuple(fault for _, fault in found), broken)


def _section_of(place: tuple[str | int, ...]) -> str:
    if not place:
        return "(file)"
    if place[0] == "sources" and len(place) > 1:
        return f"sources.{place[1]}"
    return str(place[0])


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file."""
    schema = JobFile.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "msd job"} | schema
