// Markdown to DOM nodes. While a reply streams, blocks that did not change keep their nodes, and
// an open block of code only gets the new text.

import { el, fill } from "../dom.js";
import { copyButton } from "./copy.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 12; // of lists and quotes; deeper ones are shown as text
const MAX_COLUMNS = 100; // of a table
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;

export function markdown(text) {
  const made = document.createDocumentFragment();
  for (const block of blocksOf(linesOf(text), 0)) made.append(nodeOf(block, 0));
  return made;
}

/** Shows a text that grows. */
export class MarkdownView {
  #holder;
  #shown = []; // [{ block, node }]

  constructor(holder) {
    this.#holder = holder;
  }

  show(text) {
    const blocks = blocksOf(linesOf(text), 0);
    const shown = this.#shown;
    let same = 0;
    while (same < shown.length && same < blocks.length && shown[same].block.source === blocks[same].source) same += 1;
    if (same < blocks.length && grow(shown[same], blocks[same])) same += 1;
    for (const { node } of shown.splice(same)) node.remove();
    for (const block of blocks.slice(same)) {
      const node = nodeOf(block, 0);
      this.#holder.append(node);
      shown.push({ block, node });
    }
  }
}

function grow(shown, block) {
  if (shown?.block.kind !== "code" || block.kind !== "code") return false;
  const { text, language } = shown.block;
  if (language !== block.language || !block.text.startsWith(text)) return false;
  shown.node.querySelector("code").firstChild.appendData(block.text.slice(text.length));
  shown.block = block;
  return true;
}

function linesOf(text) {
  const spaces = (tabs) => "    ".repeat(tabs.length);
  return text.split(/\r\n|\r|\n/).map((line) => line.replace(/^\t+/, spaces));
}

// A block has the lines it came from as `source`, and what its node is made of.
function blocksOf(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const start = at;
    const block = blockAt(lines, start, depth);
    at = block.end;
    found.push({ ...block, source: lines.slice(start, at).join("\n") });
  }
  return found;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return codeAt(lines, at);
  if (HEADING.test(line)) return { kind: "heading", end: at + 1, line };
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quoteAt(lines, at);
  if (depth < MAX_DEPTH && ITEM.test(line)) return listAt(lines, at);
  return tableAt(lines, at) ?? paragraphAt(lines, at, depth);
}

const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((each) => each.test(line));

function codeAt(lines, at) {
  const [, marks, language] = FENCE.exec(lines[at]);
  const indent = lines[at].search(/\S/);
  const isEnd = (line) => {
    const trimmed = line.trim();
    return trimmed.length >= marks.length && trimmed === marks[0].repeat(trimmed.length);
  };
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const inside = lines.slice(at + 1, end).map((line) => withoutIndent(line, indent));
  return { kind: "code", language, text: inside.join("\n"), end: Math.min(end + 1, lines.length) };
}

function quoteAt(lines, at) {
  let end = at;
  const inside = [];
  while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !startsBlock(lines[end]))) {
    inside.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return { kind: "quote", inside, end };
}

function listAt(lines, at) {
  const [, indent, first] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(first);
  const items = [];
  let width = 0; // of the last item's marker, with its indent
  let isAfterBlank = false;
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (!line.trim()) {
      isAfterBlank = true;
      items.at(-1).push("");
      continue;
    }
    const marker = ITEM.exec(line);
    const lead = line.search(/\S/);
    if (marker && lead < indent.length + 2 && (!items.length || lead < width)) {
      if (RULE.test(line) || /\d/.test(marker[2]) !== isOrdered || lead + 1 < indent.length) break;
      width = marker[0].length - Math.max(marker[3].length - 4, 0);
      items.push([line.slice(width)]);
    } else if (lead >= width || (marker && lead >= indent.length + 2)) {
      items.at(-1).push(withoutIndent(line, width));
    } else if (isAfterBlank || startsBlock(line)) {
      break;
    } else {
      items.at(-1).push(line.slice(lead));
    }
    isAfterBlank = false;
  }
  while (end > at + 1 && !lines[end - 1].trim()) end -= 1;
  return { kind: "list", isOrdered, first: parseInt(first, 10), items, end };
}

function tableAt(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length) return null;
  const head = cellsOf(lines[at]);
  const marks = cellsOf(lines[at + 1]);
  if (marks.length !== head.length || !lines[at + 1].includes("-") || head.length > MAX_COLUMNS) return null;
  if (!marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  const sides = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
  let end = at + 2;
  const rows = [];
  while (end < lines.length && lines[end].includes("|")) {
    rows.push(cellsOf(lines[end]).slice(0, head.length));
    end += 1;
  }
  return { kind: "table", head, sides, rows, end };
}

// A bar in code or behind a backslash does not end a cell.
function cellsOf(line) {
  const trimmed = line.trim();
  const cells = [""];
  let isCode = false;
  for (let at = 0; at < trimmed.length; at += 1) {
    const char = trimmed[at];
    if (char === "\\" && trimmed[at + 1] === "|") {
      cells[cells.length - 1] += "|";
      at += 1;
    } else if (char === "|" && !isCode) cells.push("");
    else {
      if (char === "`") isCode = !isCode;
      cells[cells.length - 1] += char;
    }
  }
  if (trimmed.startsWith("|")) cells.shift();
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim());
}

function paragraphAt(lines, at, depth) {
  const endsIt = depth < MAX_DEPTH ? startsBlock : (line) => FENCE.test(line);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !endsIt(lines[end])) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).join("\n").trim(), end };
}

const MAKERS = {
  code: codeNode,
  heading: headingNode,
  rule: () => el("hr"),
  quote: ({ inside }, depth) => fill(el("blockquote"), nodesOf(inside, depth)),
  list: listNode,
  table: tableNode,
  paragraph: ({ text }) => el("p", {}, inline(text)),
};

const nodeOf = (block, depth) => MAKERS[block.kind](block, depth);
const nodesOf = (lines, depth) => blocksOf(lines, depth + 1).map((block) => nodeOf(block, depth + 1));

function codeNode({ language, text }) {
  const code = el("code");
  code.append(document.createTextNode(text)); // also if it is empty: it grows
  return el(
    "div",
    { class: "code" },
    el("div", { class: "code-head" }, el("span", {}, language || "text"), copyButton("Copy code", () => code.textContent)),
    el("pre", { tabindex: "0", role: "region", "aria-label": `Code, ${language || "text"}` }, code),
  );
}

// Headings of a reply stand below those of the page: h1 and h2.
function headingNode({ line }) {
  const level = HEADING.exec(line)[1].length;
  let text = line.trim().slice(level).trim();
  const bare = text.replace(/#+$/, "");
  if (bare === "" || bare.endsWith(" ")) text = bare.trim();
  return el(`h${Math.min(level + 2, 6)}`, { class: `level-${level}` }, inline(text));
}

function listNode({ isOrdered, first, items }, depth) {
  const made = items.map((lines) => {
    const nodes = nodesOf(lines, depth);
    const isTight = nodes[0]?.tagName === "P";
    return fill(el("li"), isTight ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes);
  });
  const start = isOrdered && first !== 1 ? { start: first } : {};
  return fill(el(isOrdered ? "ol" : "ul", start), made);
}

function tableNode({ head, sides, rows }) {
  const row = (cells, tag, more = {}) =>
    el("tr", {}, ...head.map((_, i) => el(tag, { class: sides[i], ...more }, inline(cells[i] ?? ""))));
  const body = rows.map((cells) => row(cells, "td"));
  const table = el("table", {}, el("thead", {}, row(head, "th", { scope: "col" })), fill(el("tbody"), body));
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
}

function withoutIndent(line, width) {
  let at = 0;
  while (at < width && line[at] === " ") at += 1;
  return line.slice(at);
}
