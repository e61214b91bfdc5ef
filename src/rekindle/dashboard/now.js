// What runs at this moment: one row per slot. Speeds come from two snapshots.

import { bar, byId, count, curlLine, duration, el, emptyState, share, short, since } from "./dom.js";

const MAX_FINISHED = 6;
const PROCESS_STATES = {
  running: "The engine process runs.",
  restarting: "The engine process is being restarted. Requests wait and continue.",
  failed: "The engine process dies again and again. Requests are refused.",
};

const earlier = new Map(); // request id -> { time, n_generated }

export function showNow(snapshot, model) {
  byId("queue").textContent = model.waiting
    ? `${count(model.waiting)} of at most ${count(model.max_waiting)} waiting`
    : "nobody waits";
  showProcess(model.process);
  const rows = model.slots.map((slot) => slotRow(slot, speedOf(slot, snapshot.time)));
  if (!model.slots.length) rows.push(emptyState(stateSentence(model.state), curlLine()));
  byId("slots").replaceChildren(...rows);
  remember(model.slots, snapshot.time);
}

function showProcess(process) {
  const line = byId("process");
  line.hidden = !process || (process.state === "running" && !process.restarts);
  if (line.hidden) return;
  const times = process.restarts === 1 ? "once" : `${count(process.restarts)} times`;
  const death = process.last_death ? `; the last time, ${process.last_death}` : "";
  line.className = process.state === "running" ? "muted" : "bad";
  line.textContent = `${PROCESS_STATES[process.state]} It was restarted ${times}${death}.`;
}

function stateSentence(state) {
  if (state === "loading") return "The model is being loaded.";
  return "The model is not loaded. It loads with its first request:";
}

function speedOf(slot, time) {
  const before = earlier.get(slot.request_id);
  if (slot.phase !== "decoding" || !before || time <= before.time) return null;
  return (slot.n_generated - before.n_generated) / (time - before.time);
}

function remember(slots, time) {
  earlier.clear();
  for (const slot of slots) {
    if (slot.request_id) earlier.set(slot.request_id, { time, n_generated: slot.n_generated });
  }
}

function slotRow(slot, speed) {
  const isIdle = slot.phase === "idle";
  const row = el("div", { class: `slot ${slot.phase}`, "data-slot": slot.id });
  row.append(
    el(
      "div",
      { class: "slot-head" },
      el("span", { class: "slot-name", title: slot.request_id ?? "" }, slotName(slot)),
      el("span", { class: "slot-state" }, stateOf(slot, speed)),
    ),
  );
  if (isIdle || isHidden(slot)) return row;
  const n_computed = Math.max(0, Math.min(slot.n_rows, slot.n_prompt) - slot.n_cached);
  const total = slot.n_prompt + slot.n_generated;
  const parts = [
    ["restored", Math.min(slot.n_cached, slot.n_prompt)],
    ["prefilled", n_computed],
    ["decoded", slot.n_generated],
  ];
  row.append(bar(parts, total));
  return row;
}

/** Another namespace's request: only that the slot is busy may be known. */
function isHidden(slot) {
  return slot.request_id === "";
}

function slotName(slot) {
  if (isHidden(slot)) return `slot ${slot.id}`;
  if (slot.phase === "idle" && !slot.n_rows) return `slot ${slot.id}`;
  return slot.class === "main" ? slot.session : `${slot.session} (${slot.class})`;
}

function stateOf(slot, speed) {
  if (isHidden(slot)) return "busy for another client";
  const done = Math.min(slot.n_rows, slot.n_prompt);
  switch (slot.phase) {
    case "restoring":
      return `restoring ${short(done)} of ${short(slot.n_cached || slot.n_prompt)}`;
    case "prefilling":
      return `prefilling ${short(done)} of ${short(slot.n_prompt)}, ${short(slot.n_cached)} restored`;
    case "decoding":
      return `decoding ${short(slot.n_generated)}${speed === null ? "" : `, ${speed.toFixed(1)} tokens/s`}`;
    default:
      return slot.n_rows ? `idle, holds ${short(slot.n_rows)} tokens` : "empty";
  }
}

export function showFinished(requests) {
  byId("finished-title").hidden = !requests.length;
  byId("finished").replaceChildren(...requests.slice(-MAX_FINISHED).reverse().map(finishedRow));
}

function finishedRow(request) {
  const parts = [...request.cached.map(({ tier, tokens }) => [tier, tokens]), ["prefilled", request.prefilled]];
  const reused = request.cached.reduce((sum, { tokens }) => sum + tokens, 0);
  const words = [`${share(reused, request.prompt_tokens)} of ${short(request.prompt_tokens)}`];
  if (request.first_token_ms !== null) words.push(`first token ${duration(request.first_token_ms)}`);
  if (request.drafted) words.push(`${short(request.accepted)} of ${short(request.drafted)} drafted`);
  words.push(isUsual(request.finish) ? since(request.ended_at) : request.finish);
  return el(
    "div",
    { class: "finished-row", title: `${request.id}: ${request.finish}` },
    el("span", { class: "slot-name" }, request.session),
    el("span", { class: "slot-state" }, words.join(", ")),
    bar(parts, request.prompt_tokens),
  );
}

const isUsual = (finish) => ["stop", "length", "tool_calls"].includes(finish);
