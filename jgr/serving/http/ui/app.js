// SPDX-License-Identifier: Apache-2.0
// The page: its views, the key, the models, and what happens when somebody asks.

import { Api, inWords } from "./api.js";
import { costs, itemTable, reuseView, reused } from "./answer.js";
import { beamsView } from "./beams.js";
import { Comparison } from "./compare.js";
import { counted, make, shown } from "./dom.js";
import { Catalog } from "./items.js";
import { Live } from "./live.js";
import { Question } from "./question.js";

const VIEWS = ["ask", "compare", "live"];
const AGAIN_MS = 2000; // between two questions whether a model has started
const SWITCH_ON = "jgr serve FOLDER --set server.explain=true";

const find = (id) => document.getElementById(id);
const api = new Api((error) => find("server").replaceChildren(error.show()));
const catalog = new Catalog(api);
const question = new Question(find("question"), catalog);
const comparison = new Comparison(find("sides"), find("overlap"), api, question);
const live = new Live(api, {
  watched: find("watched"),
  told: find("window"),
  trouble: find("trouble"),
  tiles: find("tiles"),
});
let view = "ask";
let asked = 0; // the last question's number: an older one's answer is dropped
let asking = new AbortController(); // gives the last question up
let items = []; // of the answer that is shown
let explains = true; // until the server says that it does not
let versions = []; // of the models, as they were told
let again = 0; // the timer for asking after models that start

function show(name) {
  view = name;
  for (const each of VIEWS) {
    const tab = find(`tab-${each}`);
    tab.setAttribute("aria-selected", each === name);
    tab.tabIndex = each === name ? 0 : -1;
    find(each).hidden = each !== name;
  }
  question.form.hidden = name === "live";
  adapt();
  live.watch(name === "live");
}

/** Fit the form to the models, the kind of request and the view. */
function adapt() {
  question.adapt(view);
  comparison.adapt();
  const chosen = question.model?.id ?? "";
  if (chosen === catalog.model) return;
  catalog.choose(chosen);
  for (const picker of Object.values(question.pickers)) picker.refresh();
}

async function loadModels() {
  const state = find("server");
  clearTimeout(again);
  try {
    const { data } = await api.get("v1/models");
    question.know(data);
    versions = data.map((info) => info.version);
    if (data.some((info) => info.state === "starting")) again = setTimeout(loadModels, AGAIN_MS);
    const served = data.map((info) => `${info.version} (${info.state})`);
    state.replaceChildren(served.join(", "));
  } catch (error) {
    question.know([]);
    if (error.type !== "unauthorized") state.replaceChildren(inWords(error)); // that is told already
  }
  adapt();
}

/** The answer, with the levels and spans where the server explains. levels: null: it does not. */
async function explained(kind, body, signal) {
  try {
    if (explains) return await api.post(`v1/explain/${kind}`, body, signal);
  } catch (error) {
    // Off, the path is not there. A model that is not there names its field.
    if (error.type !== "not_found" || error.field) throw error;
    explains = false;
  }
  const answer = await api.post(`v1/${kind}`, body, signal);
  return { answer, levels: null, spans: reused(answer) };
}

async function ask() {
  const number = (asked += 1);
  asking.abort();
  asking = new AbortController();
  const { kind, model } = question;
  const places = ["answer", "reuse", "beams"].map(find);
  places[0].replaceChildren(make("p", { class: "hint" }, "asked …"));
  try {
    const body = question.body(model);
    const { answer, levels, spans } = await explained(kind, body, asking.signal);
    if (number !== asked) return;
    question.remember();
    if (!versions.includes(answer.model)) loadModels(); // it was loaded anew since the page asked
    items = answer.items.map((item) => item.item_id);
    for (const item of answer.items) catalog.learn(item);
    places[0].replaceChildren(make("section", { class: "card" }, costs(answer), itemTable(answer.items, viewed)));
    places[1].replaceChildren(reuseView(answer.usage, spans));
    places[2].replaceChildren(...(kind === "recommend" ? [beamsOf(levels)] : []));
    find("said").textContent = `${counted(items.length, "item")} in ${shown(answer.timing_ms.total)} ms`;
  } catch (error) {
    if (number !== asked) return;
    places[0].replaceChildren(inWords(error));
    places[1].replaceChildren();
    places[2].replaceChildren();
  }
}

function beamsOf(levels) {
  if (levels?.length) return beamsView(levels);
  const text = levels
    ? "This server has no beams to show."
    : "This server does not tell how its beams walked. Start it anew with the setting, and load this page again: ";
  return make(
    "section",
    { class: "card" },
    make("h2", {}, "Beams"),
    make("p", { class: "hint" }, text, levels ? null : make("code", {}, SWITCH_ON)),
  );
}

/** The button that takes an item into the history, as if the user had viewed it. */
function viewed(item) {
  return make(
    "button",
    {
      type: "button",
      class: "quiet",
      "aria-label": `Add ${item.item_id} to the history`,
      click: () => question.pickers.history.add(item.item_id),
    },
    "+ history",
  );
}

question.form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (view === "ask") return ask();
  comparison.ask().catch((error) => find("overlap").replaceChildren(inWords(error)));
});
question.form.addEventListener("change", (event) => {
  if (["kind", "model"].includes(event.target.name)) adapt();
});
find("take").addEventListener("click", () => question.pickers.candidates.set(items));
find("key").addEventListener("change", (event) => {
  api.setKey(event.target.value);
  explains = true;
  loadModels();
  live.retry();
});
for (const [at, name] of VIEWS.entries()) {
  const tab = find(`tab-${name}`);
  tab.addEventListener("click", () => show(name));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = VIEWS[(at + step + VIEWS.length) % VIEWS.length];
    show(next);
    find(`tab-${next}`).focus();
  });
}
show(view);
loadModels();
