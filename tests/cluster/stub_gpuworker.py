"""A gpuworker's container without torch: the service itself, but for the model that it loads."""

import time
from pathlib import Path
from typing import Any

from gpuworker import __main__ as gpuworker
from gpuworker.core.input_batch import BatchLimits
from tests.chaos import stub_model, stub_worker

_STEP_S = 0.04
# While this file is there, steps hang.
HANG = Path("/tmp/hang")


class HangingRunner(stub_worker.StubRunner):
    """The stub's runner; what hangs is the model's thread, as with a device that hangs."""

    def launch(self, plan: Any) -> stub_worker.Pending:
        while HANG.exists():
            time.sleep(0.1)
        return super().launch(plan)


def load(*_: object) -> stub_worker.StubLoaded:
    """The stub model of the chaos runs, whatever the settings say."""
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
    return stub_worker.StubLoaded(HangingRunner(limits, _STEP_S, counts), 1)


if __name__ == "__main__":
    stub_worker._without_torch()
    gpuworker._load = load
    gpuworker.main()
