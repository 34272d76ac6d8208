// The page: what it shows of the store, live or of a recording, and what the controls do.

import { ApiError, ask, useToken, watchSteps } from "./live.js";
import { drawBlocks, drawSteps, numBins, readColours, short, timeAt } from "./charts.js";
import { batch, make, reasons, table, timeline } from "./details.js";
import { Grid } from "./grid.js";
import { Recording } from "./recording.js";
import { COLUMNS, Store } from "./store.js";

const $ = (id) => document.getElementById(id);
const PAGE = 100;
const NUM_TABLE_ROWS = 60;

const state = {
  store: new Store(), recording: null, pool: null, offset: 0, worker: "", window: 60, paused: null,
  selected: null, queue: { total: 0, pages: new Map() }, failure: "", lastHeard: 0, numGaps: 0, end: 0, isDirty: true,
};
// For people and tests who measure.
const stats = { num_renders: 0, last_render_ms: 0, max_render_ms: 0 };
window.headrace = { stats, state };

const now = () => Date.now() / 1000 + state.offset;
function clock(time, isFine) {
  // A recording of another program counts from 0.
  if (state.recording && time < 1e6) return time < -1e-9 ? "" : `${time.toFixed(isFine ? 3 : 1)} s`;
  const date = new Date(time * 1000), two = (number) => String(number).padStart(2, "0");
  const text = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return isFine ? `${text}.${String(date.getMilliseconds()).padStart(3, "0")}` : text;
}
function dirty() {
  state.isDirty = true;
}

// The newest time: that of the router, or the end of a recording.
function newest() {
  return state.recording ? state.store.span()[1] : now();
}

function shown() {
  const end = state.paused ?? newest(), num = numBins($("steps")), width = state.window / num;
  // Whole parts: a bar must not change as time goes on.
  const edge = Math.ceil(end / width) * width;
  return [edge - state.window, edge, num];
}

// ---- Drawing

function render() {
  const began = performance.now();
  state.isDirty = false;
  const [begin, end, num] = shown();
  state.end = end;
  const bins = state.store.bins(state.worker, begin, end, num);
  drawFigures(bins);
  const label = (time) => clock(time, state.window <= 1);
  const isSingle = drawSteps($("steps"), state.store, state.worker, bins, state.selected, label);
  drawBlocks($("kv"), bins, label);
  notes(bins, isSingle);
  tables(begin, end, bins);
  drawLists(end);
  controls();
  stats.num_renders++;
  stats.last_render_ms = performance.now() - began;
  stats.max_render_ms = Math.max(stats.max_render_ms, stats.last_render_ms);
}

function drawFigures(bins) {
  const sum = (values) => {
    let all = 0;
    for (let i = 0; i < values.length; i++) all += values[i];
    return all;
  };
  const of = sum(bins.duration), tokens = bins.uses.map(sum), budget = sum(tokens) || 1;
  const entries = [];
  const { pool } = state;
  if (pool && !state.recording) {
    const isReady = (worker) => worker.state === "WORKER_STATE_READY";
    entries.push(["workers ready", `${pool.workers.filter(isReady).length} of ${pool.workers.length}`],
      ["running", short(pool.workers.reduce((all, worker) => all + worker.num_running, 0))],
      ["waiting", short(pool.workers.reduce((all, worker) => all + worker.num_waiting, 0) + pool.num_queued)],
      ["paused", short(pool.num_paused)]);
  }
  entries.push(["steps/s", short(bins.total / state.window)], ["tokens kept/s", short(sum(bins.generated) / state.window)],
    ["step, mean", bins.total ? `${(of / bins.total * 1000).toFixed(1)} ms` : "–"],
    ["budget used", bins.total ? `${(100 * (1 - tokens[3] / budget)).toFixed(0)} %` : "–"],
    ["time in gaps", bins.total ? `${(100 * sum(bins.gap) / (sum(bins.gap) + of)).toFixed(1)} %` : "–"], ["preemptions", short(sum(bins.preemptions))]);
  const list = $("figures");
  while (list.children.length > entries.length) list.lastChild.remove();
  entries.forEach(([name, value], at) => {
    if (!list.children[at]) {
      const entry = make("div");
      entry.append(make("dt"), make("dd"));
      list.append(entry);
    }
    const [title, text] = list.children[at].children;
    if (title.textContent !== name) title.textContent = name;
    if (text.textContent !== value) text.textContent = value;
  });
}

function text(id, value) {
  if ($(id).textContent !== value) $(id).textContent = value;
}

function notes(bins, isSingle) {
  const isEmpty = !bins.total;
  $("steps-empty").hidden = !isEmpty || !$("steps-table").hidden;
  $("steps").hidden = !$("steps-table").hidden || isEmpty;
  text("steps-empty", emptyText());
  text("steps-note", isEmpty ? "" : `${bins.total} steps, tokens per step; ${isSingle ? "each bar is a step, as wide as the step took" : "a bar is the mean of the steps that ended in it"}${state.numGaps ? `; ${state.numGaps} times steps were no longer kept when this page asked` : ""}`);
  const last = bins.num - 1, [held, cached, empty] = bins.owners.map((values) => values[last]), all = held + cached + empty;
  text("kv-note", all ? `${Math.round(100 * held / all)} % held: ${held} of requests, ${cached} prefix cache, ${empty} empty${state.recording ? "; recordings do not tell which free blocks are cached" : ""}` : "no step yet in this window");
  $("kv").hidden = !all || !$("kv-table").hidden;
  const chart = $("steps");
  const found = state.selected && at(state.selected);
  chart.setAttribute("aria-valuetext", found ? describe(found) : `${bins.total} steps; no step is chosen`);
  $("kv").setAttribute("aria-label", `KV blocks by owner over time. ${$("kv-note").textContent}`);
}

function emptyText() {
  if (state.failure && !state.store.span()) return "No data yet.";
  const { pool } = state;
  if (pool && !state.recording) {
    const away = pool.schedulers.filter((link) => !link.connected);
    if (!pool.workers.length) {
      const why = away.map((link) => `scheduler ${link.scheduler_id || link.address} is not connected: ${link.error || "trying"}`);
      const up = pool.schedulers.filter((link) => link.connected).map((link) => link.scheduler_id || link.address);
      if (up.length) why.push(`${up.join(", ")} ${up.length === 1 ? "is connected and drives" : "are connected and drive"} no worker.`);
      return ["No worker is known to this router.", ...why].join("\n");
    }
    if (!pool.workers.some((worker) => worker.state === "WORKER_STATE_READY")) return "No worker is ready; the list of workers says why.";
  }
  return state.store.span() ? "No step in this window." : "No step yet: the workers have nothing to do.\nheadrace generate \"Once upon a time\" gives them something.";
}

function at({ worker, time }) {
  const found = state.store.stepAt(worker, time + 5e-7);
  return found && { worker: found.worker, ...found.ring.step(found.i) };
}

function describe(step) {
  return `step ${step.step_id} of ${step.worker}, ended ${clock(step.position / 1e6, true)}, ${(step.duration_s * 1000).toFixed(1)} ms, ${step.prefill_tokens} prefill, ${step.decode_tokens} decode, ${step.speculative_tokens} speculative, ${step.idle_tokens} idle tokens`;
}

function tables(begin, end, bins) {
  if (!$("steps-table").hidden) {
    const steps = [];
    for (let found = state.store.stepAt(state.worker, end); found && steps.length < NUM_TABLE_ROWS && found.ring.end(found.i) > begin; found = state.store.next(state.worker, found.ring.end(found.i), -1)) {
      steps.push({ worker: found.worker, ...found.ring.step(found.i) });
    }
    const columns = [["ended", "word"], ["worker", "word"], ["step"], ["ms"], ["prefill"], ["decode"], ["speculative"], ["idle"], ["running"], ["waiting"]];
    replace("steps-table", table(`The last ${steps.length} steps`, columns, steps.map((step) => {
      const name = make("button", String(step.step_id), "row-button");
      name.type = "button";
      name.addEventListener("click", () => openStep(step));
      return [clock(step.position / 1e6, true), step.worker, name, (step.duration_s * 1000).toFixed(1), step.prefill_tokens, step.decode_tokens, step.speculative_tokens, step.idle_tokens, step.num_running, step.num_waiting];
    })));
  }
  if (!$("kv-table").hidden) {
    const rows = [], part = Math.max(1, Math.floor(bins.num / 20)), width = (bins.end - bins.begin) / bins.num;
    for (let bin = bins.num - 1; bin >= 0 && bins.owners.some((values) => values[bin]); bin -= part) rows.push([clock(bins.begin + (bin + 1) * width), ...bins.owners.map((values) => values[bin])]);
    replace("kv-table", table("KV blocks", [["until", "word"], ["requests"], ["prefix cache"], ["empty"]], rows));
  }
}

// A table is not replaced under the focus of a keyboard or a text that is being selected.
function replace(id, made) {
  const box = $(id);
  if (box.contains(document.activeElement) && document.activeElement !== box) return;
  made.className = "first";
  box.replaceChildren(made);
}

function workers() {
  return state.recording ? [...state.store.rings.keys()].map((worker_id) => ({ worker_id })) : state.pool?.workers ?? [];
}

function drawLists(end) {
  const found = workers();
  workerGrid.setTotal(found.length);
  workerGrid.draw();
  text("workers-note", found.length ? `${found.length} ${found.length === 1 ? "worker" : "workers"}; a click or Enter shows one alone` : "no worker is known");
  if (state.recording) {
    const step = state.store.stepAt("", end), queue = step ? state.recording.queues.get(step.ring.at(0, step.i)) ?? [] : [];
    queueGrid.get = (i) => queue[i] && { request_id: queue[i][0], reason: queue[i][1], worker_id: state.recording.name, num_tokens: state.recording.requests.get(queue[i][0])?.tokens };
    queueGrid.setTotal(queue.length);
    text("queue-note", `${queue.length} waiting after the step that ended ${step ? clock(step.ring.end(step.i), true) : "–"}`);
  } else {
    const { total } = state.queue;
    queueGrid.get = (i) => state.queue.pages.get(Math.floor(i / PAGE))?.[i % PAGE];
    queueGrid.setTotal(Math.min(total, 10_000));
    text("queue-note", total ? `${total} waiting${total > 10_000 ? "; the first 10,000 are listed" : ""}${state.paused ? "; as of the pause" : ""}` : "nobody waits");
  }
  queueGrid.draw();
}

function controls() {
  const end = newest(), span = state.store.span(), back = span ? Math.min(span[0] - end + 0.1, -0.1) : -1;
  const scrub = $("scrub");
  scrub.min = String(Math.floor(Math.max(back, state.recording ? -Infinity : -3600)));
  if (document.activeElement !== scrub || state.paused === null) scrub.value = String(state.paused === null ? 0 : state.paused - end);
  $("pause").setAttribute("aria-pressed", String(state.paused !== null));
  text("pause", state.recording ? "To the end" : state.paused === null ? "Pause" : "Live");
  text("when", state.paused === null ? (state.recording ? "end" : "now") : clock(state.paused, false));
  scrub.setAttribute("aria-valuetext", $("when").textContent);
  const names = workers().map((worker) => worker.worker_id), select = $("worker");
  if (select.options.length !== names.length + 1 || names.some((name, at) => select.options[at + 1].value !== name)) {
    select.replaceChildren(new Option("all workers", ""), ...names.map((name) => new Option(name, name)));
    if (!names.includes(state.worker)) state.worker = "";
    select.value = state.worker;
  }
  const quiet = now() - state.lastHeard;
  const failure = state.recording ? `A recording: ${state.recording.name}, ${state.recording.num} steps${state.recording.isCut ? ", of which the last are kept" : ""}. Load the page again for the live view.` : state.failure && state.failure + (state.lastHeard ? `\nWhat is shown is ${quiet.toFixed(0)} s old; trying again.` : "");
  $("banner").hidden = !failure;
  text("banner", failure || "");
  text("link", state.recording ? "recording" : state.failure ? "not connected" : state.pool ? `connected, router ${state.pool.version}` : "connecting");
}

// ---- Lists

const bar = (cell, parts) => {
  let box = cell.firstElementChild;
  if (!box) {
    box = make("div", undefined, "bar");
    cell.append(box);
  }
  while (box.children.length < parts.length) box.append(make("i"));
  parts.forEach(([className, share], at) => {
    box.children[at].className = className;
    box.children[at].style.width = `${100 * share}%`;
  });
};
const column = (name, className, of) => ({ name, className, fill: (cell, item, i) => {
  const value = String(of(item, i) ?? "");
  if (cell.textContent !== value) cell.textContent = value;
} });
const last = (worker) => {
  const ring = state.store.rings.get(worker.worker_id), i = ring ? ring.countUntil(state.end) - 1 : -1;
  return i >= 0 ? (place) => ring.at(place, i) : null;
};
const isNow = () => !state.recording && state.paused === null;

const workerGrid = new Grid($("workers"), "Workers", [
  column("worker", "", (worker) => worker.worker_id),
  column("state", "", (worker) => state.recording ? "recorded" : worker.state.replace("WORKER_STATE_", "").toLowerCase()),
  column("model", "minor", (worker) => worker.model),
  column("run", "number", (worker) => isNow() ? worker.num_running : last(worker)?.(11)),
  column("wait", "number", (worker) => isNow() ? worker.num_waiting : last(worker)?.(16)),
  column("step", "number minor", (worker) => last(worker) ? `${(last(worker)(3) * 1000).toFixed(1)} ms` : "–"),
  { name: "KV blocks", className: "", fill: (cell, worker) => {
    const step = last(worker);
    const owners = step ? [13, 14, 15].map(step) : [0, 0, 1];
    const all = owners.reduce((sum, value) => sum + value, 0) || 1;
    bar(cell, [["held", owners[0] / all], ["cached", owners[1] / all]]);
    cell.title = step ? `${owners[0]} of requests, ${owners[1]} cached, ${owners[2]} empty` : "no step yet";
    cell.setAttribute("aria-label", cell.title);
  } },
], (i) => workers()[i], (worker) => {
  state.worker = state.worker === worker.worker_id ? "" : worker.worker_id;
  $("worker").value = state.worker;
  dirty();
});

const queueGrid = new Grid($("queue"), "Waiting requests", [
  column("", "number", (_, i) => i + 1),
  column("request", "", (item) => item.request_id),
  column("tenant", "minor", (item) => item.tenant),
  column("tokens", "number", (item) => item.num_tokens),
  column("waits", "number minor", (item) => item.arrival_time_unix_s ? `${Math.max(0, (state.paused ?? now()) - item.arrival_time_unix_s).toFixed(1)} s` : ""),
  column("where", "minor", (item) => item.worker_id || "router"),
  column("reason", "", (item) => item.reason.replaceAll("_", " ") + (item.num_needed_blocks ? `: needs ${item.num_needed_blocks}, ${item.num_free_blocks} free` : "")),
], () => undefined, (item) => openRequest(item.request_id));
queueGrid.body.addEventListener("scroll", () => { clearTimeout(state.scrolling); state.scrolling = setTimeout(readQueue, 60); });

// ---- Dialogs

function show(title, content) {
  text("details-title", title);
  $("details-body").replaceChildren(...content);
  if (!$("details").open) $("details").showModal();
}

async function openStep(step) {
  state.selected = { worker: step.worker, time: step.position / 1e6 };
  dirty();
  const title = `Step ${step.step_id} of ${step.worker}`;
  if (state.recording) {
    show(title, batch(step, state.recording.batches.get(step.position), openRequest));
    return;
  }
  show(title, [...batch(step), make("p", "reading the batch …", "note")]);
  try {
    const found = await ask("/api/batch", { worker_id: step.worker, position: step.position });
    if ($("details-title").textContent === title) show(title, batch(step, found.rows, openRequest));
  } catch (error) {
    show(title, [...batch(step), make("p", `No batch: ${error.message}.`, "note")]);
  }
}

async function openRequest(requestId) {
  const title = `Request ${requestId}`;
  if (state.recording) {
    const request = state.recording.requests.get(requestId);
    const waited = { total_s: 0, events: request?.events ?? [] };
    show(title, request ? timeline(waited, clock) : [make("p", "The recording has no such request.", "note")]);
    return;
  }
  show(title, [make("p", "asking …", "note")]);
  try {
    const found = await ask("/api/explain", { request_id: requestId });
    if ($("details-title").textContent !== title) return;
    const again = make("button", "Read again");
    again.type = "button";
    again.addEventListener("click", () => openRequest(requestId));
    const actions = make("p", undefined, "actions");
    actions.append(again);
    show(title, [...timeline(found, clock), actions]);
  } catch (error) {
    show(title, [make("p", `No timeline: ${error.message}.`, "note")]);
  }
}

// ---- Controls

$("close").addEventListener("click", () => $("details").close());
$("worker").addEventListener("change", (event) => { state.worker = event.target.value; dirty(); });
$("window").addEventListener("change", (event) => { state.window = Number(event.target.value); dirty(); });
$("pause").addEventListener("click", () => {
  state.paused = state.paused === null && !state.recording ? newest() : null;
  dirty();
});
$("scrub").addEventListener("input", (event) => {
  const back = Number(event.target.value);
  state.paused = back > -0.05 ? null : newest() + back;
  dirty();
});
$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = $("find-id").value.trim();
  if (id) openRequest(id);
});
$("file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  text("link", `reading ${file.name}`);
  try {
    const recording = await Recording.read(file);
    live.abort();
    const [first, end] = recording.store.span(), fitting = [...$("window").options].find((option) => option.value >= end - first);
    $("window").value = fitting?.value ?? "300";
    Object.assign(state, { recording, store: recording.store, window: Number($("window").value), paused: null, selected: null, worker: "", failure: "" });
  } catch (error) {
    state.failure = `Cannot read the recording: ${error.message}.`;
  }
  event.target.value = "";
  dirty();
});
for (const button of document.querySelectorAll(".as-table")) {
  button.addEventListener("click", () => {
    const box = $(`${button.dataset.for}-table`);
    box.hidden = !box.hidden;
    button.setAttribute("aria-pressed", String(!box.hidden));
    dirty();
  });
}
const steps = $("steps");
steps.addEventListener("click", (event) => {
  const [begin, end, num] = shown();
  const time = timeAt(steps, event.offsetX, begin, end);
  // The step under the pointer: the first that ends after it, unless it began later.
  const after = state.store.next(state.worker, time, 1), before = state.store.stepAt(state.worker, time + state.window / num);
  const found = after && after.ring.end(after.i) - after.ring.at(3, after.i) <= time + state.window / num ? after : before;
  if (found) openStep({ worker: found.worker, ...found.ring.step(found.i) });
});
steps.addEventListener("keydown", (event) => {
  const [begin, end] = shown();
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, Home: 0, End: 0 }[event.key];
  if (event.key === "Enter" && state.selected) {
    const step = at(state.selected);
    if (step) openStep(step);
  } else if (by !== undefined) {
    const found = event.key === "Home" ? state.store.next(state.worker, begin, 1)
      : event.key === "End" || !state.selected ? state.store.stepAt(state.worker, end)
        : state.store.next(state.worker, state.selected.time, by);
    if (found) state.selected = { worker: found.worker, time: found.ring.end(found.i) };
    if (found && state.paused === null && !state.recording) state.paused = end; // or the step would run away
    dirty();
  } else return;
  event.preventDefault();
});
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  text("theme", theme === "dark" ? "Light" : "Dark");
  readColours();
  dirty();
}
$("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("headrace-theme", theme);
  setTheme(theme);
});
setTheme(localStorage.getItem("headrace-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
new ResizeObserver(dirty).observe(document.querySelector("main"));

// ---- Live

const live = new AbortController();
const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

async function askForToken(error) {
  const dialog = $("token");
  if (error.message) text("token-why", sessionStorage.getItem("headrace-token") ? "This token does not open the console. It wants the admin port's token, or the key of an administrator." : $("token-why").textContent);
  if (dialog.open) return;
  $("token-value").value = "";
  dialog.showModal();
  await new Promise((resolve) => { dialog.addEventListener("close", resolve, { once: true }); });
  if ($("token-value").value) useToken($("token-value").value);
  $("token-value").value = "";
}

async function failed(error) {
  if (live.signal.aborted) return;
  if (error instanceof ApiError && error.status === 401) {
    state.failure = "The console needs a token.";
    dirty();
    await askForToken(error);
    state.failure = "";
  } else {
    state.failure = error instanceof ApiError && error.status ? `The router refuses: ${error.message}.` : "The router does not answer: it has stopped, or cannot be reached.";
  }
  dirty();
}

function take(message, fields) {
  state.lastHeard = now();
  state.failure = "";
  for (const worker of message) {
    state.numGaps += worker.has_gap;
    for (const step of worker.steps) {
      const byReason = step[fields.length - 1];
      let waiting = 0;
      for (const reason in byReason) waiting += byReason[reason];
      state.store.add(worker.worker_id, step, waiting, waiting ? byReason : null, order(fields));
    }
  }
  dirty();
}
let places = null;
function order(fields) {
  return places ??= COLUMNS.slice(0, -1).map((name) => fields.indexOf(name));
}

async function readPool() {
  const pool = await ask("/api/pool");
  state.offset = pool.time_unix_s - Date.now() / 1000;
  if (state.paused === null) state.pool = pool;
  dirty();
}

async function readQueue() {
  if (state.recording || state.paused !== null) return;
  const [first, end] = queueGrid.visible(), pages = new Map();
  const from = Math.floor(first / PAGE), to = Math.floor(Math.max(first, end - 1) / PAGE);
  try {
    for (let page = from; page <= to; page++) {
      const found = await ask("/api/queue", { offset: page * PAGE, limit: PAGE });
      state.queue.total = found.num_waiting;
      pages.set(page, found.requests);
    }
    state.queue.pages = pages;
  } catch { /* the pool's poll says what is wrong */ }
  dirty();
}

async function poll() {
  while (!live.signal.aborted) {
    try {
      await readPool();
      await readQueue();
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 401)) await failed(error);
    }
    await pause(document.hidden ? 5000 : 1000);
  }
}

async function follow() {
  while (!live.signal.aborted) {
    try {
      // A larger pool has more steps a second, and the page keeps as many steps in all.
      const { workers: found } = await ask("/api/pool");
      state.failure = "";
      const history = found.length <= 8 ? 300 : found.length <= 50 ? 60 : 20;
      await watchSteps(state.store.positions(), history, take, live.signal);
    } catch (error) {
      await failed(error);
    }
    if (!live.signal.aborted) await pause(1500);
  }
}

let lastDrawn = 0;
function frame(time) {
  // Bars move on by themselves; ten pictures a second are smooth enough, and spare batteries.
  const isMoving = state.paused === null && !state.recording;
  if (time - lastDrawn >= (state.isDirty ? 100 : 1000) && (state.isDirty || isMoving)) {
    lastDrawn = time;
    render();
  }
  requestAnimationFrame(frame);
}

follow();
poll();
requestAnimationFrame(frame);
