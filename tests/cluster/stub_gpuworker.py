"""A gpuworker's container without torch: the chart's settings, the stub model of the chaos runs."""

import platform
from typing import Any

import click

from gpuworker.config import KvCacheSettings, WorkerSettings
from gpuworker.core.input_batch import BatchLimits
from headrace.service import config
from headrace.service.process import ProcessConfig, run
from headrace.service.serving import ServingConfig
from tests.chaos import stub_model, stub_worker

_STEP_S = 0.02


@click.command()
@config.with_settings({
    "gpuworker": (WorkerSettings, ""),
    "kv_cache": (KvCacheSettings, ""),
    "serving": (ServingConfig, ""),
    "process": (ProcessConfig, ""),
})  # fmt: skip
def main(settings: dict[str, Any]) -> None:
    """Answer plans with the tokens of the stub model, until SIGTERM."""
    stub_worker._without_torch()
    limits = BatchLimits(
        max_num_seqs=16,
        max_model_len=2048,
        max_num_batched_tokens=256,
        block_size=8,
        num_kv_blocks=512,
        vocab_size=stub_model.VOCAB_SIZE,
        eos_token_ids=(stub_model.EOS_TOKEN_ID,),
    )
    counts = stub_worker.Counts("/tmp/counts")
    loaded = stub_worker.StubLoaded(stub_worker.StubRunner(limits, _STEP_S, counts), 1)
    worker_id = settings["gpuworker"].worker_id or platform.node()
    serving, process = settings["serving"], settings["process"]
    run("gpuworker", process, stub_worker.serve(worker_id, loaded, serving, process))


if __name__ == "__main__":
    main()
