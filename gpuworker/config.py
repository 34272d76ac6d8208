"""Settings of a gpuworker."""

from typing import Annotated, Literal

import msgspec

from headrace.service.config import help_text


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to run and how large; None lets the worker decide from the model and the machine."""

    model: Annotated[
        str, help_text("GGUF file, Hugging Face folder, or a name that can be fetched.")
    ] = ""
    model_name: Annotated[
        str, help_text("The model's name in requests; the model's own by default.")
    ] = ""
    worker_id: Annotated[
        str, help_text("Stable name, another for each worker; the host's by default.")
    ] = ""
    device: Annotated[
        Literal["auto", "cpu", "cuda"], help_text("auto is a GPU where there is one.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        help_text("auto is float32 on a CPU, bfloat16 on a GPU."),
    ] = "auto"
    max_model_len: Annotated[
        int | None, help_text("Prompt and output of one request; the model's own by default.")
    ] = None
    max_num_seqs: Annotated[int, help_text("Requests in one step.", ge=1)] = 256
    max_num_batched_tokens: Annotated[
        int | None, help_text("Tokens in one step; 512 on a CPU, 8192 on a GPU.")
    ] = None
    role: Annotated[
        Literal["mixed", "prefill", "decode"], help_text("What schedulers use this worker for.")
    ] = "mixed"
    num_threads: Annotated[
        int | None, help_text("CPU threads; as many as physical cores by default.")
    ] = None
    num_spec_tokens: Annotated[
        int, help_text("Drafts by prompt lookup for each request and step; 0 is off.", ge=0)
    ] = 0
    attention: Annotated[
        Literal["auto", "native", "triton", "flashinfer", "torch"],
        help_text(
            "native is compiled for this CPU, triton and flashinfer (to be installed) are for "
            "GPUs, torch runs anywhere."
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool, help_text("Launch every kernel by itself on a GPU, without CUDA graphs.")
    ] = False
    cuda_graph_sizes: Annotated[
        tuple[int, ...],
        help_text(
            "Padded numbers of tokens of which a step without chunks is captured; "
            "1, 2, 4, 8 and multiples of 8 by default."
        ),
    ] = ()
    stalled_after_s: Annotated[
        float,
        help_text(
            "A worker of whose steps none ends for so long is not ready until one does.", gt=0
        ),
    ] = 60.0


class KvCacheSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pool of keys and values; None lets the worker decide from the model and the machine."""

    block_size: Annotated[
        int | None,
        help_text("Tokens in a KV block: 8, 16, 32, 64 or 128; 16 on a CPU, 64 on a GPU."),
    ] = None
    num_kv_blocks: Annotated[
        int | None, help_text("KV blocks in the pool; from memory by default.")
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None, help_text("Memory of the KV pool; from what is free by default.")
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        help_text(
            "Share of a GPU's memory that all processes together may use; the pool gets what "
            "weights, the largest step and CUDA graphs leave.",
            gt=0,
            le=1,
        ),
    ] = 0.9
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        help_text("auto is the model's own type; fp8 (E4M3) holds twice the tokens of 16 bits."),
    ] = "auto"
