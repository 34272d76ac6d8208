"""Kernels for the work between a decoder layer's matrix products; each reads its data once."""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
# sqrt(2 / pi), from the tanh approximation of GELU.
_GELU_SCALE = tl.constexpr(0.7978845608028654)
_GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def add_rms_norm(
    normed, residual, update, weight, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_UPDATE: tl.constexpr,
):  # fmt: skip
    """Adds `update` to `residual` in place and normalizes the sum; the grid is (num_tokens).

    normed, residual, update: [num_tokens, SIZE]; weight: [SIZE] float32.
    """
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    stream = tl.load(residual + row + columns, mask=is_column, other=0.0)
    if HAS_UPDATE:
        stream += tl.load(update + row + columns, mask=is_column, other=0.0)
        tl.store(residual + row + columns, stream, mask=is_column)
    wide = stream.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    scales = tl.load(weight + columns, mask=is_column, other=0.0)
    result = (wide * scale * scales).to(normed.dtype.element_ty)
    tl.store(normed + row + columns, result, mask=is_column)


@triton.jit
def gated_activation(
    out, gate_up, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr
):  # fmt: skip
    """activation(gate) * up; the grid is (num_tokens, SIZE / BLOCK rounded up).

    gate_up: [num_tokens, 2 * SIZE], gates first; out: [num_tokens, SIZE].
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=is_column, other=0.0)
    steepness = gate
    if IS_GELU:
        # 0.5 * (1 + tanh(x)) is the logistic function of 2 x.
        steepness = 2.0 * _GELU_SCALE * (gate + _GELU_CUBE * gate * gate * gate)
    activated = gate / (1.0 + tl.exp2(-steepness * _LOG2_E))
    result = activated.to(out.dtype.element_ty) * up
    tl.store(out + row * SIZE + columns, result, mask=is_column)


@triton.jit
def _turned_heads(
    heads, norm_weight, cosines, sines, position, eps,
    NUM_HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr, ROTARY_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
    first_head,
):  # fmt: skip
    """Some heads of a token, normalized and rotated: [BLOCK_HEADS, HEAD_DIM_PADDED] float32.

    A rotation combines each dimension of the first half with its partner in the second half. Both
    are loaded twice, which avoids an exchange between threads.
    """
    ranks = first_head + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    is_element = (ranks < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    rows = heads + ranks[:, None] * HEAD_DIM
    values = tl.load(rows + dims[None, :], mask=is_element, other=0.0).to(tl.float32)
    scale = tl.full([BLOCK_HEADS], 1.0, tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + eps)
        weight = tl.load(norm_weight + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        values = values * scale[:, None] * weight[None, :]
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        turns = dims < ROTARY_DIM
        partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
        partners = tl.where(turns, partners, dims)
        is_partner = (ranks < NUM_HEADS)[:, None] & (turns & (dims < HEAD_DIM))[None, :]
        partner = tl.load(rows + partners[None, :], mask=is_partner, other=0.0).to(tl.float32)
        if HAS_NORM:
            weight = tl.load(norm_weight + partners, mask=turns, other=0.0).to(tl.float32)
            partner = partner * scale[:, None] * weight[None, :]
        angle = position * HALF + dims % HALF
        cosine = tl.load(cosines + angle, mask=turns, other=1.0)
        sine = tl.load(sines + angle, mask=turns, other=0.0)
        sine = tl.where(dims < HALF, -sine, sine)
        values = values * cosine[None, :] + partner * sine[None, :]
    return values


@triton.jit
def rotate_and_write(
    query_out, key_pool, value_pool, qkv, positions, slots, query_norm, key_norm, cosines, sines,
    eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr, ROTARY_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_HEADS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Normalizes and rotates queries and keys and writes keys and values to the pool, in one pass.

    The grid is (num_padded_tokens, query blocks + KV blocks) of BLOCK_HEADS heads.

    query_out: [num_padded_tokens, NUM_HEADS, HEAD_DIM].
    key_pool, value_pool: [num_blocks, NUM_KV_HEADS, PAGE, HEAD_DIM].
    qkv: [num_padded_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM].
    positions, slots: [num_padded_tokens]; for a negative slot no key or value is written.
    query_norm, key_norm: [HEAD_DIM], read if HAS_NORM.
    cosines, sines: [max_model_len, ROTARY_DIM / 2] float32, read if ROTARY_DIM is not 0.
    LIMIT: largest magnitude of the pool's type; 0 for types that need no clamp.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    QUERY_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    position = tl.load(positions + token).to(tl.int64)
    heads = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    if block < QUERY_BLOCKS:
        first = block * BLOCK_HEADS
        ranks = first + tl.arange(0, BLOCK_HEADS)
        turned = _turned_heads(
            heads, query_norm, cosines, sines, position, eps, NUM_HEADS, BLOCK_HEADS, HEAD_DIM,
            HEAD_DIM_PADDED, ROTARY_DIM, HAS_NORM, first,
        )  # fmt: skip
        targets = (token * NUM_HEADS + ranks)[:, None] * HEAD_DIM + dims[None, :]
        is_element = (ranks < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(query_out + targets, turned.to(query_out.dtype.element_ty), mask=is_element)
    else:
        slot = tl.load(slots + token)
        first = (block - QUERY_BLOCKS) * BLOCK_HEADS
        ranks = first + tl.arange(0, BLOCK_HEADS)
        is_element = (ranks < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        is_written = is_element & (slot >= 0)
        key = _turned_heads(
            heads + NUM_HEADS * HEAD_DIM, key_norm, cosines, sines, position, eps, NUM_KV_HEADS,
            BLOCK_HEADS, HEAD_DIM, HEAD_DIM_PADDED, ROTARY_DIM, HAS_NORM, first,
        )  # fmt: skip
        values = heads + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
        value = tl.load(
            values + ranks[:, None] * HEAD_DIM + dims[None, :], mask=is_written, other=0.0
        ).to(tl.float32)
        if LIMIT > 0:
            key = tl.clamp(key, -LIMIT, LIMIT)
            value = tl.clamp(value, -LIMIT, LIMIT)
        rows = ((slot // PAGE).to(tl.int64) * NUM_KV_HEADS + ranks) * PAGE + slot % PAGE
        targets = rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(key_pool + targets, key.to(key_pool.dtype.element_ty), mask=is_written)
        tl.store(value_pool + targets, value.to(value_pool.dtype.element_ty), mask=is_written)
