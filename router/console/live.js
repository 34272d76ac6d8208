// The router's API: one-off questions, and the stream of steps that is taken up again where it broke.

const KEY = "headrace-token";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...more, authorization: `Bearer ${token}` } : more;
}

export function useToken(token) {
  sessionStorage.setItem(KEY, token);
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the router answered ${response.status}`;
  const text = await response.text();
  try { message = JSON.parse(text).error; } catch { message = text.trim() || message; }
  throw new ApiError(response.status, message);
}

export async function ask(path, query = {}) {
  const options = { headers: headers(), signal: AbortSignal.timeout(15_000) };
  const response = await checked(await fetch(`${path}?${new URLSearchParams(query)}`, options));
  return response.json();
}

// Calls take(workers) for each message of the stream, until the stream ends; throws why it ended.
export async function watchSteps(after, history, take, signal) {
  // Without a message for so long (the router sends one each second) the connection is dead.
  const control = new AbortController();
  let timer = 0;
  const alive = () => {
    clearTimeout(timer);
    timer = setTimeout(() => control.abort(new ApiError(0, "nothing came for 10 s")), 10_000);
  };
  signal.addEventListener("abort", () => control.abort(signal.reason), { once: true });
  alive();
  try {
    const response = await checked(await fetch("/api/steps", {
      method: "POST",
      headers: headers({ "content-type": "application/json" }),
      body: JSON.stringify({ after, history_s: history }),
      signal: control.signal,
    }));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", fields = null;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "the router ended the stream");
      alive();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const message = JSON.parse(line);
        if (message.fields) fields = message.fields;
        else take(message, fields);
      }
    }
  } finally {
    clearTimeout(timer);
  }
}
