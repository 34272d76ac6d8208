"""What pools measure over several routers: queues, KV use, roles and recent latencies."""

import contextlib
import socket

import pytest
import trustme

from headrace.durations import RecentDurations, percentile_s
from headrace.kubernetes.sizing import Measured
from headrace.pool_load import PoolLoad, measured
from headrace.service.channels import ChannelConfig
from headrace.service.serving import ServingConfig
from headrace.types import DurationCounts, PoolInfo, WorkerStatus
from headrace.v1 import common_pb2
from tests.headrace import fake_inference

TTFT = "gen_ai.server.time_to_first_token"


def worker(name: str, state: str = "ready", num_free: int = 50, role: str = "mixed"):
    return WorkerStatus(
        worker_id=name, model="m", role=role, state=state, device="", dtype="", num_running=0,
        num_waiting=0, max_num_seqs=8, num_free_kv_blocks=num_free, num_kv_blocks=100, block_size=8,
        max_model_len=64, max_num_batched_tokens=64,
    )  # fmt: skip


def router(*workers: WorkerStatus, num_queued: int) -> PoolInfo:
    return PoolInfo(workers=workers, num_queued=num_queued, num_in_flight=0, num_paused=0)


def test_a_pool_measures_its_own_pods_and_its_share_of_all_queues():
    workers = (
        *(worker("p-0", num_free=20), worker("p-1"), worker("p-2", "starting", 100)),
        *(worker("p-x-0", num_free=90), worker("other")),
    )
    infos = [router(*workers, num_queued=5), router(num_queued=4)]
    found = measured(infos, ["p", "p-x"], RecentDurations(60))
    assert found["p"] == Measured(num_ready=2, kv_use=0.65, num_queued=6)
    assert found["p-x"].num_queued == 3


def test_workers_of_a_role_are_those_that_are_ready():
    workers = (
        worker("p-0", role="decode"),
        worker("p-1", "draining", role="decode"),
        worker("p-2", role="prefill"),
    )
    (found,) = measured([router(*workers, num_queued=0)], ["p"], RecentDurations(60)).values()
    assert (found.prefill, found.decode) == (("p-2",), ("p-0",))


@pytest.mark.parametrize(
    ("counts", "share", "wanted"),
    [
        ([10, 0, 0, 0], 0.5, 0.05),
        ([10, 0, 0, 0], 1.0, 0.1),
        ([50, 50, 0, 0], 0.75, 0.15),
        ([0, 0, 10, 0], 0.95, 0.39),
        # All that is known of the last bucket is where it begins.
        ([0, 0, 0, 1], 0.95, 0.4),
        ([0, 0, 0, 0], 0.95, None),
    ],
)
def test_a_percentile_lies_within_its_bucket(counts, share, wanted):
    assert percentile_s((0.1, 0.2, 0.4), counts, share) == (
        wanted if wanted is None else pytest.approx(wanted)
    )


def reading(*counts: int, metric: str = TTFT) -> list[DurationCounts]:
    return [DurationCounts(metric=metric, model="m", bounds_s=(1.0, 2.0), counts=counts)]


def test_what_was_counted_with_other_workers_is_forgotten():
    recent = RecentDurations(60)
    recent.add("r0", reading(0, 0, 0), 0)
    recent.add("r0", reading(0, 9, 0), 5)
    recent.clear()
    assert recent.percentile_s(TTFT, 1) is None
    recent.add("r0", reading(1, 9, 0), 10)
    assert recent.percentile_s(TTFT, 1) == 1


def test_only_what_is_new_in_the_window_counts():
    recent = RecentDurations(60)
    recent.add("r0", reading(100, 0, 0), 0)
    assert recent.percentile_s(TTFT, 1) is None
    recent.add("r0", reading(100, 10, 0), 30)
    recent.add("r1", reading(0, 0, 100), 30)
    assert recent.percentile_s(TTFT, 1) == 2
    assert recent.percentile_s(TTFT, 0.5) == 1.5
    recent.add("r1", reading(10, 0, 100), 40)
    assert recent.percentile_s(TTFT, 0.5) == 1
    # A router that was started again counts from 0.
    recent.add("r0", reading(1, 0, 0), 89)
    assert recent.percentile_s(TTFT, 1) == 2
    recent.add("r0", reading(1, 0, 0), 90)
    assert recent.percentile_s(TTFT, 1) == 1
    recent.add("r0", reading(1, 0, 0), 200)
    assert recent.percentile_s(TTFT, 1) is None


async def test_every_router_is_asked_and_one_that_is_away_is_left_out():
    async with contextlib.AsyncExitStack() as stack:
        routers, addresses = [], []
        for _ in range(2):
            fake, server, address = await fake_inference.start()
            stack.push_async_callback(server.stop, 0)
            fake.worker.worker_id = "p-0"
            routers.append(fake)
            addresses.append(address)
        target = ",".join([*addresses, "127.0.0.1:1"])
        load = await stack.enter_async_context(PoolLoad(target, ChannelConfig(), ["p"]))
        for num_seen in (5, 15):
            for fake in routers:
                fake.durations[:] = [(TTFT, (0.1, 0.2), (num_seen, 0, 0))]
            found = (await load.measure())["p"]
        assert (found.num_queued, found.kv_use, found.ttft_s) == (4, 0.6, pytest.approx(0.095))
        await load.set_role("p-0", "decode")
        assert common_pb2.WORKER_ROLE_DECODE in {fake.worker.role for fake in routers}
        with pytest.raises(OSError, match="p-7 does not become decode: there is no worker"):
            await load.set_role("p-7", "decode")


async def test_without_a_router_nothing_is_measured():
    async with PoolLoad("127.0.0.1:1", ChannelConfig(), ["p"]) as load:
        with pytest.raises(OSError, match="no router says what the pools do: cannot reach"):
            await load.measure()


class Names:
    """A name server with one name, whose addresses change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = []
        self._others = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host, port, *args, **named):
        if host != "routers.test":
            return self._others(host, port, *args, **named)
        if not self.addresses:
            raise socket.gaierror("the name server is away")
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0))
            for one in self.addresses
        ]


async def test_a_name_of_several_routers_is_all_of_them_over_tls_too(tmp_path, monkeypatch):
    names, authority = Names(monkeypatch), trustme.CA()
    leaf = authority.issue_cert("routers.test")
    files = {name: tmp_path / name for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    leaf.cert_chain_pems[0].write_to_path(files["cert"])
    leaf.private_key_pem.write_to_path(files["key"])
    tls = {"tls_cert_file": str(files["cert"]), "tls_key_file": str(files["key"])}
    async with contextlib.AsyncExitStack() as stack:
        port = "0"
        for host in ("127.0.0.1", "127.0.0.2"):
            config = ServingConfig(listen=f"{host}:{port}", **tls)
            _, server, address = await fake_inference.start(config)
            stack.push_async_callback(server.stop, 0)
            port = address.rpartition(":")[2]
        channel = ChannelConfig(tls_ca_file=str(files["ca"]))
        load = await stack.enter_async_context(PoolLoad(f"routers.test:{port}", channel, ["w"]))
        with pytest.raises(OSError, match="its name has no address"):
            await load.measure()
        # A router with an address of each family is one router.
        names.addresses = ["::1", "127.0.0.1", "127.0.0.2"]
        assert (await load.measure())["w"].num_queued == 4
        names.addresses = []
        assert (await load.measure())["w"].num_queued == 4
