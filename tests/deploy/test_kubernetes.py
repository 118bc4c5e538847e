"""The manifests are valid for Kubernetes, give kvferryd few rights, and fit its settings."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml

import kvferry
from kvferry_server.node.config import ENV_PREFIX, NodeConfig
from kvferry_server.node.limits import DRAIN_STREAMS, STOP_MARGIN
from kvferry_server.node.loading import load
from tests.support.repository import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.30", kubernetes_validate.latest_version())


def documents() -> dict[str, Any]:
    """By kind."""
    found = {}
    for path in FOLDER.glob("*.yaml"):
        if path.name != "kustomization.yaml":
            document = yaml.safe_load(path.read_text())
            found[document["kind"]] = document
    return found


DOCUMENTS = documents()
SCALED = yaml.safe_load((FOLDER / "keda" / "decode.yaml").read_text())
POD = DOCUMENTS["DaemonSet"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", sorted(DOCUMENTS))
def test_manifest_is_valid(kind: str, version: str) -> None:
    kubernetes_validate.validate(DOCUMENTS[kind], version, strict=True)
    wrong = {**DOCUMENTS[kind], "spek": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_autoscaler_that_keda_makes_of_the_example_is_valid(version: str) -> None:
    """KEDA's own kind is not Kubernetes': its fields were compared with KEDA's definition by hand."""
    spec, targets = SCALED["spec"], {"Value": "value", "AverageValue": "averageValue"}
    autoscaler: dict[str, Any] = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": SCALED["metadata"],
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", **spec["scaleTargetRef"]},
            "minReplicas": spec["minReplicaCount"],
            "maxReplicas": spec["maxReplicaCount"],
            **spec["advanced"]["horizontalPodAutoscalerConfig"],
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": trigger["name"]},
                        "target": {
                            "type": trigger["metricType"],
                            targets[trigger["metricType"]]: trigger["metadata"]["threshold"],
                        },
                    },
                }
                for trigger in spec["triggers"]
            ],
        },
    }
    kubernetes_validate.validate(autoscaler, version, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_manifests_are_combined_by_kubectl() -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    made = [document for document in yaml.safe_load_all(done) if document]
    assert {document["kind"] for document in made} == set(DOCUMENTS)
    (daemons,) = (document for document in made if document["kind"] == "DaemonSet")
    pod = daemons["spec"]["template"]["spec"]
    images = {container["image"] for container in (*pod["containers"], *pod["initContainers"])}
    assert images == {f"registry.example/kvferry:{kvferry.__version__}"}


def test_environment_has_only_settings_of_kvferryd(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {each["name"]: each.get("value", "node-7") for each in CONTAINER["env"]}
    settings = {name: value for name, value in env.items() if name.startswith(ENV_PREFIX)}
    for name, value in settings.items():
        assert name.removeprefix(ENV_PREFIX).lower() in NodeConfig.model_fields
        monkeypatch.setenv(name, value.replace("$(NODE_NAME)", env["NODE_NAME"]))
    config = load({}).config
    assert config.advertise == "node-7"
    # Kubernetes kills it after the grace.
    assert POD["spec"]["terminationGracePeriodSeconds"] > config.drain + DRAIN_STREAMS + STOP_MARGIN
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert config.listen_address is not None
    assert ports["grpc"] == config.listen_address.port
    assert str(ports["admin"]) == POD["metadata"]["annotations"]["prometheus.io/port"]
    mounted = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    for path in (config.unix_path, config.tls_cert, config.tls_key, config.tls_ca):
        assert str(path and path.parent) in mounted


def test_ports_are_named_by_existing_names() -> None:
    names = {port["name"] for port in CONTAINER["ports"]}
    probes = [CONTAINER[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")]
    rules = DOCUMENTS["NetworkPolicy"]["spec"]["ingress"]
    assert {*probes, *(port["port"] for rule in rules for port in rule["ports"])} == names


def test_kvferryd_has_no_rights() -> None:
    of_pod, own = POD["spec"]["securityContext"], CONTAINER["securityContext"]
    assert of_pod["runAsNonRoot"]
    assert of_pod["runAsUser"] > 0
    assert own == {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert POD["spec"]["automountServiceAccountToken"] is False
    # The container that runs as root runs once, and only prepares the directory.
    (prepares,) = POD["spec"]["initContainers"]
    assert prepares["command"][0] == "install"
    assert prepares["command"][-1] == "/run/kvferry"
    assert str(of_pod["runAsUser"]) in prepares["command"]


def test_servers_restart_one_after_the_other() -> None:
    assert DOCUMENTS["DaemonSet"]["spec"]["updateStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 1},
    }
