// What the dialog shows: the batch of a step, and the timeline of a request.

const seconds = (value) => value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(1)} ms`;

export function make(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// columns: [name, class], where a "text" may be broken and a "word" not; rows: arrays of text or elements.
export function table(caption, columns, rows) {
  const made = make("table");
  made.append(make("caption", caption, "hidden"));
  const head = made.createTHead().insertRow();
  for (const [name, className] of columns) {
    const cell = make("th", name, className);
    cell.scope = "col";
    head.append(cell);
  }
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((value, at) => {
      const cell = line.insertCell();
      cell.className = columns[at][1] ?? "";
      cell.append(value);
    });
  }
  return made;
}

export function batch(step, rows, explain) {
  const kind = (name) => name.replace(/^KIND_/, "").toLowerCase().replace("_", " ");
  const facts = make("p", `${seconds(step.duration_s)}${step.gap_s ? ` after a gap of ${seconds(step.gap_s)}` : ""}. Budget: ${step.prefill_tokens} prefill, ${step.decode_tokens} decode, ${step.speculative_tokens} speculative, ${step.idle_tokens} idle. ${step.num_running} running, ${step.num_waiting} waiting${reasons(step.num_waiting_by_reason)}. KV blocks: ${step.kv_blocks_held} of requests, ${step.kv_blocks_cached} cached, ${step.kv_blocks_empty} empty.${step.num_preemptions ? ` ${step.num_preemptions} preempted.` : ""}`, "note");
  if (!rows) return [facts];
  const made = table("Requests of the step", [["request", "text"], ["kind", "word"], ["tokens"], ["drafts"], ["computed"]], rows.map((row) => {
    const name = make("button", row.request_id, "row-button");
    name.type = "button";
    name.addEventListener("click", () => explain(row.request_id));
    return [name, kind(row.kind), row.num_tokens, row.num_drafts, row.num_computed_tokens];
  }));
  return [facts, made];
}

export function reasons(byReason) {
  const found = Object.entries(byReason ?? {}).filter(([, count]) => count);
  return found.length ? ` (${found.map(([reason, count]) => `${count} ${reason.replaceAll("_", " ")}`).join(", ")})` : "";
}

export function timeline(found, clock) {
  const made = [];
  if (found.total_s) made.push(make("p", `${seconds(found.total_s)} in all; ${found.cached_tokens} prompt tokens from the prefix cache, ${found.num_preemptions} preemptions, ${found.recomputed_tokens} tokens computed again.`, "note"));
  if (found.breakdown?.length) {
    const parts = make("div", undefined, "parts");
    for (const part of found.breakdown) {
      const bar = make("div", undefined, "bar"), fill = make("i");
      fill.style.width = `${100 * part.seconds / (found.total_s || 1)}%`;
      bar.append(fill);
      parts.append(make("b", part.stage.toLowerCase().replaceAll("_", " ") + (part.cause ? ` (${part.cause.toLowerCase().replaceAll("_", " ")})` : "")), bar, make("span", seconds(part.seconds)));
    }
    made.push(parts);
  }
  const waited = Object.entries(found.steps_waited_by_cause ?? {});
  if (waited.length) made.push(make("p", `Waited, in steps: ${waited.map(([cause, num]) => `${num} ${cause.toLowerCase().replaceAll("_", " ")}`).join(", ")}.`, "note"));
  made.push(table("Timeline", [["time", "word"], ["event", "word"], ["steps", "word"], ["tokens"], ["detail", "text"]], found.events.map((event) => [
    event.time_unix_s ? clock(event.time_unix_s, true) : "", event.kind.toLowerCase(),
    event.first_step === event.last_step ? `${event.first_step}` : `${event.first_step}–${event.last_step}`,
    Number(event.num_tokens) || "", event.detail + (event.duration_s ? ` (${seconds(event.duration_s)})` : ""),
  ])));
  return made;
}
