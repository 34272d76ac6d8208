// The steps that the page holds: a ring for each worker, in columns, so that thousands of updates
// leave no garbage behind.

export const COLUMNS = [
  "position", "step_id", "start_time_unix_s", "duration_s", "gap_s", "prefill_tokens", "decode_tokens",
  "speculative_tokens", "idle_tokens", "generated_tokens", "num_requests", "num_running", "num_preemptions",
  "kv_blocks_held", "kv_blocks_cached", "kv_blocks_empty", "num_waiting",
];
export const USES = ["prefill", "decode", "speculative", "idle"];
export const OWNERS = ["held", "cached", "empty"];
// Over all workers: 22 MB of columns.
const MAX_STEPS = 160_000;
const MAX_OF_WORKER = 20_000;

const IN_ORDER = COLUMNS.map((_, column) => column);

class Ring {
  constructor() {
    this.capacity = 256;
    this.size = 0;
    this.head = 0; // where the next step goes
    this.columns = COLUMNS.map(() => new Float64Array(this.capacity));
    this.reasons = new Array(this.capacity).fill(null);
  }

  // The i-th oldest step's value.
  at(column, i) {
    return this.columns[column][(this.head - this.size + i + this.capacity) % this.capacity];
  }

  reasonsAt(i) {
    return this.reasons[(this.head - this.size + i + this.capacity) % this.capacity] ?? {};
  }

  // When the i-th oldest step ended, seconds since the epoch.
  end(i) {
    return this.at(0, i) / 1e6;
  }

  // How many steps ended at or before a time.
  countUntil(time) {
    let low = 0, high = this.size;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end(middle) <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  step(i) {
    const step = {};
    COLUMNS.forEach((name, column) => { step[name] = this.at(column, i); });
    step.num_waiting_by_reason = this.reasonsAt(i);
    return step;
  }

  // values[places[column]] is a column's value, but for the last column, which is `waiting`.
  push(values, places, waiting, reasons, limit) {
    if (this.size === this.capacity && this.capacity < limit) this.#resize(Math.min(2 * this.capacity, limit));
    if (this.capacity > limit) this.#resize(limit);
    const last = COLUMNS.length - 1;
    for (let column = 0; column < last; column++) this.columns[column][this.head] = values[places[column]];
    this.columns[last][this.head] = waiting;
    this.reasons[this.head] = reasons;
    this.head = (this.head + 1) % this.capacity;
    this.size = Math.min(this.size + 1, this.capacity);
  }

  #resize(capacity) {
    const kept = Math.min(this.size, capacity), skipped = this.size - kept;
    const columns = COLUMNS.map((_, column) => {
      const values = new Float64Array(capacity);
      for (let i = 0; i < kept; i++) values[i] = this.at(column, skipped + i);
      return values;
    });
    const reasons = new Array(capacity).fill(null);
    for (let i = 0; i < kept; i++) reasons[i] = this.reasons[(this.head - kept + i + this.capacity) % this.capacity];
    Object.assign(this, { capacity, columns, reasons, size: kept, head: kept % capacity });
  }
}

export class Store {
  constructor() {
    this.rings = new Map();
  }

  add(worker, values, waiting, reasons, places = IN_ORDER) {
    let ring = this.rings.get(worker);
    if (!ring) this.rings.set(worker, ring = new Ring());
    // A step that the page has already is one of a stream that began again.
    if (ring.size && values[places[0]] <= ring.at(0, ring.size - 1)) return;
    const limit = Math.max(64, Math.min(MAX_OF_WORKER, Math.floor(MAX_STEPS / this.rings.size)));
    ring.push(values, places, waiting, reasons, limit);
  }

  // The last position of each worker, to go on from.
  positions() {
    const after = {};
    for (const [worker, ring] of this.rings) if (ring.size) after[worker] = ring.at(0, ring.size - 1);
    return after;
  }

  ringsOf(worker) {
    if (!worker) return [...this.rings];
    const ring = this.rings.get(worker);
    return ring ? [[worker, ring]] : [];
  }

  // First and last time, or null.
  span() {
    let first = Infinity, last = -Infinity;
    for (const ring of this.rings.values()) {
      if (!ring.size) continue;
      first = Math.min(first, ring.end(0) - ring.at(3, 0));
      last = Math.max(last, ring.end(ring.size - 1));
    }
    return first <= last ? [first, last] : null;
  }

  // Sums of the steps that ended in each of `num` parts of (begin, end].
  bins(worker, begin, end, num) {
    const width = (end - begin) / num, sum = () => new Float64Array(num);
    const found = { num, begin, end, steps: sum(), uses: USES.map(sum), gap: sum(), duration: sum(), generated: sum(), preemptions: sum(), owners: OWNERS.map(sum), total: 0 };
    for (const [, ring] of this.ringsOf(worker)) {
      const { columns, capacity } = ring, first = ring.countUntil(begin), last = ring.countUntil(end);
      const [positions, , , duration, gap] = columns, [, , , , , , , , , generated, , , preempted, held, cached, empty] = columns;
      // Where the i-th oldest step is; the columns are read as they lie, which is ten times faster.
      let i = first, at = (ring.head - ring.size + i + capacity) % capacity;
      // Blocks stay as they were until the next step says otherwise.
      let blocks = i ? (at + capacity - 1) % capacity : -1;
      for (let bin = 0; bin < num; bin++) {
        const edge = 1e6 * (bin === num - 1 ? end : begin + (bin + 1) * width);
        for (; i < last && positions[at] <= edge; i++) {
          found.steps[bin]++;
          for (let use = 0; use < 4; use++) found.uses[use][bin] += columns[5 + use][at];
          found.gap[bin] += gap[at];
          found.duration[bin] += duration[at];
          found.generated[bin] += generated[at];
          found.preemptions[bin] += preempted[at];
          blocks = at;
          if (++at === capacity) at = 0;
        }
        if (blocks < 0) continue;
        found.owners[0][bin] += held[blocks];
        found.owners[1][bin] += cached[blocks];
        found.owners[2][bin] += empty[blocks];
      }
      found.total += last - first;
    }
    return found;
  }

  // The step of a worker (or of all) that ended last at or before a time.
  stepAt(worker, time) {
    let best = null;
    for (const [name, ring] of this.ringsOf(worker)) {
      const i = ring.countUntil(time) - 1;
      if (i >= 0 && (!best || ring.end(i) > best.ring.end(best.i))) best = { worker: name, ring, i };
    }
    return best;
  }

  // The step `by` places after a step, in the order of their ends.
  next(worker, time, by) {
    if (by < 0) {
      const before = this.stepAt(worker, time - 1e-6);
      return before;
    }
    let best = null;
    for (const [name, ring] of this.ringsOf(worker)) {
      const i = ring.countUntil(time);
      if (i < ring.size && (!best || ring.end(i) < best.ring.end(best.i))) best = { worker: name, ring, i };
    }
    return best;
  }
}
