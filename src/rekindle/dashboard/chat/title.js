// The title of the open conversation, and the field that renames it.

import { byId, el } from "../dom.js";
import { composes } from "./message.js";
import { TITLE_CHARS } from "./tree.js";

export class Title {
  #rename;
  #form = null; // while the field is open

  // `rename` takes the new title; an empty one is the first message's again.
  constructor(rename) {
    this.#rename = rename;
    byId("rename").addEventListener("click", () => this.#edit());
  }

  show({ title, leaf }) {
    byId("talk-title").textContent = title || "New conversation";
    byId("rename").disabled = !leaf;
  }

  /** Closes the field without a change. */
  close() {
    if (!this.#form) return;
    const hadFocus = this.#form.contains(document.activeElement);
    this.#form.remove();
    this.#form = null;
    byId("talk-title").hidden = byId("rename").hidden = false;
    if (hadFocus) byId("rename").focus();
  }

  #edit() {
    const field = el("input", { "aria-label": "Title", maxlength: TITLE_CHARS, enterkeyhint: "done" });
    const save = el("button", { type: "submit", class: "small" }, "Save");
    const cancel = el("button", { type: "button", class: "quiet small", onclick: () => this.close() }, "Cancel");
    field.value = byId("talk-title").textContent;
    this.#form = el("form", { class: "rename" }, field, save, cancel);
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.close();
      this.#rename(field.value);
    });
    this.#form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || composes(event)) return;
      event.stopPropagation(); // it does not stop a reply
      this.close();
    });
    byId("talk-title").after(this.#form);
    byId("talk-title").hidden = byId("rename").hidden = true;
    field.select();
    field.focus();
  }
}
