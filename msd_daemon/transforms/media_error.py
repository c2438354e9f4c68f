"""The one error of media transforms: an item that cannot be decoded, or is over a limit."""

from __future__ import annotations

from typing import ClassVar

from msd_client.contract.errors import CorruptRecordError


class MediaError(CorruptRecordError):
    """An image, sound or video is no sample; names the format seen, value, limit and remedy."""

    code: ClassVar[str] = "data.media"


def over_limit(what: str, seen: object, limit: object, key: str) -> MediaError:
    """Return the error of an item that is over a limit of the job.

    Args:
        what: The item and its unit: `PNG image, pixels`.
        seen: What it has.
        limit: What the job allows.
        key: Key of the job that raises the limit.
    """
    return MediaError(f"{what}: {seen}, the limit is {limit}; leave it out, or raise {key}")


def undecodable(what: str, content: bytes, error: object) -> MediaError:
    """Return the error of content that a decoder refuses.

    Args:
        what: Format and kind: `JPEG image`.
        content: All of it; its size and first bytes are shown.
        error: What the decoder said.
    """
    said = " ".join(str(error).split())[:200] or type(error).__name__
    head = content[:8].hex(" ")
    return MediaError(
        f"{what} of {len(content)} bytes (begins {head}) cannot be decoded: {said}; "
        "replace or remove the file"
    )
