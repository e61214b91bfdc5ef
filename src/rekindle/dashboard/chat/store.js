// Conversations in the browser's IndexedDB. The list reads only heads; a conversation is read when
// it is opened. Two tabs may write one conversation: messages of both are kept.

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

  async load(id) {
    return done(this.#database.transaction(WHOLE).objectStore(WHOLE).get(id));
  }

  async all() {
    return done(this.#database.transaction(WHOLE).objectStore(WHOLE).getAll());
  }

  async save(conversation) {
    const transaction = this.#database.transaction([HEADS, WHOLE], "readwrite");
    const whole = transaction.objectStore(WHOLE);
    const before = await done(whole.get(conversation.id));
    const messages = { ...before?.messages, ...conversation.messages };
    const { id, title, updatedAt } = conversation;
    whole.put({ ...conversation, messages });
    transaction.objectStore(HEADS).put({ id, title, updatedAt });
    return ended(transaction);
  }

  async remove(id) {
    const transaction = this.#database.transaction([HEADS, WHOLE], "readwrite");
    for (const name of [HEADS, WHOLE]) transaction.objectStore(name).delete(id);
    return ended(transaction);
  }
}

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
