"""Resolves user fields: names that clash with nothing, fills that fit, columns that are there."""

from __future__ import annotations

import math

import numpy as np

from federation.model.job import FieldRule, SourceSpec
from msd_client.contract.user_fields import BUILT_IN_NAMES, USER_FIELDS_MAX
from msd_daemon.config.column_check import check_columns
from msd_daemon.config.faults import Fault
from msd_daemon.config.job_file import FieldFile, JobFile
from msd_daemon.sources.formats import format_of
from msd_daemon.sources.parquet_columns import WantedColumn, field_kind


def resolve_fields(
    file: JobFile, sources: tuple[SourceSpec, ...], faults: list[Fault]
) -> tuple[FieldRule, ...]:
    """Return the user fields in the order of their names.

    Args:
        file: The job.
        sources: Its sources, as far as they could be resolved.
        faults: Receives what is wrong.
    """
    rules = []
    if len(file.fields) > USER_FIELDS_MAX:
        problem = f"are more than the {USER_FIELDS_MAX} that a slot can name"
        faults.append(Fault("fields", f"{len(file.fields)} fields", problem, "leave some out"))
    for name in sorted(file.fields):
        field = file.fields[name]
        if name in BUILT_IN_NAMES or not name.isidentifier():
            problem = "is a field of every batch" if name in BUILT_IN_NAMES else "is no Python name"
            faults.append(Fault(f"fields.{name}", name, problem, "choose another name"))
        _check_fill(name, field, faults)
        rules.append(FieldRule(name, field.from_field or name, field.per, field.dtype, field.fill))
    if rules and sources and not any(format_of(source.format).has_fields for source in sources):
        faults.append(
            Fault(
                "fields",
                ", ".join(rule.name for rule in rules),
                "no source has fields, plain text and .bin/.idx have none",
                "remove it",
            )
        )
    wanted = [
        (f"fields.{rule.name}.from", WantedColumn(rule.from_field, field_kind(rule)))
        for rule in rules
    ]
    for source in sources if rules else ():
        if source.format == "parquet" and source.shards:
            check_columns(wanted, source.shards[0], faults, f"source {source.name!r}: ")
    return tuple(rules)


def _check_fill(name: str, field: FieldFile, faults: list[Fault]) -> None:
    path, fill = f"fields.{name}.fill", field.fill
    if not math.isfinite(fill):
        faults.append(Fault(path, fill, "is not finite", "write a number"))
    elif field.dtype.startswith("int"):
        limits = np.iinfo(field.dtype)
        if fill != int(fill) or not limits.min <= int(fill) <= limits.max:
            faults.append(Fault(path, fill, f"is no {field.dtype}", "write an integer it holds"))
    elif abs(fill) > float(np.finfo(field.dtype).max):
        faults.append(Fault(path, fill, f"is no {field.dtype}", "write a smaller number"))
