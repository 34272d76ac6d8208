"""Makes the recording of the incident in docs/slow.md: a few documents among many chats.

    python -m benchmarks.incident tests/data/incident.jsonl.xz

The scheduling core decides as it would for a worker whose steps take 250 ms; the clock is
simulated, so that the run is the same each time. Chats come at random, two a second, and are to be
answered within 20 s. After a minute, four documents come, one a second. `long_prefill_share` is
1, so nothing holds the documents back.
"""

import itertools
import json
import lzma
import random
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.workloads import poisson
from scheduler.core.plan import NewRequest, SchedulerConfig, StepPlan, StepResult
from scheduler.replay.recorder import Recorder

_STEP_S = 0.25
_RUN_S = 180.0
_CHATS_PER_S = 2.0
_CHAT_DEADLINE_S = 20.0
_DOCUMENTS_BEGIN_S = 60.0
_NUM_DOCUMENTS = 4
_DOCUMENT_TOKENS = 8_000
# A Unix time, because deadlines are.
_BEGIN_S = 1_750_000_000.0
_CONFIG = SchedulerConfig(
    block_size=16,
    num_gpu_blocks=4_001,
    max_model_len=16_384,
    max_num_batched_tokens=256,
    max_num_seqs=64,
    long_prefill_token_threshold=128,
    long_prefill_share=1.0,
)


def requests() -> list[NewRequest]:
    """The requests in the order of their arrivals; prompts share no prefix."""
    rng = random.Random(7)
    arrivals = itertools.takewhile(lambda at_s: at_s < _RUN_S, poisson(_CHATS_PER_S, seed=7))
    asks = [(at_s, "chat", rng.randint(20, 120), rng.randint(10, 60)) for at_s in arrivals]
    asks += [
        (_DOCUMENTS_BEGIN_S + number, "document", _DOCUMENT_TOKENS, 20)
        for number in range(_NUM_DOCUMENTS)
    ]
    return [
        NewRequest(
            key=key,
            request_id=f"{kind}-{key}",
            prompt_token_ids=np.full(num_prompt_tokens, 1_000 + key, dtype=np.int32),
            max_tokens=num_output_tokens,
            arrival_time=_BEGIN_S + at_s,
            deadline=_BEGIN_S + at_s + _CHAT_DEADLINE_S if kind == "chat" else None,
        )
        for key, (at_s, kind, num_prompt_tokens, num_output_tokens) in enumerate(sorted(asks))
    ]


def record() -> list[dict[str, Any]]:
    """The records of the run: a header, then the steps."""
    records: list[dict[str, Any]] = []
    core = Recorder(_CONFIG, records.append)
    header = core.header("incident")
    coming = requests()
    now = _BEGIN_S
    while coming or core.has_unfinished:
        while coming and coming[0].arrival_time <= now:
            core.add_request(coming.pop(0), now)
        plan = core.schedule(now)
        now += _STEP_S
        if plan.num_reqs:
            core.update(_result(plan), now)
        core.end_step()
    return [header, *records]


def _result(plan: StepPlan) -> StepResult:
    """One token for each row whose prompt is computed."""
    num_sampled = (~plan.is_prefill_chunk).astype(np.int32)
    token_ids = np.full(int(num_sampled.sum()), 5, dtype=np.int32)
    return StepResult(step_id=plan.step_id, num_sampled_tokens=num_sampled, token_ids=token_ids)


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def main(file: Path) -> None:
    """Write the recording to FILE."""
    lines = "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in record())
    file.write_bytes(lzma.compress(lines.encode(), preset=9))


if __name__ == "__main__":
    main()
