// One branch of the forest in detail: its text, who uses it, and what can be done with it.

import { confirmed } from "./confirm.js";
import { byId, bytes, count, el, listed, since } from "./dom.js";
import { ask } from "./server.js";

const MAX_CHARS = 20_000; // that are shown; picked
const PIN_SECONDS = 3600;

export class BranchPanel {
  #panel = byId("branch");
  #shown = null; // key of the branch whose text is there
  #text = null;
  #isWhole = false;

  // `query` names the model, `changed` is called after anything was done.
  constructor(query, changed) {
    this.query = query;
    this.changed = changed;
  }

  show(branch) {
    this.#panel.hidden = !branch;
    this.#panel.parentElement.classList.toggle("with-branch", Boolean(branch));
    if (!branch) {
      this.#shown = null;
      return;
    }
    if (this.#shown !== branch.key) {
      this.#shown = branch.key;
      this.#text = el("pre", { class: "text", tabindex: "0" }, "\u2026");
      this.#isWhole = false;
      this.#readText(branch);
    }
    this.#panel.replaceChildren(
      el("h3", {}, branch.names.join(", ") || branch.session),
      facts(branch),
      this.#buttons(branch),
      this.#text,
    );
  }

  #buttons(branch) {
    const isPinned = branch.pinned_until !== null;
    const wholeOrPart = el("button", { type: "button", class: "quiet", onclick: () => this.#toggle(branch) },
      this.#isWhole ? "Own part" : "Whole prefix");
    return el(
      "div",
      { class: "buttons" },
      el("button", { type: "button", onclick: () => this.#pin(branch, PIN_SECONDS) }, "Pin 1 h"),
      isPinned
        ? el("button", { type: "button", class: "quiet", onclick: () => this.#pin(branch, 0) }, "Unpin")
        : null,
      branch.start > 0 ? wholeOrPart : null,
      el("button", { type: "button", class: "danger", onclick: () => this.#remove(branch) }, "Delete"),
    );
  }

  #path(branch, end) {
    return `/v1/cache/${encodeURIComponent(branch.key)}${end}`;
  }

  async #readText(branch) {
    const start = this.#isWhole ? 0 : branch.start;
    try {
      const path = this.#path(branch, `/text?${this.query()}&start=${start}`);
      const { text } = await ask("GET", path);
      if (this.#shown !== branch.key) return;
      const cut = text.length > MAX_CHARS ? `\n[${count(text.length - MAX_CHARS)} characters more]` : "";
      this.#text.textContent = text.slice(0, MAX_CHARS) + cut;
    } catch (error) {
      if (this.#shown === branch.key) this.#text.textContent = error.message;
    }
  }

  #toggle(branch) {
    this.#isWhole = !this.#isWhole;
    this.#readText(branch);
    this.show(branch);
  }

  async #pin(branch, seconds) {
    await this.#act(() => ask("POST", this.#path(branch, `/pin?${this.query()}`), { seconds }));
  }

  async #remove(branch) {
    const places = branch.tiers.includes("shared")
      ? "memory, disk and the store that other servers share"
      : "memory and disk";
    const text = `${count(branch.stop)} tokens, and all that goes on from them, leave ${places}. ` +
      "What other branches share stays.";
    if (!(await confirmed("Delete this branch?", text))) return;
    await this.#act(() => ask("DELETE", this.#path(branch, `?${this.query()}`)));
  }

  async #act(action) {
    try {
      await action();
    } catch (error) {
      this.#panel.prepend(el("p", { class: "problem", role: "alert" }, error.message));
      return;
    }
    await this.changed();
  }
}

function facts(branch) {
  const pinned = branch.pinned_until === null ? "no" : `until ${timeOfDay(branch.pinned_until)}`;
  const rows = [
    ["Session", branch.session],
    ["Class", branch.class],
    ["Tokens", `${count(branch.start)} to ${count(branch.stop)}`],
    ["Size", bytes(branch.bytes)],
    ["Held in", listed(branch.tiers) || "parts"],
    ["Hits", count(branch.hits)],
    ["Used", since(branch.last_used)],
    ["Pinned", pinned],
  ];
  const made = rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  return el("dl", { class: "facts" }, ...made);
}

function timeOfDay(epochSeconds) {
  const format = { hour: "2-digit", minute: "2-digit" };
  return new Date(1000 * epochSeconds).toLocaleTimeString([], format);
}
