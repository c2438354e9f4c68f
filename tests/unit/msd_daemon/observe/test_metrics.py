"""Names of metrics are an interface: what is rendered, documented, drawn and alerted on is in one table."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from msd_daemon.observe.metrics import render, samples_of
from msd_daemon.observe.metrics_page import with_table
from msd_daemon.observe.metrics_table import METRICS, OTHER, SOURCES_MAX
from tests.support.sources import ROOT

NAMES = {metric.name for metric in METRICS}
ALERTS = ROOT / "examples/prometheus/alerts.yml"
BOARD = ROOT / "examples/grafana/msd.json"


def whole() -> dict[str, Any]:
    """Return a snapshot in which everything is."""
    memory = {"pss_anon": 5, "pss_shmem": 7}
    job = {
        "name": "gpt",
        "id": "ab",
        "state": "running",
        "ranks": [{}, {}],
        "generation": 2,
        "step_released": 9,
        "step_planned": 17,
        "tokens": 1000,
        "imbalance_last": 1.5,
        "encoder_imbalance_last": 1.25,
        "fill_last": 0.5,
        "journal_stalled": "disk full",
        "join_to_first_batch_ms": 1500.0,
        "now": {"at": 100.0, "tokens_per_s": 10.0, "wait_ratio": 0.1, "wait_ratio_max": 0.2,
                "workers_cpus": 0.5},
        "verdict": {"side": "loader", "level": "slow", "cause": "cpu_bound", "stage": "transform",
                    "source": "web", "rank": 3, "since": 90.0},
        "ranks_now": [{"rank": 3, "waited_s": 4.0, "batches": 6, "load": None}, {"rank": 4, "load": 0.5}],
        "rings": [{"dp_group": 0, "stage": "all", "slots": 4, "free": 1, "ready": 2, "bytes": 64}],
        "pool": {"capacity_bytes": 9, "free_bytes": 4, "undrawn_bytes": 3, "idle_bytes": 1, "revocations": 2},
        "workers": [{"role": "loader", "memory": memory}, {"role": "loader", "memory": memory}],
        "standby": {"took_over": {"spare": 2}, "late": 1},
        "sources": [{"name": f"s{n}", "wanted": 1.0 / (n + 1), "realised": 0.0, "placed_tokens": 1,
                     "valid_tokens": 1, "drawn_samples": 1, "dropped_records": 2}
                    for n in range(SOURCES_MAX + 50)],
        "sources_now": [{"name": "s0", "waited_for_s": 8.0}, {"name": f"s{SOURCES_MAX + 1}", "waited_for_s": 1.0}],
    }  # fmt: skip
    return {
        "daemon": {"version": "1.0", "uptime_s": 5.0, "cpu_s": 2.0, "clients": 3, "stalls": 0,
                   "is_draining": False, "memory_budget_bytes": 100, "memory": memory},
        "jobs": [job, job | {"id": "cd"}],
        "cluster": {"term": 4, "nodes": [{"node": "n1", "silent_s": 0.0, "received_bytes": 1, "sent_bytes": 2}]},
    }  # fmt: skip


def test_every_metric_is_rendered_from_a_whole_snapshot_and_nothing_else():
    found = {name for name, _, _ in samples_of(whole())}
    assert found == NAMES


def test_labels_are_those_of_the_table_and_no_series_comes_twice():
    labels = {metric.name: len(metric.labels) for metric in METRICS}
    seen = set()
    for name, values, _ in samples_of(whole()):
        assert len(values) == labels[name]
        assert (name, values) not in seen
        seen.add((name, values))


def test_many_sources_are_capped_and_their_sums_are_kept():
    tokens = {
        labels: value
        for name, labels, value in samples_of(whole())
        if name == "msd_source_tokens_total" and labels[0] == "gpt"
    }
    assert len(tokens) == SOURCES_MAX + 1
    assert tokens["gpt", OTHER] == 50
    assert sum(tokens.values()) == SOURCES_MAX + 50


def test_names_follow_prometheus_habits():
    for metric in METRICS:
        assert re.fullmatch(r"msd_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not ({"rank", "source"} <= set(metric.labels))
        assert metric.help.endswith(".")
    assert len(NAMES) == len(METRICS)


@pytest.mark.parametrize("snapshot", [{}, {"jobs": [{}]}, {"daemon": {}, "jobs": [{"name": "x"}]}])
def test_a_snapshot_of_another_version_gives_what_it_has(snapshot):
    pytest.importorskip("prometheus_client")
    assert b"msd_build_info" in render(snapshot)


def test_what_is_rendered_is_what_a_scraper_reads():
    parser = pytest.importorskip("prometheus_client.parser")
    families = list(parser.text_string_to_metric_families(render(whole()).decode()))
    read = {sample.name for family in families for sample in family.samples}
    assert read == NAMES


def test_the_documented_table_is_current():
    page = (ROOT / "docs/observing.md").read_text()
    assert page == with_table(page), (
        "run python -m msd_daemon.observe.metrics_page docs/observing.md"
    )


def used(text: str) -> set[str]:
    return set(re.findall(r"\bmsd_[a-z_]+", text))


def test_alerts_and_dashboard_use_metrics_that_exist():
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert used(" ".join(rule["expr"] for rule in rules)) <= NAMES
    assert all({"summary", "description"} == set(rule["annotations"]) for rule in rules)
    board = json.loads(BOARD.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert used(" ".join(expressions)) <= NAMES
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)


def test_promtool_takes_the_rules_and_the_metrics():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    pytest.importorskip("prometheus_client")
    subprocess.run([promtool, "check", "rules", str(ALERTS)], check=True)
    subprocess.run([promtool, "check", "metrics"], input=render(whole()), check=True)
