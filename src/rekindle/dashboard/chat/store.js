// Conversations in the browser's IndexedDB. The list reads only heads; a conversation is read when
// it is opened. Two tabs may write one conversation: messages of both are kept, and of one message
// the copy that knows more.

const NAME = "rekindle-chat";
const VERSION = 1;
const HEADS = "heads";
const WHOLE = "conversations";

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const ended = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });

export class Store {
  #database;
  #known = new Set(); // ids that were in the database: one that is missing was deleted

  static async open() {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      for (const name of [HEADS, WHOLE]) request.result.createObjectStore(name, { keyPath: "id" });
    };
    const store = new Store();
    store.#database = await done(request);
    return store;
  }

  /** Id, title and time of each conversation, the latest first. */
  async heads() {
    const heads = await done(this.#database.transaction(HEADS).objectStore(HEADS).getAll());
    return heads.sort((one, other) => other.updatedAt - one.updatedAt);
  }

  /** The conversation; undefined if another tab has deleted it. */
  async load(id) {
    this.#known.add(id);
    return done(this.#database.transaction(WHOLE).objectStore(WHOLE).get(id));
  }

  async all() {
    return done(this.#database.transaction(WHOLE).objectStore(WHOLE).getAll());
  }

  async save(conversation) {
    const transaction = this.#database.transaction([HEADS, WHOLE], "readwrite");
    const whole = transaction.objectStore(WHOLE);
    const before = await done(whole.get(conversation.id));
    if (!before && this.#known.has(conversation.id)) throw new Error("another tab deleted it.");
    const messages = { ...before?.messages, ...conversation.messages };
    for (const stored of Object.values(before?.messages ?? {})) {
      if (knowsMore(stored, messages[stored.id])) messages[stored.id] = stored;
    }
    const { title, renamedAt } = laterNamed(before, conversation);
    const { id, updatedAt } = conversation;
    whole.put({ ...conversation, title, renamedAt, messages });
    transaction.objectStore(HEADS).put({ id, title, updatedAt });
    await ended(transaction);
    this.#known.add(id);
  }

  async remove(id) {
    const transaction = this.#database.transaction([HEADS, WHOLE], "readwrite");
    for (const name of [HEADS, WHOLE]) transaction.objectStore(name).delete(id);
    return ended(transaction);
  }
}

// A tab that opens a conversation while another reads a reply has a part of that reply.
function knowsMore(one, other) {
  const hasEnded = ({ finish }) => finish !== null && finish !== "interrupted";
  const chars = ({ text, reasoning, calls }) => JSON.stringify([text, reasoning, calls]).length;
  // Only the longer one has what was added to a reply that had ended.
  if (chars(one) !== chars(other)) return chars(one) > chars(other);
  if (hasEnded(one) !== hasEnded(other)) return hasEnded(one);
  return Boolean(one.facts && !other.facts);
}

// A tab that does not know of the new title must not bring back the old one.
const laterNamed = (stored, given) => ((stored?.renamedAt ?? 0) > (given.renamedAt ?? 0) ? stored : given);

/** For browsers that offer no database, for example in a private window. */
export class MemoryStore {
  #conversations = new Map();

  async heads() {
    const all = [...this.#conversations.values()];
    return all.sort((one, other) => other.updatedAt - one.updatedAt);
  }

  async load(id) {
    return structuredClone(this.#conversations.get(id));
  }

  async all() {
    return structuredClone([...this.#conversations.values()]);
  }

  async save(conversation) {
    this.#conversations.set(conversation.id, structuredClone(conversation));
  }

  async remove(id) {
    this.#conversations.delete(id);
  }
}
