"""The resolved job: every default written out, manifests frozen, no mesh, node or worker count.

`msd_daemon.config` makes it from what a user wrote; planner, loaders and constructors read it.
It travels as plain msgpack maps; its digest stands in every state (DESIGN.md P2, E2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgpack

from federation.model.cost import CalibrationRule, CostSpec
from federation.model.media import MediaRule
from federation.model.recipe import SampleRecipe, TokenFileRule, UserCall
from msd_client.contract.plain import decode_plain, encode_plain

STREAM_VERSION = 1

_SAMPLE_KEYS = ("seed", "tokenizer", "mixture", "epochs")
_SAMPLE_BATCH_KEYS = ("packing", "long", "segment_multiple")
_FREE_SOURCE_KEYS = ("on_error", "loss_weight")
_LATER_KEYS = (
    "media", "decoders", "limits", "calibration", "strategy_call", "mixture_hook", "slow_sources",
)  # fmt: skip
_LATER_COST_KEYS = ("windowed", "encoders")
_LATER_LIMIT_KEYS = ("open_s",)
_LATER_BATCH_KEYS = (
    "positions",
    "step_tokens",
    "step_tokens_ramp",
    "encode",
    "microbatch_activation_bytes",
)
_LATER_SOURCE_KEYS = ("recipe", "token_file", "group", "was", "growth")
_LATER_MIXTURE_KEYS = ("groups",)
"""Keys that came after the first release: where they say nothing, digests are what they were."""

OPEN_S = 30.0
"""Longer than a network file system is away in passing, shorter than trainers wait for a batch."""

Unit = Literal["tokens", "samples", "trained"]
"""What shares are shares of; `trained`: tokens that are trained."""
ScheduleUnit = Literal["steps", "tokens"]
Packing = Literal["best_fit", "best_fit_even", "concat", "padded", "varlen"]
LongPolicy = Literal["split", "truncate", "skip"]
Exhaustion = Literal["repeat", "stop", "drop"]
Tail = Literal["pad", "drop", "wrap"]
Part = Literal["train", "held_out", "all"]


@dataclass(frozen=True)
class Shard:
    """One file of a source as the frozen manifest has it."""

    path: str
    size_bytes: int
    fingerprint: str
    """sha256 (hex, 32 digits) over size and the first and last 64 KiB; not mtime, not path. Of an
    object in a store over its size, ETag and name, which a listing tells."""


@dataclass(frozen=True)
class GrowthPoint:
    """From a pass on, a source has so many of its shards: the first ones, later ones came behind."""

    epoch: int
    shards: int


def manifest_digest(shards: Iterable[Shard]) -> str:
    """Return the digest of shards in order; where they lie does not count."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{shard.size_bytes} {shard.fingerprint}\n".encode())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class ErrorPolicy:
    """What a bad record costs.

    `skip`: nothing, within a budget over a sliding window; `fail`: the stream; `quarantine`: nothing,
    every one is listed.
    """

    policy: Literal["skip", "fail", "quarantine"] = "skip"
    budget_ratio: float = 0.001
    window_records: int = 10_000


@dataclass(frozen=True)
class SampleLimits:
    """What one sample or shard may cost; what is over a limit is no sample: they are the stream's."""

    sample_s: float = 60.0
    """Seconds that a loader worker may be at one record, the user's own code left out."""
    open_s: float = OPEN_S
    """Seconds that a shard which cannot be opened is tried again before it is lost."""


@dataclass(frozen=True)
class ShuffleRule:
    """The order of a source; see DESIGN.md section 4."""

    is_shuffled: bool = True
    window_shards: int = 16
    window_records: int = 256
    window_bytes: int = 512 * 1024
    interleave: int = 4
    block_bytes: int = 1 << 20
    """Byte range of a block of a seekable byte-addressed format (JSONL, text)."""
    block_records: int = 4096
    """Most records of a block of a seekable record-addressed format (`.bin/.idx`)."""
    stream_block_records: int = 256


@dataclass(frozen=True)
class GroupRule:
    """Samples of a source that stay together: drawn as one, packed into one row, never cut.

    `field`: those of neighbouring records of a shard that have one value of that field; `record`:
    those that a transform makes of one record.
    """

    by: Literal["field", "record"]
    field: str = ""


@dataclass(frozen=True)
class SourceSpec:
    """One source, resolved."""

    name: str
    format: str
    """Name of a reader (msd_daemon.sources.formats)."""
    compression: Literal["none", "gz", "zst", "xz"]
    order_class: Literal["seekable", "streaming"]
    shards: tuple[Shard, ...]
    manifest_digest: str
    text_field: str = "text"
    text_document: Literal["file", "blank_line"] = "file"
    tokens_field: str = ""
    """JSONL, parquet: field that holds a list of ids, taken instead of `text_field`."""
    key_field: str = ""
    """JSONL, parquet: field that names a record (string or integer); empty = its raw content."""
    is_tokenized: bool = False
    """True for `.bin/.idx` and `tokens_field`: ids as they lie, no tokenizer, no BOS/EOS."""
    token_bytes: int = 4
    """Bytes of an id in chunks, 2 or 4: the width of the `.bin`, or what the vocabulary needs."""
    record_bytes_max: int = 64 << 20
    shuffle: ShuffleRule = ShuffleRule()
    on_error: ErrorPolicy = ErrorPolicy()
    at_exhaustion: Exhaustion = "repeat"
    max_epochs: int | None = None
    hold_out: float = 0.0
    """Share of the records, by hash of their key, that training never sees. 0 to 1."""
    part: Part = "train"
    """Which records are samples: those not held out, those held out, or all."""
    loss_weight: float = 1.0
    """What a trained label of this source weighs in the loss."""
    recipe: SampleRecipe | None = None
    """None: a record is a text or a list of ids, nothing else is asked of it."""
    token_file: TokenFileRule | None = None
    """Of format token_file."""
    group: GroupRule | None = None
    """None: every sample stands for itself."""
    was: str = ""
    """Name under which the stream began: its order is drawn by that one. Empty = `name`."""

    growth: tuple[GrowthPoint, ...] = ()
    """By ascending epoch from 0, the last one names all shards; empty = all from the first pass on.
    Shards that were appended while a stream ran take part from its next pass on."""
    is_critical: bool = False
    """True where a second loader reads it, ready to take over. No part of any digest: nothing that is
    delivered depends on it."""

    def shards_in(self, epoch: int) -> int:
        """Return how many shards, the first ones, a pass has."""
        count = len(self.shards)
        for point in self.growth:
            if point.epoch <= epoch:
                count = point.shards
        return count

    @property
    def lane_count(self) -> int:
        """Lanes of a streaming source that take turns; of all passes those of the first."""
        interleave = self.shuffle.interleave if self.shuffle.is_shuffled else 1
        return max(1, min(interleave, self.shards_in(0)))

    @property
    def order_name(self) -> str:
        """Name that the order and all randomness of the source are drawn by."""
        return self.was or self.name

    @property
    def group_field(self) -> str:
        """Field whose value neighbouring records of a group share; empty where there is none."""
        return self.group.field if self.group is not None else ""

    @property
    def has_masks(self) -> bool:
        """True where some tokens of its samples are not trained."""
        return self.recipe is not None and self.recipe.has_masks

    @property
    def has_media(self) -> bool:
        """True where its samples hold images, sounds or videos."""
        return self.recipe is not None and self.recipe.has_media

    @property
    def ending(self) -> str:
        """What a state says where the end of this source stopped the stream."""
        return f"source {self.name} is exhausted"


@dataclass(frozen=True)
class TokenizerSpec:
    """How text becomes ids: which file, and which ids are put around a document."""

    kind: Literal["huggingface", "tiktoken", "bytes", "none", "sentencepiece", "bpe_files", "clip"]
    """bpe_files: a GPT-2 pair, `*vocab.json` and `*merges.txt` beside it."""
    path: str = ""
    fingerprint: str = ""
    pattern: str = ""
    """tiktoken only: name of the split pattern (o200k_base, cl100k_base, r50k_base)."""
    vocabulary_count: int = 256
    bos_id: int | None = None
    eos_id: int | None = None
    library: str = ""
    """Library name and version that encodes, e.g. `tiktoken 0.14.0`."""


@dataclass(frozen=True)
class RampPoint:
    """A value that holds from a step, or a count of tokens placed in rows, on."""

    start: int
    value: int
    start_unit: ScheduleUnit = "steps"


@dataclass(frozen=True)
class BatchRule:
    """Shape and packing of a step: `rows` rows of `row_tokens` tokens, whatever the mesh.

    With packing varlen a step is the draw until `step_tokens` are reached, and has no rows before it
    is placed: a row is then a microbatch of at most `row_tokens` places, as many as a mesh needs.
    """

    rows: int
    """Rows of the first step; varlen: `varlen_rows`, which sizes are reckoned by."""
    row_tokens: int
    """Tokens of a row of the first step; varlen: places of a microbatch."""
    microbatch_rows: int = 1
    packing: Packing = "best_fit"
    long: LongPolicy = "split"
    labels: Literal["shifted", "aligned"] = "shifted"
    ignore: Literal["label", "loss_mask"] = "label"
    """`loss_mask`: labels are ids everywhere, `loss_weights` is 0 where nothing is trained."""
    ignore_label: int = -100
    documents: Literal["separate", "joined"] = "separate"
    pad_id: int = 0
    row_multiple: int = 1
    """`row_tokens` is a multiple of it at every step."""
    segment_multiple: int = 1
    """A segment takes a multiple of so many places of its row; it divides every `row_tokens`."""
    boundaries: Literal["exact", "constant"] = "exact"
    """`constant`: cu_seqlens has one shape in every microbatch, for CUDA graphs."""
    cp_layout: Literal["zigzag_row", "zigzag_document", "contiguous"] = "zigzag_row"
    """How a row is dealt to context-parallel ranks; see msd_client.contract.context_parallel."""
    is_mtp: bool = False
    """Multi-token prediction: the last pipeline stage gets tokens too."""
    row_segments_max: int = 64
    """Most segments of a row; packing obeys it, so that slots have a known size."""
    token_dtype: Literal["int32", "int64"] = "int32"  # noqa: S105 - a dtype
    label_dtype: Literal["int32", "int64"] = "int64"
    positions: Literal["plain", "mrope"] = "plain"
    """`mrope`: batches have `mrope_position_ids` too, of time, height and width."""
    encode: Literal["home", "any"] = "home"
    """Which group encodes media: the one that holds their text, or any, as the plan says."""
    microbatch_activation_bytes: int = 0
    """Most bytes that a microbatch keeps for the backward pass, of the whole model on one rank; 0: no
    limit. Varlen deals by it; rows keep it or the job is refused."""
    rows_ramp: tuple[RampPoint, ...] = ()
    """Later values of `rows`, by ascending start, all in one unit."""
    row_tokens_ramp: tuple[RampPoint, ...] = ()
    step_tokens: int = 0
    """varlen: tokens of the first step; 0 in all other packings."""
    step_tokens_ramp: tuple[RampPoint, ...] = ()

    def at(self, step: int, placed_tokens: int) -> BatchRule:
        """Return the rule of one step: its `rows`, `row_tokens` and `step_tokens`, no ramp.

        Args:
            step: The step's number.
            placed_tokens: Tokens that the steps before it placed in rows.
        """
        if not self.rows_ramp and not self.row_tokens_ramp and not self.step_tokens_ramp:
            return self
        row_tokens = _ramp_value(self.row_tokens, self.row_tokens_ramp, step, placed_tokens)
        step_tokens = _ramp_value(self.step_tokens, self.step_tokens_ramp, step, placed_tokens)
        return replace(
            self,
            rows=varlen_rows(step_tokens, row_tokens)
            if self.is_varlen
            else _ramp_value(self.rows, self.rows_ramp, step, placed_tokens),
            row_tokens=row_tokens,
            step_tokens=step_tokens,
            rows_ramp=(),
            row_tokens_ramp=(),
            step_tokens_ramp=(),
        )

    @property
    def is_varlen(self) -> bool:
        """True where a step is a draw of tokens and not a number of rows."""
        return self.packing == "varlen"

    @property
    def length_key(self) -> str:
        """What users call the places of a row."""
        return "microbatch_tokens" if self.is_varlen else "row_tokens"

    @property
    def rows_values(self) -> tuple[int, ...]:
        """Every value that `rows` takes."""
        if self.is_varlen:
            tokens = (self.step_tokens, *(point.value for point in self.step_tokens_ramp))
            return tuple(varlen_rows(n, size) for n in tokens for size in self.row_tokens_values)
        return (self.rows, *(point.value for point in self.rows_ramp))

    @property
    def row_tokens_values(self) -> tuple[int, ...]:
        """Every value that `row_tokens` takes."""
        return (self.row_tokens, *(point.value for point in self.row_tokens_ramp))

    @property
    def step_tokens_max(self) -> int:
        """Most tokens that any step holds."""
        longest = max(self.row_tokens_values)
        if self.is_varlen:
            tokens = (self.step_tokens, *(point.value for point in self.step_tokens_ramp))
            return max(tokens) + longest
        return max(self.rows_values) * longest


def varlen_rows(step_tokens: int, row_tokens: int) -> int:
    """Return how many rows hold the tokens of any varlen step, were they cut anywhere.

    The fragment that reaches `step_tokens` belongs to the step, and is no longer than a row.
    """
    return -(-step_tokens // row_tokens) + 1


@dataclass(frozen=True)
class FieldRule:
    """A column of the records that travels with their tokens into the batch (E10)."""

    name: str
    """Its name in the batch."""
    from_field: str
    """Its name in the records of JSONL and parquet sources."""
    per: Literal["token", "segment", "row"]
    """token: a list with one value per token of the record; segment: one value, for each segment of
    the record; row: one value, that of the row's first segment."""
    dtype: Literal["float32", "float64", "int32", "int64"] = "float32"
    fill: float = 0.0
    """Value of padding, of added BOS/EOS tokens and of sources that have no fields."""


@dataclass(frozen=True)
class LoaderRule:
    """A validation stream beside the training one (E13)."""

    name: str
    sources: tuple[str, ...]
    part: Part = "all"
    rows: int = 0
    """Rows of a step; 0 = as many as the first training step has."""
    steps: int | None = None
    step_tokens: int = 0
    """varlen: tokens of a step; 0 = as many as the first training step has."""


@dataclass(frozen=True)
class MixturePoint:
    """Weights from a step (or a token count) on; normalised at use, 0 is never drawn."""

    start: int
    weights: dict[str, float]
    start_unit: ScheduleUnit = "steps"


@dataclass(frozen=True)
class MixtureSchedule:
    """Piecewise-constant weights; the unit says what a share is a share of."""

    unit: Unit
    points: tuple[MixturePoint, ...]
    groups: dict[str, str] = field(default_factory=dict)
    """Group of each source that is in one, `text` or `text/web`: groups nest. A group weighs what
    its sources weigh together; where one of them is dropped, its weight goes to the others of it."""


@dataclass(frozen=True)
class SlowSourcesRule:
    """Others take a part of the share of a source that can't keep up, as journalled events."""

    after_s: float = 5.0
    """Seconds that ranks wait for the source before."""
    at_most: float = 0.5
    """Most of its share that others take."""


@dataclass(frozen=True)
class LossHookRule:
    """The user's function that sets weights by the losses that trainers report."""

    call: UserCall
    """`fn(step, losses, weights, **options) -> weights | None`"""
    every_steps: int = 100


@dataclass(frozen=True)
class ResolvedJob:
    """All that the content of the stream is a function of (with the journalled events)."""

    name: str
    seed: int
    sources: tuple[SourceSpec, ...]
    tokenizer: TokenizerSpec
    batch: BatchRule
    mixture: MixtureSchedule
    cost: CostSpec = field(default_factory=CostSpec)
    mixture_hook: LossHookRule | None = None
    slow_sources: SlowSourcesRule | None = None
    """None: ranks wait for a source that can't keep up."""
    strategy: str = "balanced"
    strategy_call: UserCall | None = None
    """The user's own function that `strategy` names, `module:function`; None for a built-in one."""
    balance_objective: Literal["step", "microbatch", "pipeline"] = "step"
    steps: int | None = None
    tokens: int | None = None
    epochs: int | None = None
    end: Tail = "pad"
    """What becomes of a last step that is not full: empty rows, not served, or filled from the
    next epoch."""
    fields: tuple[FieldRule, ...] = ()
    media: tuple[MediaRule, ...] = ()
    """One rule for each modality that sources have, in the order of MODALITIES."""
    limits: SampleLimits = SampleLimits()
    calibration: CalibrationRule | None = None
    """None: the factors of `cost` hold for ever."""
    decoders: str = ""
    """Libraries and versions that decode media: pixels are exact per build of them (E3)."""
    loaders: tuple[LoaderRule, ...] = ()
    """Validation streams; no part of the digest, as the training stream is no function of them."""
    schema_version: int = 1
    stream_version: int = STREAM_VERSION
    notes: tuple[str, ...] = field(default=())
    """Human lines about what resolution decided; not part of the digest."""

    def source_index(self, name: str) -> int:
        """Return the index of a source by name.

        Raises:
            KeyError: No source has that name.
        """
        for index, source in enumerate(self.sources):
            if source.name == name:
                return index
        raise KeyError(name)

    @property
    def has_groups(self) -> bool:
        """True where samples of some source stay together."""
        return any(source.group is not None for source in self.sources)

    @property
    def has_loss_weights(self) -> bool:
        """True where batches have the field `loss_weights`."""
        return self.batch.ignore == "loss_mask" or any(s.loss_weight != 1 for s in self.sources)

    @property
    def has_masks(self) -> bool:
        """True where some tokens are not trained: of chats, and the placeholders of media."""
        return bool(self.media) or any(source.has_masks for source in self.sources)

    def digest(self) -> str:
        """Return 32 hex digits over all that the stream is a function of: not name, paths, notes.

        A moved file with equal content gives an equal digest, and so does a renamed job.
        """
        return _digest(self._stream_map())

    def sample_digest(self) -> str:
        """Return `part:digest,...` over all that the sequence of samples is a function of.

        A state goes on with any job of the same parts: its steps may have another shape, its end,
        its labels, its fields and its error policies may change, nothing is lost or repeated (E1).
        The parts stand apart, so that a refusal can name those that differ.
        """
        plain = self._stream_map()
        plain["tokenizer"].pop("library")  # another version is shown, not refused (E3)
        parts: dict[str, Any] = {key: plain[key] for key in _SAMPLE_KEYS}
        parts["batch"] = {key: plain["batch"][key] for key in _SAMPLE_BATCH_KEYS}
        if "media" in plain:
            media = [
                {k: v for k, v in rule.items() if k != "row_units_max"} for rule in plain["media"]
            ]
            parts["media"] = {"rules": media}
        digests = {key: _part_digest(part) for key, part in parts.items()}
        for source in plain["sources"]:
            digests[f"sources.{source['name']}"] = _source_part(source)
        return ",".join(f"{key}:{digest}" for key, digest in sorted(digests.items()))

    def _stream_map(self) -> dict[str, Any]:
        plain = encode_job(self)
        for key in ("notes", "name", "loaders"):
            plain.pop(key)
        for source in plain["sources"]:
            _take_stream_part(source)
        plain["tokenizer"].pop("path")
        _drop_unsaid(
            plain, _LATER_KEYS, ([], "", encode_plain(SampleLimits()), None, None, None, None)
        )
        if "limits" in plain:
            _drop_unsaid(plain["limits"], _LATER_LIMIT_KEYS, (OPEN_S,))
        del plain["cost"]["activations"]  # an estimate of memory: no sample depends on it
        _drop_unsaid(plain["cost"], _LATER_COST_KEYS, ([], []))
        _drop_unsaid(plain["batch"], _LATER_BATCH_KEYS, ("plain", 0, [], "home", 0))
        _drop_unsaid(plain["mixture"], _LATER_MIXTURE_KEYS, ({},))
        for rule in plain.get("media", ()):
            _drop_places({"step": rule["step"]})
        hook = plain.get("mixture_hook") or {}
        for call in (plain.get("strategy_call"), hook.get("call")):
            _drop_places({"step": call})
        return plain


def source_digest(source: SourceSpec) -> str:
    """Return the part of a source in the sample digests of all jobs that have it."""
    plain: dict[str, Any] = encode_plain(source)
    _take_stream_part(plain)
    return _source_part(plain)


def _take_stream_part(source: dict[str, Any]) -> None:
    """Leave of a source's plain form what the stream is a function of."""
    source.pop("is_critical")
    for shard in source["shards"]:
        shard.pop("path")
    _drop_unsaid(source, _LATER_SOURCE_KEYS, (None, None, None, "", []))
    _drop_places(source.get("recipe"))


def _source_part(source: dict[str, Any]) -> str:
    return _part_digest({k: v for k, v in source.items() if k not in _FREE_SOURCE_KEYS})


def _part_digest(part: dict[str, Any]) -> str:
    return _digest(part)[:12]


def _drop_places(recipe: dict[str, Any] | None) -> None:
    """Take out where copies and interpreters lie: their content has digests of its own."""
    if recipe is None:
        return
    for key in ("transform", "step"):
        if recipe.get(key):
            del recipe[key]["folder"], recipe[key]["python"]
    if recipe.get("exclude"):
        del recipe["exclude"]["path"]
    recipe.pop("media_root", None)


def _drop_unsaid(plain: dict[str, Any], keys: tuple[str, ...], defaults: tuple[Any, ...]) -> None:
    for key, default in zip(keys, defaults, strict=True):
        if plain[key] == default:
            del plain[key]


def encode_job(job: ResolvedJob) -> dict[str, Any]:
    """Return the job as plain maps, lists and scalars."""
    plain: dict[str, Any] = encode_plain(job)
    return plain


def decode_job(plain: object) -> ResolvedJob:
    """Return the job from its plain form, refusing unknown keys and wrong types.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type.
    """
    return decode_plain(ResolvedJob, plain, "job")


def _digest(plain: dict[str, Any]) -> str:
    packed = msgpack.packb(_sorted(plain), use_bin_type=True)
    return hashlib.sha256(packed).hexdigest()[:32]


def _ramp_value(first: int, ramp: tuple[RampPoint, ...], step: int, placed_tokens: int) -> int:
    value = first
    for point in ramp:
        if point.start <= (step if point.start_unit == "steps" else placed_tokens):
            value = point.value
    return value


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        return [[key, _sorted(value[key])] for key in sorted(value)]
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value
