"""Every file that people write has a schema for their editor."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from msd_daemon.verbs.schema import command


@pytest.mark.parametrize(
    ("kind", "key"), [("job", "sources"), ("daemon", "memory"), ("planner", "listen")]
)
def test_each_kind_of_file_has_its_schema(kind: str, key: str) -> None:
    done = CliRunner().invoke(command, [kind])
    assert done.exit_code == 0, done.output
    schema = json.loads(done.output)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert key in schema["properties"]
