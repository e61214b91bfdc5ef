// Wires the feed and the endpoints to the parts of the page.

import { byId, el } from "./dom.js";
import { BranchPanel } from "./branch.js";
import { Chat } from "./chat/chat.js";
import { ForestView } from "./forest.js";
import { Hour } from "./hour.js";
import { showBudgets, showLookup, showLookupProblem, showMisses, showSessions } from "./lists.js";
import { showFinished, showNow } from "./now.js";
import { ask, follow } from "./server.js";

const MAX_REQUESTS = 200;
const MAX_BRANCHES = 10_000;
const RETELL_SECONDS = 5;
const THEME = "rekindle-theme";
const REFRESH_MS = 300; // several requests that end together are looked after once; picked

const chat = new Chat(() => byId("model").value);
const hour = new Hour();
const panel = new BranchPanel(query, refresh);
const forest = new ForestView((branch) => panel.show(branch));
let requests = [];
let sessions = null; // not known yet
let retoldAt = 0; // when lists with ages in them were last written
let models = [];
let stored = ""; // what the tiers held when the forest was read
let refreshing = null;

function query() {
  return `model=${encodeURIComponent(byId("model").value)}`;
}

function chosenModel() {
  return models.find((model) => model.id === byId("model").value) ?? models[0];
}

async function refresh() {
  if (byId("cache-view").hidden) return; // it is read when it is shown
  // Asking about a model that is not loaded would load it.
  if (chosenModel()?.state !== "loaded") return;
  await Promise.all([readSessions(), readForest()]);
}

async function readSessions() {
  sessions = (await ask("GET", `/v1/sessions?${query()}`)).data;
  showSessions(sessions);
}

// The engine answers between two steps, which may take seconds while it prefills.
async function readForest() {
  forest.show((await ask("GET", `/v1/cache/forest?limit=${MAX_BRANCHES}&${query()}`)).data);
}

function refreshSoon() {
  refreshing ??= setTimeout(async () => {
    refreshing = null;
    try {
      await refresh();
    } catch (error) {
      byId("forest-note").textContent = error.message;
    }
  }, REFRESH_MS);
}

function showModels() {
  const select = byId("model");
  const names = models.map((model) => model.id);
  const isSame = [...select.options].map((option) => option.value).join("\n") === names.join("\n");
  if (isSame) return;
  const before = select.value;
  select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  const loaded = models.find((model) => model.state === "loaded");
  select.value = names.includes(before) ? before : loaded?.id ?? names[0];
  select.disabled = names.length < 2;
}

function onSnapshot(snapshot) {
  models = snapshot.models;
  showModels();
  const model = chosenModel();
  showNow(snapshot, model);
  showBudgets(model);
  hour.add(snapshot);
  retell(snapshot.time);
  const tiers = model.cache?.tiers.map((tier) => [tier.entries, tier.bytes]);
  const held = JSON.stringify([model.id, model.state, tiers]);
  if (held !== stored) {
    stored = held;
    refreshSoon();
  }
}

function showRequests() {
  showFinished(requests);
  showMisses(requests);
}

// Ages grow while nothing happens. Whoever marks text is left alone.
function retell(time) {
  if (time - retoldAt < RETELL_SECONDS || !getSelection().isCollapsed) return;
  retoldAt = time;
  showRequests();
  if (sessions) showSessions(sessions);
}

function onHour(past) {
  hour.begin(past);
  requests = past.requests;
  showRequests();
}

function onRequest(request) {
  requests = [...requests, request].slice(-MAX_REQUESTS);
  showRequests();
  chat.onRequest(request);
  refreshSoon();
}

function onState(state) {
  const words = { live: "live", lost: "no connection; trying again" };
  byId("connection").textContent = words[state];
  byId("connection").dataset.state = state;
  stored = ""; // it may be another server by now
}

async function lookUp(event) {
  event.preventDefault();
  try {
    const body = { ...JSON.parse(byId("lookup-body").value), model: byId("model").value };
    showLookup(await ask("POST", "/v1/cache/lookup", body));
  } catch (error) {
    showLookupProblem(error instanceof SyntaxError ? `This is not JSON: ${error.message}` : error.message);
  }
}

// The forest draws itself when it gets a size.
function showView() {
  const isCache = location.hash === "#cache";
  byId("chat-view").hidden = isCache;
  byId("cache-view").hidden = !isCache;
  for (const link of document.querySelectorAll(".views a")) {
    if ((link.hash === "#cache") === isCache) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (isCache && hour.isKnown) hour.show(Date.now() / 1000);
  if (isCache) refreshSoon();
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function useTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  forest.draw();
}

function toggleTheme() {
  const theme = isDark() ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  useTheme(theme);
}

showView();
addEventListener("hashchange", showView);
useTheme(localStorage.getItem(THEME));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => useTheme(null));
byId("theme").addEventListener("click", toggleTheme);
byId("lookup").addEventListener("submit", lookUp);
byId("model").addEventListener("change", () => {
  forest.select(null);
  stored = "";
  refreshSoon();
});
follow("/v1/events", { hour: onHour, snapshot: onSnapshot, request: onRequest }, onState);
chat.start();
