// The conversations of this browser: open, delete, export and import.

import { byId, el, redraw, since } from "../dom.js";
import { confirmed } from "../confirm.js";
import { ask } from "../server.js";
import { download, exported, imported } from "./archive.js";

export const sessionOf = (id) => `chat-${id}`;

export class ConversationList {
  #store;
  #actions;

  // `actions`: open(id), begin(), forget(id), removed(id), current().
  constructor(store, actions) {
    this.#store = store;
    this.#actions = actions;
    byId("new-chat").addEventListener("click", () => this.#leaving(actions.begin));
    byId("export").addEventListener("click", () => this.#export([actions.current()], "conversation"));
    byId("export-all").addEventListener("click", async () => this.#export(await store.all(), "conversations"));
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", () => this.#import());
    byId("show-conversations").addEventListener("click", () => this.#open(byId("conversations").dataset.open !== "true"));
  }

  async show() {
    const heads = await this.#store.heads();
    const current = this.#actions.current().id;
    redraw(byId("conversation-list"), ...heads.map((head) => this.#entry(head, head.id === current)));
    return heads;
  }

  #entry({ id, title, updatedAt }, isCurrent) {
    const name = title || "Untitled";
    const open = el(
      "button",
      { type: "button", class: "quiet open", "data-key": `open-${id}`, onclick: () => this.#leaving(() => this.#actions.open(id)) },
      el("span", { class: "title" }, name),
      el("span", { class: "muted when" }, since(updatedAt / 1000)),
    );
    if (isCurrent) open.setAttribute("aria-current", "true");
    const remove = el("button", { type: "button", class: "quiet small", "data-key": `delete-${id}`, "aria-label": `Delete ${name}`, onclick: () => this.#remove(id, name) }, "\u00d7");
    return el("li", {}, open, remove);
  }

  // On a phone the list covers the thread.
  #leaving(action) {
    this.#open(false);
    action();
  }

  #open(isOpen) {
    byId("conversations").dataset.open = String(isOpen);
    byId("show-conversations").setAttribute("aria-expanded", String(isOpen));
  }

  async #remove(id, name) {
    const text = `\u201c${name}\u201d leaves this browser, and the server deletes the prefixes that it computed for it.`;
    if (!(await confirmed("Delete this conversation?", text))) return;
    this.#actions.forget(id);
    await this.#store.remove(id);
    await this.#actions.removed(id);
    try {
      await ask("DELETE", `/v1/cache?session=${encodeURIComponent(sessionOf(id))}`);
    } catch (error) {
      this.tell(`Deleted in this browser. The server kept its part: ${error.message}`);
    }
  }

  #export(conversations, name) {
    download(`rekindle-${name}-${new Date().toISOString().slice(0, 10)}.json`, exported(conversations));
  }

  async #import() {
    const [file] = byId("import-file").files;
    byId("import-file").value = "";
    if (!file) return;
    try {
      const conversations = imported(await file.text());
      for (const conversation of conversations) await this.#store.save(conversation);
      this.tell(conversations.length === 1 ? "1 conversation imported." : `${conversations.length} conversations imported.`);
      if (conversations.length) await this.#actions.open(conversations[0].id);
    } catch (error) {
      this.tell(`Nothing was imported: ${error.message}`);
    }
  }

  /** Says something below the list. */
  tell(text) {
    byId("list-status").textContent = text;
  }
}
