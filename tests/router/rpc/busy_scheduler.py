"""A fake scheduler of a large pool: many workers that step, and many requests that wait."""

import asyncio
import itertools
import time

from headrace.v1 import inference_pb2, steps_pb2
from tests.router.fake_scheduler import FakeScheduler, worker

REASONS = ("blocks", "sequence_slots", "budget", "behind_head")


class BusyScheduler(FakeScheduler):
    """Says what a scheduler of `num_workers` would; `steps` are what watchers are told."""

    def __init__(self, num_workers=200, num_waiting=10_000, steps_each=40, interval_s=0.25):
        super().__init__()
        self.workers = [worker(worker_id=f"worker-{n:03}") for n in range(num_workers)]
        for n, one in enumerate(self.workers):
            one.num_running, one.num_waiting = n % 17, n % 5
        self.num_waiting = num_waiting
        self.steps_each, self.watch_interval_s = steps_each, interval_s
        self.steps: dict[str, list[steps_pb2.Step]] = {w.worker_id: [] for w in self.workers}
        self._step_ids = itertools.count()

    def make_steps(self, num, spacing_s, now=None):
        """So many more steps of each worker, that ended until now."""
        end = time.time() if now is None else now
        for n, steps in enumerate(self.steps.values()):
            for k in range(num):
                steps.append(self._step(n, end - (num - 1 - k) * spacing_s, spacing_s))

    def _step(self, n, end, spacing_s):
        number = next(self._step_ids)
        wave = (number * 7 + n * 13) % 97
        decode, speculative = 40 + wave // 3, wave % 12
        prefill = 300 if number % 9 < 3 else wave
        held = 20 + wave % 50
        return steps_pb2.Step(
            position=int(end * 1e6) + n,
            step_id=number,
            start_time_unix_s=end - spacing_s * 0.9,
            duration_s=spacing_s * 0.9,
            gap_s=spacing_s * 0.1,
            prefill_tokens=prefill,
            decode_tokens=decode,
            speculative_tokens=speculative,
            idle_tokens=512 - prefill - decode - speculative,
            generated_tokens=decode,
            num_requests=decode,
            num_running=decode,
            num_waiting_by_reason={"blocks": 1, "behind_head": wave},
            num_preemptions=int(wave == 0),
            kv_blocks_held=held,
            kv_blocks_cached=30 - wave % 20,
            kv_blocks_empty=70 - held + wave % 20,
        )

    async def WatchSteps(self, request, context):
        after = {a.worker_id: a.position for a in request.after}
        begin = (time.time() - request.history_s) * 1e6
        while True:
            response = steps_pb2.WatchStepsResponse()
            for worker_id, steps in self.steps.items():
                since = after.get(worker_id, begin)
                if found := [step for step in steps if step.position > since]:
                    after[worker_id] = found[-1].position
                    response.workers.add(worker_id=worker_id, model="tiny", steps=found)
            yield response
            await asyncio.sleep(self.watch_interval_s)

    async def GetStepBatch(self, request, context):
        step = next(s for s in self.steps[request.worker_id] if s.position == request.position)
        rows = [
            steps_pb2.StepRow(
                request_id=f"request-{n}", num_tokens=1 + 60 * (n == 0), kind=3 - (n == 0)
            )
            for n in range(step.num_requests)
        ]
        return steps_pb2.GetStepBatchResponse(worker_id=request.worker_id, step=step, rows=rows)

    async def ListWaiting(self, request, context):
        waiting = [
            steps_pb2.WaitingRequest(
                request_id=f"request-{n}",
                tenant=f"tenant-{n % 40}",
                model="tiny",
                num_tokens=100 + n % 900,
                arrival_time_unix_s=1000.0 + n,
                worker_id=f"worker-{n % len(self.workers):03}",
                reason=REASONS[n % 4],
                num_needed_blocks=12 * (n % 4 == 0),
                num_free_blocks=7 * (n % 4 == 0),
            )
            for n in range(min(self.num_waiting, request.limit))
        ]
        return steps_pb2.ListWaitingResponse(requests=waiting, num_waiting=self.num_waiting)

    async def Explain(self, request, context):
        event = inference_pb2.ExplainEvent
        return inference_pb2.ExplainResponse(
            request_id=request.request_id,
            events=[
                event(kind="ADDED", detail="place 3 in the queue", time_unix_s=1000.0),
                event(
                    kind="WAITED", detail="needs 12 KV blocks, 7 free", last_step=9, duration_s=2
                ),
                event(kind="ADMITTED", first_step=10, last_step=10, detail="16 tokens cached"),
                event(kind="SCHEDULED", first_step=10, last_step=44, num_tokens=90),
            ],
            steps_waited_by_cause={"BLOCKS": 10},
            cached_tokens=16,
        )
