"""The kernels of paged attention: one for decodes and chunks, and one that merges splits.

A program computes one work item (see `work`) and one KV head: some queries of one request over one
range of its context. Query heads that share a KV head are rows of the same product, so a decode
with 8 query heads per KV head fills half of a 16-row tile instead of a sixteenth.
"""

import triton
import triton.language as tl

# Fields of a work item, int32 each; `work.ITEM_FIELDS` counts them.
_TABLE_START = tl.constexpr(0)
_FIRST_TOKEN = tl.constexpr(1)
_NUM_QUERIES = tl.constexpr(2)
_FIRST_POSITION = tl.constexpr(3)
_KV_START = tl.constexpr(4)
_KV_END = tl.constexpr(5)
_PARTIAL_ROW = tl.constexpr(6)
_ITEM_FIELDS = tl.constexpr(8)
# Fields of a merge entry.
_MERGE_TOKEN = tl.constexpr(0)
_MERGE_ROW = tl.constexpr(1)
_MERGE_SPLITS = tl.constexpr(2)
_MERGE_STRIDE = tl.constexpr(3)
_MERGE_FIELDS = tl.constexpr(4)


@triton.jit
def _load_tile(
    pool, table, tile, kv_start, kv_end, kv_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, USES_DESCRIPTORS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Keys or values from position `tile` on: [BLOCK_N, HEAD_DIM_PADDED].

    Rows outside [kv_start, kv_end) are zeros, but a descriptor loads a whole page with the slots
    past the context: the caller must keep those rows out of every sum.
    """
    if USES_DESCRIPTORS:
        page_id = tl.load(table + tile // PAGE)
        values = pool.load([(page_id * NUM_KV_HEADS + kv_head) * PAGE, 0])
    else:
        columns = tl.arange(0, BLOCK_N)
        dims = tl.arange(0, HEAD_DIM_PADDED)
        positions = tile + columns
        is_used = (positions >= kv_start) & (positions < kv_end)
        if BLOCK_N <= PAGE:
            # The tile lies in one page: one block id is loaded, other addresses are affine.
            block = tl.load(table + tile // PAGE).to(tl.int64)
            rows = (block * NUM_KV_HEADS + kv_head) * PAGE + tile % PAGE + columns
        else:
            if IS_MASKED:
                blocks = tl.load(table + positions // PAGE, mask=is_used, other=0)
            else:
                blocks = tl.load(table + positions // PAGE)
            rows = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * PAGE + positions % PAGE
        pointers = pool + rows[:, None] * HEAD_DIM + dims[None, :]
        is_dim = (dims < HEAD_DIM)[None, :]
        if IS_MASKED:
            values = tl.load(pointers, mask=is_used[:, None] & is_dim, other=0.0)
        elif HEAD_DIM_PADDED != HEAD_DIM:
            values = tl.load(pointers, mask=is_dim, other=0.0)
        else:
            values = tl.load(pointers)
    return values


@triton.jit
def _attend_range(
    acc, row_max, row_sum, query, positions, key_pool, value_pool, table,
    start, end, kv_start, kv_end, kv_head, score_scale, cap_log2, window,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    USES_DESCRIPTORS: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the tiles in [start, end) to the running softmax.

    `acc` is not yet divided by `row_sum`; `row_max` and scores are in base 2. Without masks, every
    query must see every key of these tiles.
    """
    for tile in tl.range(start, end, BLOCK_N):
        key = _load_tile(
            key_pool, table, tile, kv_start, kv_end, kv_head, NUM_KV_HEADS, HEAD_DIM,
            HEAD_DIM_PADDED, PAGE, BLOCK_N, USES_DESCRIPTORS, IS_MASKED,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        scores *= score_scale
        if HAS_CAP:
            # cap * tanh(x) as an exponential; the scale already holds 2 / cap.
            scores = cap_log2 - 2.0 * cap_log2 / (1.0 + tl.exp2(scores))
        columns = tile + tl.arange(0, BLOCK_N)
        is_used = (columns >= kv_start) & (columns < kv_end)
        if IS_MASKED:
            is_visible = (columns[None, :] <= positions[:, None]) & is_used[None, :]
            if HAS_WINDOW:
                is_visible = is_visible & (positions[:, None] - columns[None, :] < window)
            scores = tl.where(is_visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        finite_max = new_max
        if IS_MASKED:
            # A row with no visible key so far has maximum -inf; 0 in its place avoids inf - inf.
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - finite_max[:, None])
        rescale = tl.exp2(row_max - finite_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        value = _load_tile(
            value_pool, table, tile, kv_start, kv_end, kv_head, NUM_KV_HEADS, HEAD_DIM,
            HEAD_DIM_PADDED, PAGE, BLOCK_N, USES_DESCRIPTORS, IS_MASKED,
        )  # fmt: skip
        value = value.to(query.dtype)
        if USES_DESCRIPTORS and IS_MASKED:
            # An unused slot may hold NaN or inf, and zero weight times that is NaN.
            value = tl.where(is_used[:, None], value, 0.0)
        acc = tl.dot(weights.to(query.dtype), value, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _whole_tiles(
    kv_start, kv_end, first_position, num_queries, window,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Start and end of the range of tiles in which every query sees every key.

    Tiles before the range are cut by the window or the item's start, tiles after the range by
    causality or the item's end. The range may be empty.
    """
    full_start = tl.cdiv(kv_start, BLOCK_N) * BLOCK_N
    if HAS_WINDOW:
        last_position = first_position + num_queries - 1
        seen_by_all = tl.maximum(last_position - window + 1, 0)
        full_start = tl.maximum(full_start, tl.cdiv(seen_by_all, BLOCK_N) * BLOCK_N)
    full_start = tl.minimum(full_start, tl.cdiv(kv_end, BLOCK_N) * BLOCK_N)
    full_end = tl.minimum(kv_end, first_position + 1) // BLOCK_N * BLOCK_N
    return full_start, tl.maximum(full_start, full_end)


@triton.jit(do_not_specialize=["window"])
def paged_attention(
    out, query, key_pool, value_pool, tables, items, partial_out, partial_lse,
    score_scale, cap_log2, window,
    QUERY_STRIDE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    SKIPS_MASKS: tl.constexpr, USES_DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Attention of one work item over one KV head; the grid is (num_items * NUM_KV_HEADS).

    out: [num_padded_tokens, num_heads, HEAD_DIM], written if the item is not split.
    query: the shape of out; QUERY_STRIDE is the distance between tokens in elements.
    key_pool, value_pool: pointers or descriptors of [num_blocks, NUM_KV_HEADS, PAGE, HEAD_DIM].
    tables: block ids; an item holds the offset of its request's first block id.
    items: [num_items, 8]; an item with no queries is padding.
    partial_out: [num_partial_rows, num_heads, HEAD_DIM_PADDED] float32, written if split.
    partial_lse: [num_partial_rows, num_heads] float32, base 2, written if the item is split.
    score_scale: softmax scale in base 2; with a soft cap, that scale times 2 / cap.
    cap_log2: soft cap in base 2.
    """
    program = tl.program_id(0)
    kv_head = program % NUM_KV_HEADS
    item = items + (program // NUM_KV_HEADS) * _ITEM_FIELDS
    num_queries = tl.load(item + _NUM_QUERIES)
    if num_queries == 0:
        return
    first_token = tl.load(item + _FIRST_TOKEN)
    first_position = tl.load(item + _FIRST_POSITION)
    kv_start = tl.load(item + _KV_START)
    kv_end = tl.load(item + _KV_END)
    table = tables + tl.load(item + _TABLE_START)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    ranks = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    positions = first_position + ranks
    is_row = ranks < num_queries
    is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first_token + ranks).to(tl.int64)
    query_tile = tl.load(
        query + (tokens * QUERY_STRIDE + heads * HEAD_DIM)[:, None] + dims[None, :],
        mask=is_element,
        other=0.0,
    )

    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    start = kv_start // BLOCK_N * BLOCK_N
    if SKIPS_MASKS:
        full_start, full_end = _whole_tiles(
            kv_start, kv_end, first_position, num_queries, window, BLOCK_N, HAS_WINDOW
        )
        if HAS_WINDOW:
            acc, row_max, row_sum = _attend_range(
                acc, row_max, row_sum, query_tile, positions, key_pool, value_pool, table,
                start, full_start, kv_start, kv_end, kv_head, score_scale, cap_log2, window,
                NUM_KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, BLOCK_N, HAS_CAP, HAS_WINDOW,
                USES_DESCRIPTORS, True,
            )  # fmt: skip
        acc, row_max, row_sum = _attend_range(
            acc, row_max, row_sum, query_tile, positions, key_pool, value_pool, table,
            full_start, full_end, kv_start, kv_end, kv_head, score_scale, cap_log2, window,
            NUM_KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, BLOCK_N, HAS_CAP, HAS_WINDOW,
            USES_DESCRIPTORS, False,
        )  # fmt: skip
        start = full_end
    acc, row_max, row_sum = _attend_range(
        acc, row_max, row_sum, query_tile, positions, key_pool, value_pool, table,
        start, kv_end, kv_start, kv_end, kv_head, score_scale, cap_log2, window,
        NUM_KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, PAGE, BLOCK_N, HAS_CAP, HAS_WINDOW,
        USES_DESCRIPTORS, True,
    )  # fmt: skip

    # Loaded a second time: keeping these values in registers during the loops would spill.
    first_token = tl.load(item + _FIRST_TOKEN, volatile=True)
    num_queries = tl.load(item + _NUM_QUERIES, volatile=True)
    partial_row = tl.load(item + _PARTIAL_ROW)
    tokens = (first_token + ranks).to(tl.int64)
    is_row = ranks < num_queries
    is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    # A row without visible keys (they are in another split, or the row is padding) is all zeros.
    is_empty = row_sum == 0.0
    divisor = tl.where(is_empty, 1.0, row_sum)
    acc = acc / divisor[:, None]
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    if partial_row < 0:
        targets = (tokens * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + targets, acc.to(out.dtype.element_ty), mask=is_element)
    else:
        partial_heads = (partial_row + ranks).to(tl.int64) * NUM_HEADS + heads
        lse = tl.where(is_empty, float("-inf"), row_max + tl.log2(divisor))
        tl.store(partial_lse + partial_heads, lse, mask=is_row)
        targets = partial_heads[:, None] * HEAD_DIM_PADDED + dims[None, :]
        tl.store(partial_out + targets, acc, mask=is_row[:, None])


@triton.jit
def merge_splits(
    out, partial_out, partial_lse, merges,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one query and head; the grid is (num_merges * NUM_HEADS).

    merges: [num_merges, 4]; an entry with no splits is padding. For the other arguments see
    `paged_attention`.
    """
    program = tl.program_id(0)
    head = program % NUM_HEADS
    entry = merges + (program // NUM_HEADS) * _MERGE_FIELDS
    num_splits = tl.load(entry + _MERGE_SPLITS)
    if num_splits == 0:
        return
    token = tl.load(entry + _MERGE_TOKEN).to(tl.int64)
    first_row = tl.load(entry + _MERGE_ROW)
    stride = tl.load(entry + _MERGE_STRIDE)

    dims = tl.arange(0, HEAD_DIM_PADDED)
    acc = tl.zeros([HEAD_DIM_PADDED], tl.float32)
    total = 0.0
    highest = float("-inf")
    for start in tl.range(0, num_splits, BLOCK_SPLITS):
        splits = start + tl.arange(0, BLOCK_SPLITS)
        is_split = splits < num_splits
        rows = (first_row + splits * stride).to(tl.int64) * NUM_HEADS + head
        lse = tl.load(partial_lse + rows, mask=is_split, other=float("-inf"))
        # Finite from the first round on: a split has more keys than a tile has queries, so at most
        # the first split lies wholly before a query's window.
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - new_highest)
        rescale = tl.exp2(highest - new_highest)
        parts = tl.load(
            partial_out + rows[:, None] * HEAD_DIM_PADDED + dims[None, :],
            mask=is_split[:, None],
            other=0.0,
        )
        acc = acc * rescale + tl.sum(parts * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        highest = new_highest
    target = out + (token * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(target, (acc / total).to(out.dtype.element_ty), mask=dims < HEAD_DIM)
