"""Opens bytes with FFmpeg so that nothing but these bytes is read.

Some formats that FFmpeg knows by their content are lists of other files or addresses (HLS, concat).
The demuxers are therefore named, and no protocol is allowed.
"""

from __future__ import annotations

import io
from typing import Any

DEMUXERS = (
    "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "avi", "flv", "mpegts", "mpeg", "mpegvideo", "ogg",
    "asf", "ivf", "mxf", "gif", "flac", "mp3", "aac", "wav", "w64", "aiff", "au", "caf", "amr",
    "nistsphere",
)  # fmt: skip

_OPTIONS = {"format_whitelist": ",".join(DEMUXERS), "protocol_whitelist": "none"}


def open_container(content: bytes) -> Any:
    """Return an open `av` input container; use it as a context.

    Raises:
        av.FFmpegError: It is none of `DEMUXERS`, or is damaged.
    """
    import av

    return av.open(io.BytesIO(content), metadata_errors="ignore", container_options=_OPTIONS)


def single_thread(stream: Any, options: dict[str, str] | None = None) -> None:
    """Keep a stream's decoder in this thread; set before the first frame.

    Args:
        stream: Of an open container.
        options: Further options of its decoder.
    """
    stream.thread_type = "NONE"
    stream.thread_count = 1
    if options:
        stream.codec_context.options = options
