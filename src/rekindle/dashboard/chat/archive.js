// Conversations as a file, and back. A file may come from anywhere: every field is checked, and
// unknown ones are dropped. An imported conversation is a copy with a new id.

import { newId } from "./tree.js";

const FORMAT = "rekindle-conversations";
const VERSION = 1;
const ROLES = ["user", "assistant", "tool"];

export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  URL.revokeObjectURL(url);
}

export function imported(text) {
  const file = JSON.parse(text);
  if (file?.format !== FORMAT) throw new Error("This file has no conversations of this page in it.");
  if (file.version !== VERSION) throw new Error(`This page reads version ${VERSION} of such files, not ${file.version}.`);
  if (!Array.isArray(file.conversations)) throw new Error("`conversations` is not a list.");
  return file.conversations.map(conversationOf);
}

function conversationOf(given, index) {
  const place = `conversations.${index}`;
  const messages = {};
  const ids = new Map(); // an id of a file may be any text
  for (const [id, message] of Object.entries(object(given?.messages, `${place}.messages`))) {
    ids.set(id, newId());
    messages[ids.get(id)] = messageOf(message, `${place}.messages.${id}`);
  }
  for (const message of Object.values(messages)) {
    if (message.parent !== null && !ids.has(message.parent)) throw new Error(`${place}: a message has no parent.`);
    message.parent = ids.get(message.parent) ?? null;
  }
  for (const [id, message] of Object.entries(messages)) message.id = id;
  refuseCycles(messages, place);
  return {
    id: newId(),
    title: string(given.title ?? "", `${place}.title`),
    createdAt: number(given.createdAt, `${place}.createdAt`),
    updatedAt: number(given.updatedAt, `${place}.updatedAt`),
    settings: settingsOf(object(given.settings ?? {}, `${place}.settings`), `${place}.settings`),
    messages,
    leaf: ids.get(given.leaf) ?? null,
  };
}

function messageOf(given, place) {
  object(given, place);
  if (!ROLES.includes(given.role)) throw new Error(`${place}.role is none of ${ROLES.join(", ")}.`);
  const message = {
    role: given.role,
    parent: given.parent === null ? null : string(given.parent, `${place}.parent`),
    at: number(given.at, `${place}.at`),
    text: string(given.text, `${place}.text`),
  };
  for (const name of ["reasoning", "model", "finish", "error", "callId"]) {
    if (given[name] !== undefined && given[name] !== null) message[name] = string(given[name], `${place}.${name}`);
  }
  if (given.calls !== undefined) message.calls = list(given.calls, `${place}.calls`).map((call) => callOf(call, place));
  if (given.facts) message.facts = factsOf(given.facts, `${place}.facts`);
  if (given.earlier) message.earlier = list(given.earlier, `${place}.earlier`).filter(Boolean).map((part) => factsOf(part, `${place}.earlier`));
  return message;
}

function callOf(given, place) {
  return {
    id: string(given?.id, `${place}.calls.id`),
    name: string(given.name, `${place}.calls.name`),
    arguments: string(given.arguments, `${place}.calls.arguments`),
  };
}

function settingsOf(given, place) {
  const sampling = object(given.sampling ?? {}, `${place}.sampling`);
  for (const [name, value] of Object.entries(sampling)) number(value, `${place}.sampling.${name}`);
  const text = (name) => string(given[name] ?? "", `${place}.${name}`);
  return { system: text("system"), sampling: { ...sampling }, tools: text("tools"), extra: text("extra") };
}

const NUMBERS = ["promptTokens", "prefilled", "generated", "drafted", "accepted", "firstTokenMs", "tokensPerSecond"];

function factsOf(given, place) {
  const facts = { miss: null };
  for (const name of NUMBERS) facts[name] = given[name] === null ? null : number(given[name], `${place}.${name}`);
  facts.cached = list(given.cached, `${place}.cached`).map(({ tier, tokens }) => ({
    tier: string(tier, `${place}.cached.tier`),
    tokens: number(tokens, `${place}.cached.tokens`),
  }));
  if (given.miss) facts.miss = missOf(object(given.miss, `${place}.miss`), `${place}.miss`);
  return facts;
}

function missOf(given, place) {
  const miss = { message: null, part: null, tokens_lost: number(given.tokens_lost, `${place}.tokens_lost`) };
  for (const name of ["reason", "before", "expected", "got"]) miss[name] = string(given[name], `${place}.${name}`);
  if (given.message !== null) miss.message = number(given.message, `${place}.message`);
  if (given.part !== null) miss.part = string(given.part, `${place}.part`);
  return miss;
}

// Each message is looked at once: what is known to lead to a root is not followed again.
function refuseCycles(messages, place) {
  const rooted = new Set();
  for (const start of Object.values(messages)) {
    const walked = new Set();
    for (let at = start; at && !rooted.has(at.id); at = messages[at.parent]) {
      if (walked.has(at.id)) throw new Error(`${place}: messages are their own parents.`);
      walked.add(at.id);
    }
    for (const id of walked) rooted.add(id);
  }
}

function checked(value, isRight, what, place) {
  if (!isRight) throw new Error(`${place} is not ${what}.`);
  return value;
}

const string = (value, place) => checked(value, typeof value === "string", "a text", place);
const number = (value, place) => checked(value, Number.isFinite(value), "a number", place);
const list = (value, place) => checked(value, Array.isArray(value), "a list", place);
const object = (value, place) =>
  checked(value, typeof value === "object" && value !== null && !Array.isArray(value), "an object", place);
