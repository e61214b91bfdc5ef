// A conversation is a tree of messages. An edited message or another reply is a sibling of the
// first; nothing is overwritten. The messages from the root to `leaf` are the ones shown and sent.

export const TITLE_CHARS = 60;

export const NO_SETTINGS = { system: "", sampling: {}, tools: "", extra: "" };

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return `m${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

export function newConversation(settings = NO_SETTINGS) {
  const now = Date.now();
  return { id: newId(), title: "", createdAt: now, updatedAt: now, settings: structuredClone(settings), messages: {}, leaf: null };
}

/** Adds a message behind `parent` (an id, or null) and shows it. */
export function add(conversation, parent, fields) {
  const message = { id: newId(), parent, at: Date.now(), text: "", ...fields };
  conversation.messages[message.id] = message;
  conversation.leaf = message.id;
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message.text);
  return message;
}

/** Gives the conversation a title of its own; an empty one: that of its first message. */
export function rename(conversation, title) {
  const [first] = branches(conversation).get(null) ?? [];
  conversation.title = titleOf(title) || titleOf(first?.text ?? "");
  conversation.renamedAt = Date.now();
}

/** Opens a reply that has ended, so that it grows on. Its facts stay, as those of a part. */
export function reopen(message) {
  message.earlier = [...(message.earlier ?? []), message.facts ?? null];
  message.facts = null;
  message.finish = null;
  delete message.error;
}

export function pathTo(conversation, id) {
  const path = [];
  for (let at = conversation.messages[id]; at; at = conversation.messages[at.parent]) path.push(at);
  return path.reverse();
}

export const shownPath = (conversation) => pathTo(conversation, conversation.leaf);

/** The messages behind each message (null: the first ones), the oldest first. */
export function branches(conversation) {
  // Messages of two tabs are merged, so that the order of keys says nothing.
  const inOrder = Object.values(conversation.messages).sort(
    (one, other) => one.at - other.at || (one.id < other.id ? -1 : 1));
  return Map.groupBy(inOrder, (message) => message.parent);
}

/** Shows a message, and behind it the latest of its descendants. */
export function choose(conversation, message) {
  const behind = branches(conversation);
  let leaf = message;
  while (behind.has(leaf.id)) leaf = behind.get(leaf.id).at(-1);
  conversation.leaf = leaf.id;
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}\u2026` : line;
}
