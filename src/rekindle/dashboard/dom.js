// Small helpers: elements, numbers and times as people read them.
// What comes from clients goes in as text nodes only, never as markup.

export const byId = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== ""));
  return node;
}

/** Replaces the children of `parent`. One that had the focus hands it on, by its `data-key`. */
export function redraw(parent, ...children) {
  const key = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  parent.replaceChildren(...children);
  if (key) parent.querySelector(`[data-key="${key}"]`)?.focus({ preventScroll: true });
}

// One by one: a call takes no more than some ten thousand arguments.
export function fill(node, children) {
  for (const child of children) node.append(child);
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (n) => whole.format(n);

export function short(n) {
  if (n < 10_000) return count(n);
  return n < 1e6 ? `${(n / 1e3).toFixed(n < 1e5 ? 1 : 0)}k` : `${(n / 1e6).toFixed(1)}M`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = n > 0 ? Math.min(Math.floor(Math.log2(n) / 10), units.length - 1) : 0;
  const value = n / 1024 ** power;
  return `${power && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}

export function duration(ms) {
  if (ms === null) return "\u2013";
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  return ms < 60_000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 60_000)} min`;
}

export function age(seconds) {
  if (seconds < 5) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86_400)} d ago`;
}

export const since = (epochSeconds) => age(Date.now() / 1000 - epochSeconds);

export const share = (part, all) => (all > 0 ? `${((100 * part) / all).toFixed(1)} %` : "\u2013");

export function bar(parts, total) {
  // parts: [[class, amount]]; the rest of the track stays empty.
  const track = el("div", { class: "bar" });
  for (const [name, amount] of parts) {
    if (amount <= 0 || total <= 0) continue;
    const part = el("span", { class: `part ${name}` });
    part.style.width = `${Math.min(100, (100 * amount) / total)}%`;
    track.append(part);
  }
  return track;
}

export function legendItem(kind, name) {
  return el("span", { class: "legend-item" }, el("i", { class: `swatch ${kind}` }), name);
}

export function listed(words) {
  return words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}` : words.join("");
}

export function emptyState(sentence, command) {
  return el(
    "div",
    { class: "empty" },
    el("p", {}, sentence),
    command ? el("pre", { tabindex: "0" }, el("code", {}, command)) : null,
  );
}

const curl = (data) =>
  `curl ${location.origin}/v1/chat/completions -H 'content-type: application/json' \\\n  -d ${data}`;

export const curlLine = () => curl(`'{"messages": [{"role": "user", "content": "Hello"}]}'`);

// Long enough that something of it is stored.
export const longCurlLine = () =>
  curl(`'{"messages": [{"role": "user", "content": "'"$(seq -s ' ' 400)"'"}]}'`);
