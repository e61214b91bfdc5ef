// The chat: the open conversation, its thread and composer, and the replies that are being read.

import { byId, el } from "../dom.js";
import { bodyOf, Interrupted, receive } from "./completion.js";
import { factsOfRequest, total } from "./facts.js";
import { ConversationList, sessionOf } from "./list.js";
import { composes, MessageView, sends } from "./message.js";
import { Settings } from "./settings.js";
import { MemoryStore, Store } from "./store.js";
import { Title } from "./title.js";
import { add, branches, choose, newConversation, newId, pathTo, rename, reopen, shownPath } from "./tree.js";

const OPEN = "rekindle-conversation"; // in the tab's storage: which one a reload opens
const SAVE_MS = 1000; // while a reply grows; a reload loses at most as much
const LEAST_PAUSE_MS = 40; // between two drawings of a reply that grows
const PAUSES_PER_DRAWING = 8; // so that drawing takes a small part of the time, however long the reply
const NEAR_END_PIXELS = 80; // a reader who scrolled up is left there
const MAX_UNSEEN = 50;

export class Chat {
  #model;
  #store = null;
  #list = null;
  #settings = new Settings(() => this.#save(this.#conversation));
  #title = new Title((title) => this.#rename(title));
  #conversation = newConversation();
  #views = new Map(); // message id -> its view, of the open conversation
  #runs = new Map(); // conversation id -> the reply that is being read
  #forgotten = new Set(); // ids of deleted conversations: a late end of a reply must not store one again
  #unseen = new Map(); // request id -> its message, until the feed reports the request

  // `model` returns the name of the chosen model.
  constructor(model) {
    this.#model = model;
    this.#settings.show(this.#conversation.settings);
  }

  async start() {
    this.#store = await Store.open().catch(() => null);
    byId("not-kept").hidden = this.#store !== null;
    this.#store ??= new MemoryStore();
    this.#list = new ConversationList(this.#store, {
      open: (id) => this.#open(id),
      begin: () => this.#begin(),
      forget: (id) => this.#forget(id),
      removed: (id) => this.#removed(id),
      current: () => this.#conversation,
    });
    byId("composer").addEventListener("submit", (event) => this.#send(event));
    byId("draft").addEventListener("keydown", (event) => this.#onKey(event));
    byId("stop").addEventListener("click", () => this.#stop());
    byId("chat-view").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !composes(event)) this.#stop();
    });
    const heads = await this.#store.heads();
    const id = sessionStorage.getItem(OPEN) ?? heads[0]?.id;
    await (heads.some((head) => head.id === id) ? this.#open(id) : this.#show());
  }

  /** Hears of every finished request. Only the feed knows what a stopped reply cost. */
  onRequest(seen) {
    const [requestId] = seen.id.split(".");
    const waiting = this.#unseen.get(requestId);
    if (!waiting) return;
    this.#unseen.delete(requestId);
    const { message, part } = waiting;
    if (part < (message.earlier?.length ?? 0)) message.earlier[part] ??= factsOfRequest(seen);
    else message.facts ??= factsOfRequest(seen);
    this.#save(waiting.conversation);
    this.#show();
  }

  async #open(id) {
    const running = this.#runs.get(id);
    const conversation = running?.conversation ?? (await this.#store.load(id));
    if (!conversation) return this.#list.show(); // another tab deleted it
    for (const message of Object.values(conversation.messages)) {
      const isLeft = message.role === "assistant" && message.finish === null && message !== running?.message;
      if (isLeft) message.finish = "interrupted";
    }
    this.#use(conversation);
  }

  #begin() {
    this.#use(newConversation(this.#conversation.settings));
    byId("draft").focus();
  }

  #forget(id) {
    this.#forgotten.add(id);
    this.#runs.get(id)?.controller.abort();
  }

  async #removed(id) {
    if (this.#conversation.id !== id) return this.#list.show();
    const [head] = await this.#store.heads();
    return head ? this.#open(head.id) : this.#begin();
  }

  #use(conversation) {
    this.#conversation = conversation;
    sessionStorage.setItem(OPEN, conversation.id);
    this.#settings.show(conversation.settings);
    this.#title.close();
    this.#views.clear();
    byId("thread").replaceChildren();
    this.#show();
    byId("thread").scrollTop = byId("thread").scrollHeight;
  }

  // An empty conversation is not worth a place in the list.
  async #save(conversation) {
    if (!conversation.leaf || this.#forgotten.has(conversation.id)) return;
    await this.#store.save(conversation).catch((error) => {
      this.#list.tell(`This conversation cannot be stored: ${error.message}`);
    });
  }

  #touch(conversation) {
    conversation.updatedAt = Date.now();
    return this.#save(conversation).then(() => this.#list.show());
  }

  #onKey(event) {
    if (!sends(event)) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  }

  #send(event) {
    event.preventDefault();
    const draft = byId("draft");
    const conversation = this.#conversation;
    if (!draft.value.trim() || this.#runs.has(conversation.id)) return;
    add(conversation, conversation.leaf, { role: "user", text: draft.value });
    draft.value = "";
    this.#generate(conversation, conversation.leaf);
  }

  #stop() {
    this.#runs.get(this.#conversation.id)?.controller.abort();
  }

  #edit(message, text) {
    const conversation = this.#conversation;
    const { role, parent } = message;
    const edited = add(conversation, parent, { role, text, ...(role === "assistant" ? { finish: "edited", model: message.model } : {}) });
    if (role === "user") this.#generate(conversation, edited.id);
    else {
      this.#touch(conversation);
      this.#show();
      focusDraft();
    }
  }

  #rename(title) {
    rename(this.#conversation, title);
    this.#save(this.#conversation).then(() => this.#show());
  }

  #answer(message, results) {
    const conversation = this.#conversation;
    let parent = message.id;
    message.calls.forEach(({ id }, i) => {
      parent = add(conversation, parent, { role: "tool", callId: id, text: results[i] }).id;
    });
    this.#generate(conversation, parent);
  }

  // Whoever steps through branches goes on with the same key.
  #choose(message, step) {
    choose(this.#conversation, message);
    this.#save(this.#conversation);
    this.#show();
    const turns = [...this.#views.get(message.id).node.querySelectorAll("[data-step]:enabled")];
    (turns.find((turn) => Number(turn.dataset.step) === step) ?? turns[0])?.focus();
  }

  #generate(conversation, parent) {
    const message = add(conversation, parent, { role: "assistant", finish: null, model: this.#model() });
    return this.#receive(conversation, message, pathTo(conversation, parent));
  }

  #continue(message) {
    reopen(message);
    return this.#receive(this.#conversation, message, pathTo(this.#conversation, message.id));
  }

  async #receive(conversation, message, path) {
    const run = { conversation, message, controller: new AbortController(), progress: null, pause: 0, timer: null };
    const requestId = newId();
    this.#runs.get(conversation.id)?.controller.abort(); // an edit was open while it began
    this.#runs.set(conversation.id, run);
    this.#await(requestId, run);
    this.#touch(conversation);
    this.#show();
    byId("thread").scrollTop = byId("thread").scrollHeight;
    focusDraft();
    const saving = setInterval(() => this.#save(conversation), SAVE_MS);
    try {
      const call = { session: sessionOf(conversation.id), requestId, signal: run.controller.signal };
      await receive(bodyOf(conversation.settings, path, message), call, message, (progress) => {
        run.progress = progress;
        this.#growSoon(run);
      });
    } catch (error) {
      fail(message, error, run.controller.signal.aborted);
    }
    clearInterval(saving);
    clearTimeout(run.timer);
    if (this.#runs.get(conversation.id) === run) this.#runs.delete(conversation.id);
    if (message.facts) this.#unseen.delete(requestId);
    await this.#touch(conversation); // what is shown as ended outlives a reload
    this.#show();
    byId("chat-status").textContent = message.error ?? `The reply is complete: ${message.finish}.`;
  }

  #await(requestId, { conversation, message }) {
    if (this.#unseen.size >= MAX_UNSEEN) this.#unseen.delete(this.#unseen.keys().next().value);
    this.#unseen.set(requestId, { conversation, message, part: message.earlier?.length ?? 0 });
  }

  #growSoon(run) {
    run.timer ??= setTimeout(() => {
      run.timer = null;
      const view = this.#views.get(run.message.id);
      if (!view) return; // another conversation is open
      const start = performance.now();
      this.#following(() => view.grow(true, run.progress));
      run.pause = Math.max(LEAST_PAUSE_MS, PAUSES_PER_DRAWING * (performance.now() - start));
    }, run.pause);
  }

  #following(draw) {
    const thread = byId("thread");
    const isAtEnd = thread.scrollHeight - thread.scrollTop - thread.clientHeight < NEAR_END_PIXELS;
    draw();
    if (isAtEnd) thread.scrollTop = thread.scrollHeight;
  }

  #show() {
    const conversation = this.#conversation;
    const run = this.#runs.get(conversation.id);
    const path = shownPath(conversation);
    this.#title.show(conversation);
    byId("talk-total").textContent = total(path);
    byId("export").disabled = !path.length;
    byId("send").hidden = Boolean(run);
    byId("stop").hidden = !run;
    byId("thread-empty").hidden = path.length > 0;
    this.#following(() => this.#showPath(path, run));
    this.#list.show();
  }

  #showPath(path, run) {
    const behind = branches(this.#conversation);
    const views = path.map((message) => this.#viewOf(message));
    const thread = byId("thread");
    const isKept = (child, i) => child === views[i]?.node;
    const same = [...thread.children].findIndex((child, i) => !isKept(child, i));
    if (same >= 0) for (const child of [...thread.children].slice(same)) child.remove();
    for (const { node } of views.slice(thread.children.length)) thread.append(node);
    path.forEach((message, i) =>
      views[i].show({
        siblings: behind.get(message.parent),
        isLast: i === path.length - 1,
        isRunning: message === run?.message,
        isBusy: Boolean(run),
        progress: run?.progress ?? null,
      }));
  }

  #viewOf(message) {
    if (!this.#views.has(message.id)) {
      const view = new MessageView(message, {
        edit: (edited, text) => this.#edit(edited, text),
        regenerate: ({ parent }) => this.#generate(this.#conversation, parent),
        proceed: (cut) => this.#continue(cut),
        choose: (chosen, step) => this.#choose(chosen, step),
        answer: (answered, results) => this.#answer(answered, results),
      });
      this.#views.set(message.id, view);
    }
    return this.#views.get(message.id);
  }
}

function fail(message, error, isStopped) {
  if (isStopped) message.finish = "stopped";
  else {
    message.finish = error instanceof Interrupted ? "interrupted" : "error";
    message.error = error.message;
  }
}

// On a phone the focus would open the keyboard over the thread.
function focusDraft() {
  if (matchMedia("(pointer: fine)").matches) byId("draft").focus();
}
