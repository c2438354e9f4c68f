"""Resolves `placeholder:`: the ids that stand in the text for images, videos and sounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from msd_client.contract.media_fields import Modality
from msd_daemon.config.faults import MISSING, Fault
from msd_daemon.config.media_steps import PlaceholderFile

TokenIdOf = Callable[[str | int], int | None]

KNOWN_TOKENS: dict[Modality, tuple[tuple[str, str, str], ...]] = {
    "image": (
        ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        ("<image>", "", ""),
        ("[IMG]", "", "[IMG_END]"),
    ),
    "video": (("<|video_pad|>", "<|vision_start|>", "<|vision_end|>"), ("<video>", "", "")),
    "audio": (
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
        ("<audio>", "", ""),
    ),
}
"""Placeholder, begin and end that models use; the first that the tokenizer has is the default."""


class MediaIds(NamedTuple):
    """Ids that stand for an item."""

    placeholder: int
    begin: int | None = None
    end: int | None = None


def resolve_ids(
    modality: Modality,
    given: PlaceholderFile | None,
    token_id_of: TokenIdOf,
    known_ids: Mapping[Modality, MediaIds],
    faults: list[Fault],
) -> MediaIds:
    """Return the ids of a modality.

    Args:
        modality: Of the items.
        given: What the job says of it.
        token_id_of: Gives the id of a token or id; None where the tokenizer has it not.
        known_ids: What the model's own configuration names; goes before well-known tokens.
        faults: Receives what is wrong.
    """
    given = given or PlaceholderFile()
    path = f"placeholder.{modality}"

    def id_of(key: str, token: str | int) -> int | None:
        found = token_id_of(token)
        if found is None:
            problem = "the tokenizer has no such token"
            faults.append(Fault(f"{path}.{key}", token, problem, "name one that it has"))
        return found

    ids: MediaIds | None
    if given.token is not None:
        ids = MediaIds(id_of("token", given.token) or 0)
    else:
        ids = known_ids.get(modality) or _well_known(modality, token_id_of)
    if ids is None:
        tried = ", ".join(token for token, _, _ in KNOWN_TOKENS[modality])
        problem = f"the tokenizer has none of {tried}"
        faults.append(Fault(path, MISSING, problem, "name a token, or an id"))
        ids = MediaIds(0)
    if given.begin is not None:
        ids = ids._replace(begin=id_of("begin", given.begin))
    if given.end is not None:
        ids = ids._replace(end=id_of("end", given.end))
    return ids


def _well_known(modality: Modality, token_id_of: TokenIdOf) -> MediaIds | None:
    for token, begin, end in KNOWN_TOKENS[modality]:
        place = token_id_of(token)
        if place is not None:
            around = [token_id_of(word) if word else None for word in (begin, end)]
            return MediaIds(place, *around)
    return None
