"""The Kubernetes files: what kubectl renders is valid, confined, and keeps the daemons' own promises."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.compose import passwords
from deploy.kubernetes.rules import OUTPUT, prometheus_rule
from deploy.simulator.certificates import Authority
from drain.settings import CLOSE_TIMEOUT as DRAIN_CLOSE
from drain.settings import load_settings as load_drain
from migrations.roles import apply_roles, role_name
from relay.settings import CLOSE_TIMEOUT as RELAY_CLOSE
from relay.settings import load_settings as load_relay

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("production", "demo")
VERSIONS = ("1.27", "1.34")
"""The oldest version with unhealthyPodEvictionPolicy, and a new one."""
CUSTOM = {"PodMonitor", "PrometheusRule", "ScaledObject", "TriggerAuthentication"}

Resource = dict[str, Any]

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="KUBERNETES FILES NOT TESTED: kubectl is missing"
)


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Resource]]:
    """What `kubectl kustomize` makes of each overlay; the demo's passwords are made beside a copy of the files."""
    copy = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("secrets"))
    secrets = copy / "overlays" / "demo" / "secrets"
    passwords.write(secrets, passwords.Places())
    Authority(secrets / "simulator", ["simulator"]).auth_key("SIMKEY0001")
    found = {}
    for overlay in OVERLAYS:
        done = subprocess.run(
            ["kubectl", "kustomize", copy / "overlays" / overlay], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        found[overlay] = list(yaml.safe_load_all(done.stdout))
    return found


@pytest.fixture(params=OVERLAYS)
def resources(request: pytest.FixtureRequest, rendered: dict[str, list[Resource]]) -> list[Resource]:
    return rendered[request.param]


def one(resources: list[Resource], kind: str, name: str) -> Resource:
    found = [each for each in resources if each["kind"] == kind and each["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def pods(resources: list[Resource]) -> Iterator[tuple[str, Resource]]:
    """Pod templates by the name of what makes them."""
    for each in resources:
        if each["kind"] in ("Deployment", "Job"):
            yield each["metadata"]["name"], each["spec"]["template"]


def containers(template: Resource) -> list[Resource]:
    return template["spec"].get("initContainers", []) + template["spec"]["containers"]


def environment(resources: list[Resource], name: str) -> dict[str, str]:
    """What the settings of one daemon are told by its ConfigMaps."""
    template = one(resources, "Deployment", name)["spec"]["template"]
    found: dict[str, str] = {}
    for source in template["spec"]["containers"][0]["envFrom"]:
        found |= one(resources, "ConfigMap", source["configMapRef"]["name"])["data"]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_everything_is_valid(resources: list[Resource], version: str) -> None:
    for each in resources:
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, version, strict=True)


def test_every_resource_is_in_the_namespace_of_its_overlay(resources: list[Resource]) -> None:
    namespace = next(each for each in resources if each["kind"] == "Namespace")
    name = namespace["metadata"]["name"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {each["metadata"].get("namespace") for each in resources if each is not namespace} == {name}


def test_every_pod_is_restricted(resources: list[Resource]) -> None:
    """Pod Security Standards, profile restricted; and no token of a service account, no write to the image."""
    for name, template in pods(resources):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "RELAY_PORT of a service named relay looks like a setting"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(template):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context.get("readOnlyRootFilesystem") or name == "rabbitmq"
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert set(container["resources"]["limits"]) == {"memory"}, "a limit of CPU makes slow leases"


@pytest.mark.parametrize("daemon", ["relay", "drain"])
def test_a_rollout_has_no_gap_and_a_nodes_drain_is_not_held_up(
    resources: list[Resource], daemon: str
) -> None:
    deployment = one(resources, "Deployment", daemon)["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    labels = deployment["template"]["metadata"]["labels"]
    for spread in deployment["template"]["spec"]["topologySpreadConstraints"]:
        assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    budget = one(resources, "PodDisruptionBudget", daemon)["spec"]
    assert budget["maxUnavailable"] == 1
    assert "minAvailable" not in budget
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert budget["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("daemon", ["relay", "drain"])
def test_each_probe_asks_its_own_question(resources: list[Resource], daemon: str) -> None:
    container = one(resources, "Deployment", daemon)["spec"]["template"]["spec"]["containers"][0]
    for probe, path in (
        ("startupProbe", "/startupz"),
        ("livenessProbe", "/livez"),
        ("readinessProbe", "/readyz"),
    ):
        assert container[probe]["httpGet"] == {"path": path, "port": "metrics"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600, "a database may be away for longer"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["metrics"] == {"relay": 9464, "drain": 9465}[daemon]


def test_relays_deadline_fits_into_the_grace(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(resources, "relay").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SECRETS_DIR", "/dev/null")
    relay = load_relay().relay  # refuses combinations that break a promise
    spec = one(resources, "Deployment", "relay")["spec"]["template"]["spec"]
    grace = spec["terminationGracePeriodSeconds"]
    assert relay.grace == grace, "the daemon checks against another number than the platform's"
    assert relay.batch_deadline <= relay.stop_deadline
    assert relay.stop_deadline + RELAY_CLOSE < grace


def test_drains_deadlines_fit_into_the_grace_and_that_into_the_lease(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(resources, "drain").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SECRETS_DIR", "/dev/null")
    drain = load_drain().drain
    spec = one(resources, "Deployment", "drain")["spec"]["template"]["spec"]
    grace = spec["terminationGracePeriodSeconds"]
    assert drain.grace == grace, "the daemon checks against another number than the platform's"
    assert drain.drain_deadline + drain.flush_deadline + DRAIN_CLOSE < grace < drain.lease
    assert list(drain.apps) == ["shop"]
    mounts = {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    for app in drain.apps.values():
        assert app.key_file is not None
        assert str(app.key_file.parent) in mounts


def test_every_settings_variable_means_something(resources: list[Resource]) -> None:
    """A misspelt variable in a ConfigMap would only be a warning in a log."""
    documented = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    for daemon in ("relay", "drain"):
        for name in environment(resources, daemon):
            assert f"`{name}`" in documented


def test_no_secret_is_in_the_files_and_each_secret_that_a_pod_wants_is_named(
    rendered: dict[str, list[Resource]],
) -> None:
    text = (SOURCE / "overlays" / "production" / "kustomization.yaml").read_text(encoding="utf-8")
    for overlay, resources in rendered.items():
        made = {each["metadata"]["name"] for each in resources if each["kind"] == "Secret"}
        wanted = {
            volume["secret"]["secretName"]
            for _, template in pods(resources)
            for volume in template["spec"].get("volumes", [])
            if "secret" in volume
        }
        if overlay == "demo":
            assert wanted <= made
        else:
            assert made == set()
            for name in wanted | {"observer"}:
                assert f"create secret generic {name} " in text
    ignored = subprocess.run(
        ["git", "check-ignore", "-q", "deploy/kubernetes/overlays/demo/secrets/owner/database_url"], cwd=ROOT
    )
    assert ignored.returncode == 0


def test_the_network_is_closed_but_for_what_each_needs(resources: list[Resource]) -> None:
    policies = [each["spec"] for each in resources if each["kind"] == "NetworkPolicy"]
    (closed,) = [each for each in policies if each["policyTypes"] == ["Ingress", "Egress"]]
    assert "ingress" not in closed
    chosen = closed["podSelector"]["matchLabels"].items()
    for name, template in pods(resources):
        if name in ("relay", "drain", "migrate"):
            assert chosen <= template["metadata"]["labels"].items()
    scrape = one(resources, "NetworkPolicy", "relay-drain-scrape")["spec"]
    assert scrape["ingress"][0]["ports"] == [{"protocol": "TCP", "port": "metrics"}]
    apns = one(resources, "NetworkPolicy", "drain-apns")["spec"]["egress"][0]
    assert {port["port"] for port in apns["ports"]} == {443, 2197}


def test_the_scrape_finds_the_pods_and_names_the_jobs_as_the_rules_do(
    rendered: dict[str, list[Resource]],
) -> None:
    resources = rendered["production"]
    monitor = one(resources, "PodMonitor", "relay-drain")["spec"]
    (expression,) = monitor["selector"]["matchExpressions"]
    assert expression["key"] == monitor["jobLabel"] == "app.kubernetes.io/name"
    for daemon in ("relay", "drain"):
        template = one(resources, "Deployment", daemon)["spec"]["template"]
        assert template["metadata"]["labels"][expression["key"]] == daemon
        assert daemon in expression["values"]
        names = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= names


def test_the_operators_rules_are_the_tested_rules() -> None:
    assert OUTPUT.read_text(encoding="utf-8") == prometheus_rule(), "run: python -m deploy.kubernetes.rules"


def test_the_autoscaler_owns_the_number_of_drains(rendered: dict[str, list[Resource]]) -> None:
    resources = rendered["production"]
    scaled = one(resources, "ScaledObject", "drain")["spec"]
    assert scaled["scaleTargetRef"] == {"name": "drain"}
    assert "replicas" not in one(resources, "Deployment", "drain")["spec"]
    assert one(resources, "Deployment", "relay")["spec"]["replicas"] == 2
    assert 2 <= scaled["minReplicaCount"] <= scaled["fallback"]["replicas"] <= scaled["maxReplicaCount"]
    authentication = scaled["triggers"][0]["authenticationRef"]["name"]
    (secret,) = one(resources, "TriggerAuthentication", authentication)["spec"]["secretTargetRef"]
    assert secret == {"parameter": "connection", "name": "observer", "key": "database_url"}


@pytest.mark.xdist_group("roles")
async def test_the_autoscaler_counts_what_is_claimable_now_as_the_observer(
    rendered: dict[str, list[Resource]], database: Any
) -> None:
    """Leased rows and rows that wait for their time do not count; one number, also of an empty ledger."""
    query = one(rendered["production"], "ScaledObject", "drain")["spec"]["triggers"][0]["metadata"]["query"]
    apply_roles(database.url, "relay_drain")
    async with database.session() as connection:
        await connection.execute(f'SET ROLE "{role_name("relay_drain", "observer")}"')
        assert [tuple(row) for row in await connection.fetch(query)] == [(0,)]
    await database.enqueue_deliveries(30)
    await database.enqueue_deliveries(12, app="other")
    await database.enqueue_deliveries(5, more="not_before => now() + interval '1 hour'")
    await database.fetch(
        """UPDATE {schema}.notification_deliveries
           SET status = 'claimed', next_attempt_at = now() + interval '2 minutes' WHERE id % 10 = 0 AND id <= 30"""
    )
    async with database.session() as connection:
        await connection.execute(f'SET ROLE "{role_name("relay_drain", "observer")}"')
        assert [tuple(row) for row in await connection.fetch(query)] == [(39,)]


async def test_the_autoscalers_query_costs_the_same_whatever_the_history(
    rendered: dict[str, list[Resource]], database: Any
) -> None:
    query = one(rendered["production"], "ScaledObject", "drain")["spec"]["triggers"][0]["metadata"]["query"]
    await database.enqueue_deliveries(20_000)
    await database.fetch(
        "UPDATE {schema}.notification_deliveries SET status = 'sent', finished_at = now() WHERE id > 200"
    )
    database.run("VACUUM ANALYZE relay_drain.notification_deliveries")
    async with database.session() as connection:
        plan = json.loads(await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query}"))[0]
    assert plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] < 100
    assert "Seq Scan" not in json.dumps(plan)
