"""A real run that begins where another loader stopped, from the state that msdctl made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msd_client.contract.state import StreamState
from tests.conftest import StartNode
from tests.support.ledger import Corpus, read_ledger
from tests.support.node import write_job
from tests.support.told import run_msdctl

pytestmark = pytest.mark.processes


def test_what_another_loader_consumed_never_comes(
    start_node: StartNode, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSD__DAEMON__STATE_DIR", str(tmp_path / "state"))
    rng = np.random.default_rng(5)
    lengths = {name: [rng.integers(1, 70, 30).tolist() for _ in range(2)] for name in ("a", "b")}
    corpus = Corpus(lengths)
    job = {
        "name": "taken-over",
        "tokenizer": {"file": str(tmp_path / "d" / "tokenizer.json")},
        "sources": corpus.write_texts(tmp_path / "d", {"a": "", "b": "zst"}),
        "batch": {"rows": 4, "row_tokens": 64, "microbatch_rows": 2},
        "defaults": {"shuffle": False},
        "epochs": 1,
    }
    file = write_job(tmp_path / "job.yaml", job)
    half = int(corpus.sizes[60:].sum()) // 2
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"a": {"samples": 37}, "b": {"tokens": half}}))
    out = tmp_path / "start.state"
    code, told, _ = run_msdctl(
        capsys, "start-state", file, "--consumed", counts, "--step", 900, "-o", out
    )
    assert (code, told["schema"]) == (0, "msd.start_state/1")
    assert told["sources"][0]["samples"] == 37
    assert told["sources"][1]["tokens"] == half
    same = tmp_path / "same.state"
    code, _, _ = run_msdctl(
        capsys, "start-state", file, "--consumed", f"a=37samples,b={half}tokens", "--step", 900,
        "-o", same,
    )  # fmt: skip
    assert (code, same.read_bytes()) == (0, out.read_bytes())
    node = start_node()
    ledger = read_ledger(node, corpus, job, {"dp": 2}, None, state={"msd": out.read_bytes()})
    assert ledger.steps[0] == 900
    for source, skipped in enumerate((int(corpus.sizes[:37].sum()), half)):
        first, end = 60 * source, 60 * (source + 1)
        ids = np.concatenate(
            [np.arange(start, start + size) for start, size in zip(
                corpus.firsts[first:end], corpus.sizes[first:end], strict=True
            )]
        )  # fmt: skip
        delivered = ledger.delivered()[ids]
        assert not delivered[:skipped].any()
        # A last token by itself has no label: it alone may be dropped.
        assert (delivered[skipped:] == 1).sum() >= len(ids) - skipped - 2
        assert delivered.max() == 1
    last = StreamState.decode(ledger.states[max(ledger.states)])
    assert last.step == ledger.steps[-1] + 1


def test_the_command_line_says_what_it_wants(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 9)
    file = write_job(
        tmp_path / "job.yaml",
        {
            "tokenizer": {"bytes": True}, "sources": {"a": "a.jsonl"},
            "batch": {"rows": 2, "row_tokens": 8, "microbatch_rows": 1},
        },
    )  # fmt: skip
    out = tmp_path / "s"
    for given, code, words in (
        ("a", 2, "web=120000samples"), ("a=5", 78, "(it has no unit): write 12345samples"),
        ("b=5samples", 78, "no source 'b'"), ("none.json", 2, "can't be read"),
    ):  # fmt: skip
        seen, _, err = run_msdctl(capsys, "start-state", file, "--consumed", given, "-o", out)
        assert (seen, words in err) == (code, True), err
        assert not out.exists()
