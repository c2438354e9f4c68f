"""The manifests fit together, and what they run is what this version takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from federation.addresses import parse_endpoint
from msd_client.contract.paths import default_socket_path
from msd_client.msdctl.verbs import VerbGroup
from msd_daemon import app, planner_app
from msd_daemon.config.daemon_file import load_daemon_config
from msd_daemon.config.planner_file import load_planner_config
from msd_daemon.config.units import parse_bytes
from tests.support.sources import ROOT

FOLDER = ROOT / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
NODE = "gpu-node-7.example"


def documents(name: str = "*.yaml") -> list[dict[str, Any]]:
    found = []
    for path in sorted(FOLDER.glob(name)):
        found += list(yaml.safe_load_all(path.read_text()))
    return found


def pod_of(document: dict[str, Any]) -> dict[str, Any] | None:
    spec = document["spec"]
    found: dict[str, Any] | None = spec if document["kind"] == "Pod" else spec.get("template")
    return found if found is None or document["kind"] == "Pod" else dict(found["spec"])


def container(kind: str) -> dict[str, Any]:
    (document,) = [one for one in documents() if one["kind"] == kind]
    pod = pod_of(document)
    assert pod is not None
    return dict(pod["containers"][0])


def environ_of(given: dict[str, Any]) -> dict[str, str]:
    """Return the environment as the kubelet would make it."""
    found: dict[str, str] = {}
    for entry in given.get("env", []):
        if "valueFrom" in entry:
            assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
            found[entry["name"]] = NODE
        else:
            found[entry["name"]] = re.sub(
                r"\$\((\w+)\)", lambda match: found[match[1]], entry["value"]
            )
    return found


def strings(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def test_there_is_a_planner_a_daemon_a_node_and_a_trainer() -> None:
    kinds = [document["kind"] for document in documents()]
    assert sorted(kinds) == ["DaemonSet", "Pod", "Service", "StatefulSet"]
    assert all(document["apiVersion"] in ("v1", "apps/v1") for document in documents())


@pytest.mark.parametrize("document", documents(), ids=lambda one: one["kind"])
def test_every_mount_has_its_volume_and_every_selector_its_label(document: dict[str, Any]) -> None:
    pod = pod_of(document)
    if pod is None:
        assert document["spec"]["selector"] == {"app": "msd-planner"}
        return
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {one["metadata"]["name"] for one in document["spec"].get("volumeClaimTemplates", [])}
    mounted = {
        mount["name"]
        for one in (*pod.get("initContainers", []), *pod["containers"])
        for mount in one["volumeMounts"]
    }
    assert mounted == volumes
    if document["kind"] != "Pod":
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert document["spec"]["selector"]["matchLabels"] == labels
    # Nothing of the host's but the folder of the socket.
    assert not {"hostIPC", "hostPID", "hostNetwork"} & set(pod)
    assert {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume} <= {
        "/run/msd"
    }


def test_the_daemon_takes_its_arguments_and_settings(tmp_path: Path) -> None:
    given = container("DaemonSet")
    options = app._parse(given["args"])
    config = load_daemon_config(None, environ_of(given) | {"HOME": "/h"}, app._flags(options))
    assert str(config.socket) == "/run/msd/msd.sock"
    assert config.federation is not None
    assert config.federation.node == NODE
    (planner,) = config.federation.planners
    name, _, endpoint = planner.partition("@")
    service = next(one for one in documents() if one["kind"] == "Service")
    place = parse_endpoint(endpoint, "planners")
    assert place.host == f"{service['metadata']['name']}.{service['metadata']['namespace']}"
    assert place.port == service["spec"]["ports"][0]["port"]
    assert f"--name={name}" in container("StatefulSet")["args"]
    listen = parse_endpoint(config.federation.listen, "listen")
    assert listen.port == given["ports"][0]["containerPort"]
    keys = next(mount for mount in given["volumeMounts"] if mount["name"] == "keys")
    assert config.federation.keys_dir == keys["mountPath"]
    limit = parse_bytes(given["resources"]["limits"]["memory"])
    assert isinstance(limit, int)
    assert config.memory_bytes <= limit / 2, "workers need memory, too"


def test_the_planner_takes_its_arguments() -> None:
    given = container("StatefulSet")
    options = vars(planner_app._parse(given["args"]))
    for name in ("config", "endpoint_file", "end_with_stdin"):
        del options[name]
    flags = {key: value for key, value in options.items() if value is not None}
    config = load_planner_config(None, {"HOME": "/h"}, flags)
    assert config.announce is not None
    port = parse_endpoint(config.listen, "listen").port
    assert port == parse_endpoint(config.announce, "announce").port
    assert port == given["ports"][0]["containerPort"]


def test_probes_and_hooks_call_verbs_that_there_are() -> None:
    given = container("DaemonSet")
    probe = given["readinessProbe"]["exec"]["command"]
    hook = given["lifecycle"]["preStop"]["exec"]["command"][2].replace('"$NODE_NAME"', NODE).split()
    for command in (probe, hook):
        assert command[0] == "msdctl"
        done = CliRunner().invoke(VerbGroup(name="msdctl"), [*command[1:], "--help"])
        assert done.exit_code == 0, done.output


def test_the_trainer_finds_the_daemon_and_is_let_in() -> None:
    (trainer,) = documents("trainer.yaml")
    (one,) = trainer["spec"]["containers"]
    daemon = next(one for one in documents() if one["kind"] == "DaemonSet")
    pod = pod_of(daemon)
    assert pod is not None
    assert trainer["spec"]["securityContext"]["runAsUser"] == pod["securityContext"]["runAsUser"]
    assert str(default_socket_path(environ_of(one), 1000)) == "/run/msd/msd.sock"
    assert one["volumeMounts"][0]["mountPath"] == "/run/msd"


def test_all_parts_are_of_one_image() -> None:
    images = {text for text in strings(documents("msd.yaml")) if re.fullmatch(r"msd:\S+", text)}
    assert len(images) == 1
