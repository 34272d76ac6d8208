// Reads a recording of a scheduler (`--record`, tests/data): the steps, their batches, and what
// became of each request.

import { Store } from "./store.js";

export const MAX_BYTES = 64 * 1024 * 1024;
const MAX_STEPS = 20_000;
// Recordings of other programs have no times.
const UNKNOWN_STEP_S = 0.02;

export class Recording {
  constructor(name) {
    this.name = name;
    this.store = new Store();
    this.batches = new Map(); // by position
    this.queues = new Map();
    this.requests = new Map(); // by name: { tokens, events }
    this.num = 0;
    this.isCut = false;
  }

  static async read(file) {
    if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than ${MAX_BYTES / 1048576} MiB`);
    const found = new Recording(file.name);
    const reader = file.stream().pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", isWhole = false;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      rest += value;
      if (isWhole) continue;
      const lines = rest.split("\n");
      rest = lines.pop();
      for (let n = 0; n < lines.length; n++) {
        let record;
        try { record = JSON.parse(lines[n]); } catch {
          if (found.head) throw new Error(`${file.name}: a line is not JSON`);
          rest = [...lines, rest].join("\n"); // one JSON object on many lines
          isWhole = true;
          break;
        }
        found.#take(record);
      }
    }
    if (rest.trim()) {
      try { found.#take(JSON.parse(rest)); } catch (error) {
        // The last line of a file that is still written may be cut.
        if (!found.num) throw new Error(`${file.name} is no recording: ${error.message}`);
      }
    }
    if (!found.num) throw new Error(`${file.name} has no step`);
    found.#end();
    return found;
  }

  #take(record) {
    if (!this.head) {
      if (!record.schema?.includes("sched-trace")) throw new Error("it does not begin with a schema of scheduler traces");
      this.head = record;
      const { config } = record;
      this.budget = config.max_num_scheduled_tokens || config.max_num_batched_tokens;
      this.numBlocks = config.num_gpu_blocks - 1;
      this.#add(record.requests);
      for (const step of record.steps ?? []) this.#step(step);
    } else this.#step(record);
  }

  #add(requests) {
    for (const [name, request] of Object.entries(requests ?? {})) {
      this.requests.set(name, { tokens: request.prompt.length + (request.output?.length ?? 0), prompt: request.prompt.length, events: [] });
    }
  }

  #note(name, step, time, kind, detail, tokens = 0) {
    const events = this.requests.get(name)?.events;
    if (!events) return;
    const last = events.at(-1);
    if (last?.kind === kind && kind === "SCHEDULED") {
      Object.assign(last, { last_step: step, num_tokens: last.num_tokens + tokens });
    } else events.push({ first_step: step, last_step: step, kind, detail, num_tokens: tokens, time_unix_s: time });
  }

  #step(record) {
    this.#add(record.requests);
    const { sched, update, state = {}, i: number = this.num } = record;
    const time = record.now || (this.lastTime === undefined ? 0 : this.lastTime + UNKNOWN_STEP_S);
    for (const name of record.add ?? []) this.#note(name, number, time, "ADDED", `prompt of ${this.requests.get(name)?.prompt} tokens`);
    for (const name of [...(record.abort ?? []), ...(record.abort_mid ?? [])]) this.#note(name, number, time, "FINISHED", "ended from outside");
    if (sched) this.#plan(number, time, sched, state);
    for (const out of update?.out ?? []) {
      const request = this.requests.get(out.id);
      if (request) request.tokens += out.tokens.length;
      if (this.open) this.open.values[4] += out.tokens.length;
      if (out.finish) this.#note(out.id, number, time, "FINISHED", `${out.finish}, with ${out.tokens.length} tokens in the last step`);
    }
  }

  #plan(number, time, sched, state) {
    this.#end(time);
    this.lastTime = time;
    for (const name of [...sched.new, ...sched.resumed]) this.#note(name, number, time, "ADMITTED", `${sched.hit?.[name] ?? 0} tokens from the prefix cache`);
    for (const [name, trigger] of sched.preempt_info ?? []) this.#note(name, number, time, "PREEMPTED", `preempted: ${trigger} needed its blocks`);
    const rows = Object.entries(sched.tokens).map(([name, tokens]) => {
      const drafts = sched.spec?.[name]?.length ?? 0, computed = sched.computed[name] ?? 0, own = tokens - drafts;
      this.#note(name, number, time, "SCHEDULED", "", tokens);
      const isChunk = own > 1 && computed + own < (this.requests.get(name)?.tokens ?? 0);
      const kind = isChunk ? "PREFILL_CHUNK" : own > 1 ? "PREFILL" : drafts ? "SPECULATIVE" : "DECODE";
      return { request_id: name, num_tokens: tokens, num_drafts: drafts, num_computed_tokens: computed, kind: `KIND_${kind}` };
    });
    if (!rows.length) return;
    const sum = (kinds, of) => rows.reduce((all, row) => all + (kinds.includes(row.kind.slice(5)) ? of(row) : 0), 0);
    const speculative = rows.reduce((all, row) => all + row.num_drafts, 0);
    const prefill = sum(["PREFILL", "PREFILL_CHUNK"], (row) => row.num_tokens - row.num_drafts);
    const decode = sum(["DECODE", "SPECULATIVE"], () => 1);
    const waiting = [...(state.held ?? []), ...(state.skipped ?? []), ...(state.waiting ?? [])];
    const queue = [
      ...waiting.map((name) => [name, (state.held ?? []).includes(name) ? "long_prefills" : (state.skipped ?? []).includes(name) ? "skipped" : "waiting"]),
      ...(state.paused ?? []).map((name) => [name, "client"]),
    ];
    const free = sched.free, held = this.numBlocks - free;
    this.open = {
      time, rows, queue, number,
      values: [prefill, decode, speculative, Math.max(0, this.budget - prefill - decode - speculative), 0, rows.length, (state.running ?? rows).length, sched.preempt_info?.length ?? 0, held, 0, free],
    };
  }

  // Ends the open step: a recording says when a step was planned, not when its result came.
  #end(time) {
    const { open } = this;
    if (!open) return;
    const duration = Math.min(1, Math.max(1e-5, (time ?? open.time + UNKNOWN_STEP_S) - open.time));
    const position = Math.max(Math.round((open.time + duration) * 1e6), (this.lastPosition ?? 0) + 1);
    this.lastPosition = position;
    const reasons = {};
    for (const [, reason] of open.queue) reasons[reason] = (reasons[reason] ?? 0) + 1;
    this.store.add(this.name, [position, open.number, open.time, duration, 0, ...open.values], open.queue.length, reasons);
    this.batches.set(position, open.rows);
    this.queues.set(position, open.queue);
    this.num++;
    if (this.batches.size > MAX_STEPS) {
      const oldest = this.batches.keys().next().value;
      this.batches.delete(oldest);
      this.queues.delete(oldest);
      this.isCut = true;
    }
    this.open = null;
  }
}
