"""Router, scheduler and gpuworker, started from the rendered pods, serve with TLS and tokens."""

import pytest

from tests.headrace.waiting import eventually
from tests.helm.cases import CPU, SUPPLIED, TRIGGER
from tests.helm.rendered import PODS, Rendered

pytestmark = [pytest.mark.system, pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture
async def cluster(chart, tmp_path):
    objects = chart.render(
        {
            "gpuworker": {
                **CPU,
                # Of two workers that there may be, one is there.
                "autoscaling": {"type": "keda", "maxReplicas": 2, "triggers": [TRIGGER]},
                "config": {
                    "gpuworker": {"num_threads": 1, "max_num_seqs": 4, "max_model_len": 256},
                    "kv_cache": {"num_kv_blocks": 64},
                },
            },
            "tls": SUPPLIED,
            "store": {"type": "none"},
        }
    )
    rendered = Rendered(objects, tmp_path)
    yield rendered
    await rendered.close()


async def test_the_rendered_pods_generate_and_stop(cluster):
    # Routers and schedulers are up before what they call is there, as in a cluster.
    for service in PODS:
        await cluster.start(service)
    for service in PODS:
        await eventually(lambda service=service: cluster.probe(service), timeout_s=240)
    # The pod is started again until the scheduler has met its worker (restartPolicy: OnFailure).
    outputs = []

    async def has_generated() -> bool:
        code, output = await cluster.helm_test()
        outputs.append(output)
        return code == 0

    await eventually(has_generated, timeout_s=240)
    assert outputs[-1].strip()
    for service in PODS:
        assert await cluster.stop(service) == 0
    assert not await cluster.probe("router")
