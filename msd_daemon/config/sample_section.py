"""Resolves how records of all sources become samples: their recipes, and the job's media."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from federation.model.job import SourceSpec, TokenizerSpec
from federation.model.media import MediaRule
from federation.model.recipe import UserCall
from msd_client.contract.errors import MsdError
from msd_client.contract.media_fields import Modality
from msd_daemon.config.batch_file import ramp_start
from msd_daemon.config.faults import Fault, fault_of_message, told_fault
from msd_daemon.config.job_file import JobFile
from msd_daemon.config.media_section import resolve_media
from msd_daemon.config.media_steps import Call
from msd_daemon.config.recipe_section import RecipeResolver
from msd_daemon.config.source_section import check_parquet
from msd_daemon.config.transform_file import TransformFile
from msd_daemon.config.user_code import resolve_user_call
from msd_daemon.shm.chunk_layout import UNTRAINED_BIT
from msd_daemon.sources.wanted_fields import modalities_of
from msd_daemon.transforms.tokenizer import Tokenizer, open_tokenizer


def resolve_samples(
    file: JobFile,
    sources: tuple[SourceSpec, ...],
    tokenizer: TokenizerSpec | None,
    base_dir: Path,
    store_dir: Path,
    faults: list[Fault],
    notes: list[str],
    broken: frozenset[str] = frozenset(),
) -> tuple[tuple[SourceSpec, ...], tuple[MediaRule, ...]]:
    """Return the sources with their recipes, and a rule for each modality that they have.

    Args:
        file: The job.
        sources: As far as they could be resolved.
        tokenizer: None where it could not be.
        base_dir: Folder that relative paths start from.
        store_dir: Where copies of the user's files and lists are kept, by content.
        faults: Receives what is wrong.
        notes: Receives what was decided.
        broken: Sections that are absent from `file` for a fault that was told.
    """

    @cache
    def opened() -> Tokenizer | None:
        return None if tokenizer is None else open_tokenizer(tokenizer)

    def token_id_of(token: str | int) -> int | None:
        if isinstance(token, str):
            found = opened()
            return None if found is None else found.special_tokens.get(token)
        is_known = tokenizer is None or 0 <= token < tokenizer.vocabulary_count
        return token if is_known else None

    template_text = _template_text(file, tokenizer, base_dir, faults)
    recipes = RecipeResolver(file, template_text, token_id_of, base_dir, store_dir, faults)
    found: list[SourceSpec] = []
    faulty: set[str] = set()
    for source in sources:
        count = len(faults)
        found.append(recipes.resolve(source))
        if len(faults) > count:
            faulty.add(source.name)
    sources = tuple(found)
    if tokenizer is not None and tokenizer.kind != "none":
        _check_templates(file, sources, opened, faults, notes)
    for source in sources:
        if source.name not in faulty:  # else its recipe may lack what says which columns it reads
            check_parquet(f"sources.{source.name}", source, faults)
    used = _used(sources)

    def step_of(path: str, step: Call) -> UserCall | None:
        section = TransformFile(call=step.call, python=step.python)
        return resolve_user_call(path, section, base_dir, store_dir, faults)

    caps = _row_caps(file, faults)
    media = resolve_media(file, used, token_id_of, caps, step_of, faults, broken=broken)
    notes += [_media_note(rule, file.batch.microbatch_rows) for rule in media]
    faults += [
        Fault(
            f"placeholder.{rule.modality}.tokens",
            rule.placeholder_tokens,
            "with positions: mrope an item has the tokens of its merged grid",
            "leave it out",
        )
        for rule in media
        if rule.placeholder_tokens and rule.modality != "audio" and file.batch.positions == "mrope"
    ]
    if any(source.has_masks for source in sources):
        _check_masks(file, tokenizer, faults)
    if any(source.group is not None for source in sources):
        _check_groups(file, faults)
    return sources, media


def _template_text(
    file: JobFile, tokenizer: TokenizerSpec | None, base_dir: Path, faults: list[Fault]
) -> str:
    if tokenizer is None or not _has_chats(file):
        return ""
    from msd_daemon.transforms.chat_template import complete_template, find_chat_template

    if file.chat is None or file.chat.template is None:
        try:
            found = find_chat_template(Path(tokenizer.path)) if tokenizer.path else None
        except MsdError as error:
            faults.append(told_fault("chat.template", tokenizer.path, error))
            return ""
        return complete_template(found, tokenizer) if found else ""
    path = base_dir / Path(file.chat.template).expanduser()
    try:
        return complete_template(path.read_text(encoding="utf-8"), tokenizer)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        faults.append(
            Fault("chat.template", file.chat.template, str(reason), "write the file of a template")
        )
    except MsdError as error:
        faults.append(told_fault("chat.template", file.chat.template, error))
    return ""


def _check_templates(
    file: JobFile,
    sources: tuple[SourceSpec, ...],
    opened: Callable[[], Tokenizer | None],
    faults: list[Fault],
    notes: list[str],
) -> None:
    """Refuse a chat template of which nobody can tell what the assistant says (E12)."""
    rules = {
        replace(source.recipe.chat, messages_field="", tools_field="")
        for source in sources
        if source.recipe is not None and source.recipe.chat is not None
    }
    if not rules:
        return
    from msd_daemon.transforms.chat_check import check_template

    given = file.chat.template if file.chat is not None else None
    for rule in sorted(rules, key=lambda rule: rule.train_on):
        tokenizer = opened()
        assert tokenizer is not None
        report = check_template(rule, tokenizer)
        value = given or "the tokenizer's own"
        faults += [fault_of_message("chat.template", value, line) for line in report.faults]
        notes += [f"chat: {note}" for note in report.notes]


def _media_note(rule: MediaRule, rows: int) -> str:
    units = "frames" if rule.modality == "audio" else "patches"
    size_bytes = rule.microbatch_bytes(rows)
    return (
        f"{rule.modality}: at most {rule.row_units_max} {units} a row, {rule.unit_bytes} bytes each, "
        f"{size_bytes} bytes a microbatch"
    )


def _has_chats(file: JobFile) -> bool:
    sections = (file.defaults, *file.sources.values())
    return any(section.messages is not None for section in sections)


def _used(sources: tuple[SourceSpec, ...]) -> frozenset[Modality]:
    found: set[Modality] = set()
    for source in sources:
        if source.recipe is not None:
            found |= modalities_of(source.recipe)
    return frozenset(found)


def _row_caps(file: JobFile, faults: list[Fault]) -> dict[Modality, int]:
    """Return the units that a row may hold of each modality that the batch gives a limit for."""
    rows = file.batch.microbatch_rows
    caps: dict[Modality, int] = {}
    for key, modalities in (
        ("microbatch_patches", ("image", "video")),
        ("microbatch_frames", ("audio",)),
    ):
        value = getattr(file.batch, key)
        if value is None:
            continue
        if value < rows:
            faults.append(
                Fault(f"batch.{key}", value, f"is below microbatch_rows {rows}", "raise it")
            )
        caps |= dict.fromkeys(modalities, value // rows)  # type: ignore[arg-type]
    return caps


def _check_groups(file: JobFile, faults: list[Fault]) -> None:
    if file.batch.packing in ("concat", "padded"):
        faults.append(
            Fault(
                "batch.packing",
                file.batch.packing,
                "a group needs one row of several whole segments",
                "use best_fit, best_fit_even or varlen",
            )
        )
    _check_lengths(file, "groups cannot be cut", faults)


def _check_lengths(file: JobFile, carried: str, faults: list[Fault]) -> None:
    """Refuse rows that become shorter while what is carried has to stay whole."""
    pairs = sorted((ramp_start(key), value) for key, value in file.batch.lengths.items())
    lengths = [value for _, value in pairs]
    if any(later < earlier for earlier, later in pairwise(lengths)):
        faults.append(
            Fault(
                f"batch.{file.batch.length_key}",
                lengths,
                f"becomes shorter; what is carried of {carried}",
                "let rows only become longer",
            )
        )


def _check_masks(file: JobFile, tokenizer: TokenizerSpec | None, faults: list[Fault]) -> None:
    if file.batch.packing == "concat":
        faults.append(
            Fault(
                "batch.packing",
                "concat",
                "cuts anywhere; chats and media have places where nothing may be cut",
                "use best_fit or padded",
            )
        )
    _check_lengths(file, "chats and media cannot be cut again", faults)
    if tokenizer is not None and UNTRAINED_BIT <= tokenizer.vocabulary_count < 1 << 31:
        faults.append(
            Fault(
                "tokenizer",
                tokenizer.vocabulary_count,
                f"ids of chats and media are below {UNTRAINED_BIT}",
                "use a tokenizer of fewer ids",
            )
        )
