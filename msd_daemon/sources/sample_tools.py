"""Opens what a source's recipe needs: decoders, chat template, filters, the user's own code.

Each module is imported where a source uses it, so that a worker of plain texts stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.job import SourceSpec
from federation.model.media import MediaRule
from federation.model.recipe import SampleRecipe, UserCall
from msd_daemon.shm.mark_page import InFlight
from msd_daemon.sources.field_view import FieldView
from msd_daemon.sources.media_files import MediaFiles
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.record_guard import timed_outside
from msd_daemon.sources.sample_encoder import SampleTools
from msd_daemon.sources.sample_parts import composer_of
from msd_daemon.sources.shared_calls import SharedCalls
from msd_daemon.sources.wanted_fields import modalities_of
from msd_daemon.transforms.tokenizer import Tokenizer

Close = Callable[[], None]
Watch = Callable[[UserCall, Any], None]
"""Is told what the user's code is about to be given: a sample's fields, or pixels, or a wave."""


def open_tools(
    spec: SourceSpec,
    media: tuple[MediaRule, ...],
    tokenizer: Tokenizer,
    meter: ReadMeter,
    in_flight: InFlight | None = None,
    watch: Watch | None = None,
    calls: SharedCalls | None = None,
) -> tuple[SampleTools, Close]:
    """Return the tools of a source, and what closes them.

    Args:
        spec: The source.
        media: The job's rules.
        tokenizer: Of the job.
        meter: Counts what is read.
        in_flight: Told when the user's code works on a record.
        watch: Sees all that the user's code is given.
        calls: Processes of the user's code that others use, too; None: of its own alone.

    Raises:
        ConfigError: A list, a template or the user's code is not what the job was resolved with.
    """
    recipe = spec.recipe or SampleRecipe()
    marks = in_flight or InFlight()
    closers: list[Close] = []
    shared = calls or SharedCalls()
    tools = SampleTools(
        compose=composer_of(spec),
        decoders=tuple(_decoder(rule, recipe, closers, marks, watch, shared) for rule in media),
        files=MediaFiles(recipe.media_root, spec.record_bytes_max, meter, marks),
        where=_where(recipe.where),
        exclude=_exclude(recipe),
        transform=_transform(recipe.transform, closers, marks, watch, shared),
        chat=_chat(recipe, tokenizer),
        fim=_fim(recipe),
    )

    def close() -> None:
        for closer in closers:
            closer()

    return tools, close


def _decoder(
    rule: MediaRule,
    recipe: SampleRecipe,
    closers: list[Close],
    marks: InFlight,
    watch: Watch | None,
    calls: SharedCalls,
) -> Any:
    if rule.modality not in modalities_of(recipe):
        return None
    from msd_daemon.transforms.media_pipeline import open_pipeline

    if rule.step is None:
        return open_pipeline(rule, None)
    opened, close = calls.open(rule.step)
    closers.append(close)
    own, call = rule.step, timed_outside(marks, opened.call_array)

    def step(array: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[Any]:
        if watch is not None:
            watch(own, array)
        changed: npt.NDArray[Any] = call(array, int(rng.integers(1 << 63)))
        return changed

    return open_pipeline(rule, step)


def _where(expression: str) -> Callable[[Mapping[str, Any]], bool] | None:
    if not expression:
        return None
    from msd_daemon.sources.where import compile_where

    return compile_where(expression)


def _exclude(recipe: SampleRecipe) -> Callable[[bytes], bool] | None:
    if recipe.exclude is None:
        return None
    from msd_daemon.sources.exclude import ExcludeList

    return ExcludeList(recipe.exclude.path).has


def _transform(
    rule: UserCall | None,
    closers: list[Close],
    marks: InFlight,
    watch: Watch | None,
    calls: SharedCalls,
) -> Callable[[Mapping[str, Any], int], list[Mapping[str, Any]]] | None:
    if rule is None:
        return None
    shared, close = calls.open(rule)
    closers.append(close)
    own, opened = rule, timed_outside(marks, shared.call)

    def call(sample: Mapping[str, Any], key: int) -> list[Mapping[str, Any]]:
        if watch is not None:
            watch(own, sample)
        given: list[Mapping[str, Any]] = opened(sample, key)
        return given

    return call


def _chat(
    recipe: SampleRecipe, tokenizer: Tokenizer
) -> Callable[[FieldView], tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]] | None:
    if recipe.chat is None:
        return None
    from msd_daemon.transforms.chat import ChatEncoder

    rule, encoder = recipe.chat, ChatEncoder(recipe.chat, tokenizer)

    def encode(view: FieldView) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        messages = view.get(rule.messages_field)
        tools = view.get(rule.tools_field) if rule.tools_field else None
        return encoder.encode(messages, tools)

    return encode


def _fim(
    recipe: SampleRecipe,
) -> Callable[[npt.NDArray[Any], np.random.Generator], npt.NDArray[Any]] | None:
    if recipe.fim is None:
        return None
    from msd_daemon.transforms.fim import fim

    rule = recipe.fim
    return lambda ids, rng: fim(ids, rule, rng)
