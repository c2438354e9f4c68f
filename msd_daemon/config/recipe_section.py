"""Resolves the recipes of sources: which steps a record goes through, with every default."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from federation.model.job import GroupRule, SourceSpec
from federation.model.recipe import (
    ChatRule,
    ExcludeRule,
    FimRule,
    InterleaveRule,
    SampleRecipe,
)
from msd_client.contract.errors import ConfigError, MsdError
from msd_daemon.config.faults import Fault, told_fault
from msd_daemon.config.job_file import DefaultsFile, JobFile, SourceFile
from msd_daemon.config.recipe_file import ExcludeFile, FimFile, GroupFieldFile
from msd_daemon.config.user_code import resolve_user_call
from msd_daemon.sources.formats import format_of
from msd_daemon.sources.where import compile_where
from msd_daemon.transforms.template import compile_template

TokenIdOf = Callable[[str | int], int | None]
ExcludeKind = Literal["key", "content"]
ExcludeKey = tuple[ExcludeKind, str, str]
"""Of what, the list as written, and its column."""

WINDOW_BYTES_OF_MEDIA = 8 << 20
"""Record windows count raw bytes: of images 512 KiB would be two or three records."""


@dataclass
class RecipeResolver:
    """Resolves the recipes of a job's sources, one by one; a list that sources share is built once."""

    file: JobFile
    template_text: str
    """The chat template, empty where there is none."""
    token_id_of: TokenIdOf
    """Gives the id of a token."""
    base_dir: Path
    """Folder that relative paths start from."""
    store_dir: Path
    """Where copies of the user's files and lists are kept, by content."""
    faults: list[Fault]
    """Receives what is wrong."""
    _lists: dict[ExcludeKey, ExcludeRule] = field(default_factory=dict, init=False)

    def resolve(self, spec: SourceSpec) -> SourceSpec:
        """Return the source with its recipe; one that asks for nothing has none.

        Args:
            spec: As far as it could be resolved.
        """
        file, faults = self.file, self.faults
        source, defaults = file.sources[spec.name], file.defaults
        path = f"sources.{spec.name}"
        has_fields = format_of(spec.format).has_fields
        # A format without fields takes no default that names one, as it takes no default `text`.
        shared = defaults if has_fields else DefaultsFile()
        if not has_fields:
            _refuse_fields(path, source, spec.format, faults)
        recipe = SampleRecipe(
            where=_where(path, source, shared, faults),
            exclude=self._exclude(path, source.exclude or defaults.exclude),
            template=_template(path, source, shared, faults),
            chat=_chat(path, file, source, shared, self.template_text, faults),
            interleave=_interleave(source, shared),
            image_field=source.image or shared.image or "",
            audio_field=source.audio or shared.audio or "",
            video_field=source.video or shared.video or "",
            media_root=_media_root(source.media_root or defaults.media_root or "", self.base_dir),
            fim=_fim(path, source.fim or defaults.fim, self.token_id_of, faults),
            transform=resolve_user_call(
                f"{path}.transform",
                source.transform or defaults.transform,
                self.base_dir,
                self.store_dir,
                faults,
            ),
        )
        group = source.group or shared.group
        if group is not None:
            spec = replace(spec, group=_group(path, group, spec, recipe, faults))
        if recipe == SampleRecipe(media_root=recipe.media_root):
            return spec
        _check_together(path, source, spec, recipe, faults)
        changed = replace(spec, recipe=recipe)
        if recipe.has_masks:
            changed = replace(changed, token_bytes=4)
        if recipe.has_media and not _has_window_bytes(source, defaults):
            rule = replace(changed.shuffle, window_bytes=WINDOW_BYTES_OF_MEDIA)
            changed = replace(changed, shuffle=rule)
        return changed

    def _exclude(self, path: str, section: ExcludeFile | None) -> ExcludeRule | None:
        if section is None:
            return None
        from msd_daemon.sources.exclude import build_exclude_list

        kind: ExcludeKind = "key" if section.keys is not None else "content"
        listed = section.keys or section.hashes or ""
        known = (kind, listed, section.column)
        if known in self._lists:
            return self._lists[known]
        try:
            files = _expand_list(listed, self.base_dir)
            self._lists[known] = build_exclude_list(files, self.store_dir, kind, section.column)
        except (MsdError, OSError) as error:
            key = "keys" if section.keys is not None else "hashes"
            self.faults.append(told_fault(f"{path}.exclude.{key}", listed, error))
        return self._lists.get(known)


def _group(
    path: str,
    section: Literal["record"] | GroupFieldFile,
    spec: SourceSpec,
    recipe: SampleRecipe,
    faults: list[Fault],
) -> GroupRule:
    if isinstance(section, GroupFieldFile):
        if not format_of(spec.format).has_fields:
            faults.append(
                Fault(
                    f"{path}.group.field",
                    section.field,
                    f"format {spec.format} has no fields",
                    "remove it",
                )
            )
        elif spec.order_class == "streaming":
            faults.append(
                Fault(
                    f"{path}.group.field",
                    section.field,
                    f"{spec.format} {spec.compression} is read as a stream, whose blocks end anywhere",
                    "store the records as parquet, Arrow or plain JSONL, or a group as one record and "
                    "write group: record",
                )
            )
        return GroupRule("field", section.field)
    if recipe.transform is None:
        faults.append(
            Fault(
                f"{path}.group",
                section,
                "a record is one sample: the source has no transform that makes several",
                "give a transform, or group: {field: NAME}",
            )
        )
    return GroupRule("record")


def _has_window_bytes(source: SourceFile, defaults: DefaultsFile) -> bool:
    sections = (source.shuffle, defaults.shuffle)
    return any(section is not None and section.window_bytes is not None for section in sections)


def _refuse_fields(path: str, source: SourceFile, kind: str, faults: list[Fault]) -> None:
    for key in ("messages", "tools", "interleave", "image", "video", "audio"):
        value = getattr(source, key)
        if value is not None:
            shown = value if isinstance(value, str) else key
            faults.append(
                Fault(f"{path}.{key}", shown, f"format {kind} has no fields", "remove it")
            )


def _where(path: str, source: SourceFile, shared: DefaultsFile, faults: list[Fault]) -> str:
    expression = source.where or shared.where or ""
    if expression:
        try:
            compile_where(expression)
        except MsdError as error:
            faults.append(told_fault(f"{path}.where", expression, error))
    return expression


def _template(path: str, source: SourceFile, shared: DefaultsFile, faults: list[Fault]) -> str:
    text = source.template or (shared.template if source.text is None else None) or ""
    if text:
        try:
            compile_template(text)
        except MsdError as error:
            faults.append(told_fault(f"{path}.template", text, error))
    return text


def _chat(
    path: str,
    file: JobFile,
    source: SourceFile,
    shared: DefaultsFile,
    template_text: str,
    faults: list[Fault],
) -> ChatRule | None:
    messages = source.messages or (shared.messages if source.text is None else None)
    if messages is None:
        return None
    if not template_text:
        faults.append(
            Fault(
                f"{path}.messages",
                messages,
                "there is no chat template: the tokenizer's folder has none",
                "write chat: {template: FILE}",
            )
        )
        return None
    train_on = file.chat.train_on if file.chat is not None else "assistant"
    return ChatRule(messages, source.tools or shared.tools or "", template_text, train_on)


def _interleave(source: SourceFile, shared: DefaultsFile) -> InterleaveRule | None:
    section = source.interleave or shared.interleave
    if section is None:
        return None
    return InterleaveRule(section.text, section.image, section.layout, section.missing)


def _media_root(root: str, base_dir: Path) -> str:
    if not root or "://" in root:
        return root
    return str(base_dir / Path(root).expanduser())


def _expand_list(listed: str, base_dir: Path) -> list[str]:
    """Return the files of a list.

    Raises:
        ConfigError: There is none.
    """
    if "://" in listed:
        from msd_daemon.stores.listing import FolderRule, expand_url

        return [found.url for found in expand_url(listed, FolderRule(lambda _: True))]
    names = sorted(glob.glob(str(base_dir / Path(listed).expanduser()), recursive=True))
    if not names:
        raise ConfigError(f"{listed!r} matches no file: mend the path")
    return names


def _fim(
    path: str, section: FimFile | None, token_id_of: TokenIdOf, faults: list[Fault]
) -> FimRule | None:
    if section is None:
        return None
    ids = {}
    for key in ("prefix", "suffix", "middle"):
        token = getattr(section, key)
        ids[key] = token_id_of(token)
        if ids[key] is None:
            faults.append(
                Fault(
                    f"{path}.fim.{key}",
                    token,
                    "is no token of the tokenizer",
                    "write one, or an id",
                )
            )
    return FimRule(
        section.rate,
        ids["prefix"] or 0,
        ids["suffix"] or 0,
        ids["middle"] or 0,
        section.spm_rate,
    )


def _check_together(
    path: str, source: SourceFile, spec: SourceSpec, recipe: SampleRecipe, faults: list[Fault]
) -> None:
    contents: dict[str, Any] = {
        "messages": recipe.chat and recipe.chat.messages_field,
        "interleave": recipe.interleave and recipe.interleave.texts_field,
        "template": recipe.template,
        "tokens": spec.tokens_field,
        "text": source.text,
    }
    given = [key for key, value in contents.items() if value]
    if len(given) > 1:
        faults.append(
            Fault(
                f"{path}.{given[0]}",
                contents[given[0]],
                f"the source gives {' and '.join(given)}, a sample is made of one of them",
                "keep one",
            )
        )
    if spec.is_tokenized and recipe.has_media:
        faults.append(
            Fault(f"{path}.tokens", spec.tokens_field, "ids have no media beside them", "use text")
        )
    _check_megatron(path, spec, recipe, faults)


def _check_megatron(path: str, spec: SourceSpec, recipe: SampleRecipe, faults: list[Fault]) -> None:
    if spec.format != "megatron":
        return
    asked: Mapping[str, object] = {
        "where": recipe.where,
        "exclude": recipe.exclude,
        "template": recipe.template,
        "transform": recipe.transform,
        "fim": recipe.fim,
    }
    faults += [
        Fault(f"{path}.{key}", key, "documents of .bin/.idx are ids alone", "remove it")
        for key, value in asked.items()
        if value
    ]
