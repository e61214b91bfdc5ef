// One reply of the server: the request that a conversation becomes, and the stream that is read.

import { events, refusal, request } from "../server.js";
import { factsOfReply } from "./facts.js";

/** The connection failed: nobody said what is wrong. */
export class Interrupted extends Error {}

/** The body of a chat completion for the messages of `path`. The reply continues `message`, if that is the last of them. */
export function bodyOf(settings, path, message) {
  const { model } = message;
  const tools = json(settings.tools, "Tools");
  return {
    ...json(settings.extra, "Other fields"),
    ...settings.sampling,
    ...(tools ? { tools: tools.map(asTool) } : {}),
    ...(model ? { model } : {}),
    messages: [...(settings.system ? [{ role: "system", content: settings.system }] : []), ...path.filter(isSent).map(asSent)],
    ...(path.at(-1) === message ? { continue_final_message: true } : {}),
    n: 1, // a message has one reply
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
  };
}

/** What is wrong with the settings, in one sentence; null: nothing. */
export function settingsProblem(settings) {
  try {
    const tools = json(settings.tools, "Tools");
    if (tools !== null && !Array.isArray(tools)) return "Tools: a list is needed.";
    const extra = json(settings.extra, "Other fields");
    if (extra !== null && (typeof extra !== "object" || Array.isArray(extra))) return "Other fields: an object is needed.";
    return null;
  } catch (error) {
    return error.message;
  }
}

function json(text, name) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: this is not JSON: ${error.message}`);
  }
}

// A function alone is enough; the API wants it wrapped.
const asTool = (tool) => (tool?.name && !tool.function ? { type: "function", function: tool } : tool);

// A reply that failed before its first token was never said.
const isSent = ({ role, text, reasoning, calls }) => role !== "assistant" || text || reasoning || calls?.length;

// As the server sent it: only the same text finds the same tokens.
function asSent({ role, text, reasoning, calls, callId }) {
  if (role === "tool") return { role, content: text, tool_call_id: callId };
  if (role === "user") return { role, content: text };
  return {
    role,
    content: text || null,
    ...(reasoning ? { reasoning_content: reasoning } : {}),
    ...(calls?.length ? { tool_calls: calls.map(asCall) } : {}),
  };
}

const asCall = ({ id, name, arguments: json }) => ({ id, type: "function", function: { name, arguments: json } });

/** Reads a reply into `message`. `onChange` hears of each piece, with the progress of the prompt. */
export async function receive(body, { session, requestId, signal }, message, onChange) {
  const headers = {
    "content-type": "application/json",
    "x-request-id": requestId,
    "x-rekindle-session": session,
    "x-rekindle-explain": "1",
  };
  const sentAt = performance.now();
  const options = { method: "POST", body: JSON.stringify(body), headers, signal };
  const response = await request("/v1/chat/completions", options).catch(() => {
    throw new Interrupted("The server does not answer.");
  });
  if (!response.ok) throw await refusal(response);
  const reader = new Reader(message, sentAt);
  for await (const { data } of arriving(response.body)) {
    if (data === "[DONE]") return;
    onChange(reader.take(JSON.parse(data)));
  }
  throw new Interrupted(CUT);
}

const CUT = "The connection ended before the reply did.";

async function* arriving(stream) {
  try {
    yield* events(stream);
  } catch {
    throw new Interrupted(CUT);
  }
}

class Reader {
  #message;
  #sentAt;
  #firstTokenMs = null;

  constructor(message, sentAt) {
    this.#message = message;
    this.#sentAt = sentAt;
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.model) this.#message.model = chunk.model;
    const [choice] = chunk.choices;
    if (choice) this.#takeChoice(choice);
    if (chunk.rekindle) this.#message.facts = factsOfReply(chunk, this.#firstTokenMs);
    return chunk.prompt_progress ?? null;
  }

  #takeChoice({ delta, finish_reason: finish }) {
    const message = this.#message;
    const { content, reasoning_content: reasoning, tool_calls: calls } = delta;
    if (content || reasoning || calls) this.#firstTokenMs ??= performance.now() - this.#sentAt;
    if (content) message.text += content;
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    for (const call of calls ?? []) this.#takeCall(call);
    if (finish) message.finish = finish;
  }

  #takeCall({ index, id, function: { name, arguments: json } }) {
    const calls = (this.#message.calls ??= []);
    calls[index] ??= { id, name, arguments: "" };
    calls[index].arguments += json;
  }
}
