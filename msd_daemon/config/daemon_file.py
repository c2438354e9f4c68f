"""Model of `daemon.toml` and its layers: defaults < file < `MSD__SECTION__KEY` < flags.

No file at all works: a daemon of one user with its socket under `$XDG_RUNTIME_DIR`. Where each
value came from is kept, so that `msdctl` can show it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from socket import gethostname
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from federation.retention import STEPS_KEPT
from msd_client.contract.errors import ConfigError
from msd_client.contract.paths import (
    check_socket_path,
    default_runtime_dir,
    default_socket_path,
    default_state_dir,
)
from msd_client.contract.ring_layout import SLOTS_MAX
from msd_client.machine_memory import usable_memory_bytes
from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.config.dashboard_options import DashboardOptions, is_loopback, parse_listen
from msd_daemon.config.faults import Fault, fault_of_message, faults_of_validation
from msd_daemon.config.federation_options import FederationOptions
from msd_daemon.config.toml_file import read_toml
from msd_daemon.config.units import format_bytes, parse_bytes
from msd_daemon.stores.options import EndpointOptions, StoreOptions, check_store_options

ENVIRONMENT_PREFIX = "MSD__"
FILE_VARIABLE = "MSD_CONFIG"
"""Names `daemon.toml` for a daemon and for verbs that read sources themselves, alike."""
MEMORY_SHARE = 0.25
MEMORY_BYTES_MAX_DEFAULT = 32 << 30
"""A quarter of a 2 TB node would be far more than any text job can use ahead of its ranks."""
POOL_SHARE_MAX = 0.75
"""Rings need the rest of the budget."""
LOADER_WORKERS_DEFAULT_MAX = 4
WORKER_BYTES_RANGE = (1 << 30, 8 << 30)

Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str), Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86_400, allow_inf_nan=False)]
PathText = Annotated[str, Field(min_length=1, max_length=4096)]


def _without_auto(value: object) -> object:
    return None if value == "auto" else value


Auto = BeforeValidator(_without_auto, json_schema_input_type=int | str)
"""Turns `auto` into None: derived later, from the node or the job."""


class Section(BaseModel):
    """Table of the daemon's file: no unknown key, no silent conversion."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )


class DaemonSection(Section):
    """Where the daemon lives and how it ends."""

    socket: PathText | None = None
    """Control socket; default `$XDG_RUNTIME_DIR/msd/msd.sock`, else `/tmp/msd-UID/msd.sock`."""
    runtime_dir: PathText | None = None
    """Folder of socket and lock."""
    state_dir: PathText | None = None
    """Folder of journal and indexes; default `$XDG_STATE_HOME/msd`, else `~/.local/state/msd`."""
    idle_exit_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """End after so long without a job or client; 0 stays for ever."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged, to standard error."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object a line, with an id from each event to all that follows from it."""
    observe: bool = True
    """A look at every job each second, for `msdctl why`, history, metrics and charts; false: none of these."""


class MemorySection(Section):
    """Bytes of shared memory for all jobs of this node."""

    memory_bytes: Annotated[Bytes | None, Auto] = None
    """Pool and rings together; default 25 % of RAM, at most 32Gi."""
    pool_bytes: Annotated[Bytes | None, Auto] = None
    """Chunk pool of a job; auto derives it from the job."""
    segment: Literal["auto", "shm", "memfd"] = "auto"
    """Kind of shared memory: `auto` takes POSIX shared memory, and a sealed memfd where /dev/shm is too small."""
    ring_slots: Annotated[Annotated[int, Field(ge=2, le=SLOTS_MAX)] | None, Auto] = None
    """Slots of a ring; auto derives them from the microbatches in flight."""


class WorkersSection(Section):
    """Processes that load and build."""

    loader_workers: Annotated[Annotated[int, Field(ge=1, le=1024)] | None, Auto] = None
    """Loader workers a job begins with; default: min(4, CPUs this process may use)."""
    loader_workers_max: Annotated[Annotated[int, Field(ge=1, le=1024)] | None, Auto] = None
    """Most that scaling may have; auto: loader_workers where that is given, else one a CPU."""
    scaling: bool = True
    """Partitions of sources follow the mixture and the costs seen; false: they stay where they begin, and
    msdctl scale alone moves them."""
    spares: Annotated[int, Field(ge=0, le=64)] = 1
    """Loader workers of a job that are set up, tokenizer and all, and take the place of one that ends."""
    shadow_bytes: Annotated[Bytes | None, Auto] = None
    """Of the pool, for chunks that the shadow of a critical source has ready; auto: two a loader."""
    late_s: Seconds = 5.0
    """A worker that does nothing for so long, while it has work and ranks wait, is replaced."""
    memory_bytes: Annotated[Bytes | None, Auto] = None
    """Private memory above which a loader worker is replaced, its sources moved to the spare; auto: a
    quarter of the RAM by the workers, 1Gi to 8Gi."""


class PlannerSection(Section):
    """Planning ahead of the ranks."""

    horizon_steps: Annotated[int, Field(ge=1, le=1024)] = 8
    """Steps planned before they are asked for; of jobs with media as many as 256Mi hold, 3 at least."""


class JournalSection(Section):
    """What a job's journal keeps for rewinds and lineage."""

    steps_kept: Annotated[int, Field(ge=256, le=10_000_000)] = STEPS_KEPT
    """Steps of a generation, at least; a step is about 0.8 KB and 110 bytes a source that it drew from."""


class AccessSection(Section):
    """Who may connect, and which folders jobs may read."""

    allow_uids: list[Annotated[int, Field(ge=0)]] = []
    """Users who may connect, besides the daemon's own and root."""
    allow_gids: list[Annotated[int, Field(ge=0)]] = []
    """Groups whose members may connect."""
    roots: list[PathText] = []
    """Folders that jobs may read; none given means whatever the daemon's user may read."""


class DeadlinesSection(Section):
    """How long a wait may last before it ends with an error that names what was waited for."""

    first_batch_s: Seconds = 300.0
    """From the iteration's begin to the first batch of a rank."""
    next_batch_s: Seconds = 120.0
    """From one batch of a rank to the next."""
    join_s: Seconds = 300.0
    """From the first rank that joins to the last."""
    reader_stuck_s: Seconds = 600.0
    """A rank that holds back its ring for so long is cut off."""
    restart_grace_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 60.0
    """How long a job keeps workers and pool for ranks that left in mid-stream; 0 ends it at once."""


class EndpointSection(Section):
    """Where the stores of a scheme answer; credentials by the names of variables alone."""

    endpoint: str = ""
    """URL of a service other than the provider's own."""
    region: str = ""
    """Region of the buckets; default: the provider's way to find it."""
    account: str = ""
    """Azure: the storage account."""
    profile_env: str = ""
    """Variable that names a profile of the AWS credentials file."""
    access_key_env: str = ""
    """Variable that holds the access key's id."""
    secret_key_env: str = ""
    """Variable that holds the secret key."""
    session_token_env: str = ""
    """Variable that holds the session's token."""
    token_env: str = ""
    """Variable that holds a bearer token (gs, hf)."""
    anonymous: bool = False
    """Do not sign requests: public buckets."""


class StoresSection(Section):
    """Shards in object stores and on web servers."""

    cache_dir: PathText | None = None
    """Disk cache of this node; default `store-cache` in the state folder."""
    index_store: PathText | None = None
    """Folder, or s3, gs or az URL, where nodes share the indexes of shards."""
    cache_bytes: Annotated[
        int, BeforeValidator(parse_bytes, json_schema_input_type=int | str), Field(ge=0)
    ] = 0
    """Most bytes of the disk cache; 0 has none."""
    requests_per_host: Annotated[int, Field(ge=1, le=1024)] = 64
    """Requests of this node open to one host."""
    connect_timeout_s: Seconds = 10.0
    """Longest time until a host takes a connection."""
    read_timeout_s: Seconds = 30.0
    """Longest silence inside an answer."""
    deadline_s: Seconds = 300.0
    """Longest time of one read with all its retries."""
    block_bytes: Bytes = 256 * 1024
    """Unit of caching."""
    request_bytes: Bytes = 4 << 20
    """Most bytes of one request."""
    memory_bytes: Bytes = 64 << 20
    """Blocks that a worker keeps in memory."""
    read_ahead_threads: Annotated[int, Field(ge=0, le=64)] = 8
    """Threads of a worker that fetch ahead of its readers; 0 has none."""
    endpoints: dict[str, EndpointSection] = {}
    """By scheme (`s3`, `gs`, `az`, `hf`) or by bucket (`s3://bucket`)."""


class FederationSection(Section):
    """This node in a cluster; without planners it is a node of its own."""

    node: Annotated[str, Field(max_length=128)] = ""
    """Name in the cluster; default: the host's."""
    planners: list[Annotated[str, Field(min_length=1, max_length=256)]] = []
    """Endpoints of all planners, as `tcp://host:7710`."""
    listen: Annotated[str, Field(min_length=1, max_length=256)] = "tcp://127.0.0.1:0"
    """Where the exchange listens for samples' consumers; port 0: any free one."""
    announce: Annotated[str, Field(max_length=256)] = ""
    """Address by which other nodes reach it, its own port where none is named; default: of `listen`."""
    keys_dir: Annotated[str, Field(max_length=4096)] = ""
    """Folder of keys (`msdctl keys`); needed beyond loopback."""
    data_encryption: Literal["curve", "none"] = "curve"
    """Of samples between nodes, where there are keys; `none` on a trusted network alone."""
    loads: bool = True
    """False: other nodes load for the ranks here."""


class DashboardSection(Section):
    """The web page and the metrics of this node, in a process of their own."""

    listen: Annotated[str, Field(max_length=256)] = ""
    """Where it listens, as `127.0.0.1:8710`; empty: nowhere. `msdctl dashboard` needs no key."""
    token_file: Annotated[str, Field(max_length=4096)] = ""
    """File with the token that visitors and Prometheus give; needed beyond loopback."""


class DaemonFile(Section):
    """`daemon.toml`."""

    daemon: DaemonSection = DaemonSection()
    memory: MemorySection = MemorySection()
    workers: WorkersSection = WorkersSection()
    planner: PlannerSection = PlannerSection()
    journal: JournalSection = JournalSection()
    access: AccessSection = AccessSection()
    deadlines: DeadlinesSection = DeadlinesSection()
    stores: StoresSection = StoresSection()
    federation: FederationSection = FederationSection()
    dashboard: DashboardSection = DashboardSection()


def load_daemon_config(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> DaemonConfig:
    """Return the daemon's settings from all layers.

    Args:
        file: `daemon.toml`; None: the one that MSD_CONFIG names, else none.
        environ: Environment; default the process's own.
        flags: `section.key` to value, the strongest layer.

    Raises:
        ConfigError: Faults of all layers at once, each with key path, value and remedy.
    """
    environ = os.environ if environ is None else environ
    file = file or _named_file(environ)
    layers: list[tuple[str, dict[str, Any]]] = []
    if file is not None:
        layers.append((str(file), read_toml(file, "daemon.toml")))
    faults: list[Fault] = []
    layers.append(("", _from_environment(environ, faults)))
    layers.append(("flag", _nest(flags or {})))
    merged, origins = _merge(layers)
    try:
        model = DaemonFile.model_validate(merged)
    except ValidationError as error:
        found = [fault for _, fault in faults_of_validation(error, DaemonFile)]
        raise _config_error([*faults, *found], origins) from error
    config = _fill(model, environ, origins, faults)
    if faults or config is None:
        raise _config_error(faults, origins)
    return config


def daemon_schema() -> dict[str, Any]:
    """Return the JSON Schema of `daemon.toml`."""
    schema = DaemonFile.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "msd daemon",
    } | schema


def _federation(section: FederationSection) -> FederationOptions | None:
    """Return what makes the daemon a node of a cluster, None without planners."""
    if not section.planners:
        return None
    return FederationOptions(
        node=section.node or gethostname(),
        planners=tuple(section.planners),
        listen=section.listen,
        announce=section.announce,
        keys_dir=section.keys_dir,
        is_data_encrypted=section.data_encryption == "curve",
        loads=section.loads,
    )


def _named_file(environ: Mapping[str, str]) -> Path | None:
    name = environ.get(FILE_VARIABLE)
    if not name:
        return None
    if not os.path.isabs(name):  # a daemon that connect() starts runs in another folder
        raise ConfigError(f"{FILE_VARIABLE} is {name!r}, not an absolute path: begin it with /")
    return Path(name)


def _from_environment(environ: Mapping[str, str], faults: list[Fault]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        parts = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if len(parts) != 2 or not all(parts):
            faults.append(
                Fault(name, environ[name], "not MSD__SECTION__KEY", "name a section and a key")
            )
            continue
        tables.setdefault(parts[0], {})[parts[1]] = _value_of_text(environ[name])
    return tables


def _value_of_text(text: str) -> object:
    """Return a TOML value where the text is one (3, true, [1, 2]), else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _nest(flags: Mapping[str, object]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for path, value in flags.items():
        section, _, key = path.partition(".")
        tables.setdefault(section, {})[key] = value
    return tables


def _merge(
    layers: list[tuple[str, dict[str, Any]]],
) -> tuple[dict[str, Any], dict[str, str]]:
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, tables in layers:
        for section, table in tables.items():
            if not isinstance(table, dict):
                merged[section] = table  # the model refuses it with its path
                origins[section] = origin
                continue
            target = merged.setdefault(section, {})
            for key, value in table.items():
                if isinstance(target, dict):
                    target[key] = value
                environment_name = f"{ENVIRONMENT_PREFIX}{section}__{key}".upper()
                origins[f"{section}.{key}"] = origin or environment_name
    return merged, origins


def _config_error(faults: list[Fault], origins: Mapping[str, str]) -> ConfigError:
    lines = []
    for fault in faults:
        origin = origins.get(fault.path)
        lines.append(fault.line() + (f" (from {origin})" if origin else ""))
    count = f"{len(lines)} fault" + ("s" if len(lines) != 1 else "")
    return ConfigError("\n  ".join([f"the daemon's configuration has {count}:", *lines]))


def _fill(
    model: DaemonFile, environ: Mapping[str, str], origins: dict[str, str], faults: list[Fault]
) -> DaemonConfig | None:
    memory = model.memory
    total_bytes = usable_memory_bytes()
    memory_bytes = memory.memory_bytes or min(
        int(total_bytes * MEMORY_SHARE), MEMORY_BYTES_MAX_DEFAULT
    )
    faults += _memory_faults(memory, memory_bytes, total_bytes)
    paths = _paths(model.daemon, environ, faults)
    roots = tuple(Path(root) for root in model.access.roots)
    faults += [
        Fault(f"access.roots[{i}]", str(root), "not an existing folder", "write an absolute path")
        for i, root in enumerate(roots)
        if not (root.is_absolute() and root.is_dir())
    ]
    stores = _store_options(model.stores, paths[1], paths[2], faults)
    dashboard = _dashboard(model.dashboard, faults)
    for section, table in model.model_dump().items():
        for key in table:
            origins.setdefault(f"{section}.{key}", "default")
    if faults or stores is None:
        return None
    loader_workers = model.workers.loader_workers or min(
        LOADER_WORKERS_DEFAULT_MAX, len(os.sched_getaffinity(0))
    )
    given = model.workers.loader_workers
    cpus = max(len(os.sched_getaffinity(0)), loader_workers)
    loader_workers_max = model.workers.loader_workers_max or given or cpus
    return DaemonConfig(
        socket=paths[0],
        runtime_dir=paths[1],
        state_dir=paths[2],
        idle_exit_s=model.daemon.idle_exit_s,
        log_level=model.daemon.log_level,
        log_format=model.daemon.log_format,
        observe=model.daemon.observe,
        memory_bytes=memory_bytes,
        pool_bytes=memory.pool_bytes,
        segment=memory.segment,
        ring_slots=memory.ring_slots,
        loader_workers=min(loader_workers, loader_workers_max),
        loader_workers_min=1 if given is None else min(given, loader_workers_max),
        loader_workers_max=loader_workers_max,
        scaling=model.workers.scaling,
        spares=model.workers.spares,
        shadow_bytes=model.workers.shadow_bytes,
        late_s=model.workers.late_s,
        worker_memory_bytes=model.workers.memory_bytes
        or min(
            max(total_bytes // 4 // loader_workers_max, WORKER_BYTES_RANGE[0]),
            WORKER_BYTES_RANGE[1],
        ),
        horizon_steps=model.planner.horizon_steps,
        journal_steps_kept=model.journal.steps_kept,
        allow_uids=tuple(model.access.allow_uids),
        allow_gids=tuple(model.access.allow_gids),
        roots=roots,
        first_batch_s=model.deadlines.first_batch_s,
        next_batch_s=model.deadlines.next_batch_s,
        join_s=model.deadlines.join_s,
        reader_stuck_s=model.deadlines.reader_stuck_s,
        restart_grace_s=model.deadlines.restart_grace_s,
        stores=stores,
        federation=_federation(model.federation),
        dashboard=dashboard,
        origins=dict(sorted(origins.items())),
    )


def _dashboard(section: DashboardSection, faults: list[Fault]) -> DashboardOptions | None:
    if not section.listen:
        return None
    try:
        host, port = parse_listen(section.listen)
    except ValueError as error:
        faults.append(fault_of_message("dashboard.listen", section.listen, str(error)))
        return None
    if not is_loopback(host) and not section.token_file:
        faults.append(
            Fault("dashboard.listen", section.listen, "is reached from other machines, without a token",
                  "name a file with one in dashboard.token_file, or listen at 127.0.0.1")
        )  # fmt: skip
    if section.token_file and not os.path.isabs(section.token_file):
        faults.append(
            Fault("dashboard.token_file", section.token_file, "not an absolute path",
                  "begin it with /")
        )  # fmt: skip
    return DashboardOptions(host=host, port=port, token_file=section.token_file)


def _store_options(
    section: StoresSection, runtime_dir: Path, state_dir: Path, faults: list[Fault]
) -> StoreOptions | None:
    endpoints = {
        place: EndpointOptions(
            **given.model_dump(exclude={"anonymous"}), is_anonymous=given.anonymous
        )
        for place, given in section.endpoints.items()
    }
    options = StoreOptions(
        cache_dir=section.cache_dir or str(state_dir / "store-cache"),
        index_store=section.index_store or "",
        cache_bytes_max=section.cache_bytes,
        requests_per_host_max=section.requests_per_host,
        connect_timeout_s=section.connect_timeout_s,
        read_timeout_s=section.read_timeout_s,
        deadline_s=section.deadline_s,
        block_bytes=section.block_bytes,
        request_bytes_max=section.request_bytes,
        memory_bytes_max=section.memory_bytes,
        read_ahead_threads=section.read_ahead_threads,
        shared_dir=str(runtime_dir / "stores"),
        endpoints=endpoints,
    )
    try:
        check_store_options(options)
    except ConfigError as error:
        problem, _, remedy = error.message.rpartition(": ")
        faults.append(Fault("stores", None, problem, remedy))
        return None
    return options


def _memory_faults(memory: MemorySection, memory_bytes: int, total_bytes: int) -> list[Fault]:
    faults = []
    if memory_bytes > total_bytes:
        faults.append(
            Fault(
                "memory.memory_bytes",
                memory.memory_bytes,
                f"pool and rings can't fit: {format_bytes(memory_bytes)} of "
                f"{format_bytes(total_bytes)} that this node or cgroup has",
                "lower it or leave it out (25 % of RAM)",
            )
        )
    if memory.pool_bytes is not None and memory.pool_bytes > memory_bytes * POOL_SHARE_MAX:
        faults.append(
            Fault(
                "memory.pool_bytes",
                memory.pool_bytes,
                f"leaves no room for rings: {format_bytes(memory.pool_bytes)} of the budget "
                f"memory.memory_bytes {format_bytes(memory_bytes)}, at most "
                f"{POOL_SHARE_MAX:.0%} may be pool",
                "lower it, raise memory.memory_bytes, or leave it out",
            )
        )
    return faults


def _paths(
    section: DaemonSection, environ: Mapping[str, str], faults: list[Fault]
) -> tuple[Path, Path, Path]:
    uid = os.geteuid()
    runtime_dir = Path(section.runtime_dir or default_runtime_dir(environ, uid))
    if section.socket:
        socket = Path(section.socket)
    elif section.runtime_dir:
        socket = runtime_dir / "msd.sock"
    else:
        socket = default_socket_path(environ, uid)
    state_dir = Path(section.state_dir or default_state_dir(environ, uid))
    try:
        check_socket_path(socket)
    except ConfigError as error:
        problem, _, remedy = error.message.split(": ", 2)[2].rpartition("; ")
        faults.append(Fault("daemon.socket", str(socket), problem, remedy))
    for key, path in (("runtime_dir", runtime_dir), ("state_dir", state_dir)):
        if not path.is_absolute():
            faults.append(
                Fault(f"daemon.{key}", str(path), "not an absolute path", "begin it with /")
            )
    return socket, runtime_dir, state_dir
