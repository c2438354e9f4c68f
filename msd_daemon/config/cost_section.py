"""Resolves `model:` into the integer costs of the job: reads config files, gathers faults.

The formulas are federation's (planning.model_config, planning.model_flops); costs steer placement
only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from federation.model.cost import ActivationBytes, CostSpec, EncoderCost
from federation.model.media import MediaRule, PatchRule, ResizeRule
from federation.planning.config_numbers import ShapeError
from federation.planning.costs import bounded_cost, reduced_cost
from federation.planning.model_config import (
    EncoderKind,
    audio_item_units,
    audio_shape,
    decoder_shape,
    encoder_sections,
    family_note,
    spellings_of,
    text_section,
    vision_shape,
)
from federation.planning.model_flops import (
    DecoderShape,
    EncoderShape,
    decoder_activations,
    decoder_cost,
    encoder_activations,
    encoder_cost,
)
from msd_client.contract.media_fields import Modality
from msd_daemon.config.faults import MISSING, Fault
from msd_daemon.config.job_file import ModelFile

CONFIG_BYTES_MAX = 1 << 20
STEP_COST_MAX = 1 << 60
HEAD_CHANNELS = 64
"""Of a backbone that is written out without heads."""

_KIND_OF: dict[Modality, EncoderKind] = {"image": "vision", "video": "vision", "audio": "audio"}


@dataclass(frozen=True)
class StepBounds:
    """The largest step of a job: what bounds the sum of its costs."""

    rows: int
    row_tokens: int


def resolve_cost(
    model: ModelFile | None,
    base_dir: Path,
    bounds: StepBounds,
    media: tuple[MediaRule, ...],
    faults: list[Fault],
    notes: list[str] | None = None,
) -> CostSpec:
    """Return the cost of segments and media; without a model every token costs the same.

    Args:
        model: The section of the job.
        base_dir: Folder that a relative `config` path starts from.
        bounds: The largest step.
        media: Modalities of the job; encoders of others are left out.
        faults: Receives what is wrong; the result is then of no use.
        notes: Receives what was decided.
    """
    if model is None:
        return CostSpec()
    found = _ModelReader(model, base_dir, faults)
    backbone = found.backbone()
    if notes is not None:
        notes += found.notes
    encoders = {rule.modality: found.encoder(rule, backbone) for rule in media}
    if backbone is None:
        return CostSpec()
    is_recomputed = model.recompute == "full"
    cost = replace(
        decoder_cost(backbone),
        encoders=tuple(it.cost for it in encoders.values() if it is not None),
        activations=ActivationBytes(
            decoder_activations(backbone, is_recomputed=is_recomputed),
            **{
                modality: encoder_activations(it.shape, is_recomputed=is_recomputed)
                for modality, it in encoders.items()
                if it is not None
            },
        ),
    )
    row_units: dict[str, int] = {rule.modality: rule.row_units_max for rule in media}
    return bounded_cost(
        reduced_cost(cost), bounds.rows, bounds.row_tokens, row_units, STEP_COST_MAX
    )


@dataclass(frozen=True)
class _Encoder:
    shape: EncoderShape
    cost: EncoderCost


class _ModelReader:
    """Reads the files that a `model` section names; each once."""

    def __init__(self, model: ModelFile, base_dir: Path, faults: list[Fault]) -> None:
        self._model = model
        self._base_dir = base_dir
        self._faults = faults
        self.notes: list[str] = []
        self._configs: dict[str, Mapping[str, Any] | None] = {}

    def backbone(self) -> DecoderShape | None:
        """Return the language model's shape; keys that are written out win over the file's."""
        backbone, path = self._model.backbone, "model.backbone"
        written: dict[str, Any] = backbone.model_dump(
            exclude={"config", "gated"}, exclude_none=True
        )
        is_gated = backbone.gated if "gated" in backbone.model_fields_set else None
        config: Mapping[str, Any] = {}
        if backbone.config is not None:
            read = self._read(backbone.config, f"{path}.config")
            if read is None:
                return None
            note = family_note(read)
            if note is not None:
                self.notes.append(f"{path}.config: {note}")
            config = _without(text_section(read), written)
        else:
            is_gated = backbone.gated
            written = _with_shape(written)
        try:
            return decoder_shape({**config, **written}, is_gated=is_gated)
        except ShapeError as error:
            self._gaps(error, path)
            return None

    def encoder(self, rule: MediaRule, backbone: DecoderShape | None) -> _Encoder | None:
        """Return the encoder of a modality; None where none is named: its media cost nothing."""
        kind = _KIND_OF[rule.modality]
        name, path = self._encoder_file(rule.modality)
        if name is None:
            return None
        read = self._read(name, path)
        if read is None:
            return None
        section = encoder_sections(read).get(kind)
        if section is None:
            if path.startswith("model.encoder"):
                problem = f"it describes no {kind} encoder, which {rule.modality} needs"
                remedy = "give the config.json of one, or a map of modality to file"
                self._faults.append(Fault(path, name, problem, remedy))
            return None
        output = 0 if backbone is None else backbone.hidden
        try:
            shape = (vision_shape if kind == "vision" else audio_shape)(section, output)
        except ShapeError as error:
            self._gaps(error, path)
            return None
        units = self._item_units(rule, audio_item_units(section) if kind == "audio" else 0)
        return _Encoder(shape, encoder_cost(shape, rule.modality, units))

    def _encoder_file(self, modality: Modality) -> tuple[str | None, str]:
        given = self._model.encoder
        if isinstance(given, str):
            return given, "model.encoder"
        if given is not None and modality in given:
            return given[modality], f"model.encoder.{modality}"
        return self._model.backbone.config, "model.backbone.config"

    def _item_units(self, rule: MediaRule, encoder_units: int) -> int:
        written = self._model.item_units.get(rule.modality)
        if written is not None:
            return min(written, rule.row_units_max)
        return typical_item_units(rule, encoder_units)

    def _gaps(self, error: ShapeError, path: str) -> None:
        self._faults += [
            Fault(
                f"{path}.{gap.key}",
                MISSING if gap.value is None else gap.value,
                gap.problem,
                gap.remedy,
            )
            for gap in error.gaps
        ]

    def _read(self, name: str, path: str) -> Mapping[str, Any] | None:
        if name not in self._configs:
            self._configs[name] = _read_config(self._base_dir / name, name, path, self._faults)
        return self._configs[name]


def typical_item_units(rule: MediaRule, encoder_units: int = 0) -> int:
    """Return the units that attend to each other, at most those of a row.

    Of an image or a frame of a video by the resize limits, of a sound by its window.

    Args:
        rule: The modality's.
        encoder_units: Most that the encoder takes at once; 0: no limit.
    """
    limits = [rule.row_units_max]
    if encoder_units:
        limits.append(encoder_units)
    audio, picture = rule.audio, rule.image or rule.video
    if picture is not None:
        limits.append(_picture_patches(picture.resize, picture.patches, picture.pixels_max))
    if audio is not None and audio.mel is not None and audio.window_s:
        limits.append(max(1, round(1000 * audio.window_s / audio.mel.hop_ms)))
    return min(limits)


def _picture_patches(resize: ResizeRule, patches: PatchRule, pixels_max: int) -> int:
    side = patches.patch
    if resize.policy == "fixed":
        return max(1, (resize.height // side) * (resize.width // side))
    if resize.policy == "short_side" and resize.crop != "none":
        return max(1, (resize.side // side) ** 2)
    return max(1, (resize.pixels_max or pixels_max) // (side * side))


def _without(config: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which written keys are not spelt in another way."""
    hidden = {spelling for key in written for spelling in spellings_of(key)}
    return {key: value for key, value in config.items() if key not in hidden}


def _with_shape(written: dict[str, Any]) -> dict[str, Any]:
    """Fill in what a backbone that is written out may leave out: heads and the MLP's width."""
    if "hidden_size" not in written:
        return {"num_attention_heads": 1} | written
    hidden = int(written["hidden_size"])
    filled: dict[str, Any] = {}
    if "num_attention_heads" not in written:
        heads = max(1, hidden // HEAD_CHANNELS)
        filled = {"num_attention_heads": heads, "head_dim": hidden // heads}
    if written.get("num_experts", 1) < 2:
        filled["intermediate_size"] = 4 * hidden
    return filled | written


def _read_config(file: Path, name: str, path: str, faults: list[Fault]) -> Mapping[str, Any] | None:
    remedy = "give a model's config.json"
    try:
        with file.open("rb") as opened:
            data = json.loads(opened.read(CONFIG_BYTES_MAX))
    except (OSError, ValueError, RecursionError) as error:
        problem = getattr(error, "strerror", None) or "not JSON"
        faults.append(Fault(path, name, f"{file}: {problem}", remedy))
        return None
    if not isinstance(data, dict):
        faults.append(Fault(path, name, "not a JSON object", remedy))
        return None
    return data
