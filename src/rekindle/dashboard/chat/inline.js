// Inline Markdown to DOM nodes: emphasis, code, links. One pass over the text; every character is
// moved a bounded number of times, so hostile text costs linear time, too.

import { el, fill } from "../dom.js";

const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "s" };
const MAX_URL = 2000;
const PLAIN = /[^\\`*_~![\]<h]+/y;
// Anything but the web (javascript:, data:, a path of this server) stays text.
const WEB = /^https?:\/\/[^\s]+$/i;
const TARGET = /\]\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"\n]*")?\s*\)/y;
const AUTOLINK = /<(https?:\/\/[^\s<>]{1,2000})>/y;
const BARE = /https?:\/\/[^\s<>"`[\]*]{1,2000}/y;

export function inline(text) {
  const made = new Builder();
  const closers = codeEnds(text);
  let at = 0;
  while (at < text.length) {
    const plain = matchAt(PLAIN, text, at);
    if (plain) {
      made.text(plain[0]);
      at += plain[0].length;
    } else {
      at = special(text, at, made, closers);
    }
  }
  return made.end();
}

// Returns where to go on.
function special(text, at, made, closers) {
  const char = text[at];
  if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
    made.text(text[at + 1]);
    return at + 2;
  }
  if (char === "`") return code(text, at, made, closers);
  if ("*_~".includes(char)) return emphasis(text, at, made);
  if (char === "!" && text[at + 1] === "[") {
    made.openLink("![");
    return at + 2;
  }
  if (char === "[") {
    made.openLink("[");
    return at + 1;
  }
  if (char === "]") return endOfLink(text, at, made);
  if (char === "<" || (char === "h" && !isWord(text[at - 1]))) {
    const end = url(text, at, made);
    if (end) return end;
  }
  made.text(char);
  return at + 1;
}

// For every run of backticks, where the next run of the same length begins.
function codeEnds(text) {
  const ends = new Map();
  const last = new Map();
  for (const run of text.matchAll(/`+/g)) {
    const length = run[0].length;
    if (last.has(length)) ends.set(last.get(length), run.index);
    last.set(length, run.index);
  }
  return ends;
}

function code(text, at, made, ends) {
  const length = runLength(text, at);
  const end = ends.get(at);
  if (end === undefined) {
    made.text(text.slice(at, at + length));
    return at + length;
  }
  let inside = text.slice(at + length, end).replaceAll("\n", " ");
  if (inside.startsWith(" ") && inside.endsWith(" ") && inside.trim()) inside = inside.slice(1, -1);
  made.add(el("code", {}, inside));
  return end + length;
}

function emphasis(text, at, made) {
  const char = text[at];
  const length = runLength(text, at);
  const [before, after] = [text[at - 1] ?? " ", text[at + length] ?? " "];
  const inWord = char === "_" && isWord(before) && isWord(after);
  const canClose = !isSpace(before) && !(char === "_" && isWord(after));
  const canOpen = !isSpace(after) && !(char === "_" && isWord(before));
  let left = length;
  if (canClose && !inWord) left = made.closeRun(char, left);
  if (left && canOpen && !inWord) left = made.openRun(char, left);
  if (left) made.text(char.repeat(left));
  return at + length;
}

function endOfLink(text, at, made) {
  const part = text.slice(at, at + MAX_URL + 100);
  const found = made.isLinkOpen ? matchAt(TARGET, part, 0) : null;
  if (!found) {
    made.dropLink();
    made.text("]");
    return at + 1;
  }
  made.closeLink(found[1]);
  return at + found[0].length;
}

function url(text, at, made) {
  const quoted = matchAt(AUTOLINK, text, at);
  const bare = quoted ? null : matchAt(BARE, text, at);
  if ((!quoted && !bare) || made.isLinkOpen) return null;
  const address = quoted ? quoted[1] : withoutTail(bare[0]);
  made.add(linkTo(address, [address]));
  return at + (quoted ? quoted[0].length : address.length);
}

// A dot or a bracket behind an address belongs to the sentence.
function withoutTail(address) {
  const tail = address.includes("(") ? /[.,;:!?']/ : /[.,;:!?')]/;
  let end = address.length;
  while (tail.test(address[end - 1])) end -= 1;
  return address.slice(0, end);
}

function linkTo(address, children) {
  return fill(el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }), children);
}

class Builder {
  #frames = [{ kind: null, marker: "", nodes: [] }];
  #open = new Map(); // kind -> whether a frame of it is open; at most one of a kind is

  get #top() {
    return this.#frames.at(-1);
  }

  get isLinkOpen() {
    return this.#open.has("link");
  }

  text(text) {
    this.#top.nodes.push(text);
  }

  add(node) {
    this.#top.nodes.push(node);
  }

  end() {
    while (this.#frames.length > 1) this.#flatten();
    return fill(document.createDocumentFragment(), joined(this.#top.nodes));
  }

  openRun(char, length) {
    const kinds = length > 3 ? [] : length === 3 ? [char.repeat(2), char] : [char.repeat(length)];
    let left = length;
    for (const kind of kinds) {
      if (!(kind in TAGS) || this.#open.has(kind)) continue;
      this.#push(kind, kind);
      left -= kind.length;
    }
    return left;
  }

  closeRun(char, length) {
    let left = length;
    for (;;) {
      const exact = char.repeat(left);
      const kind = left <= 2 && this.#open.has(exact) ? exact : this.#innermost(char, left);
      if (!kind) return left;
      this.#flattenTo(kind);
      const { nodes } = this.#pop();
      this.add(fill(el(TAGS[kind]), joined(nodes)));
      left -= kind.length;
    }
  }

  #innermost(char, most) {
    const frame = this.#frames.findLast(({ kind }) => kind?.[0] === char && kind in TAGS);
    return frame && frame.kind.length <= most ? frame.kind : null;
  }

  openLink(marker) {
    this.dropLink();
    this.#push("link", marker);
  }

  closeLink(address) {
    this.#flattenTo("link");
    if (!WEB.test(address)) {
      this.#flatten();
      this.text(`](${address})`);
      return;
    }
    const { nodes } = this.#pop();
    this.add(linkTo(address, joined(nodes.length ? nodes : [address])));
  }

  dropLink() {
    if (!this.isLinkOpen) return;
    this.#flattenTo("link");
    this.#flatten();
  }

  #push(kind, marker) {
    this.#frames.push({ kind, marker, nodes: [] });
    this.#open.set(kind, true);
  }

  #pop() {
    const frame = this.#frames.pop();
    this.#open.delete(frame.kind);
    return frame;
  }

  #flattenTo(kind) {
    while (this.#top.kind !== kind) this.#flatten();
  }

  #flatten() {
    const { marker, nodes } = this.#pop();
    const parent = this.#top.nodes;
    parent.push(marker);
    for (const node of nodes) parent.push(node);
  }
}

// Neighbouring texts become one text node.
function joined(nodes) {
  const made = [];
  let texts = [];
  const flush = () => {
    if (texts.length) made.push(document.createTextNode(texts.join("")));
    texts = [];
  };
  for (const node of nodes) {
    if (typeof node === "string") texts.push(node);
    else {
      flush();
      made.push(node);
    }
  }
  flush();
  return made;
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

const isSpace = (char) => /\s/.test(char);
const isWord = (char) => char !== undefined && /[\p{L}\p{N}]/u.test(char);
