"""The JSON Schema says what keys mean, in the words of the models."""

from __future__ import annotations

from msd_daemon.config.job_file import job_schema


def test_keys_of_jobs_are_described() -> None:
    sections = job_schema()["$defs"]
    batch = sections["BatchFile"]["properties"]
    assert batch["long"]["description"] == "What becomes of a document longer than a row."
    assert batch["rows"]["description"].startswith("Rows of a global step; a number, or a schedule")
    source = sections["SourceFile"]["properties"]  # those it takes from the recipe and defaults too
    assert source["template"]["description"].startswith("Joins fields into one text")
    assert source["key"]["description"].startswith("Field that names a record")
    assert sections["Patchify"]["description"] == "The last step of images and videos."
