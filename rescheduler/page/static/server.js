// What the page asks its server for.

export class RefusedError extends Error {}

export async function ask(path, token, options = {}) {
  const headers = { Authorization: `Bearer ${token}` };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.status === 401) throw new RefusedError("the token is not that of this server");
  if (!response.ok) throw new Error(await reason(response));
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `HTTP ${response.status}`;
  }
}

// Server-sent events as they come: {kind, data}. Not an EventSource, which cannot send a header.
export async function* events(path, token, signal) {
  const response = await ask(path, token, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) yield event(part);
    }
  } finally {
    reader.cancel().catch(() => {}); // it may be lost already
  }
}

function event(part) {
  let kind = "message";
  const data = [];
  for (const line of part.split("\n")) {
    if (line.startsWith("event: ")) kind = line.slice(7);
    if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return { kind, data: JSON.parse(data.join("\n")) };
}

// The token that every request needs. It is in the address's fragment, which browsers send to
// nobody, for as long as it takes to read it; then it is in this tab's memory only.
const KEY = "headway-token";

export function readToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    keepToken(given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepToken(token) {
  sessionStorage.setItem(KEY, token);
}
