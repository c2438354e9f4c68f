"""Prometheus' text of a node, made from its snapshot (observe/snapshot.py) in whatever process asks.

The daemon itself has no endpoint: the dashboard's process serves this at /metrics, and
`msdctl metrics` prints it, for node_exporter's textfile collector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msd_client.contract.errors import UsageError
from msd_daemon.observe.metrics_table import METRICS, OTHER, SOURCES_MAX, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Map = dict[str, Any]
Sample = tuple[str, tuple[str, ...], float]
"""Name, label values, value."""

_BY_NAME = {metric.name: metric for metric in METRICS}


def render(snapshot: Map) -> bytes:
    """Return the metrics of a node as text in Prometheus' format.

    Args:
        snapshot: The answer to the local request `snapshot`. Keys may be absent: daemons one minor
            version apart talk.

    Raises:
        UsageError: prometheus-client is not installed.
    """
    try:
        from prometheus_client.exposition import generate_latest
        from prometheus_client.registry import Collector, CollectorRegistry
    except ImportError as error:
        raise UsageError(
            "metrics need the package prometheus-client: pip install 'msd[metrics]'"
        ) from error

    class Once(Collector):
        def collect(self) -> Iterable[Any]:
            return _families(samples_of(snapshot))

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    return bytes(generate_latest(registry))


def _families(samples: Iterable[Sample]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    found: dict[str, Any] = {}
    for name, labels, value in samples:
        metric: Metric = _BY_NAME[name]
        if name not in found:
            found[name] = kinds[metric.kind](name, metric.help, labels=metric.labels)
        found[name].add_metric(labels, value)
    for metric in METRICS:
        if metric.name in found:
            yield found[metric.name]


def samples_of(snapshot: Map) -> Iterator[Sample]:
    """Yield what a snapshot says, by the names of METRICS; what is not known is left out."""
    yield from _daemon(snapshot.get("daemon") or {})
    names: dict[str, int] = {}
    for job in snapshot.get("jobs") or []:
        # Labels name jobs as people do; of several with one name each but the first has its identity.
        name = str(job.get("name", "?"))
        names[name] = names.get(name, 0) + 1
        label = name if names[name] == 1 else f"{name}@{job.get('id', '?')}"
        for part in (_job, _verdict, _ranks, _rings, _workers, _sources):
            yield from _numbers(part(label, job))
    yield from _numbers(_cluster(snapshot.get("cluster") or {}))


def _numbers(samples: Iterable[tuple[str, tuple[str, ...], Any]]) -> Iterator[Sample]:
    for name, labels, value in samples:
        if isinstance(value, (int, float)):
            yield name, labels, float(value)


def _daemon(daemon: Map) -> Iterator[Sample]:
    yield "msd_build_info", (str(daemon.get("version", "?")),), 1.0
    yield from _numbers(
        [
            ("msd_daemon_uptime_seconds", (), daemon.get("uptime_s")),
            ("msd_daemon_cpu_seconds_total", (), daemon.get("cpu_s")),
            ("msd_daemon_clients", (), daemon.get("clients")),
            ("msd_daemon_stalls_total", (), daemon.get("stalls")),
            ("msd_daemon_draining", (), daemon.get("is_draining")),
            ("msd_memory_budget_bytes", (), daemon.get("memory_budget_bytes")),
        ]
    )
    own = {"role": "daemon", "memory": daemon.get("memory")}
    yield from _memory("", [own, *(daemon.get("processes") or [])])


def _memory(job: str, processes: Iterable[Map]) -> Iterator[Sample]:
    sums: dict[tuple[str, str], float] = {}
    for process in processes:
        memory = process.get("memory") or {}
        for kind, key in (("anonymous", "pss_anon"), ("shared", "pss_shmem")):
            labels = (str(process.get("role", "?")), kind)
            sums[labels] = sums.get(labels, 0.0) + float(memory.get(key) or 0)
    for (role, kind), total in sums.items():
        yield "msd_process_memory_bytes", (job, role, kind), total


def _job(label: str, job: Map) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    now, one = job.get("now") or {}, (label,)
    yield "msd_job_state", (label, str(job.get("state", "?"))), 1
    yield "msd_job_ranks", one, len(job.get("ranks") or [])
    plain = {
        "msd_job_generation": job.get("generation"),
        "msd_job_step_released": job.get("step_released"),
        "msd_job_step_planned": job.get("step_planned"),
        "msd_job_tokens_total": job.get("tokens"),
        "msd_job_tokens_per_second": now.get("tokens_per_s"),
        "msd_job_wait_ratio": now.get("wait_ratio"),
        "msd_job_wait_ratio_max": now.get("wait_ratio_max"),
        "msd_job_imbalance_ratio": job.get("imbalance_last"),
        "msd_job_encoder_imbalance_ratio": job.get("encoder_imbalance_last"),
        "msd_job_fill_ratio": job.get("fill_last"),
        "msd_workers_cpus": now.get("workers_cpus"),
    }
    for name, value in plain.items():
        yield name, one, value
    if "journal_stalled" in job:
        yield "msd_job_journal_stalled", one, bool(job["journal_stalled"])
    if job.get("join_to_first_batch_ms") is not None:
        yield "msd_first_batch_seconds", one, job["join_to_first_batch_ms"] / 1e3
    pool = job.get("pool") or {}
    for state in ("capacity", "free", "undrawn", "idle"):
        yield "msd_pool_bytes", (label, state), pool.get(f"{state}_bytes")
    yield "msd_pool_revocations_total", one, pool.get("revocations")


def _verdict(label: str, job: Map) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    verdict = job.get("verdict") or {}
    if not verdict:
        return
    about = tuple(str(verdict.get(key, "")) for key in ("side", "level", "cause", "stage"))
    yield "msd_verdict", (label, *about), 1
    at, since = (job.get("now") or {}).get("at"), verdict.get("since")
    if isinstance(at, (int, float)) and isinstance(since, (int, float)):
        yield "msd_verdict_age_seconds", (label,), max(at - since, 0.0)
    if verdict.get("source"):
        yield "msd_verdict_source", (label, str(verdict["source"])), 1
    if verdict.get("rank") is not None:
        yield "msd_verdict_rank", (label, str(verdict["rank"])), 1


def _ranks(label: str, job: Map) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    for rank in job.get("ranks_now") or []:
        labels = (label, str(rank.get("rank", "?")))
        yield "msd_rank_waited_seconds_total", labels, rank.get("waited_s")
        yield "msd_rank_batches_total", labels, rank.get("batches")
        yield "msd_rank_load_ratio", labels, rank.get("load")


def _rings(label: str, job: Map) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    for ring in job.get("rings") or []:
        labels = (label, str(ring.get("dp_group", "?")), str(ring.get("stage", "?")))
        free, ready, slots = ring.get("free"), ring.get("ready"), ring.get("slots")
        yield "msd_ring_bytes", labels, ring.get("bytes")
        yield "msd_ring_slots", (*labels, "free"), free
        yield "msd_ring_slots", (*labels, "ready"), ready
        held = ring.get("held", 0)
        yield "msd_ring_slots", (*labels, "held"), held
        if isinstance(free, int) and isinstance(ready, int) and isinstance(slots, int):
            yield "msd_ring_slots", (*labels, "filling"), slots - free - ready - held


def _workers(label: str, job: Map) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    workers = job.get("workers") or []
    counts: dict[str, int] = {}
    for worker in workers:
        role = str(worker.get("role", "?"))
        counts[role] = counts.get(role, 0) + 1
    for role, count in counts.items():
        yield "msd_workers", (label, role), count
    yield from _memory(label, workers)
    standby = job.get("standby") or {}
    for by, count in (standby.get("took_over") or {}).items():
        yield "msd_worker_replacements_total", (label, str(by)), count
    yield "msd_workers_late_total", (label,), standby.get("late")


_SOURCE_COLUMNS = {
    "msd_source_wanted_ratio": "wanted",
    "msd_source_realised_ratio": "realised",
    "msd_source_tokens_total": "placed_tokens",
    "msd_source_valid_tokens_total": "valid_tokens",
    "msd_source_samples_total": "drawn_samples",
    "msd_source_dropped_total": "dropped_records",
}


def _sources(label: str, job: Map) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    sources = job.get("sources") or []
    by_wanted = sorted(sources, key=lambda it: -float(it.get("wanted") or 0))
    kept = {str(it.get("name")) for it in by_wanted[:SOURCES_MAX]}

    def summed(rows: Iterable[Map], key: str) -> dict[str, float]:
        sums: dict[str, float] = {}
        for row in rows:
            name = str(row.get("name"))
            name = name if name in kept else OTHER
            sums[name] = sums.get(name, 0.0) + float(row.get(key) or 0)
        return sums

    for metric, key in _SOURCE_COLUMNS.items():
        for name, total in summed(sources, key).items():
            yield metric, (label, name), total
    for name, total in summed(job.get("sources_now") or [], "waited_for_s").items():
        yield "msd_source_waited_seconds_total", (label, name), total


def _cluster(cluster: Map) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    yield "msd_cluster_term", (), cluster.get("term")
    for node in cluster.get("nodes") or []:
        name = (str(node.get("node", "?")),)
        yield "msd_node_silent_seconds", name, node.get("silent_s")
        yield "msd_node_received_bytes_total", name, node.get("received_bytes")
        yield "msd_node_sent_bytes_total", name, node.get("sent_bytes")
