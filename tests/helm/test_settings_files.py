"""The settings files that the chart writes are read by the services themselves."""

import pytest

from gpuworker.config import KvCacheSettings, WorkerSettings
from headrace.service.channels import ChannelConfig
from headrace.service.config import load
from headrace.service.discovery import DiscoveryConfig, OwnershipConfig
from headrace.service.process import ProcessConfig
from headrace.service.serving import ServingConfig
from helm.settings import SET_BY_THE_CHART
from router.config import PublicServing, RouterConfig, StreamsConfig, TenantConfig, TenantsConfig
from scheduler.config import PoolSettings, SchedulerSettings
from tests.helm.cases import CERT_MANAGER, CPU

ROUTER = {
    "router": RouterConfig,
    "streams": StreamsConfig,
    "tenant": TenantConfig,
    "tenants": TenantsConfig,
    "discovery": DiscoveryConfig,
    "serving": PublicServing,
    "channel": ChannelConfig,
    "process": ProcessConfig,
}
SCHEDULER = {
    "scheduler": SchedulerSettings,
    "pool": PoolSettings,
    "discovery": DiscoveryConfig,
    "ownership": OwnershipConfig,
    "serving": ServingConfig,
    "channel": ChannelConfig,
    "process": ProcessConfig,
}
GPUWORKER = {
    "gpuworker": WorkerSettings,
    "kv_cache": KvCacheSettings,
    "serving": ServingConfig,
    "process": ProcessConfig,
}


@pytest.fixture
def read(tmp_path):
    """Reads a file with the structs of a service."""

    def read(text, structs):
        file = tmp_path / "settings.toml"
        file.write_text(text)
        return {name: load(struct, section=name, file=file) for name, struct in structs.items()}

    return read


def address(pool, number):
    name = f"hr-headrace-gpuworker-{pool}"
    return f"{name}-{number}.{name}.space.svc.cluster.local:8702"


def workers(objects, number, read):
    file = objects.file("scheduler", f"hr-headrace-scheduler-{number}.toml")
    return set(read(file, SCHEDULER)["scheduler"].worker)


@pytest.mark.parametrize(("is_tls", "address"), [(False, "ip"), (True, "name")])
def test_with_discovery_by_labels_no_file_has_a_list(chart, read, is_tls, address):
    values = {"discovery": {"type": "kubernetes"}, "tls": CERT_MANAGER if is_tls else {}}
    objects = chart.render(values)
    router = read(objects.file("router", "router.toml"), ROUTER)
    scheduler = read(objects.file("scheduler", "hr-headrace-scheduler-0.toml"), SCHEDULER)
    for settings in (router, scheduler):
        assert settings["discovery"] == DiscoveryConfig("kubernetes", address=address)
    assert not router["router"].scheduler
    assert "component=scheduler" in router["router"].scheduler_selector
    assert not scheduler["scheduler"].worker
    assert "component=gpuworker" in scheduler["scheduler"].worker_selector


def test_each_service_reads_its_file(chart, read):
    objects = chart.render()
    router = read(objects.file("router", "router.toml"), ROUTER)
    assert router["router"].model_name == "smollm2-135m-instruct"
    assert router["router"].scheduler == (
        "hr-headrace-scheduler-0.hr-headrace-scheduler.space.svc.cluster.local:8701",
    )
    assert router["serving"].auth_token_file == "/etc/headrace/tokens/router-token"
    assert router["channel"].auth_token_file == "/etc/headrace/tokens/scheduler-token"
    assert workers(objects, 0, read) == {address("default", 0)}
    worker = read(objects.file("gpuworker-default", "gpuworker.toml"), GPUWORKER)
    assert worker["gpuworker"].device == "cuda"
    assert worker["serving"].listen == "0.0.0.0:8702"


def test_a_worker_without_a_gpu_says_so(chart, read):
    objects = chart.render({"gpuworker": CPU})
    worker = read(objects.file("gpuworker-default", "gpuworker.toml"), GPUWORKER)
    assert worker["gpuworker"].device == "cpu"


def test_services_speak_tls_to_each_other_and_show_certificates(chart, read):
    objects = chart.render({"tls": CERT_MANAGER})
    router = read(objects.file("router", "router.toml"), ROUTER)
    worker = read(objects.file("gpuworker-default", "gpuworker.toml"), GPUWORKER)
    assert router["serving"].tls_cert_file == "/etc/headrace/tls/tls.crt"
    assert not router["serving"].tls_client_ca_file
    assert router["channel"].tls_ca_file == "/etc/headrace/tls/ca.crt"
    assert router["channel"].tls_key_file == "/etc/headrace/tls/tls.key"
    assert worker["serving"].tls_client_ca_file == "/etc/headrace/tls/ca.crt"


def test_settings_keep_their_types(chart, read):
    """Helm holds numbers as floats: 268435456 must not become 2.68435456e+08."""
    objects = chart.render(
        {
            "router": {
                "config": {
                    "router": {"max_prompt_bytes": 8388608, "priority_aging_s": 0.5},
                    "tenants": {"named": {"gold tier": {"weight": 3, "requests_per_minute": 90}}},
                    "channel": {"max_message_bytes": 268435456},
                }
            },
            "scheduler": {
                "config": {
                    "scheduler": {"watermark": 0.00001, "enable_prefix_caching": False},
                    "pool": {"max_num_losses": 0},
                }
            },
            "gpuworker": {
                "config": {
                    "gpuworker": {"cuda_graph_sizes": [1, 2], "max_model_len": None},
                    "kv_cache": {"kv_cache_memory_bytes": 68719476736},
                }
            },
        }
    )
    router = read(objects.file("router", "router.toml"), ROUTER)
    assert router["router"].max_prompt_bytes == 8388608
    assert router["router"].priority_aging_s == 0.5
    assert router["tenants"].named["gold tier"].weight == 3
    assert router["channel"].max_message_bytes == 268435456
    scheduler = read(objects.file("scheduler", "hr-headrace-scheduler-0.toml"), SCHEDULER)
    assert scheduler["scheduler"].watermark == 0.00001
    assert not scheduler["scheduler"].enable_prefix_caching
    assert scheduler["pool"].max_num_losses == 0
    worker = read(objects.file("gpuworker-default", "gpuworker.toml"), GPUWORKER)
    assert worker["gpuworker"].cuda_graph_sizes == (1, 2)
    assert worker["gpuworker"].max_model_len is None
    assert worker["kv_cache"].kv_cache_memory_bytes == 68719476736


def test_text_is_quoted(chart, read):
    name = 'a"b\\c<d>é\n[router]'
    objects = chart.render({"model": {"servedName": name}})
    assert read(objects.file("router", "router.toml"), ROUTER)["router"].model_name == name


@pytest.mark.parametrize(
    ("model", "served"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct"),
        ("/var/cache/headrace/my.model.v1.gguf", "my.model.v1"),
    ],
)
def test_a_model_with_dots_in_its_name_is_served_by_its_last_part(chart, read, model, served):
    objects = chart.render({"model": {"name": model}})
    assert read(objects.file("router", "router.toml"), ROUTER)["router"].model_name == served
    worker = read(objects.file("gpuworker-default", "gpuworker.toml"), GPUWORKER)["gpuworker"]
    assert (worker.model, worker.model_name) == (model, served)


def test_a_pool_has_its_own_values_and_those_of_gpuworker(chart, read):
    objects = chart.render(
        {
            "gpuworker": {
                "dtype": "float16",
                "config": {"gpuworker": {"max_num_seqs": 8}, "kv_cache": {"block_size": 32}},
            },
            "pools": [
                {"name": "a"},
                {"name": "b", "gpu": {"count": 0}, "config": {"gpuworker": {"max_num_seqs": 4}}},
            ],
        }
    )
    a, b = (
        read(objects.file(f"gpuworker-{pool}", "gpuworker.toml"), GPUWORKER) for pool in ("a", "b")
    )
    assert (a["gpuworker"].max_num_seqs, b["gpuworker"].max_num_seqs) == (8, 4)
    assert a["kv_cache"].block_size == b["kv_cache"].block_size == 32
    assert (a["gpuworker"].device, b["gpuworker"].device) == ("cuda", "cpu")
    assert a["gpuworker"].dtype == b["gpuworker"].dtype == "float16"


def test_each_worker_belongs_to_one_scheduler(chart, read):
    pools = [{"name": "a", "replicas": 3}, {"name": "b", "replicas": 2}, {"name": "c"}]
    objects = chart.render({"scheduler": {"replicas": 2}, "pools": pools})
    first, second = (workers(objects, number, read) for number in (0, 1))
    assert first == {address("a", 0), address("a", 2), address("b", 1), address("c", 0)}
    assert second == {address("a", 1), address("b", 0)}
    router = read(objects.file("router", "router.toml"), ROUTER)["router"]
    assert len(router.scheduler) == 2


def test_a_pool_that_grows_moves_no_worker(chart, read):
    def owned(replicas):
        pools = [{"name": "a", "replicas": replicas}, {"name": "b", "replicas": 2}]
        objects = chart.render({"scheduler": {"replicas": 2}, "pools": pools})
        return [workers(objects, number, read) for number in (0, 1)]

    assert all(before < after for before, after in zip(owned(2), owned(4), strict=True))


def test_workers_can_be_added_without_a_restart_of_schedulers(chart, read):
    def rendered(replicas):
        values = {"gpuworker": {"replicas": replicas, "maxReplicas": 4}}
        scheduler = chart.render(values).one("StatefulSet", "scheduler")
        return scheduler, workers(chart.render(values), 0, read)

    assert rendered(1) == rendered(4)
    assert rendered(1)[1] == {address("default", number) for number in range(4)}
    assert len(rendered(5)[1]) == 5


def test_a_scheduler_knows_the_workers_that_autoscaling_may_add(chart, read):
    trigger = {"type": "cpu", "metadata": {"value": "60"}}
    scaling = {"type": "keda", "minReplicas": 0, "maxReplicas": 5, "triggers": [trigger]}
    objects = chart.render({"gpuworker": {"autoscaling": scaling}})
    assert workers(objects, 0, read) == {address("default", number) for number in range(5)}


def test_the_chart_sets_settings_that_exist():
    structs = {**ROUTER, **SCHEDULER, **GPUWORKER}
    for section, names in SET_BY_THE_CHART.items():
        assert names <= set(structs[section].__struct_fields__), section
