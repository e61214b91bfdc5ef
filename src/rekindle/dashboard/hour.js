// The last hour: big numbers, tokens by where they came from, time to the first token.

import { byId, count, curlLine, duration, emptyState, legendItem, share, short, svg } from "./dom.js";

const SECONDS = 3600;
const SOURCES = ["live", "memory", "disk", "shared", "upstream"];
const ELSEWHERE = ["shared", "upstream"]; // a server on its own has neither, nor speaks of them
const KINDS = [...SOURCES, "prefilled"];

export class Hour {
  #buckets = new Map();
  #firstToken = { p50: null, p95: null };
  #seen = "";
  #legend = "";

  constructor() {
    this.#showLegend([]);
    byId("latency-legend").append(legendItem("p50", "p50"), legendItem("p95", "p95"));
  }

  begin(hour) {
    this.#buckets = new Map(hour.buckets.map((bucket) => [bucket.start, bucket]));
    this.#seen = "";
  }

  add(snapshot) {
    for (const bucket of snapshot.buckets) this.#buckets.set(bucket.start, bucket);
    for (const start of this.#buckets.keys()) {
      if (start <= snapshot.time - SECONDS) this.#buckets.delete(start);
    }
    this.#firstToken = snapshot.first_token_ms;
    this.#showLegend(snapshot.models);
    this.show(snapshot.time);
  }

  get isKnown() {
    return this.#seen !== "";
  }

  show(now) {
    const buckets = [...this.#buckets.values()];
    const state = `${Math.floor(now / 10)} ${byId("tokens-chart").clientWidth} ${JSON.stringify(buckets.slice(-2))}`;
    if (state === this.#seen) return;
    this.#seen = state;
    this.#showFigures(buckets);
    if (!buckets.length) {
      const nothing = emptyState("Nothing was asked in the last hour. Try:", curlLine());
      byId("tokens-chart").replaceChildren(nothing);
      byId("latency-chart").replaceChildren();
      return;
    }
    const made = columns(buckets, now);
    drawTokens(byId("tokens-chart"), made);
    drawLatency(byId("latency-chart"), made);
  }

  #showLegend(models) {
    const buckets = [...this.#buckets.values()];
    const kinds = KINDS.filter((kind) => !ELSEWHERE.includes(kind) || isUsed(kind, models, buckets));
    if (kinds.join() === this.#legend) return;
    this.#legend = kinds.join();
    byId("legend").replaceChildren(...kinds.map((kind) => legendItem(kind, kind)));
  }

  #showFigures(buckets) {
    const sum = (name) => buckets.reduce((total, bucket) => total + bucket[name], 0);
    const reused = SOURCES.reduce((total, source) => total + sum(source), 0);
    const prompt = reused + sum("prefilled");
    byId("hit-share").textContent = share(reused, prompt);
    byId("hit-note").textContent = `${short(reused)} of ${short(prompt)} prompt tokens`;
    byId("twice").textContent = count(sum("twice"));
    byId("twice").classList.toggle("bad", sum("twice") > 0);
    byId("first-token").textContent = duration(this.#firstToken.p50);
    byId("first-token-note").textContent = `p50; p95 ${duration(this.#firstToken.p95)}`;
    byId("saved").textContent = short(reused);
    this.#showDrafts(sum("accepted"), sum("drafted"));
    byId("requests").textContent = count(sum("requests"));
  }

  #showDrafts(accepted, drafted) {
    byId("accepted").textContent = drafted ? share(accepted, drafted) : "\u2013";
    byId("accepted-note").textContent = drafted
      ? `${short(accepted)} of ${short(drafted)} tokens`
      : "nothing was drafted";
  }
}

function isUsed(kind, models, buckets) {
  const caches = models.map((model) => model.cache).filter((cache) => cache);
  return buckets.some((bucket) => bucket[kind] > 0) || caches.some((cache) =>
    cache.tokens[kind] > 0 || cache.tiers.some((tier) => tier.name === kind));
}

// A server that started a while ago shows a part of the hour. Several buckets share a column
// where the page is narrow.
function columns(buckets, now) {
  const oldest = now - Math.min(...buckets.map((bucket) => bucket.start));
  const span = [600, 1800, SECONDS].find((seconds) => seconds >= oldest) ?? SECONDS;
  const n = innerWidth < 700 ? 60 : 90;
  const seconds = Math.max(10, span / n);
  const first = (Math.floor(now / seconds) + 1) * seconds - span;
  const made = Array.from({ length: span / seconds }, (_, i) => ({
    ...Object.fromEntries(KINDS.map((kind) => [kind, 0])), start: first + i * seconds, p50: null, p95: null,
  }));
  for (const bucket of buckets) {
    const column = made[Math.floor((bucket.start - first) / seconds)];
    if (!column) continue;
    for (const kind of KINDS) column[kind] += bucket[kind];
    column.p50 = Math.max(column.p50 ?? 0, bucket.first_token_ms.p50 ?? 0) || null;
    column.p95 = Math.max(column.p95 ?? 0, bucket.first_token_ms.p95 ?? 0) || null;
  }
  return made;
}

const TOKENS_HEIGHT = 240;
const LATENCY_HEIGHT = 130;
const LEFT = 44;
const BOTTOM = 18;

function frame(holder, made, height, top, label) {
  const width = Math.max(holder.clientWidth, 240);
  const box = `0 0 ${width} ${height}`;
  const chart = svg("svg", { width, height, viewBox: box, role: "img", "aria-label": label });
  const plot = { left: LEFT, width: width - LEFT, height: height - BOTTOM - 6, top: 6 };
  for (const part of [0, 0.5, 1]) {
    const y = plot.top + plot.height * (1 - part);
    chart.append(svg("line", { class: "grid", x1: plot.left, x2: width, y1: y, y2: y }));
    const place = { class: "axis", x: plot.left - 6, y: y + 4, "text-anchor": "end" };
    chart.append(svg("text", place, top.text(part * top.value)));
  }
  const minutes = ((made[1].start - made[0].start) * made.length) / 60;
  const times = [
    [0, `${minutes} min ago`, "start"],
    [0.5, `${minutes / 2} min`, "middle"],
    [1, "now", "end"],
  ];
  for (const [part, text, anchor] of times) {
    const x = plot.left + plot.width * part;
    chart.append(svg("text", { class: "axis", x, y: height - 3, "text-anchor": anchor }, text));
  }
  holder.replaceChildren(chart);
  return { chart, plot };
}

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value);
}

function drawTokens(holder, made) {
  const total = (column) => KINDS.reduce((sum, kind) => sum + column[kind], 0);
  const top = { value: niceTop(Math.max(...made.map(total), 10)), text: short };
  const { chart, plot } = frame(holder, made, TOKENS_HEIGHT, top, "Prompt tokens by source");
  const step = plot.width / made.length;
  made.forEach((column, i) => {
    let y = plot.top + plot.height;
    for (const kind of KINDS) {
      const height = (plot.height * column[kind]) / top.value;
      if (height <= 0) continue;
      y -= height;
      const place = { x: plot.left + i * step + 0.5, y, width: Math.max(step - 1, 1), height };
      const title = svg("title", {}, `${kind}: ${count(column[kind])} tokens`);
      chart.append(svg("rect", { class: `fill-${kind}`, ...place }, title));
    }
  });
}

function drawLatency(holder, made) {
  const slowest = Math.max(...made.map((column) => column.p95 ?? 0), 10);
  const top = { value: niceTop(slowest), text: (ms) => (ms ? duration(ms) : "0") };
  const { chart, plot } = frame(holder, made, LATENCY_HEIGHT, top, "Time to the first token");
  const step = plot.width / made.length;
  made.forEach((column, i) => {
    if (column.p50 === null) return;
    const x = plot.left + (i + 0.5) * step;
    const y = (ms) => plot.top + plot.height * (1 - ms / top.value);
    chart.append(svg("line", { class: "whisker", x1: x, x2: x, y1: y(column.p50), y2: y(column.p95) }));
    for (const kind of ["p95", "p50"]) {
      const title = svg("title", {}, `${kind}: ${duration(column[kind])}`);
      chart.append(svg("circle", { class: `fill-${kind}`, cx: x, cy: y(column[kind]), r: 3 }, title));
    }
  });
}
