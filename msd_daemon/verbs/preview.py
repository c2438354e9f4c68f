"""`msdctl preview`: the first packed rows of a job as text and pictures, with every join marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from federation.model.media import MediaRule
from msd_client.contract.errors import UsageError
from msd_client.msdctl.output import json_option, print_json
from msd_daemon.inline_media import InlineItem
from msd_daemon.preview import PreviewRow, PreviewSegment, StreamPreview
from msd_daemon.transforms.decoder import Decoder, open_decoder

_OPEN, _CLOSE = "⟦", "⟧"


@click.command(name="preview", short_help="Show the first packed rows as text and pictures.")
@click.argument("job")
@click.option("--rows", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--characters",
    type=click.IntRange(min=0),
    default=240,
    show_default=True,
    help="Most characters shown of a piece; 0 shows all.",
)
@click.option(
    "--media-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write pictures of images, videos and sounds there, as PNG.",
)
@json_option
def command(job: str, rows: int, characters: int, media_dir: Path | None, as_json: bool) -> None:
    """Show the first packed rows of JOB, as training would receive them first.

    Text that is not trained stands in ⟦ ⟧, an image, video or sound as its size and tokens.

    Runs loaders and planner in this process; needs no daemon and leaves nothing behind.
    """
    from msd_daemon.verbs.local_job import resolve_local_job

    resolved, _ = resolve_local_job(job)
    decode = open_decoder(resolved.tokenizer)
    preview = StreamPreview(resolved)
    try:
        plan = preview.plan_first_step()
        found = list(preview.rows(plan, rows))
    finally:
        preview.close()
    pictures = [_write_media(media_dir, row, resolved.media) for row in found]
    if as_json:
        payload = {"job": resolved.name, "digest": resolved.digest(), "step": 0}
        maps = [
            _row_map(row, decode, resolved.media) | {"media_files": [str(path) for path in paths]}
            for row, paths in zip(found, pictures, strict=True)
        ]
        print_json("preview", payload | {"rows": maps})
        return
    what = "microbatches" if resolved.batch.is_varlen else "rows"
    click.echo(
        f"step 0 of {resolved.name}: {plan.rows} {what} of {plan.row_tokens} tokens, "
        f"{100 * plan.fill_ratio:.2f} % full, {plan.valid_tokens} labels trained, "
        f"documents {resolved.batch.documents}"
    )
    for row, paths in zip(found, pictures, strict=True):
        click.echo("\n".join(row_lines(row, decode, characters, resolved.media)))
        for path in paths:
            click.echo(f"── {path}")


def _write_media(folder: Path | None, row: PreviewRow, rules: Sequence[MediaRule]) -> list[Path]:
    if folder is None or not rules:
        return []
    from msd_daemon.preview_media import write_row_media

    try:
        return write_row_media(folder, row, rules)
    except OSError as error:
        raise UsageError(f"--media-dir {folder}: {error.strerror or error}") from error


def row_lines(
    row: PreviewRow, decode: Decoder, characters: int, rules: Sequence[MediaRule] = ()
) -> Iterator[str]:
    """Yield a row for people: a rule at every join, then the text of the piece."""
    count = len(row.segments)
    yield ""
    yield f"══ row {row.number}: {count} pieces, {row.pad_tokens} tokens of padding"
    for segment in row.segments:
        same = ", of the same group" if segment.begins_group is False else ""
        yield f"── {segment.source}, {_extent(segment)}{same}"
        yield _cut(_text(segment, decode, rules, _OPEN, _CLOSE), characters)
    if row.pad_tokens:
        yield f"── padding, {row.pad_tokens} tokens"


def _extent(segment: PreviewSegment) -> str:
    length = len(segment.tokens)
    if length == segment.document_tokens:
        return f"whole document of {length} tokens"
    end = segment.offset + length
    return f"tokens {segment.offset} to {end} of a document of {segment.document_tokens}"


def _text(
    segment: PreviewSegment,
    decode: Decoder,
    rules: Sequence[MediaRule],
    opening: str = "",
    closing: str = "",
) -> str:
    """Return the text of a piece, an item as `[image 38x26 patches, 247 tokens]`."""
    parts = []
    for span in segment.spans():
        if span.item is not None:
            parts.append(f"[{_item_text(span.item, rules[span.kind])}]")
            continue
        text = decode(segment.tokens[span.begin : span.end].tolist())
        parts.append(text if span.is_trained else f"{opening}{text}{closing}")
    return "".join(parts)


def _item_text(item: InlineItem, rule: MediaRule) -> str:
    t, h, w = item.grid
    sizes = f"{w}x{h} patches"
    if rule.modality == "video":
        sizes = f"{t}x{sizes}"
    elif rule.modality == "audio":
        sizes = f"{len(item.data)} frames"
    return f"{rule.modality} {sizes}, {item.tokens} tokens"


def _cut(text: str, characters: int) -> str:
    """Return the head and tail of a text, both of which show at a join."""
    if not characters or len(text) <= characters:
        return text
    half = max(1, characters // 2)
    head, tail = text[:half], text[-half:]
    if head.count(_OPEN) > head.count(_CLOSE):
        head += _CLOSE
    if tail.count(_CLOSE) > tail.count(_OPEN):
        tail = _OPEN + tail
    return f"{head}\n   [... {len(text) - 2 * half} characters ...]\n{tail}"


def _row_map(
    row: PreviewRow, decode: Decoder, rules: Sequence[MediaRule] = ()
) -> dict[str, object]:
    return {
        "row": row.number,
        "pad_tokens": row.pad_tokens,
        "segments": [
            {
                "source": segment.source,
                "offset": segment.offset,
                "tokens": len(segment.tokens),
                "document_tokens": segment.document_tokens,
                "text": _text(segment, decode, rules),
                "trained_spans": [
                    [span.begin, span.end] for span in segment.spans() if span.is_trained
                ],
                "media": [
                    {
                        "modality": rules[span.kind].modality,
                        "begin": span.begin,
                        "tokens": span.item.tokens,
                        "units": len(span.item.data),
                        "grid": list(span.item.grid),
                    }
                    for span in segment.spans()
                    if span.item is not None
                ],
            }
            | ({} if segment.begins_group is None else {"begins_group": segment.begins_group})
            for segment in row.segments
        ],
    }
