// The settings of a conversation: system prompt, sampling, tools. An empty field is the server's.

import { byId, el } from "../dom.js";
import { settingsProblem } from "./completion.js";

const SAMPLING = [
  ["temperature", "Temperature", "any"],
  ["top_p", "Top p", "any"],
  ["top_k", "Top k", "1"],
  ["min_p", "Min p", "any"],
  ["repeat_penalty", "Repeat penalty", "any"],
  ["max_tokens", "Most tokens", "1"],
  ["seed", "Seed", "1"],
];
const TEXTS = ["system", "tools", "extra"];

export class Settings {
  #settings = null;
  #onChange;

  constructor(onChange) {
    this.#onChange = onChange;
    byId("sampling").append(...SAMPLING.map(numberField));
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
    byId("settings").addEventListener("input", () => this.#read());
    byId("settings-toggle").addEventListener("click", () => this.#toggle());
  }

  show(settings) {
    this.#settings = settings;
    for (const name of TEXTS) byId(`set-${name}`).value = settings[name];
    for (const [name] of SAMPLING) byId(`set-${name}`).value = settings.sampling[name] ?? "";
    this.#showProblem();
  }

  #read() {
    for (const name of TEXTS) this.#settings[name] = byId(`set-${name}`).value;
    const given = SAMPLING.map(([name]) => [name, byId(`set-${name}`).valueAsNumber]);
    // Fields of an imported conversation that have no place here stay.
    for (const [name, value] of given) {
      if (Number.isNaN(value)) delete this.#settings.sampling[name];
      else this.#settings.sampling[name] = value;
    }
    this.#showProblem();
    this.#onChange();
  }

  #showProblem() {
    const problem = settingsProblem(this.#settings);
    byId("settings-problem").hidden = !problem;
    byId("settings-problem").textContent = problem ?? "";
  }

  #toggle() {
    const form = byId("settings");
    form.hidden = !form.hidden;
    byId("settings-toggle").setAttribute("aria-expanded", String(!form.hidden));
    if (!form.hidden) byId("set-system").focus();
  }
}

function numberField([name, label, step]) {
  const input = el("input", { id: `set-${name}`, type: "number", step, placeholder: "server's" });
  return el("label", { for: `set-${name}` }, label, input);
}
