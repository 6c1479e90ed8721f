"""The files of launch/ and configs/ that other programs read. No Docker here: they are checked by shape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from sgl_krul.config import Config, load_config
from sgl_krul.config.tree import RedisConfig
from sgl_krul.metrics import Metrics
from sgl_krul.service import Counters

PROJECT = Path(__file__).parents[2]
LAUNCH = PROJECT / "launch"
CONFIGS = PROJECT / "configs"
COMPOSE = LAUNCH / "compose.yaml"
DASHBOARD = CONFIGS / "dashboards" / "sgl-krul.json"
ENVIRON = {"HOME": "/home/ada", "KRUL_PORT": "30001", "KRUL_REDIS_PASSWORD": "pa$s/word"}
GIB = 1 << 30

# Of the Compose specification, what launch/compose.yaml uses: anything else there is a slip until added here.
SERVICE_KEYS = {
    "command",
    "depends_on",
    "environment",
    "healthcheck",
    "image",
    "network_mode",
    "ports",
    "restart",
    "volumes",
}
HEALTHCHECK_KEYS = {"test", "interval", "timeout", "retries"}
DURATION = re.compile(r"([0-9]+[hms])+")


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def read_config(name: str) -> Config:
    return load_config(CONFIGS / name, ENVIRON)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    mapping = read_yaml(COMPOSE)
    assert isinstance(mapping, dict)
    return mapping


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = compose["services"]
    return services


# ---- compose.yaml ----


def test_compose_has_what_is_promised(compose: dict[str, Any], services: dict[str, dict[str, Any]]) -> None:
    assert compose.keys() == {"name", "services", "volumes"}
    assert services.keys() == {"redis", "prometheus", "grafana"}
    text = " ".join(COMPOSE.read_text(encoding="utf-8").replace("#", " ").split())
    assert "validated by schema only" in text
    assert "never been run" in text


def test_services_have_known_keys_of_the_right_types(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service.keys() <= SERVICE_KEYS, name
        assert "image" in service, name
        for key in ("command", "depends_on", "ports", "volumes"):
            values = service.get(key, [])
            assert isinstance(values, list), f"{name}.{key}"
            # A bare no, yes or 6379:22 is a boolean or a number to YAML.
            assert all(isinstance(value, str) for value in values), f"{name}.{key}: {values}"
        environment = service.get("environment", {})
        assert all(isinstance(value, str) for value in environment.values()), f"{name}: {environment}"
        assert service.get("restart", "no") in ("no", "always", "on-failure", "unless-stopped"), name
        assert set(service.get("depends_on", [])) <= services.keys() - {name}, name


def test_images_are_pinned_to_a_release(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert re.fullmatch(r"[a-z0-9/.-]+:v?[0-9]+\.[0-9]+\.[0-9]+", service["image"]), name


def test_healthchecks(services: dict[str, dict[str, Any]]) -> None:
    checks = {name: service["healthcheck"] for name, service in services.items() if "healthcheck" in service}
    assert checks.keys() == {"redis"}
    for check in checks.values():
        assert check.keys() == HEALTHCHECK_KEYS
        assert check["test"][0] in ("CMD", "CMD-SHELL")
        assert DURATION.fullmatch(check["interval"])
        assert DURATION.fullmatch(check["timeout"])
        assert check["retries"] > 0


def test_nothing_listens_beyond_this_machine(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        # The specification refuses published ports in the network of the host.
        assert ("ports" in service) != (service.get("network_mode") == "host"), name
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:[0-9]{2,5}:[0-9]{2,5}", port), name
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_volumes_and_files_exist(compose: dict[str, Any], services: dict[str, dict[str, Any]]) -> None:
    named = set()
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            assert target.startswith("/"), f"{name}: {volume}"
            if source.startswith("."):
                assert (LAUNCH / source).exists(), f"{name}: {volume}"
                assert mode == ["ro"], f"{name}: {volume}"
            else:
                named.add(source)
    assert named == compose["volumes"].keys()


def redis_option(services: dict[str, dict[str, Any]], option: str) -> str:
    command: list[str] = services["redis"]["command"]
    return command[command.index(option) + 1]


def test_redis_is_bounded_above_what_servers_store_there(services: dict[str, dict[str, Any]]) -> None:
    size = redis_option(services, "--maxmemory")
    assert size.endswith("gb")  # 1024s, to Redis
    redis = read_config("redis.yaml").redis
    assert redis is not None
    assert int(size.removesuffix("gb")) * GIB >= 1.25 * redis.capacity_bytes
    assert redis_option(services, "--maxmemory-policy") == "noeviction"
    assert "127.0.0.1:6379:6379" in services["redis"]["ports"]
    assert redis.url.startswith("redis://127.0.0.1:6379")


# ---- Prometheus and Grafana ----


def test_prometheus_reads_its_configuration(services: dict[str, dict[str, Any]]) -> None:
    mounted = dict(volume.split(":")[:2] for volume in services["prometheus"]["volumes"])
    assert f"--config.file={mounted['./prometheus.yml']}" in services["prometheus"]["command"]
    config = read_yaml(LAUNCH / "prometheus.yml")
    assert config.keys() == {"global", "scrape_configs"}
    assert config["global"].keys() == {"scrape_interval", "scrape_timeout"}
    assert all(DURATION.fullmatch(value) for value in config["global"].values())
    (job,) = config["scrape_configs"]
    assert job.keys() == {"job_name", "metrics_path", "static_configs"}
    assert job["metrics_path"] == "/metrics"
    (group,) = job["static_configs"]
    assert group == {"targets": ["127.0.0.1:30000"]}  # where `krul serve` listens


def test_grafana_finds_its_data_source_and_the_dashboard(services: dict[str, dict[str, Any]]) -> None:
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounted["./grafana/datasources"] == "/etc/grafana/provisioning/datasources"
    assert mounted["./grafana/dashboards"] == "/etc/grafana/provisioning/dashboards"

    sources = read_yaml(LAUNCH / "grafana/datasources/prometheus.yaml")
    assert sources["apiVersion"] == 1
    (source,) = sources["datasources"]
    assert source["type"] == "prometheus"
    assert (
        f"--web.listen-address={source['url'].removeprefix('http://')}" in services["prometheus"]["command"]
    )
    interval = read_yaml(LAUNCH / "prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval

    providers = read_yaml(LAUNCH / "grafana/dashboards/sgl-krul.yaml")
    assert providers["apiVersion"] == 1
    (provider,) = providers["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"] == mounted["../configs/dashboards"]
    assert used_sources(read_dashboard()) == {source["uid"]}


def read_dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def used_sources(node: Any) -> set[str]:
    if isinstance(node, dict):
        found = {node["datasource"]["uid"]} if "datasource" in node else set()
        return found.union(*map(used_sources, node.values()))
    return set().union(*map(used_sources, node)) if isinstance(node, list) else set()


def queries() -> Iterator[tuple[str, str]]:
    """Every query of the dashboard, with the title of its panel or the name of its variable."""
    dashboard = read_dashboard()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        yield variable["name"], variable["query"]["query"]


def registered_names() -> set[str]:
    """Every name that a server's /metrics shows."""
    registry = CollectorRegistry()
    metrics = Metrics({"model_name": "tiny"}, registry)
    metrics.set_tier("redis", used_bytes=0, capacity_bytes=1, sessions=0, breaker="closed")
    metrics.set_sessions({"paused": 0})
    metrics.count(asdict(Counters()))
    metrics.restored("redis", 0.1, 1, 1)
    metrics.paused("redis", 0.1, 1)
    return {sample.name for family in registry.collect() for sample in family.samples}


def test_every_metric_of_the_dashboard_is_one_we_register() -> None:
    known = registered_names()
    for title, query in queries():
        names = set(re.findall(r"\b[a-z_]*krul_[a-z_]+", query))
        assert names, f"{title}: {query}"
        assert names <= known, f"{title}: {names - known}"


@pytest.mark.parametrize(
    "metric",
    [
        "krul_sessions",
        "krul_tier_bytes",
        "krul_tier_capacity_bytes",
        "krul_restore_seconds_bucket",
        "krul_hits_total",
        "krul_misses_total",
        "krul_restored_tokens_total",
        "krul_recomputed_tokens_total",
        "krul_corrupt_chunks_total",
        "krul_put_failures_total",
        "krul_breaker_state",
    ],
)
def test_the_dashboard_shows(metric: str) -> None:
    assert any(re.search(rf"\b{metric}\b", query) for _, query in queries())


def test_queries_are_balanced_and_choose_model_and_server() -> None:
    for title, query in queries():
        for opening, closing in ("()", "{}", "[]"):
            assert query.count(opening) == query.count(closing), f"{title}: {query}"
        if not query.startswith("label_values("):
            selectors = re.findall(r"\{([^}]*)\}", query)
            assert selectors, title
            assert set(selectors) == {'model_name=~"$model", instance=~"$instance"'}, f"{title}: {query}"
            # A counter's total says nothing; a gauge has no rate.
            rated = re.findall(r"(?:rate|increase)\((\w+)", query)
            assert all(name.endswith(("_total", "_bucket")) for name in rated), f"{title}: {query}"
            assert len(rated) == len(re.findall(r"krul_\w+(?:_total|_bucket)\b", query)), f"{title}: {query}"


def test_panels_fit_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    dashboard = read_dashboard()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


# ---- configs/ ----


def test_one_redis_for_several_servers() -> None:
    config = read_config("redis.yaml")
    assert config.redis == RedisConfig(url="redis://127.0.0.1:6379/0", capacity_bytes=16 * GIB)
    assert config.placement.replicate == "redis"
    assert config.ssd is not None
    assert config.ssd.path == Path("/var/lib/sgl-krul/sessions-30001")
    assert config.tenants.separator == "/"


def test_cluster() -> None:
    config = read_config("redis-cluster.yaml")
    assert config.redis is not None
    assert config.redis.url.startswith("rediss+cluster://")
    assert config.redis.password == ENVIRON["KRUL_REDIS_PASSWORD"]
    assert config.redis.tls_ca_file == Path("/etc/sgl-krul/redis-ca.pem")
    assert config.redis.ttl_s == config.session.ttl_s == 14 * 86_400
    assert config.placement.replicate == "both"
    assert config.ssd is not None
    assert config.ssd.daily_write_bytes == 2 * 10**12
    assert [rule.tenant for rule in config.tenants.rules] == ["batch"]
    assert ENVIRON["KRUL_REDIS_PASSWORD"] not in repr(config)
