"""`msdctl scale`: show who reads which source and why, or say in how many partitions it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from msd_client.contract.errors import NotFoundError, UsageError
from msd_client.msdctl.daemon_call import call, socket_option
from msd_client.msdctl.output import format_table, json_option, print_json, say


@click.command(name="scale", short_help="Show or set in how many partitions sources are read.")
@click.argument("source", required=False)
@click.argument("partitions", required=False, metavar="[N|auto]")
@click.option("--loaders", help="The loader worker of each partition, such as 0,2,3.")
@click.option(
    "--max", "loaders_max", type=click.IntRange(min=1), help="Most loader workers from now on."
)
@click.option("--job", help="Name or id of the job; needed where several run.")
@socket_option
@json_option
def command(
    source: str | None,
    partitions: str | None,
    loaders: str | None,
    loaders_max: int | None,
    job: str | None,
    socket_path: Path | None,
    as_json: bool,
) -> None:
    """Show which loader workers read each source and why, or set in how many partitions it is read.

    With N, SOURCE is read in N partitions, each by a worker of its own, whatever it costs; `auto`
    gives it back to the scaler. The stream is the same whoever reads it: partitions change hands between two blocks.
    """
    named = {} if job is None else {"job": job}
    if loaders_max is not None:
        answer = call(socket_path, "scale", loaders_max=loaders_max, **named)
        if as_json:
            print_json("scale_set", answer)
        else:
            say(f"job {answer['job']}: at most {loaders_max} loader workers")
    if source is not None and partitions is not None:
        fields: dict[str, Any] = {"source": source, "partitions": _count(partitions)}
        if loaders is not None:
            fields["loaders"] = [_number(part) for part in loaders.split(",")]
        _set(fields | named, socket_path, as_json)
    if loaders_max is not None or partitions is not None:
        return
    status = call(socket_path, "status", **named)
    jobs = [_shown(found, source) for found in status.get("jobs", [])]
    if not jobs:
        raise NotFoundError("no job runs")
    if source is not None:
        _check_known(source, status["jobs"])
    if as_json:
        print_json("scale", {"jobs": jobs})
        return
    for found in jobs:
        click.echo(_text(found))


def _set(fields: dict[str, Any], socket_path: Path | None, as_json: bool) -> None:
    source, partitions = fields["source"], fields["partitions"]
    answer = call(socket_path, "scale", **fields)
    if as_json:
        print_json("scale_set", answer)
    elif partitions is None:
        say(f"job {answer['job']}: source {source} is read as the scaler finds")
    elif answer.get("is_pending"):
        say(
            f"job {answer['job']}: source {source} will be read in {_parts(partitions)} from the next "
            "block on"
        )
    else:
        say(f"job {answer['job']}: source {source} is read in {_parts(partitions)}")


def _parts(count: int) -> str:
    return f"{count} partition" + "s" * (count != 1)


def _count(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"scale: {text!r} partitions: write a whole number above 0, or auto")
    return int(text)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"scale: --loaders has {text!r}: write numbers, such as 0,2,3")
    return int(text)


def _check_known(source: str, jobs: list[dict[str, Any]]) -> None:
    """Raise NotFoundError where every job reads and none has such a source."""
    scalings = [job.get("scaling") for job in jobs]
    names = [it["name"] for scaling in scalings if scaling for it in scaling["sources"]]
    if all(scaling and scaling["sources"] for scaling in scalings) and source not in names:
        raise NotFoundError(f"no job has a source {source!r}: {', '.join(names)}")


def _shown(job: dict[str, Any], source: str | None) -> dict[str, Any]:
    scaling = dict(job.get("scaling") or {})
    sources = scaling.get("sources", [])
    if source is not None:
        scaling["sources"] = [entry for entry in sources if entry["name"] == source]
        scaling["last"] = [it for it in scaling.get("last", []) if it["source"] == source]
    return {"job": job.get("name"), "scaling": scaling}


def _text(found: dict[str, Any]) -> str:
    scaling = found["scaling"]
    if not scaling:
        return f"{found['job']}: nothing is read yet"
    how = "" if scaling["is_on"] else "; scaling is off (workers.scaling), msdctl scale alone moves"
    head = (
        f"{found['job']}: {scaling['loaders']} loader workers of at most {scaling['loaders_max']}, "
        f"{scaling['loaders_wanted']} wanted: {scaling['reason'] or 'not looked yet'}{how}"
    )
    lines = [
        head,
        format_table(
            ("source", "load", "ahead", "partitions", "loaders", "note"),
            [
                (
                    entry["name"],
                    round(entry["load"], 2),
                    round(entry["load_ahead"], 2),
                    entry["partitions"],
                    " ".join(map(str, entry["loaders"])),
                    _note(entry),
                )
                for entry in scaling["sources"]
            ],
        ),
    ]
    lines += [
        f"{it['source']}: loaders {it['before']} -> {it['after']}: {it['reason']}"
        for it in scaling["last"][-5:]
    ]
    return "\n".join(lines)


def _note(entry: dict[str, Any]) -> str:
    notes = []
    pending = entry.get("partitions_pending")
    if pending is not None:
        notes.append(f"moves: {_parts(pending)} from the next block on")
    if entry["pinned"] is not None:
        notes.append(f"set to {entry['pinned']}")
    if entry["is_parked"]:
        notes.append("nothing open")
    if entry["blocks_ahead"]:
        notes.append(f"{entry['blocks_ahead']} blocks fetched ahead")
    return ", ".join(notes)
