"""Sampling kernels: logit edits, penalties, truncation and Gumbel-max.

A row's token depends only on that row's logits, settings, seed and position. Truncation finds its
thresholds by a radix search over the ordered bits of float32 values, four bits at a time. The
search is exact and needs neither a sort nor extra memory.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
# SplitMix64 (Steele, Lea, Flood 2014), as in `gpuworker.sampling.noise`.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LOWEST_KEY = tl.constexpr(-(1 << 31))
_PIVOTS = tl.constexpr(16)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def edit_logits(logits, rows, token_ids, values, VOCAB_SIZE: tl.constexpr):  # fmt: skip
    """Adds values to single logits; the grid is (num_edits).

    logits: [num_samples, VOCAB_SIZE]; rows, token_ids, values: [num_edits]. An edit with a negative
    row is padding. The value minus infinity forbids a token.
    """
    edit = tl.program_id(0)
    row = tl.load(rows + edit).to(tl.int64)
    if row >= 0:
        token = tl.load(token_ids + edit)
        tl.atomic_add(logits + row * VOCAB_SIZE + token, tl.load(values + edit))


@triton.jit
def adjust_logits(
    logits, slots, output_counts, prompt_bits, grammar_rows, grammar_bits, draft_starts,
    draft_counts, drafts, repetition, presence, frequency, temperature,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Applies penalties, grammar and temperature in one pass; the grid is (num_samples, blocks).

    logits: [num_samples, VOCAB_SIZE] float32, changed in place.
    slots: [num_samples] row of the persistent batch.
    output_counts: [num_slots, VOCAB_SIZE] int16, how often each token is in the request's output.
    prompt_bits: [num_slots, words] int32, which tokens are in the request's prompt.
    grammar_rows: [num_samples] row of grammar_bits, or negative without a grammar.
    grammar_bits: [_, words] int32, which tokens the grammar allows.
    draft_starts, draft_counts: [num_samples] the range in `drafts` of the drafts before a sample;
        these drafts count as output.
    repetition, presence, frequency, temperature: [num_samples] float32; penalties of 1, 0 and 0
        change nothing; a temperature of 0 does not scale.
    """
    WORDS: tl.constexpr = (VOCAB_SIZE + 31) // 32
    sample = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < VOCAB_SIZE
    slot = tl.load(slots + sample).to(tl.int64)
    values = tl.load(logits + sample * VOCAB_SIZE + tokens, mask=is_token, other=0.0)
    repeated = tl.load(repetition + sample)
    present = tl.load(presence + sample)
    frequent = tl.load(frequency + sample)
    if (repeated != 1.0) | (present != 0.0) | (frequent != 0.0):
        counts = tl.load(output_counts + slot * VOCAB_SIZE + tokens, mask=is_token, other=0)
        counts = counts.to(tl.int32)
        start = tl.load(draft_starts + sample)
        for i in tl.range(0, tl.load(draft_counts + sample)):
            counts += (tokens == tl.load(drafts + start + i)).to(tl.int32)
        words = tl.load(prompt_bits + slot * WORDS + tokens // 32, mask=is_token, other=0)
        is_seen = (counts > 0) | (((words >> (tokens % 32)) & 1) != 0)
        penalized = tl.where(values > 0, values / repeated, values * repeated)
        values = tl.where(is_seen, penalized, values)
        loss = present + frequent * counts.to(tl.float32)
        values = tl.where(counts > 0, values - loss, values)
    grammar = tl.load(grammar_rows + sample).to(tl.int64)
    if grammar >= 0:
        words = tl.load(grammar_bits + grammar * WORDS + tokens // 32, mask=is_token, other=0)
        values = tl.where(((words >> (tokens % 32)) & 1) != 0, values, float("-inf"))
    heat = tl.load(temperature + sample)
    if heat > 0:
        values = values / heat
    tl.store(logits + sample * VOCAB_SIZE + tokens, values, mask=is_token)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _key(values):
    """Maps float32 values to integers of the same order; NaN sorts first or last."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The float32 value of a key; minus infinity for the lowest key, which no value maps to."""
    narrow = key.to(tl.int32)
    bits = tl.where(narrow < 0, narrow ^ 0x7FFFFFFF, narrow)
    return tl.where(key == _LOWEST_KEY, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _highest_key_reaching(
    row, wanted, floor, largest,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """The highest key such that the tokens at or above this key sum to at least `wanted`.

    A token counts 1. With BY_MASS, it counts exp(value - largest), or 0 if its value is below
    `floor`.
    """
    lowest = tl.full([], _LOWEST_KEY, tl.int64)
    step = tl.full([], 1 << 28, tl.int64)
    ranks = tl.arange(0, _PIVOTS)
    for _ in tl.range(0, 8):
        pivots = lowest + ranks * step
        sums = tl.zeros([BLOCK, _PIVOTS], tl.float32)
        for start in tl.range(0, VOCAB_SIZE, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            is_token = tokens < VOCAB_SIZE
            values = tl.load(row + tokens, mask=is_token, other=float("-inf"))
            if BY_MASS:
                amounts = tl.exp2((values - largest) * _LOG2_E)
                amounts = tl.where(is_token & (values >= floor), amounts, 0.0)
            else:
                amounts = tl.where(is_token, 1.0, 0.0)
            is_reached = _key(values).to(tl.int64)[:, None] >= pivots[None, :]
            sums += tl.where(is_reached, amounts[:, None], 0.0)
        reached = tl.sum(sums.to(tl.float64), 0) >= wanted
        lowest += tl.max(tl.where(reached, ranks, 0), 0) * step
        step = step // _PIVOTS
    return lowest


@triton.jit
def sample_tokens(
    token_ids, scaled, seeds, positions, top_k, top_p, min_p, is_drawn,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SEARCH: tl.constexpr,
):  # fmt: skip
    """Gumbel-max over the tokens that truncation keeps; the grid is (num_samples).

    token_ids: [num_samples] int32, the result.
    scaled: [num_samples, VOCAB_SIZE] float32 logits divided by temperature.
    seeds, positions: [num_samples] int64; a seed's bits are unsigned.
    top_k: [num_samples] int32, 0 is off; top_p, min_p: float64, 1 and 0 are off.
    is_drawn: [num_samples] int32; 0 takes the likeliest token, on ties the lowest token id.
    """
    sample = tl.program_id(0).to(tl.int64)
    row = scaled + sample * VOCAB_SIZE
    is_random = tl.load(is_drawn + sample) != 0

    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, VOCAB_SIZE, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(row + tokens, mask=tokens < VOCAB_SIZE, other=float("-inf"))
        highest = tl.maximum(highest, values)
    largest = tl.max(highest, 0)

    floor = largest
    if is_random:
        share = tl.load(min_p + sample)
        k = tl.load(top_k + sample)
        p = tl.load(top_p + sample)
        floor = float("-inf")
        if share > 0:
            floor = (largest.to(tl.float64) + tl.log(share)).to(tl.float32)
        if (k > 0) & (k < VOCAB_SIZE):
            key = _highest_key_reaching(
                row, k.to(tl.float64), floor, largest, VOCAB_SIZE, BLOCK_SEARCH, False
            )
            floor = tl.maximum(floor, _value(key))
        if p < 1:
            mass = tl.zeros([BLOCK], tl.float64)
            for start in tl.range(0, VOCAB_SIZE, BLOCK):
                tokens = start + tl.arange(0, BLOCK)
                is_token = tokens < VOCAB_SIZE
                values = tl.load(row + tokens, mask=is_token, other=float("-inf"))
                amounts = tl.exp2((values - largest) * _LOG2_E)
                mass += tl.where(is_token & (values >= floor), amounts, 0.0).to(tl.float64)
            key = _highest_key_reaching(
                row, p * tl.sum(mass, 0), floor, largest, VOCAB_SIZE, BLOCK_SEARCH, True
            )
            floor = tl.maximum(floor, _value(key))

    # Truncation always keeps the likeliest token, even if rounding raised a threshold above it.
    floor = tl.minimum(floor, largest)
    stream = _mix(tl.load(seeds + sample).to(tl.uint64, bitcast=True))
    stream = _mix(stream + (tl.load(positions + sample) + 1).to(tl.uint64) * _GOLDEN)
    best = tl.full([BLOCK], float("-inf"), tl.float64)
    best_token = tl.full([BLOCK], _NO_TOKEN, tl.int32)
    for start in tl.range(0, VOCAB_SIZE, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(row + tokens, mask=tokens < VOCAB_SIZE, other=float("-inf"))
        is_left = (tokens < VOCAB_SIZE) & (values >= floor)
        scores = values.to(tl.float64)
        # Noise is computed only for blocks in which truncation keeps a token.
        if is_random & (tl.max(is_left.to(tl.int32), 0) != 0):
            bits = _mix(stream + tokens.to(tl.uint64) * _GOLDEN)
            uniform = ((bits >> 11).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16
            scores = scores - tl.log(-tl.log(uniform))
        scores = tl.where(is_left, scores, float("-inf"))
        is_better = scores > best
        best = tl.where(is_better, scores, best)
        best_token = tl.where(is_better, tokens, best_token)
    winner = tl.max(best, 0)
    token = tl.min(tl.where(best == winner, best_token, _NO_TOKEN), 0)
    # If the logits are NaN, no token was chosen and 0 is stored; the caller rejects such a row.
    tl.store(token_ids + sample, tl.where(token == _NO_TOKEN, 0, token))


@triton.jit
def accept_drafts(
    num_kept, token_ids, sample_starts, num_samples, draft_starts, drafts, BLOCK: tl.constexpr
):  # fmt: skip
    """Counts each request's accepted samples; the grid is (num_reqs).

    A request keeps its samples up to and including the first sample that differs from its draft.
    A sample after an accepted draft equals the sample that decoding without drafts would give.

    num_kept, num_samples: [num_reqs].
    sample_starts, draft_starts: [num_reqs] a request's first sample in token_ids and first draft in
        drafts. A request has one draft less than samples, or no samples.
    """
    request = tl.program_id(0)
    samples = tl.load(num_samples + request)
    first = tl.load(sample_starts + request)
    first_draft = tl.load(draft_starts + request)
    kept = samples
    for start in tl.range(0, samples - 1, BLOCK):
        ranks = start + tl.arange(0, BLOCK)
        is_draft = ranks < samples - 1
        sampled = tl.load(token_ids + first + ranks, mask=is_draft, other=0)
        wanted = tl.load(drafts + first_draft + ranks, mask=is_draft, other=0)
        is_wrong = is_draft & (sampled != wanted)
        kept = tl.minimum(kept, tl.min(tl.where(is_wrong, ranks + 1, samples), 0))
    tl.store(num_kept + request, kept)
