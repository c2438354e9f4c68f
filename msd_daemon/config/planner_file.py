"""Model of `planner.toml`, the file of a cluster's planner; flags are the stronger layer."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from federation.planner_config import PlannerConfig
from federation.store.etcd_client import EtcdTls
from federation.store.open_store import LEASE_RANGE_S, parse_store_url
from federation.store.plan_store import LEASE_S
from msd_client.contract.errors import ConfigError
from msd_client.contract.paths import default_state_dir
from msd_daemon.config.faults import Fault, faults_of_validation
from msd_daemon.config.toml_file import read_toml

FILE_VARIABLE = "MSD_PLANNER_CONFIG"
"""Names `planner.toml` where no flag does."""
LISTEN_DEFAULT = "tcp://127.0.0.1:7533"

Text = Annotated[str, Field(min_length=1, max_length=4096)]


class PlannerFile(BaseModel):
    """`planner.toml`: no unknown key, no silent conversion."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )

    name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Told to nodes and other planners; default: the host's name."""
    listen: Text = LISTEN_DEFAULT
    """Endpoint that it binds; beyond this machine keys are needed."""
    announce: Text | None = None
    """Endpoint at which nodes reach it, where that is not the one it binds."""
    store: Text | None = None
    """`sqlite:///path` or `etcd://host1:2379,host2,host3/prefix`; default `plan.db` in the state folder."""
    state_dir: Text | None = None
    """Local folder; default `$XDG_STATE_HOME/msd/planner`, else `~/.local/state/msd/planner`."""
    keys_dir: Text | None = None
    """Folder of CURVE keys."""
    lease_s: Annotated[float, Field(ge=LEASE_RANGE_S[0], le=LEASE_RANGE_S[1])] = LEASE_S
    """So long a leader that says nothing is waited for; all planners of a cluster write the same."""
    store_ca_file: Text | None = None
    """For etcds://: authority of etcd's certificates; default: the system's."""
    store_cert_file: Text | None = None
    """For etcds://: this planner's certificate."""
    store_key_file: Text | None = None
    """For etcds://: the key of that certificate."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged, to standard error."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object a line."""


def load_planner_config(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> PlannerConfig:
    """Return the planner's settings.

    Args:
        file: `planner.toml`; None: the one that MSD_PLANNER_CONFIG names, else none.
        environ: Environment; default the process's own.
        flags: By key, stronger than the file.

    Raises:
        ConfigError: All faults at once, each with key, value and remedy.
    """
    environ = os.environ if environ is None else environ
    if file is None and environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE])
    merged = ({} if file is None else read_toml(file, "planner.toml")) | dict(flags or {})
    try:
        model = PlannerFile.model_validate(merged)
    except ValidationError as error:
        faults = [fault for _, fault in faults_of_validation(error, PlannerFile)]
        raise _config_error(faults) from error
    return _filled(model, environ)


def planner_schema() -> dict[str, Any]:
    """Return the JSON Schema of `planner.toml`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "msd planner",
    } | PlannerFile.model_json_schema()


def _filled(model: PlannerFile, environ: Mapping[str, str]) -> PlannerConfig:
    faults: list[Fault] = []
    state_dir = Path(model.state_dir or default_state_dir(environ, os.geteuid()) / "planner")
    keys_dir = None if model.keys_dir is None else Path(model.keys_dir)
    for key, path in (("state_dir", state_dir), ("keys_dir", keys_dir)):
        if path is not None and not path.is_absolute():
            faults.append(Fault(key, str(path), "not an absolute path", "begin it with /"))
    store = model.store or f"sqlite://{state_dir.absolute()}/plan.db"
    try:
        is_tls = parse_store_url(store).is_tls
    except ConfigError as error:
        problem, _, remedy = error.message.rpartition(": ")
        faults.append(Fault("store", store, problem, remedy))
        is_tls = True
    names = {
        "store_ca_file": model.store_ca_file,
        "store_cert_file": model.store_cert_file,
        "store_key_file": model.store_key_file,
    }
    for key, value in names.items():
        if value is not None and not is_tls:
            faults.append(Fault(key, value, "is for TLS alone", "write the store as etcds://"))
        elif value is not None and not Path(value).is_file():
            faults.append(Fault(key, value, "not an existing file", "write its path"))
    if (model.store_cert_file is None) != (model.store_key_file is None):
        faults.append(
            Fault("store_cert_file", model.store_cert_file, "comes without its pair",
                  "write store_cert_file and store_key_file, or neither")
        )  # fmt: skip
    if faults:
        raise _config_error(faults)
    return PlannerConfig(
        name=model.name or socket.gethostname(),
        listen=model.listen,
        store=store,
        state_dir=state_dir,
        announce=model.announce,
        keys_dir=keys_dir,
        lease_s=model.lease_s,
        tls=EtcdTls(*names.values()) if is_tls else None,
        log_level=model.log_level,
        log_format=model.log_format,
    )


def _config_error(faults: list[Fault]) -> ConfigError:
    count = f"{len(faults)} fault" + ("s" if len(faults) != 1 else "")
    lines = [f"the planner's configuration has {count}:", *(fault.line() for fault in faults)]
    return ConfigError("\n  ".join(lines))
