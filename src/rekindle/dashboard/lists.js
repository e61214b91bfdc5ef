// Sessions, misses, budgets, and the answer to a look-up.

import { bar, byId, bytes, count, curlLine, duration, el, emptyState, share, short, since } from "./dom.js";

const MAX_MISSES = 50;
const REASONS = {
  first_request: "first request",
  evicted: "evicted",
  other_model: "other model",
  text_changed: "text changed",
  tools_changed: "tools changed",
  system_changed: "system prompt changed",
  template_rewrote_turn: "template rewrote a turn",
  cache_off: "cache is off",
  recompute_faster: "computing was faster",
  no_checkpoint: "no state was kept there",
};

export function showSessions(sessions) {
  if (!sessions.length) {
    byId("sessions").replaceChildren(
      emptyState("No session yet. A header names one: x-rekindle-session.", curlLine()));
    return;
  }
  const heads = ["Session", "Requests", "Prompt", "From cache", "Prefilled", "Twice", "Used"];
  const head = el("tr", {}, ...heads.map((name) => el("th", { scope: "col" }, name)));
  const rows = sessions.map((session) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", title: session.session }, session.session),
      el("td", {}, count(session.requests)),
      el("td", {}, short(session.prompt_tokens)),
      el("td", {}, share(session.cached_tokens, session.prompt_tokens)),
      el("td", {}, short(session.prefilled_tokens)),
      el("td", { class: session.prefilled_twice_tokens ? "bad" : "" }, count(session.prefilled_twice_tokens)),
      el("td", {}, since(session.last_used)),
    ));
  byId("sessions").replaceChildren(el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}

export function showMisses(requests) {
  const missed = requests.filter((request) => isTold(request.miss)).slice(-MAX_MISSES).reverse();
  const cards = missed.map((request) => missCard(request.miss, request));
  if (!cards.length) {
    cards.push(emptyState("None. A prompt that changes what was computed before is shown here, with the place."));
  }
  byId("misses").replaceChildren(...cards);
}

// A first request loses nothing, nor does a short one that wants no cache.
function isTold(miss) {
  return miss !== null && miss.tokens_lost > 0;
}

export function missCard(miss, request) {
  const place = [
    request?.session,
    miss.message === null ? null : `message ${miss.message}`,
    miss.part,
    request ? since(request.ended_at) : null,
  ];
  return el(
    "article",
    { class: "miss" },
    el(
      "div",
      { class: "miss-head" },
      el("span", { class: "chip" }, REASONS[miss.reason] ?? miss.reason),
      el("span", { class: "muted place" }, place.filter((part) => part).join(", ")),
      miss.tokens_lost ? el("span", { class: "lost" }, `${count(miss.tokens_lost)} tokens lost`) : null,
    ),
    diff(miss),
  );
}

function diff(miss) {
  if (!miss.before && !miss.expected && !miss.got) return null;
  return el(
    "div",
    { class: "diff" },
    miss.before ? el("pre", { class: "before" }, miss.before) : null,
    el("pre", { class: "expected" }, miss.expected || "(nothing)"),
    el("pre", { class: "got" }, miss.got || "(nothing)"),
  );
}

export function showBudgets(model) {
  const cache = model.cache;
  if (!cache) {
    byId("budgets").replaceChildren(emptyState("The model is not loaded."));
    return;
  }
  const parts = [];
  if (cache.off_because) parts.push(el("p", { class: "problem" }, `Nothing is stored: ${cache.off_because}`));
  parts.push(budget("Context", "live", model.cells_used, model.cells, `${count(model.cells)} positions`, count));
  const upstream = cache.tiers.find((tier) => tier.name === "upstream");
  if (upstream?.trouble) parts.push(problem(upstream.trouble));
  for (const tier of cache.tiers.filter((each) => each.name === "memory" || each.name === "disk")) {
    const entries = `${count(tier.entries)} entries`;
    parts.push(budget(tier.name === "disk" ? "Disk" : "Memory", tier.name, tier.bytes, tier.budget_bytes, entries, bytes));
    if (tier.trouble) parts.push(problem(tier.trouble));
  }
  parts.push(diskHealth(cache.disk));
  const shared = cache.tiers.find((tier) => tier.name === "shared");
  if (shared) parts.push(sharedStore(shared, cache.shared));
  const reason = model.no_drafts_because;
  if (reason) parts.push(el("p", { class: "muted", id: "no-drafts" }, `Nothing is drafted: ${reason}`));
  byId("budgets").replaceChildren(...parts);
}

function budget(name, kind, used, limit, note, format) {
  const numbers = limit > 0 ? `${format(used)} of ${format(limit)}` : "off";
  return el(
    "div",
    { class: "budget" },
    el("div", { class: "budget-head" }, el("b", {}, name), el("span", { class: "muted" }, note), el("span", { class: "numbers" }, numbers)),
    bar([[kind, used]], limit),
  );
}

// What others store there is not known here: there is no bar to fill.
function sharedStore(tier, done) {
  const state = tier.trouble ? ["not answering", "bad"] : ["ok", ""];
  return el(
    "div",
    { class: "budget", id: "shared-store" },
    el(
      "div",
      { class: "budget-head" },
      el("b", {}, "Shared store"),
      el("span", { class: "muted place" }, tier.directory ?? ""),
      el("span", { class: `numbers ${state[1]}` }, state[0]),
    ),
    tier.trouble ? problem(tier.trouble) : null,
    figures([
      ["Known here", tier.entries, false],
      ["Looked up", done.probes, false],
      ["Without an answer", done.probes_failed, true],
      ["Written", done.writes, false],
      ["Not admitted", done.writes_refused, false],
      ["Failed to write", done.writes_failed, true],
      ["Quarantined", done.quarantined, true],
      ["Vanished", done.vanished, false],
    ]),
  );
}

function problem(text) {
  return el("p", { class: "problem", role: "alert" }, text);
}

function diskHealth(disk) {
  return figures([
    ["Written", disk.writes, false],
    ["Refused by settings", disk.writes_refused, false],
    ["Evicted", disk.evictions, false],
    ["Failed to write", disk.writes_failed, true],
    ["Quarantined", disk.quarantined, true],
    ["Vanished", disk.vanished, true],
  ]);
}

function figures(rows) {
  const facts = rows.map(([name, value, isBad]) =>
    el("div", {}, el("dt", {}, name), el("dd", { class: isBad && value ? "bad" : "" }, count(value))));
  return el("dl", { class: "facts" }, ...facts);
}

export function showLookup(found) {
  const parts = [...found.cached.map(({ tier, tokens }) => [tier, tokens]), ["prefilled", found.prefilled]];
  const reused = found.prompt_tokens - found.prefilled;
  const words = [
    `${share(reused, found.prompt_tokens)} would be found: ${count(reused)} of ${count(found.prompt_tokens)} tokens`,
    ...found.cached.map(({ tier, tokens }) => `${count(tokens)} ${tier}`),
    `${count(found.prefilled)} to prefill`,
  ];
  if (found.expected_ms.total !== null) words.push(`about ${duration(found.expected_ms.total)}`);
  byId("lookup-result").replaceChildren(
    bar(parts, found.prompt_tokens),
    el("p", {}, `${words.join("; ")}.`),
    ...(isTold(found.miss) ? [missCard(found.miss, null)] : []),
  );
}

export function showLookupProblem(message) {
  byId("lookup-result").replaceChildren(el("p", { class: "problem" }, message));
}
