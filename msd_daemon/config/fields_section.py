"""Resolves user fields: names that clash with nothing, sources that can have them."""

from __future__ import annotations

from federation.model.job import FieldRule, SourceSpec
from msd_client.contract.field_table import FIELD_TABLE
from msd_daemon.config.faults import Fault
from msd_daemon.config.job_file import JobFile


def resolve_fields(
    file: JobFile, sources: tuple[SourceSpec, ...], faults: list[Fault]
) -> tuple[FieldRule, ...]:
    """Return the user fields in the order of their names.

    Args:
        file: The job.
        sources: Its sources, as far as they could be resolved.
        faults: Receives what is wrong.
    """
    taken = {field.name for field in FIELD_TABLE}
    rules = []
    for name in sorted(file.fields):
        field = file.fields[name]
        if name in taken or not name.isidentifier():
            problem = "is a field of every batch" if name in taken else "is no Python name"
            faults.append(Fault(f"fields.{name}", name, problem, "choose another name"))
        if field.dtype.startswith("int") and field.fill != int(field.fill):
            faults.append(
                Fault(f"fields.{name}.fill", field.fill, f"is no {field.dtype}", "write an integer")
            )
        rules.append(FieldRule(name, field.from_field or name, field.per, field.dtype, field.fill))
    if rules and sources and not any(source.format in ("jsonl", "parquet") for source in sources):
        faults.append(
            Fault(
                "fields",
                ", ".join(rule.name for rule in rules),
                "no source has fields, only jsonl and parquet do",
                "remove it",
            )
        )
    return tuple(rules)
