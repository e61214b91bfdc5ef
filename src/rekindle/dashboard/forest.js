// The forest of stored prefixes on a canvas: from left to right the positions of tokens, from top
// to bottom the branches. Only rows in view are drawn.

import { byId, bytes, count, emptyState, legendItem, listed, longCurlLine, since } from "./dom.js";

const MIN_ROW = 24;
const MAX_ROW = 36;
const USUAL_HEIGHT = 300; // that few rows fill as far as they can
const MAX_HEIGHT = 432;
const HINT =
  "Width is tokens: a branch goes on from what is left of it. Click one, or walk with the arrow keys.";
const MIN_WIDTH = 3;
const MIN_LABEL_WIDTH = 48;
const SCALE_HEIGHT = 18;

export class ForestView {
  #canvas = byId("forest");
  #view = byId("forest-view");
  #branches = [];
  #order = []; // as they stand from top to bottom
  #n_rows = 0;
  #row = MIN_ROW;
  #n_tokens = 1;
  #hovered = null;
  #isDrawn = true;
  selected = null;

  constructor(onSelect) {
    this.onSelect = onSelect;
    showLegend([]);
    this.#canvas.addEventListener("click", (event) => this.select(this.#at(event)));
    this.#canvas.addEventListener("mousemove", (event) => this.#hover(this.#at(event)));
    this.#canvas.addEventListener("mouseleave", () => this.#hover(null));
    this.#canvas.addEventListener("keydown", (event) => this.#walk(event));
    this.#view.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.#view);
  }

  show(entries) {
    const key = this.selected?.key;
    this.#branches = entries.map((entry) => ({ ...entry, children: [], top: 0, bottom: 0 }));
    this.#arrange();
    showLegend(entries);
    this.#canvas.dataset.branches = entries.length;
    this.#hovered = null;
    byId("forest-note").textContent = entries.length ? this.#summary() : "";
    this.#view.hidden = byId("forest-hover").hidden = !entries.length;
    byId("forest-hover").textContent = HINT;
    byId("forest-empty").hidden = entries.length > 0;
    if (!entries.length) byId("forest-empty").replaceChildren(nothingStored());
    this.selected = this.#branches.find((branch) => branch.key === key) ?? null;
    if (key !== undefined) this.onSelect(this.selected);
    this.draw();
  }

  select(branch) {
    this.selected = branch;
    this.onSelect(branch);
    this.draw();
  }

  draw() {
    if (!this.#isDrawn) return;
    this.#isDrawn = false;
    requestAnimationFrame(() => {
      this.#isDrawn = true;
      this.#paint();
    });
  }

  #arrange() {
    const roots = [];
    for (const branch of this.#branches) {
      (branch.parent === null ? roots : this.#branches[branch.parent].children).push(branch);
    }
    freshestFirst(this.#branches, roots);
    this.#order = [];
    const stack = roots.reverse();
    let row = 0;
    while (stack.length) {
      const branch = stack.pop();
      branch.top = branch.bottom = row;
      this.#order.push(branch);
      if (branch.children.length) stack.push(...[...branch.children].reverse());
      else row += 1;
    }
    for (const branch of [...this.#branches].reverse()) {
      if (branch.children.length) branch.bottom = branch.children.at(-1).bottom;
    }
    this.#n_rows = row;
    this.#row = Math.max(MIN_ROW, Math.min(MAX_ROW, Math.floor(USUAL_HEIGHT / row)));
    this.#n_tokens = this.#branches.reduce((most, branch) => Math.max(most, branch.stop), 1);
  }

  #summary() {
    const tokens = this.#branches.reduce((sum, branch) => sum + branch.stop - branch.start, 0);
    const shared = this.#branches.filter((branch) => branch.children.length);
    const saved = shared.reduce(
      (sum, branch) => sum + (branch.stop - branch.start) * (branch.bottom - branch.top), 0);
    return `${count(this.#n_rows)} ends, ${count(tokens)} tokens stored, ${count(saved)} saved by sharing`;
  }

  #paint() {
    const width = this.#view.clientWidth;
    const rows = this.#n_rows * this.#row;
    const height = Math.min(rows, MAX_HEIGHT) + SCALE_HEIGHT;
    if (!width || !rows) return;
    byId("forest-space").style.height = `${rows + SCALE_HEIGHT}px`;
    this.#view.style.height = `${height}px`;
    const ratio = devicePixelRatio || 1;
    this.#canvas.width = width * ratio;
    this.#canvas.height = height * ratio;
    this.#canvas.style.width = `${width}px`;
    this.#canvas.style.height = `${height}px`;
    const pen = this.#canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const look = themeColours();
    const scale = width / this.#n_tokens;
    const offset = this.#view.scrollTop;
    for (const branch of this.#branches) {
      const top = branch.top * this.#row - offset;
      const bottom = (branch.bottom + 1) * this.#row - offset;
      if (bottom < 0 || top > height - SCALE_HEIGHT) continue;
      this.#paintBranch(pen, look, branch, { top, bottom, scale, height: height - SCALE_HEIGHT });
    }
    this.#paintScale(pen, look, { width, height, scale });
  }

  #paintBranch(pen, look, branch, { top, bottom, scale, height }) {
    const x = branch.start * scale;
    const width = Math.max((branch.stop - branch.start) * scale - 1, MIN_WIDTH);
    pen.fillStyle = look[tierOf(branch)];
    pen.globalAlpha = branch === this.#hovered ? 0.8 : 1;
    pen.fillRect(x, top + 1, width, bottom - top - 2);
    pen.globalAlpha = 1;
    const copies = branch.tiers.slice(1);
    copies.forEach((tier, i) => {
      const y = bottom - 5 * (copies.length - i);
      pen.fillStyle = look.card;
      pen.fillRect(x, y - 1, width, 1);
      pen.fillStyle = look[tier];
      pen.fillRect(x, y, width, 4);
    });
    if (branch === this.selected) {
      pen.strokeStyle = look.ink;
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, top + 2, width - 2, bottom - top - 4);
    }
    if (branch.pinned_until !== null) paintPin(pen, look, x + width - 9, top + 9);
    if (width < MIN_LABEL_WIDTH) return;
    const middle = (Math.max(top, 0) + Math.min(bottom, height)) / 2;
    const room = width - (branch.pinned_until === null ? 12 : 26);
    paintLabel(pen, look, branch, x + 7, middle - 2 * copies.length, room);
  }

  #paintScale(pen, look, { width, height, scale }) {
    pen.fillStyle = look.card;
    pen.fillRect(0, height - SCALE_HEIGHT, width, SCALE_HEIGHT);
    pen.fillStyle = look.muted;
    pen.font = look.font;
    pen.textBaseline = "middle";
    const step = niceStep(this.#n_tokens, width);
    for (let position = 0; position <= this.#n_tokens; position += step) {
      const isLast = position * scale > width - 50;
      pen.textAlign = position === 0 ? "left" : isLast ? "right" : "center";
      pen.fillText(count(position), Math.min(position * scale, width), height - SCALE_HEIGHT / 2 + 2);
    }
    pen.textAlign = "left";
  }

  #at(event) {
    const box = this.#canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top + this.#view.scrollTop) / this.#row);
    const scale = box.width / this.#n_tokens;
    const x = event.clientX - box.left;
    const slack = MIN_WIDTH / scale;
    const hits = this.#branches.filter((branch) => {
      const stop = Math.max(branch.stop, branch.start + slack);
      return branch.top <= row && row <= branch.bottom && branch.start <= x / scale && x / scale < stop;
    });
    return hits.at(-1) ?? null;
  }

  #hover(branch) {
    if (branch === this.#hovered) return;
    this.#hovered = branch;
    this.#canvas.style.cursor = branch ? "pointer" : "";
    byId("forest-hover").textContent = branch ? describe(branch) : HINT;
    this.draw();
  }

  #walk(event) {
    const place = this.#order.indexOf(this.selected);
    const next = {
      ArrowDown: () => this.#order[place + 1],
      ArrowUp: () => this.#order[Math.max(place - 1, 0)],
      ArrowLeft: () => this.#branches[this.selected?.parent ?? -1],
      ArrowRight: () => this.selected?.children[0],
    }[event.key]?.();
    if (!next) return;
    event.preventDefault();
    this.select(next);
    const top = next.top * this.#row;
    const isInView = top >= this.#view.scrollTop && top < this.#view.scrollTop + MAX_HEIGHT - this.#row;
    if (!isInView) this.#view.scrollTop = top - MAX_HEIGHT / 2;
  }
}

// A server on its own has no shared store, nor speaks of one.
function showLegend(entries) {
  const isShared = entries.some((entry) => entry.tiers.includes("shared"));
  const kinds = [["memory", "memory"], ["disk", "disk"], ["pin", "pinned"]];
  if (isShared) kinds.splice(2, 0, ["shared", "shared"]);
  byId("forest-legend").replaceChildren(...kinds.map((kind) => legendItem(...kind)));
}

function nothingStored() {
  return emptyState(
    "Nothing is stored yet. Prompts of some hundred tokens are, once they are answered:",
    longCurlLine(),
  );
}

function freshestFirst(branches, roots) {
  for (const branch of [...branches].reverse()) {
    branch.freshest = Math.max(branch.last_used, ...branch.children.map((child) => child.freshest));
    branch.children.sort((one, other) => other.freshest - one.freshest);
  }
  roots.sort((one, other) => other.freshest - one.freshest);
}

function tierOf(branch) {
  return branch.tiers.includes("memory") ? "memory" : branch.tiers[0] ?? "partial";
}

function describe(branch) {
  const name = branch.names.length ? branch.names.join(", ") : branch.session;
  const tiers = listed(branch.tiers) || "in parts";
  return `${name}: ${count(branch.stop - branch.start)} tokens, ${bytes(branch.bytes)}, ${tiers}, ` +
    `used ${since(branch.last_used)}`;
}

function paintLabel(pen, look, branch, x, y, room) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y - MIN_ROW / 2, room, MIN_ROW);
  pen.clip();
  pen.fillStyle = look["on-tier"];
  pen.textBaseline = "middle";
  pen.font = look.boldFont;
  const name = branch.names.length ? branch.names.join(", ") : branch.session;
  pen.fillText(name, x, y);
  const after = x + pen.measureText(name).width + 8;
  pen.font = look.font;
  pen.fillText(count(branch.stop - branch.start), after, y);
  pen.restore();
}

function paintPin(pen, look, x, y) {
  pen.fillStyle = look.pin;
  pen.strokeStyle = look.card;
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.arc(x, y, 4.5, 0, 2 * Math.PI);
  pen.fill();
  pen.stroke();
}

function niceStep(n_tokens, width) {
  const wanted = (n_tokens * 90) / width;
  const power = 10 ** Math.floor(Math.log10(Math.max(wanted, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= wanted);
}

function themeColours() {
  // A custom property is not resolved until something is coloured with it.
  const probe = byId("forest-hover");
  const of = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const names = ["memory", "disk", "shared", "partial", "ink", "card", "muted", "pin", "on-tier"];
  const colours = Object.fromEntries(names.map((name) => [name, of(name)]));
  probe.style.color = "";
  return { ...colours, font: "12px system-ui, sans-serif", boldFont: "600 12px system-ui, sans-serif" };
}
