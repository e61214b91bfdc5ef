// What a reply cost, and what was not computed again. One shape for both sources: the end of a
// stream, and the feed, which also knows the replies that were stopped.

import { bar, count, duration, el, legendItem, share } from "../dom.js";
import { missCard } from "../lists.js";

// Not by `usage`: a server may scale it for clients that believe in another window.
export function factsOfReply({ timings, rekindle }, firstTokenMs) {
  return {
    promptTokens: reused(rekindle) + rekindle.prefilled,
    cached: rekindle.cached,
    prefilled: rekindle.prefilled,
    generated: timings.predicted_n,
    drafted: timings.draft_n ?? 0,
    accepted: timings.draft_n_accepted ?? 0,
    firstTokenMs,
    tokensPerSecond: timings.predicted_per_second || null,
    miss: rekindle.miss ?? null,
  };
}

export function factsOfRequest(seen) {
  return {
    promptTokens: seen.prompt_tokens,
    cached: seen.cached,
    prefilled: seen.prefilled,
    generated: seen.generated,
    drafted: seen.drafted,
    accepted: seen.accepted,
    firstTokenMs: seen.first_token_ms,
    tokensPerSecond: seen.tokens_per_second,
    miss: seen.miss,
  };
}

export const reused = (facts) => facts.cached.reduce((sum, { tokens }) => sum + tokens, 0);

/** `earlier`: the facts of the parts of the reply before this one, as far as they are known. */
export function factsNode(facts, earlier = []) {
  const parts = [...facts.cached.map(({ tier, tokens }) => [tier, tokens]), ["prefilled", facts.prefilled]];
  const rows = [
    ["First token", duration(facts.firstTokenMs)],
    ["Speed", facts.tokensPerSecond === null ? "\u2013" : `${facts.tokensPerSecond.toFixed(1)} tokens/s`],
    ["Written", written([...earlier.filter(Boolean), facts])],
    ["Drafted", facts.drafted ? `${count(facts.accepted)} of ${count(facts.drafted)} accepted` : "nothing"],
  ];
  return el(
    "div",
    { class: "message-facts" },
    el("p", {}, el("b", { class: "reused" }, share(reused(facts), facts.promptTokens)), ` of ${count(facts.promptTokens)} prompt tokens not computed again`),
    bar(parts, facts.promptTokens),
    el("p", { class: "legend" }, ...parts.map(([kind, tokens]) => legendItem(kind, `${kind} ${count(tokens)}`))),
    el("dl", { class: "facts" }, ...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    facts.miss ? missCard(facts.miss, null) : null,
  );
}

function written(parts) {
  const tokens = parts.reduce((sum, { generated }) => sum + generated, 0);
  return `${count(tokens)} tokens${parts.length > 1 ? ` in ${parts.length} parts` : ""}`;
}

/** One line about all replies of a conversation that are shown. */
export function total(messages) {
  const told = messages.filter(({ facts, earlier }) => facts || earlier?.some(Boolean));
  const all = told.flatMap(({ facts, earlier = [] }) => [...earlier, facts]).filter(Boolean);
  if (!all.length) return "";
  const prompt = all.reduce((sum, facts) => sum + facts.promptTokens, 0);
  const found = all.reduce((sum, facts) => sum + reused(facts), 0);
  const replies = told.length === 1 ? "1 reply" : `${count(told.length)} replies`;
  return `${replies}: ${count(found)} of ${count(prompt)} prompt tokens not computed again`;
}
