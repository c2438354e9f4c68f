"""How the fields of a record become one sample; resolved. A source of plain texts or ids has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class UserCall:
    """A user's own function, in the interpreter that the job names (E20)."""

    call: str
    """`module:function`."""
    python: str
    """Interpreter."""
    folder: str
    """Copy of the user's files, by content."""
    digest: str
    """Of those files, the interpreter's version and `call`."""
    sample_s_max: float = 60.0
    """A record that takes longer is quarantined."""
    memory_bytes_max: int = 8 << 30
    """Of the interpreter's process; a record that needs more is quarantined."""


@dataclass(frozen=True)
class ChatRule:
    """Messages become a text by a template; loss on the assistant's turns alone (E12)."""

    messages_field: str = "messages"
    tools_field: str = ""
    template: str = ""
    """The Jinja text, not its file."""
    train_on: Literal["assistant", "last", "all"] = "assistant"


@dataclass(frozen=True)
class InterleaveRule:
    """Texts and images in turn."""

    texts_field: str
    images_field: str
    layout: Literal["obelics", "mmc4"] = "obelics"
    """obelics: two lists of one length, one of both is null at each place; mmc4: a list of texts,
    and images that name the text they stand before."""
    missing: Literal["fault", "leave_out"] = "fault"
    """What becomes of an image whose file is not there: its document is a fault, or goes without."""


@dataclass(frozen=True)
class ExcludeRule:
    """Records that are left out, by key or by content."""

    path: str
    """The sorted list of 16-byte hashes that was made of the user's list at submit."""
    fingerprint: str
    by: Literal["key", "content"] = "key"


@dataclass(frozen=True)
class FimRule:
    """Fill-in-the-middle: a share of the texts is cut in three and put in another order."""

    rate: float
    prefix_id: int
    suffix_id: int
    middle_id: int
    spm_rate: float = 0.5
    """Share of those in the order suffix, prefix, middle."""


@dataclass(frozen=True)
class TokenFileRule:
    """How a file of ids without an index is cut into records."""

    record_tokens: int = 2048
    eot_id: int | None = None
    """Ends a document and is its last token; None: there are no documents."""
    id_bytes: int = 0
    """Bytes of an id, 2 or 4, where no header says it; 0: as many as the vocabulary needs."""


@dataclass(frozen=True)
class SampleRecipe:
    """What is done with a record, in this order: where, exclude, transform, text, media, tokens."""

    where: str = ""
    """Expression over fields; a record for which it is not true is left out."""
    exclude: ExcludeRule | None = None
    transform: UserCall | None = None
    template: str = ""
    """Joins fields: `{question}\\n{answer}`; empty = the source's text field."""
    chat: ChatRule | None = None
    interleave: InterleaveRule | None = None
    image_field: str = ""
    """Field of the image or images: bytes, a path, {bytes, path}, or a list of them."""
    audio_field: str = ""
    video_field: str = ""
    media_root: str = ""
    """Folder or URL that paths of media start from; empty = the shard's own folder."""
    fim: FimRule | None = None

    @property
    def has_media(self) -> bool:
        """True where samples hold images, sounds or videos."""
        fields = (self.image_field, self.audio_field, self.video_field)
        return any(fields) or self.interleave is not None

    @property
    def has_masks(self) -> bool:
        """True where some tokens of a sample are not trained."""
        return self.has_media or self.chat is not None
