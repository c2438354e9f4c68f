"""Pictures of a previewed row's media, made from its units: what the model sees, not the files.

Images stand on contact sheets, videos as frames side by side, sounds as spectrograms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.media import AudioRule, MediaRule
from msd_daemon.inline_media import InlineItem
from msd_daemon.transforms.image_patches import unpatchify
from msd_daemon.transforms.media_preview import SHEET_FRAMES, preview_frames

if TYPE_CHECKING:
    from PIL.Image import Image

    from msd_daemon.preview import PreviewRow

Pixels = npt.NDArray[np.uint8]

TILE_PIXELS = 256
"""Longest side of a picture on a sheet; smaller ones keep their pixels."""
SHEET_TILES_MAX = 24
SHEET_COLUMNS = 6
SPECTROGRAM_PIXELS_MIN = 160
"""Height of a spectrogram at least, where it has fewer bins."""
_CAPTION_PIXELS = 14
_GAP_PIXELS = 4
_GROUND = (40, 40, 40)


class _Tile(NamedTuple):
    pixels: Pixels
    caption: str


def write_row_media(folder: Path, row: PreviewRow, rules: Sequence[MediaRule]) -> list[Path]:
    """Write PNG files of the media of a row, and return them.

    Args:
        folder: Made where it is not there.
        row: The row.
        rules: The job's.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, rule in enumerate(rules):
        found = [
            (segment.source, span.item)
            for segment in row.segments
            for span in segment.spans()
            if span.kind == kind and span.item is not None
        ]
        for number, sheet in enumerate(_sheets(rule, found)):
            path = folder / f"row{row.number}-{rule.modality}-{number}.png"
            sheet.save(path)
            written.append(path)
    return written


def frames_of(item: InlineItem, rule: MediaRule) -> Pixels:
    """Return the frames of an image or video of a batch. Shape (frames, height, width, 3)."""
    pictures = rule.video or rule.image
    assert pictures is not None
    return unpatchify(item.data, pictures.patches, item.grid)


def _sheets(rule: MediaRule, found: list[tuple[str, InlineItem]]) -> Iterator[Image]:
    """Yield one sheet for up to 24 images, and one for each video and sound."""
    if rule.modality == "image":
        tiles = [
            _Tile(frames_of(item, rule)[0], f"{number} {source} {_size(item)}")
            for number, (source, item) in enumerate(found)
        ]
        for begin in range(0, len(tiles), SHEET_TILES_MAX):
            yield _sheet(tiles[begin : begin + SHEET_TILES_MAX])
        return
    for number, (source, item) in enumerate(found):
        if rule.modality == "audio":
            picture = preview_frames(item.data, rule.audio or AudioRule())
            # One bin is one pixel high, which nobody sees.
            picture = picture.repeat(max(1, SPECTROGRAM_PIXELS_MIN // len(picture)), axis=0)
            yield _sheet([_Tile(picture, f"{number} {source}")], longest=max(picture.shape))
            continue
        frames = frames_of(item, rule)
        count = min(SHEET_FRAMES, len(frames))
        chosen = np.linspace(0, len(frames) - 1, count).round().astype(int).tolist()
        first = f"{number} {source} "
        yield _sheet([_Tile(frames[at], f"{'' if at else first}frame {at}") for at in chosen])


def _size(item: InlineItem) -> str:
    return f"{item.grid[2]}x{item.grid[1]}"


def _sheet(tiles: Sequence[_Tile], longest: int = TILE_PIXELS) -> Image:
    """Return pictures in rows, each with its caption below it."""
    from PIL import Image, ImageDraw

    pictures = []
    for tile in tiles:
        picture = Image.fromarray(tile.pixels)
        picture.thumbnail((longest, longest))
        pictures.append(picture)
    columns = min(SHEET_COLUMNS, len(pictures))
    rows = -(-len(pictures) // columns)
    draw = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    captions = [tile.caption.encode("ascii", "replace").decode() for tile in tiles]
    widths = [picture.width for picture in pictures]
    widths += [math.ceil(draw.textlength(caption)) for caption in captions]
    width = max(widths) + _GAP_PIXELS
    height = max(picture.height for picture in pictures) + _CAPTION_PIXELS + _GAP_PIXELS
    sheet = Image.new("RGB", (columns * width, rows * height), _GROUND)
    draw = ImageDraw.Draw(sheet)
    for at, (caption, picture) in enumerate(zip(captions, pictures, strict=True)):
        left, top = at % columns * width, at // columns * height
        sheet.paste(picture, (left, top))
        draw.text((left, top + picture.height + 1), caption, fill=(255, 255, 255))
    return sheet
