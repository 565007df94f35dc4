// Everything that goes over the wire. The key, if there is one, is kept in memory only.

import { events } from "./sse.js";

let key = null;
let askForKey = () => {};

export function setKey(value) {
  key = value;
}

// `callback` is told when the server wants a key, or another one.
export function onKeyWanted(callback) {
  askForKey = callback;
}

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { cache: "no-store", ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) askForKey();
  let message = response.statusText;
  try {
    const body = await response.json();
    message = body.error?.message ?? body.detail ?? message;
  } catch {
    // not JSON: the status has to do
  }
  throw new ServerError(response.status, `${response.status}: ${message}`);
}

export async function getJson(path, signal) {
  return (await call(path, { signal })).json();
}

// Yields {index, text, finish} for each piece of an answer, and {usage} where it is told.
export async function* streamChat(body, signal) {
  const response = await call("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(500, chunk.error.message ?? "the server reports an error");
    if (chunk.usage) yield { index: null, text: "", finish: null, usage: chunk.usage };
    for (const { index, delta, finish_reason: finish } of chunk.choices ?? []) {
      yield { index, text: delta?.content ?? delta?.reasoning_content ?? "", finish: finish ?? null, usage: null };
    }
  }
}
