# SPDX-License-Identifier: Apache-2.0
"""The container files and manifests: linted, held against their schemas, and against what jgr itself says.

None of them is run here: there is no container runtime and no cluster.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import jgr
from jgr.cli import cluster, serve
from jgr.config import Config, ConfigError, ServerConfig, override
from jgr.serving.engine import tracing
from jgr.serving.http import listener
from jgr.serving.http.keys import read_keys
from jgr.serving.http.operations import OPERATIONS, open_paths
from tools.dashboards import BOARDS

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = (ROOT / "Dockerfile", ROOT / "Dockerfile.cuda")
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
BIN = Path(sys.executable).parent
KUBERNETES = "1.30"
"""The oldest version that the manifests are held against; the newest is that of kubernetes-validate."""
OPEN = open_paths(ServerConfig())
DRAIN_S = (
    Config().server.drain_timeout_s
    + listener.GIVE_UP_TIMEOUT_S
    + tracing.SEND_TIMEOUT_S
    + serve.JOIN_TIMEOUT_S
)
"""The longest time from SIGTERM to the end."""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def manifest(name: str) -> Any:
    return read(DEPLOY / "kubernetes" / f"{name}.yaml")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    done = subprocess.run([BIN / "hadolint", "--no-color", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_can_find_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python:latest\n")
    command = [BIN / "hadolint", tmp_path / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DL3007" in done.stdout


def test_the_dockerfiles_differ_in_the_packages_alone() -> None:
    cpu, cuda = (path.read_text().split("FROM ", 1)[1] for path in DOCKERFILES)
    toolkit = " NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    assert cuda.replace("runtime-cuda13-py311", "runtime-py311").replace(toolkit, "") == cpu
    assert toolkit in cuda


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_copies_is_sent_to_the_builder(path: Path) -> None:
    allowed = [
        line[1:].rstrip("/") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    copied = list(
        chain(*(line.split()[1:-1] for line in path.read_text().splitlines() if line.startswith("COPY")))
    )
    assert len(copied) == 7
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(name == place or name.startswith(f"{place}/") for place in allowed), name


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_asks_its_server_for_its_health(path: Path) -> None:
    text = path.read_text()
    (command,) = re.findall(r"^HEALTHCHECK .*?CMD (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
    (url,) = re.findall(r"urlopen\('http://127\.0\.0\.1:(.*?)'", json.loads(command)[2])
    assert url == f"{Config().server.port}/health/ready"
    assert "/health/ready" in OPEN
    assert f"EXPOSE {Config().server.port}\n" in text


def test_the_health_check_fails_until_the_server_is_ready() -> None:
    """The command itself, against a server that says 503, then 200, and against none."""
    import http.server
    import threading

    status = 503

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/ready" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    (command,) = re.findall(r"CMD (\[.*?\])$", DOCKERFILES[0].read_text(), re.MULTILINE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    _, flag, code = json.loads(command)
    code = code.replace(":8000/", f":{server.server_port}/")

    def healthy() -> bool:
        done = subprocess.run([sys.executable, flag, code], capture_output=True, check=False)
        return done.returncode == 0

    try:
        assert not healthy()
        status = 200
        assert healthy()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert not healthy()


def test_the_compose_file_fits_its_schema() -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_compose_file_starts_what_it_names() -> None:
    compose = read(DEPLOY / "compose.yaml")
    services = compose["services"]
    assert services.keys() == {"jgr", "prometheus", "grafana", "redis"}
    named = set()
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert set(service.get("depends_on", ())) <= services.keys()
        for waits_for, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            assert "healthcheck" in services[waits_for]
        for volume in service.get("volumes", ()):
            place = volume.split(":")[0]
            if place.startswith("./"):
                assert (DEPLOY / place).exists(), place
            elif not place.startswith("$"):
                named.add(place)
    assert named == compose["volumes"].keys()
    own = services["jgr"]
    assert own["ports"] == [f"127.0.0.1:8000:{Config().server.port}"]
    assert int(own["stop_grace_period"].removesuffix("s")) > DRAIN_S
    assert "features.store=redis://redis:6379/0" in own["command"]


def test_prometheus_and_grafana_find_what_they_read() -> None:
    services = read(DEPLOY / "compose.yaml")["services"]
    (job,) = read(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target == f"jgr:{Config().server.port}"
    assert "/metrics" in [operation.path for operation in OPERATIONS]
    (source,) = read(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert f"127.0.0.1:{port}:{port}" in services[host]["ports"]
    mounts = {}
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            place, inside, *_ = volume.split(":")
            mounts[inside] = place
    (rules,) = read(DEPLOY / "prometheus" / "prometheus.yml")["rule_files"]
    assert (DEPLOY / mounts[f"/etc/prometheus/{rules}"]).samefile(DEPLOY / "prometheus" / "alerts.yml")
    (boards,) = read(DEPLOY / "grafana/provisioning/dashboards/jgr.yaml")["providers"]
    found = sorted(path.name for path in (DEPLOY / mounts[boards["options"]["path"]]).glob("*.json"))
    assert found == sorted(f"{board.name}.json" for board in BOARDS)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", [KUBERNETES, kubernetes_validate.latest_version()])
def test_the_manifests_fit_kubernetes(path: Path, version: str) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_validator_can_fail() -> None:
    broken = manifest("deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_the_probes_ask_what_the_server_answers_without_a_key() -> None:
    (container,) = manifest("deployment")["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": Config().server.port}]
    paths = {}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        paths[name] = container[name]["httpGet"]["path"]
        assert container[name]["httpGet"]["port"] == "http"
        assert paths[name] in OPEN
    # A server that is busy or drains is not ready, and lives.
    assert paths["livenessProbe"] == "/health/live"
    assert paths["readinessProbe"] == paths["startupProbe"] == "/health/ready"


def test_a_rollout_has_the_time_to_compile() -> None:
    spec = manifest("deployment")["spec"]
    probe = spec["template"]["spec"]["containers"][0]["startupProbe"]
    assert spec["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]


def test_a_pod_has_the_time_to_drain() -> None:
    spec = manifest("deployment")["spec"]["template"]["spec"]
    wait, seconds = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert wait == "sleep"
    assert spec["terminationGracePeriodSeconds"] > int(seconds) + DRAIN_S


def test_the_manifests_name_each_other() -> None:
    deployment = manifest("deployment")
    pod, labels = deployment["spec"]["template"]["spec"], deployment["spec"]["template"]["metadata"]["labels"]
    (container,) = pod["containers"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert manifest("service")["spec"]["selector"] == labels
    assert manifest("service")["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert manifest("disruptions")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("disruptions")["spec"]["minAvailable"] < deployment["spec"]["replicas"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes["keys"]["secret"]["secretName"] == manifest("keys")["metadata"]["name"]
    claim = volumes["model"]["persistentVolumeClaim"]["claimName"]
    assert claim == manifest("model")["metadata"]["name"]
    assert container["image"] == f"jgr:{jgr.__version__}"
    user = re.findall(r"--uid (\d+)", DOCKERFILES[0].read_text())
    assert [str(pod["securityContext"]["runAsUser"])] == user


def test_the_keys_of_the_example_start_no_server_until_they_are_replaced(tmp_path: Path) -> None:
    text = manifest("keys")["stringData"]["keys.json"]
    (tmp_path / "keys.json").write_text(text)
    config = ServerConfig(keys=str(tmp_path / "keys.json"))
    with pytest.raises(ConfigError, match="keys"):
        read_keys(config)
    for number in range(3):
        text = text.replace("REPLACE", f"{number:032x}", 1)
    (tmp_path / "keys.json").write_text(text)
    assert [entry.name for entry in read_keys(config)][:3] == ["shop", "prometheus", "ops"]


def pods() -> dict[str, Any]:
    """The pods' templates of the fleet on KubeRay."""
    spec = read(DEPLOY / "fleet" / "rayservice.yaml")["spec"]["rayClusterConfig"]
    workers = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"], **workers}


@pytest.mark.parametrize("version", [KUBERNETES, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("name", pods())
def test_the_pods_of_a_fleet_fit_kubernetes(name: str, version: str) -> None:
    """RayService itself is a resource of KubeRay's, which the validator does not know."""
    template = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": name},
        "template": pods()[name],
    }
    kubernetes_validate.validate(template, version, strict=True)
    broken = {**template, "template": {"spec": {"container": []}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


def test_a_fleet_is_started_alike_by_ray_and_by_kuberay() -> None:
    service = read(DEPLOY / "fleet" / "rayservice.yaml")["spec"]
    config = read(DEPLOY / "fleet" / "fleet.yaml")
    assert yaml.safe_load(service["serveConfigV2"]) == config
    (application,) = config["applications"]
    assert application["import_path"].partition(":")[0] == "jgr.serving.cluster.application"
    assert (ROOT / "jgr" / "serving" / "cluster" / "application.py").exists()
    fleet = override(Config(), *application["args"]["settings"])
    assert service["rayClusterConfig"]["authOptions"] == {"mode": "token"}, "else jgr does not deploy"
    (group,) = service["rayClusterConfig"]["workerGroupSpecs"]
    assert group["replicas"] == fleet.fleet.replicas
    ports, claims = set(), set()
    for pod in pods().values():
        (container,) = pod["spec"]["containers"]
        assert {each["name"]: each["value"] for each in container["env"]} == cluster.ENVIRONMENT
        assert int(container["resources"]["requests"]["cpu"]) >= 1
        # A mounted Secret is root's: a pod that runs as another user reads it by its group.
        mode = next(v["secret"]["defaultMode"] for v in pod["spec"]["volumes"] if "secret" in v)
        assert mode & 0o040 and pod["spec"]["securityContext"]["fsGroup"] > 0
        ports |= {port["containerPort"] for port in container["ports"] if port["name"] == "serve"}
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
        claims |= {v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"][:1]}
        mounted = {m["mountPath"] for m in container["volumeMounts"]}
        assert mounted == {*application["args"]["models"], str(Path(fleet.server.keys).parent)}
    worker = pods()["replicas"]["spec"]
    assert int(worker["containers"][0]["resources"]["requests"]["cpu"]) > fleet.fleet.cpus
    assert worker["terminationGracePeriodSeconds"] > fleet.server.drain_timeout_s + 10
    assert ports == {config["http_options"]["port"]}
    assert claims == {manifest("model")["metadata"]["name"]}


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own schemas
def test_ray_takes_the_fleets_file_and_the_import_path_takes_its_arguments() -> None:
    from ray.serve.schema import ServeDeploySchema

    from jgr.config import UserError
    from jgr.serving.cluster import application

    config = ServeDeploySchema.model_validate(read(DEPLOY / "fleet" / "fleet.yaml"))
    (served,) = config.applications
    module, _, name = str(served.import_path).partition(":")
    assert getattr(application, name) is application.fleet and module == application.__name__
    assert served.args.keys() <= set(application.ARGUMENTS)
    for wrong, said in (
        ({"model": []}, "there is no model"),
        ({"models": "runs/shop"}, "models: must be a list"),
    ):
        with pytest.raises(UserError, match=said):
            application.fleet(wrong)
