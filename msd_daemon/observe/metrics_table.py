"""The metrics that msd exports: names, kinds, labels and help texts. They are an interface.

Base units (seconds, bytes, ratios of 1); counters end in `_total` and begin anew with a generation of
the job, as Prometheus expects of a process that restarts. Labels are from small sets: sources beyond
SOURCES_MAX are one, `other`; no metric has both ranks and sources.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SOURCES_MAX = 200
OTHER = "other"


class Metric(NamedTuple):
    """One metric."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    help: str


_JOB = ("job",)
_SOURCE = ("job", "source")
_RANK = ("job", "rank")

METRICS = (
    Metric("msd_build_info", "gauge", ("version",), "1; the daemon's version is a label."),
    Metric("msd_daemon_uptime_seconds", "gauge", (), "Since the daemon began."),
    Metric("msd_daemon_cpu_seconds_total", "counter", (), "CPU of the daemon's own process."),
    Metric("msd_daemon_clients", "gauge", (), "Connections on its socket."),
    Metric("msd_daemon_stalls_total", "counter", (), "Times that its loop stood still for seconds."),
    Metric("msd_daemon_draining", "gauge", (), "1 while it ends and takes no new rank."),
    Metric("msd_memory_budget_bytes", "gauge", (), "Shared memory that all jobs may have together."),
    Metric(
        "msd_process_memory_bytes", "gauge", ("job", "role", "kind"),
        "Memory of msd's processes by share; kind is anonymous or shared, job is empty of the daemon's own.",
    ),
    Metric("msd_job_state", "gauge", ("job", "state"), "1 at the state that a job is in."),
    Metric("msd_job_ranks", "gauge", _JOB, "Ranks of the job on this node."),
    Metric("msd_job_generation", "gauge", _JOB, "Number of the running generation."),
    Metric("msd_job_step_released", "gauge", _JOB, "Last step that every rank here gave back."),
    Metric("msd_job_step_planned", "gauge", _JOB, "First step that is not planned."),
    Metric("msd_job_tokens_total", "counter", _JOB, "Tokens placed in the rows of planned steps."),
    Metric("msd_job_tokens_per_second", "gauge", _JOB, "Of planned steps, over the last second."),
    Metric("msd_job_wait_ratio", "gauge", _JOB, "Part of their time that ranks waited for data, mean."),
    Metric("msd_job_wait_ratio_max", "gauge", _JOB, "The same of the rank that waited most."),
    Metric("msd_job_imbalance_ratio", "gauge", _JOB, "Cost of the slowest rank by the mean, last step."),
    Metric(
        "msd_job_encoder_imbalance_ratio", "gauge", _JOB,
        "The same of the encoders' cost, where media are encoded anywhere.",
    ),
    Metric("msd_job_fill_ratio", "gauge", _JOB, "Part of the last step's rows that holds tokens."),
    Metric("msd_job_journal_stalled", "gauge", _JOB, "1 while plans wait for the journal's disk."),
    Metric(
        "msd_first_batch_seconds", "gauge", _JOB,
        "From the last rank's join to the generation's first batch.",
    ),
    Metric(
        "msd_verdict", "gauge", ("job", "side", "level", "cause", "stage"),
        "1 at the verdict that holds: who waits for whom, see `msdctl why`.",
    ),
    Metric("msd_verdict_age_seconds", "gauge", _JOB, "For how long it has held."),
    Metric("msd_verdict_source", "gauge", _SOURCE, "1 at the source that the verdict names."),
    Metric("msd_verdict_rank", "gauge", _RANK, "1 at the rank that the verdict names."),
    Metric("msd_rank_waited_seconds_total", "counter", _RANK, "Time that a rank waited for batches, but for its first."),
    Metric("msd_rank_batches_total", "counter", _RANK, "Batches that a rank gave back."),
    Metric(
        "msd_rank_load_ratio", "gauge", _RANK,
        "Attention pairs of the rank's group in the last planned step, by the heaviest group's.",
    ),
    Metric(
        "msd_ring_slots", "gauge", ("job", "dp_group", "stage", "state"),
        "Slots of a ring; state is free, ready (published, not given to its readers yet), held (given, not given back) or filling.",
    ),
    Metric("msd_ring_bytes", "gauge", ("job", "dp_group", "stage"), "Size of a ring."),
    Metric(
        "msd_pool_bytes", "gauge", ("job", "state"),
        "Chunk memory; state is capacity, free, undrawn (read ahead) or idle.",
    ),
    Metric("msd_pool_revocations_total", "counter", _JOB, "Chunks that were given up and read again."),
    Metric("msd_workers", "gauge", ("job", "role"), "Processes of a job by role."),
    Metric("msd_workers_cpus", "gauge", _JOB, "CPUs that they used over the last second."),
    Metric(
        "msd_worker_replacements_total", "counter", ("job", "by"),
        "Loader workers that were replaced, by what took their place: shadow, spare or new.",
    ),
    Metric("msd_workers_late_total", "counter", _JOB, "Workers that were killed for doing nothing."),
    Metric("msd_source_wanted_ratio", "gauge", _SOURCE, "Share that the mixture wants, last step."),
    Metric("msd_source_realised_ratio", "gauge", _SOURCE, "Share that the generation got so far."),
    Metric("msd_source_tokens_total", "counter", _SOURCE, "Tokens placed in rows."),
    Metric("msd_source_valid_tokens_total", "counter", _SOURCE, "Labels that count."),
    Metric("msd_source_samples_total", "counter", _SOURCE, "Samples drawn."),
    Metric("msd_source_dropped_total", "counter", _SOURCE, "Records dropped, all reasons."),
    Metric("msd_source_waited_seconds_total", "counter", _SOURCE, "Time that the draw waited for it."),
    Metric("msd_cluster_term", "gauge", (), "Fencing number of the planner that leads."),
    Metric("msd_node_silent_seconds", "gauge", ("node",), "Since a node of the cluster was heard of."),
    Metric("msd_node_received_bytes_total", "counter", ("node",), "Samples of other nodes, by taker."),
    Metric("msd_node_sent_bytes_total", "counter", ("node",), "Samples for other nodes, by giver."),
)  # fmt: skip
