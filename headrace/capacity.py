"""How long a request one worker can carry to its end. Pure: any core may import it.

The router (admission, placement), the scheduler's intake and the scheduling core all ask here, so
that none of them refuses what another would serve.
"""


def max_num_tokens(
    *, max_model_len: int, num_kv_blocks: int, block_size: int, num_lookahead_tokens: int = 0
) -> int:
    """The number of tokens, prompt and output, at which any request of the worker ends.

    A request that has the worker to itself can use the whole KV pool, whatever the watermark. The
    last token needs no KV, so a pool of n slots carries n + 1 tokens. A prompt can be served if it
    is shorter than this.

    Args:
        num_kv_blocks: KV blocks that requests can use, without the null block.
        num_lookahead_tokens: KV slots that a draft model writes beyond a request's tokens.
    """
    num_slots = num_kv_blocks * block_size
    if num_slots >= max_model_len:
        return max_model_len
    return min(max_model_len, num_slots - num_lookahead_tokens + 1)
