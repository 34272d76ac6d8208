"""Runs the task of `whole_model` on another engine, through the engine's public interface.

    python -m benchmarks.peers vllm < task.json

Prints the engine's speeds as the last line, JSON. Exit status 3: the engine is not installed.
"""

import importlib.util
import inspect
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NOT_INSTALLED = 3


def main(arguments: list[str]) -> int:
    (name,) = arguments
    if importlib.util.find_spec(name) is None:
        return NOT_INSTALLED
    print(json.dumps(_ENGINES[name](json.load(sys.stdin))))
    return 0


def run_transformers(task: dict[str, Any]) -> dict[str, Any]:
    """Runs transformers' plain forward with a growing cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in task["hf"].items() if key != "model_type"}
    config = AutoConfig.for_model(task["hf"]["model_type"], **fields)
    with torch.device(task["device"]):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, task["dtype"]))
    model.eval()
    # Newer releases name the argument `cache` and warn about the old name.
    parameters = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in parameters else "past_key_values"

    def now() -> float:
        if task["device"] == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @torch.inference_mode()
    def prefill(num_reqs: int) -> tuple[Any, float]:
        size = (num_reqs, task["num_prompt_tokens"])
        tokens = torch.randint(task["hf"]["vocab_size"], size, device=task["device"])
        start = now()
        output = model(tokens, use_cache=True, logits_to_keep=1)
        return output, now() - start

    @torch.inference_mode()
    def decode(num_reqs: int) -> float:
        output, _ = prefill(num_reqs)
        times = []
        for _ in range(task["num_decodes"]):
            start = now()
            tokens = output.logits[:, -1:].argmax(-1)
            output = model(tokens, use_cache=True, **{cache_name: output.past_key_values})
            times.append(now() - start)
        return num_reqs / statistics.median(times)

    prefill(1)
    seconds = statistics.median(prefill(1)[1] for _ in range(3))
    return {
        "prefill": task["num_prompt_tokens"] / seconds,
        "decode": {n: decode(n) for n in task["batches"]},
    }


def run_vllm(task: dict[str, Any]) -> dict[str, Any]:
    """Runs vLLM offline; decode time is the extra time for more tokens of the same requests."""
    from vllm import LLM, SamplingParams

    num_prompt, num_decodes = task["num_prompt_tokens"], task["num_decodes"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(task["hf"]), encoding="utf-8")
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=task["dtype"],
            max_model_len=num_prompt + num_decodes + 1,
            max_num_seqs=max(task["batches"]),
            enable_prefix_caching=False,
        )

        def seconds(num_reqs: int, num_tokens: int) -> float:
            generator = torch.Generator().manual_seed(num_reqs)
            size = (num_reqs, num_prompt)
            tokens = torch.randint(task["hf"]["vocab_size"], size, generator=generator)
            prompts = [{"prompt_token_ids": row} for row in tokens.tolist()]
            sampling = SamplingParams(
                temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
            )
            start = time.perf_counter()
            engine.generate(prompts, sampling, use_tqdm=False)
            return time.perf_counter() - start

        def median(num_reqs: int, num_tokens: int) -> float:
            return statistics.median(seconds(num_reqs, num_tokens) for _ in range(3))

        seconds(1, 1)
        return {
            "prefill": num_prompt / median(1, 1),
            "decode": {
                n: n * num_decodes / (median(n, 1 + num_decodes) - median(n, 1))
                for n in task["batches"]
            },
        }


_ENGINES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "vllm": run_vllm,
    "transformers": run_transformers,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
