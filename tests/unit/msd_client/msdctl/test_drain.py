"""What `msdctl drain` says."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from msd_client.msdctl import drain


@pytest.mark.parametrize("is_last", [False, True])
def test_who_drains_the_last_node_is_warned(monkeypatch: pytest.MonkeyPatch, is_last: bool) -> None:
    nodes = [{"node": "a", "is_drained": is_last}, {"node": "b", "is_drained": True}]

    def answer(*_: Any, **__: Any) -> dict[str, Any]:
        return {"nodes": nodes}

    monkeypatch.setattr(drain, "call", answer)
    done = CliRunner().invoke(drain.command, ["b"])
    assert done.exit_code == 0
    assert "node b is drained" in done.output
    assert ("all nodes that load are drained (a, b)" in done.output) == is_last
