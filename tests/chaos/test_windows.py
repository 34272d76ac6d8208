"""A process dies in each window of the handoffs: between every two that pass a request on.

A proxy holds the bytes at the window's border, so a request is surely there when the process dies.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace.status.states import State
from headrace.v1 import inference_pb2
from tests.chaos.cluster import Cluster
from tests.chaos.windows import CLAIM, HEAVY, KINDS, SHAPE, Scene, read_to_end
from tests.headrace.waiting import until

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

LONG = KINDS["long"]
LIVE = [state for state in State if not state.is_final]
FINAL = [state for state in State if state.is_final]
OUTCOME = inference_pb2.AbortOutcome


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    async with Cluster(SHAPE, tmp_path_factory.mktemp("windows")) as cluster:
        await cluster.until_ready()
        scene = Scene(cluster)
        yield scene
        await scene.close()


def slow(*cases: Any) -> list[Any]:
    """Cases that runs of the slow tests have, beside those of every run."""
    given = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.slow) for case in given]


# The link, and whether what comes back on it is held, instead of what is sent. Some of the requests
# are one token long, so the windows of a first token are those of an end too.
WINDOWS = {
    "submitted": ("r0-s0", False),
    "taken-in": ("r0-s0", True),
    "planned": ("s0-w0", False),
    "computed": ("s0-w0", True),
    "not-journalled": ("s0-store", False),
    "answered": ("client-r0", True),
}


@pytest.mark.parametrize(
    ("window", "victim"),
    [
        *(("submitted", "r0"), ("taken-in", "r0"), ("taken-in", "s0"), ("planned", "w0")),
        *(("computed", "s0"), ("not-journalled", "s0"), ("answered", "r0")),
        *slow(("submitted", "s0"), ("submitted", "w0"), ("taken-in", "w0"), ("planned", "r0")),
        *slow(("planned", "s0"), ("computed", "r0"), ("computed", "w0"), ("not-journalled", "r0")),
    ],
)
async def test_whoever_dies_in_a_window_each_token_comes_once(
    scene: Scene, window: str, victim: str
):
    async with scene.act(f"{window}-{victim}"):
        link, holds_answers = WINDOWS[window]
        trap = scene.trap(link, holds_answers=holds_answers)
        reading = scene.read()
        await scene.until_sprung(trap)
        await scene.kill(victim)
        trap.release()
        await scene.restart(victim)
        await reading.finish()


@pytest.mark.parametrize("victim", ["r0", "s0"])
async def test_what_was_admitted_and_waits_for_its_turn_runs_elsewhere(scene: Scene, victim: str):
    async with scene.act(f"waiting-{victim}"):
        trap = scene.trap("s0-w0")
        names = ("long", "two", "stopped")  # all that the worker takes
        first = scene.read(*names)
        await scene.until_sprung(trap)
        for name in names:
            await scene.until_state(name, State.DISPATCHED, State.RUNNING)
        second = scene.read("one-token", "logprobs")
        await scene.until_state("one-token", State.QUEUED)
        await scene.until_state("logprobs", State.QUEUED)
        await scene.kill(victim)
        trap.release()
        await scene.restart(victim)
        await first.finish()
        await second.finish()


async def test_a_request_whose_record_dies_with_its_router_is_sent_again(scene: Scene):
    async with scene.act("unwritten"):
        results = scene.trap("s0-w0", holds_answers=True)
        records = scene.trap("r0-store")
        reading = scene.read("one-token", "long")
        await scene.until_sprung(results)
        await scene.until_sprung(records)
        await scene.kill("r0")
        results.release()
        await reading.finish()


@pytest.mark.parametrize("lives", [True, *slow(False)])
async def test_a_submission_that_arrives_after_its_router_has_died_changes_nothing(
    scene: Scene, lives: bool
):
    async with scene.act(f"late-submission-{lives}"):
        submissions = scene.trap("r0-s0")
        reading = scene.read("long", "one-token")
        await scene.until_sprung(submissions)
        await scene.until_state("long", State.DISPATCHED)
        await scene.until_state("one-token", State.DISPATCHED)
        results = scene.trap("s0-w0", holds_answers=True)
        await scene.kill("r0")
        submissions.disarm()
        await scene.until_sprung(results)  # by way of the other router
        if lives:
            submissions.release()
        results.release()
        await reading.finish()
        submissions.release()


async def test_what_a_dead_scheduler_has_written_arrives_late_and_changes_nothing(scene: Scene):
    async with scene.act("late-journal"):
        journal = scene.trap("s0-store")
        reading = scene.read("long", "one-token", "two")
        await scene.until_sprung(journal)
        journal.disarm()
        await scene.kill("s0")
        await scene.restart("s0")
        await reading.finish()
        before = await scene.until_state("long", *FINAL)
        journal.release()
        await scene.settle()
        assert await scene.record("long") == before


# The second router takes the request up.
RESUMING = {
    "loading": ("r1-store", None, True),
    "claiming": ("r1-store", CLAIM, False),
    "claimed": ("r1-store", CLAIM, True),
    "submitted": ("r1-s0", None, False),
    "adopted": ("r1-s0", None, True),
}


@pytest.mark.parametrize(
    ("window", "victim"),
    [
        *(("loading", "r0"), ("claiming", "r1"), ("claimed", "r1"), ("claimed", "s0")),
        *(("submitted", "s0"), ("adopted", "r1")),
        *slow(("loading", "r1"), ("claiming", "s0"), ("claimed", "r0"), ("submitted", "r1")),
        *slow(("adopted", "w0"), ("adopted", "s0")),
    ],
)
async def test_whoever_dies_while_a_request_is_taken_up_each_token_comes_once(
    scene: Scene, window: str, victim: str
):
    async with scene.act(f"resuming-{window}-{victim}"):
        reader = scene.raw(LONG, "long", "r0")
        await reader.read(lambda: reader.received.positions[0] >= 3)
        results = scene.trap("s0-w0", "", holds_answers=True)
        link, marker, holds_answers = RESUMING[window]
        trap = scene.trap(link, marker, holds_answers=holds_answers)
        reader.router = "r1"
        reading = scene.start(read_to_end(reader))
        await scene.until_sprung(trap)
        await scene.kill(victim)
        trap.release()
        results.release()
        await scene.restart(victim)
        await reading


@pytest.mark.parametrize("is_claimed", [True, *slow(False)])
async def test_a_router_that_dies_in_a_recovery_leaves_it_to_the_next(
    scene: Scene, is_claimed: bool
):
    async with scene.act(f"recovering-{is_claimed}"):
        plans = scene.trap("s0-w0")
        for name, kind in KINDS.items():
            reader = scene.raw(kind, name, "r0", recover_always=True)
            await scene.leave(reader, *LIVE)
        claims = {
            r: scene.trap(f"{r}-store", CLAIM, holds_answers=is_claimed) for r in ("r0", "r1")
        }
        await scene.kill("r0", "s0")
        plans.release()
        await scene.restart("r0", "s0")
        await until(lambda: any(trap.sprung.is_set() for trap in claims.values()))
        (claiming,) = (r for r, trap in claims.items() if trap.sprung.is_set())
        await scene.kill(claiming)
        for trap in claims.values():
            trap.release()
        await scene.restart(claiming)
        await finished_unread(scene)


async def test_two_routers_that_restart_at_once_run_no_request_twice(scene: Scene):
    async with scene.act("both"):
        plans = scene.trap("s0-w0")
        for router, (name, kind) in zip(("r0", "r1") * 3, KINDS.items(), strict=False):
            reader = scene.raw(kind, name, router, recover_always=True)
            await scene.leave(reader, *LIVE)
        claims = [scene.trap(f"{router}-store", CLAIM) for router in ("r0", "r1")]
        everything = ("r0", "r1", "s0")
        await scene.kill(*everything)
        # What the dead scheduler has sent is lost.
        scene.cluster.proxies["s0-w0"].reset()
        plans.release()
        await scene.restart(*everything)
        for trap in claims:
            await scene.until_sprung(trap)
        # A router gives up a claim that is not answered, and the claim may arrive all the same.
        await until(lambda: any(trap.is_given_up for trap in claims))
        for trap in sorted(claims, key=lambda trap: not trap.is_given_up):
            trap.release()
        await finished_unread(scene)
        for name, kind in KINDS.items():
            assert scene.num_placed(name) == kind.n, name


async def finished_unread(scene: Scene) -> None:
    """Waits until all requests have ended without a reader, then reads them."""
    for name in KINDS:
        await scene.until_state(name, *FINAL)
    for name, kind in KINDS.items():
        await read_to_end(scene.raw(kind, name, "r0", resumes=True))


@pytest.mark.parametrize("with_the_store", [True, *slow(False)])
async def test_after_a_power_cut_all_requests_are_finished(scene: Scene, with_the_store: bool):
    async with scene.act(f"power-{with_the_store}"):
        reading = scene.read("long", "two", "stopped")
        left = scene.raw(LONG, "left", "r1")
        await scene.leave(left, *LIVE)
        await reading.until_begun(3)
        scene.trap("s0-w0", "", holds_answers=True)
        everything = ("r0", "r1", "s0", "w0")
        store = scene.cluster.store.nodes[0]
        await asyncio.gather(scene.kill(*everything), *([store.kill()] if with_the_store else []))
        scene.release()
        if with_the_store:
            await store.start()
        await scene.restart(*everything)
        await reading.finish()
        # Its client does not come back.
        await scene.until_state("left", State.LENGTH_CAPPED)
        await read_to_end(scene.raw(LONG, "left", "r0", resumes=True))


# Where the request is held when the other router is asked to abort it.
ABORTING = {
    "dispatched": [("r0-s0", False)],
    "cut-off": [("r0-s0", False), ("r0-s0", True)],
    "planned": [("s0-w0", False)],
    "finishing": [("s0-w0", True)],
    "finished": [("r0-s0", True)],
}


@pytest.mark.parametrize("where", ABORTING)
async def test_an_abort_at_the_other_router_and_the_request_have_one_end(scene: Scene, where: str):
    async with scene.act(f"abort-{where}"):
        for link, holds_answers in ABORTING[where]:
            scene.trap(link, holds_answers=holds_answers)
        waits_for = FINAL if where == "finished" else [State.DISPATCHED, State.RUNNING]
        reader = scene.raw(KINDS["one-token"], "one", "r0")
        reading = scene.start(read_to_end(reader))
        await scene.until_state("one", *waits_for)
        reader.received.was_aborted = True
        seen = scene.watch("one")
        outcome = await scene.abort("one", "r1")
        wanted = OUTCOME.RESULT_ALREADY_FINISHED if where == "finished" else OUTCOME.RESULT_ABORTED
        scene.release()
        await reading
        await scene.settle()
        assert outcome == wanted
        assert seen[-1] in FINAL
        assert not set(FINAL).intersection(seen[:-1]), seen


async def preempted(scene: Scene, name: str) -> str:
    await scene.until_state(name, State.PREEMPTED)
    return name


async def first_of(*tasks: asyncio.Task[str]) -> str:
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    return done.pop().result()


async def test_an_abort_ends_a_preempted_request(scene: Scene):
    async with scene.act("abort-preempted"):
        readers = {name: scene.raw(HEAVY, name, "r0") for name in ("a", "b")}
        tasks = [scene.start(read_to_end(reader)) for reader in readers.values()]
        name = await first_of(*(scene.start(preempted(scene, name)) for name in readers))
        readers[name].received.was_aborted = True
        assert await scene.abort(name, "r1") == OUTCOME.RESULT_ABORTED
        await asyncio.gather(*tasks)
        assert (await scene.record(name))["state"] == State.ABORTED


async def test_an_abort_ends_a_paused_request_that_is_being_resumed(scene: Scene):
    async with scene.act("abort-paused"):
        reader = scene.raw(HEAVY, "one", "r0")
        await reader.read(lambda: reader.received.is_begun)
        await scene.until_state("one", State.PAUSED)
        reader.received.was_aborted = True
        _, outcome = await asyncio.gather(read_to_end(reader), scene.abort("one", "r1"))
        assert outcome == OUTCOME.RESULT_ABORTED
        await scene.until_state("one", State.ABORTED)


@pytest.mark.parametrize("is_claimed", [True, *slow(False)])
async def test_an_abort_and_a_recovery_have_one_end(scene: Scene, is_claimed: bool):
    async with scene.act(f"abort-recovering-{is_claimed}"):
        plans = scene.trap("s0-w0")
        reader = scene.raw(LONG, "one", "r0", recover_always=True)
        await scene.leave(reader, *LIVE)
        again = scene.raw(LONG, "one", "r0", resumes=True)
        again.received.was_aborted = True
        claims = scene.trap("r1-store", CLAIM, holds_answers=is_claimed)
        await scene.kill("r0", "s0")
        plans.release()
        idle = scene.trap("r0-store", CLAIM)
        await scene.restart("r0", "s0")
        await scene.until_sprung(claims)
        idle.release()
        aborting = scene.start(scene.abort("one", "r0"))
        await scene.until_state("one", *FINAL)
        scene.release()
        await aborting
        await read_to_end(again)
        assert (await scene.record("one"))["state"] == State.ABORTED
