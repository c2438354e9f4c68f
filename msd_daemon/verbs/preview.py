"""`msdctl preview`: the first packed rows of a job as text, with every join marked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from msd_client.msdctl.job_argument import read_job
from msd_client.msdctl.output import json_option, print_json
from msd_daemon.preview import PreviewRow, PreviewSegment, StreamPreview
from msd_daemon.transforms.decoder import Decoder, open_decoder


@click.command(name="preview", short_help="Show the first packed rows as text.")
@click.argument("job")
@click.option("--rows", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--characters",
    type=click.IntRange(min=0),
    default=240,
    show_default=True,
    help="Most characters shown of a piece; 0 shows all.",
)
@json_option
def command(job: str, rows: int, characters: int, as_json: bool) -> None:
    """Show the first packed rows of JOB, as training would receive them first.

    Runs loaders and planner in this process; needs no daemon and leaves nothing behind.
    """
    from msd_daemon.config.resolve import resolve_job
    from msd_daemon.verbs.local_stores import configure_local_stores

    configure_local_stores()
    written = read_job(job)
    resolved = resolve_job(written.text, Path(written.base_dir), written.name)
    decode = open_decoder(resolved.tokenizer)
    preview = StreamPreview(resolved)
    try:
        plan = preview.plan_first_step()
        found = list(preview.rows(plan, rows))
    finally:
        preview.close()
    if as_json:
        payload = {"job": resolved.name, "digest": resolved.digest(), "step": 0}
        print_json("preview", payload | {"rows": [_row_map(row, decode) for row in found]})
        return
    click.echo(
        f"step 0 of {resolved.name}: {plan.rows} rows of {plan.row_tokens} tokens, "
        f"{100 * plan.fill_ratio:.2f} % full, {plan.valid_tokens} labels trained, "
        f"documents {resolved.batch.documents}"
    )
    for row in found:
        click.echo("\n".join(row_lines(row, decode, characters)))


def row_lines(row: PreviewRow, decode: Decoder, characters: int) -> Iterator[str]:
    """Yield a row for people: a rule at every join, then the text of the piece."""
    count = len(row.segments)
    yield ""
    yield f"══ row {row.number}: {count} pieces, {row.pad_tokens} tokens of padding"
    for segment in row.segments:
        yield f"── {segment.source}, {_extent(segment)}"
        yield _cut(decode(segment.tokens.tolist()), characters)
    if row.pad_tokens:
        yield f"── padding, {row.pad_tokens} tokens"


def _extent(segment: PreviewSegment) -> str:
    length = len(segment.tokens)
    if length == segment.document_tokens:
        return f"whole document of {length} tokens"
    end = segment.offset + length
    return f"tokens {segment.offset} to {end} of a document of {segment.document_tokens}"


def _cut(text: str, characters: int) -> str:
    """Return the head and tail of a text, both of which show at a join."""
    if not characters or len(text) <= characters:
        return text
    half = max(1, characters // 2)
    return f"{text[:half]}\n   [... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def _row_map(row: PreviewRow, decode: Decoder) -> dict[str, object]:
    return {
        "row": row.number,
        "pad_tokens": row.pad_tokens,
        "segments": [
            {
                "source": segment.source,
                "offset": segment.offset,
                "tokens": len(segment.tokens),
                "document_tokens": segment.document_tokens,
                "text": decode(segment.tokens.tolist()),
            }
            for segment in row.segments
        ],
    }
