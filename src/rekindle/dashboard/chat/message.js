// One message of the thread: its text, reasoning, calls and facts, and what can be done with it.

import { el, redraw } from "../dom.js";
import { copyButton } from "./copy.js";
import { factsNode } from "./facts.js";
import { MarkdownView } from "./markdown.js";

const NAMES = { user: "You", assistant: "Reply", tool: "Tool result" };
const ENDS = {
  length: "The reply reached its limit of tokens.",
  stopped: "Stopped.",
  interrupted: "The connection ended before the reply did.",
};

const WHOLE = ["stop", "tool_calls"]; // the model ended these replies

export class MessageView {
  #message;
  #actions;
  #body = el("div", { class: "body" });
  #reasoning = el("div", { class: "body" });
  #fold = el("details", { class: "reasoning", hidden: "" }, el("summary", {}, "Reasoning"), this.#reasoning);
  #calls = el("div", { class: "calls" });
  #state = el("p", { class: "state muted", role: "status", hidden: "" });
  #buttons = el("div", { class: "buttons" });
  #facts = el("aside", { class: "message-side" });
  #texts = new MarkdownView(this.#body);
  #thoughts = new MarkdownView(this.#reasoning);
  #factsShown = null;

  // `actions`: edit(message, text), regenerate(message), proceed(message), choose(message, step), answer(message, results).
  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    this.#facts.setAttribute("aria-label", "What this reply cost");
    const isReply = message.role === "assistant";
    const name = message.model && isReply ? message.model : NAMES[message.role];
    this.node = el(
      "article",
      { class: `message ${message.role}`, "data-id": message.id, "aria-label": NAMES[message.role] },
      el("div", { class: "message-main" }, el("h3", { class: "who" }, name), isReply ? this.#fold : null, this.#body, this.#calls, this.#state, this.#buttons),
      isReply ? this.#facts : null,
    );
  }

  /** Shows what may grow: texts, calls, state. `progress` of the prompt, while it is evaluated. */
  grow(isRunning, progress) {
    const { text, reasoning, calls, role } = this.#message;
    if (role === "assistant") this.#texts.show(text);
    else this.#body.textContent = text;
    this.#fold.hidden = !reasoning;
    if (reasoning) this.#thoughts.show(reasoning);
    if (calls) this.#calls.replaceChildren(...calls.map(callNode));
    this.#showState(isRunning, progress);
  }

  /** Shows the message in its place: among `siblings`, the last one or not. */
  show({ siblings, isLast, isRunning, isBusy, progress }) {
    this.grow(isRunning, progress);
    this.node.classList.toggle("running", isRunning);
    redraw(this.#buttons, ...(isBusy ? [] : this.#actionButtons(siblings, isLast)));
    const { calls, facts, earlier } = this.#message;
    const answers = this.node.querySelector(".answers");
    if (isLast && calls?.length && !isBusy) answers ?? this.#calls.after(this.#answerForm());
    else answers?.remove();
    const shown = facts && JSON.stringify([facts, earlier]);
    if (facts && shown !== this.#factsShown) this.#facts.replaceChildren(factsNode(facts, earlier));
    this.#factsShown = shown;
  }

  #showState(isRunning, progress) {
    const { text, reasoning, calls, finish, error } = this.#message;
    const isSilent = !text && !reasoning && !calls;
    let words = "";
    if (isRunning && isSilent) words = progress ? `Reading the prompt: ${progress.processed} of ${progress.total} tokens, ${progress.cache} from the cache` : "Waiting";
    else if (!isRunning) words = error ?? ENDS[finish] ?? "";
    this.#state.hidden = !words;
    this.#state.textContent = words;
    this.#state.classList.toggle("bad", Boolean(error));
  }

  #actionButtons(siblings, isLast) {
    const message = this.#message;
    const button = (name, onclick) => el("button", { type: "button", class: "quiet small", "data-key": name, onclick }, name);
    const at = siblings.indexOf(message);
    const turn = (step, name) => {
      const made = button(step < 0 ? "\u2039" : "\u203a", () => this.#actions.choose(siblings[at + step], step));
      made.setAttribute("aria-label", name);
      made.dataset.step = step;
      made.disabled = !siblings[at + step];
      return made;
    };
    const places = siblings.length > 1
      ? [turn(-1, "Earlier branch"), el("span", { class: "muted branch-number" }, `${at + 1} of ${siblings.length}`), turn(1, "Later branch")]
      : [];
    return [
      ...places,
      copyButton("Copy message", () => message.text),
      ...(message.role === "tool" ? [] : [button("Edit", () => this.#edit())]),
      ...(isLast && canGrow(message) ? [button("Continue", () => this.#actions.proceed(message))] : []),
      ...(message.role === "assistant" ? [button("Regenerate", () => this.#actions.regenerate(message))] : []),
    ];
  }

  #edit() {
    const area = el("textarea", { rows: "4", "aria-label": "Edited message" });
    area.value = this.#message.text;
    const close = () => {
      form.replaceWith(this.#body);
      this.#buttons.hidden = false;
    };
    const isReply = this.#message.role === "assistant";
    const form = el(
      "form",
      { class: "edit" },
      area,
      el("p", { class: "muted" }, isReply ? "The edited reply becomes a branch; your next message continues it." : "The edited message becomes a branch with a new reply."),
      el("div", { class: "buttons" }, el("button", { type: "submit" }, isReply ? "Save" : "Send"), el("button", { type: "button", class: "quiet", onclick: close }, "Cancel")),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      close();
      this.#actions.edit(this.#message, area.value);
    });
    area.addEventListener("keydown", (event) => {
      if (composes(event)) return;
      if (event.key === "Escape") close();
      else if (sends(event)) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.#body.replaceWith(form);
    this.#buttons.hidden = true;
    area.focus();
  }

  #answerForm() {
    const { calls } = this.#message;
    const areas = calls.map(({ name }) => el("textarea", { rows: "2", "aria-label": `Result of ${name}`, placeholder: `Result of ${name}` }));
    const form = el("form", { class: "answers" }, ...areas, el("div", { class: "buttons" }, el("button", { type: "submit" }, "Send results")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#actions.answer(this.#message, areas.map((area) => area.value));
    });
    return form;
  }
}

/** Whether a key is for the input method. Safari reports the one that ends a composition as 229. */
export const composes = (event) => event.isComposing || event.keyCode === 229;

export const sends = (event) => event.key === "Enter" && !event.shiftKey && !composes(event);

// Reasoning alone cannot be continued: most templates close it.
const canGrow = ({ role, text, calls, finish }) => role === "assistant" && text && !calls?.length && !WHOLE.includes(finish);

function callNode({ name, arguments: json }) {
  return el(
    "div",
    { class: "call" },
    el("p", {}, el("span", { class: "chip" }, "calls"), " ", el("code", {}, name)),
    el("pre", { tabindex: "0", role: "region", "aria-label": `Arguments of ${name}` }, el("code", {}, indented(json))),
  );
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not complete yet
  }
}
