// Talks to the server: JSON with the key of this tab, and the feed of events.

import { byId } from "./dom.js";

const KEY = "rekindle-key";
const RETRY_MS = 1000;
const MAX_RETRY_MS = 15_000;

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

let asking = null; // one dialog, however many requests were refused

function askForKey() {
  asking ??= new Promise((done) => {
    const dialog = byId("key-dialog");
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, byId("key").value.trim());
      byId("key").value = "";
      dialog.close();
      asking = null;
      done();
    };
    dialog.showModal();
  });
  return asking;
}

export async function request(path, options = {}) {
  for (;;) {
    const used = sessionStorage.getItem(KEY);
    const response = await fetch(path, { ...options, headers: { ...options.headers, ...headers() } });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(KEY) === used) await askForKey();
  }
}

export async function ask(method, path, body) {
  const options = { method };
  if (body !== undefined) {
    options.body = typeof body === "string" ? body : JSON.stringify(body);
    options.headers = { "content-type": "application/json" };
  }
  const response = await request(path, options);
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** The error that a reply says. A proxy between may say it without JSON. */
export async function refusal(response) {
  const answer = await response.json().catch(() => null);
  return new Error(answer?.error?.message ?? `The server answered ${response.status}.`);
}

// `handlers` are by the name of the event; `onState` hears "live" and "lost".
export async function follow(path, handlers, onState) {
  let wait = RETRY_MS;
  for (;;) {
    try {
      const response = await request(path);
      if (!response.ok) throw new Error(`${response.status}`);
      onState("live");
      wait = RETRY_MS;
      await readEvents(response.body, handlers);
    } catch (error) {
      if (!(error instanceof TypeError) && !/^\d+$/.test(error.message)) console.error(error);
    }
    onState("lost");
    await pause(wait);
    wait = Math.min(2 * wait, MAX_RETRY_MS);
  }
}

async function readEvents(stream, handlers) {
  for await (const { name, data } of events(stream)) {
    if (name in handlers) handlers[name](JSON.parse(data));
  }
}

/** The server-sent events of a stream; comments are left out. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (pending + value).split("\n\n");
    pending = frames.pop();
    for (const frame of frames) {
      const lines = frame.split("\n");
      const field = (name) => lines.find((line) => line.startsWith(name))?.slice(name.length);
      const data = field("data: ");
      if (data !== undefined) yield { name: field("event: "), data };
    }
  }
}
