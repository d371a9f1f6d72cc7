// SPDX-License-Identifier: Apache-2.0
// The form: what is asked of the server, as a body of /v1/recommend or /v1/rank.

import { make, setOptions } from "./dom.js";
import { Picker } from "./picker.js";

const DEADLINES_MS = [null, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
const DAY_S = 86400;
const LAYOUTS = ["user_prefix", "item_prefix", "causal"];
const NUMBERS = { recommend: ["top_k", "beam_width", "min_beam_width"], rank: ["top_k", "min_candidates"] };

/** The options of a choice among layouts. */
export const LAYOUT_OPTIONS = [["", "the server's choice"], ...LAYOUTS.map((name) => [name, name])];

/** Whether a model answers requests of a kind, as jgr.serving.versions.served_models has it. */
export function serves(info, kind) {
  return (kind === "recommend" ? info.max_beam_width : info.max_candidates) > 0;
}

export class Question {
  #histories = new Map(); // what each user was last asked with

  constructor(form, catalog) {
    this.form = form;
    this.fields = form.elements;
    this.infos = [];
    this.pickers = {};
    for (const root of form.querySelectorAll("[data-picker]")) {
      this.pickers[root.dataset.picker] = new Picker(root, catalog);
    }
    this.fields.deadline.max = DEADLINES_MS.length - 1;
    setOptions(this.fields.layout, LAYOUT_OPTIONS);
    this.fields.deadline.addEventListener("input", () => this.#showDeadline());
    this.fields.user_id.addEventListener("change", () => this.#recall());
    this.#showDeadline();
  }

  get kind() {
    return this.fields.kind.value;
  }

  /** The model that the form names; undefined where none of the server's does what is asked for. */
  get model() {
    return this.infos.find((info) => info.id === this.fields.model.value);
  }

  /** The models that do what is asked for. */
  get able() {
    return this.infos.filter((info) => serves(info, this.kind));
  }

  /** The server's models. Where none of them does what the form asks for, it asks for the other kind. */
  know(infos) {
    this.infos = infos;
    if (infos.length && !this.able.length) this.fields.kind.value = this.kind === "rank" ? "recommend" : "rank";
  }

  /** Show the fields of the kind and of the view, and the limits of the model. */
  adapt(view) {
    const { kind } = this;
    setOptions(this.fields.model, this.able.map((info) => [info.id, info.id]));
    for (const part of this.form.querySelectorAll("[data-kind], [data-view]")) {
      const { kind: ofKind = kind, view: ofView = view } = part.dataset;
      part.hidden = ofKind !== kind || ofView !== view;
    }
    const info = this.model;
    if (!info) return;
    this.fields.top_k.max = kind === "recommend" ? info.max_beam_width : info.max_candidates;
    this.fields.beam_width.max = info.max_beam_width;
    this.fields.beam_width.placeholder = info.beam_width;
    this.#offer(info.segments);
  }

  /** The body of the request to one model. Throws an Error in words for what is no JSON. */
  body(info, layout = this.fields.layout.value) {
    const { kind, fields, pickers } = this;
    const body = { history: pickers.history.ids, include_metadata: true, explain: true };
    if (info) body.model = info.id;
    if (fields.user_id.value) body.user_id = fields.user_id.value;
    for (const name of NUMBERS[kind]) if (fields[name].value !== "") body[name] = Number(fields[name].value);
    const deadline = DEADLINES_MS[fields.deadline.value];
    if (deadline) body.deadline_ms = deadline;
    if (fields.exclude_history.checked) body.exclude_history = true;
    if (fields.priority.value !== "interactive") body.priority = fields.priority.value;
    if (kind === "rank") {
      body.candidates = fields.all.checked ? "all" : pickers.candidates.ids;
      if (layout) body.layout = layout;
      if (Array.isArray(body.candidates)) body.top_k = Math.min(body.top_k, body.candidates.length) || undefined;
    } else {
      const filters = this.#filters();
      if (Object.keys(filters).length) body.filters = filters;
    }
    const further = this.#further();
    if (kind === "rank" && info?.timed && !("history_times" in further)) {
      body.history_times = daily(body.history.length);
    }
    return Object.assign(body, further);
  }

  /** Keep the user's history for the next time that the user is named; until the page is left. */
  remember() {
    const user = this.fields.user_id.value;
    if (!user) return;
    if (!this.#histories.has(user)) document.getElementById("users").append(make("option", { value: user }));
    this.#histories.set(user, this.pickers.history.ids);
  }

  #recall() {
    const known = this.#histories.get(this.fields.user_id.value);
    if (known) this.pickers.history.set(known);
  }

  #filters() {
    const filters = {};
    for (const name of ["exclude", "deny", "allow"]) {
      if (this.pickers[name].ids.length) filters[name] = this.pickers[name].ids;
    }
    const segments = [...this.form.querySelectorAll("#segments input:checked")].map((box) => box.value);
    if (segments.length) filters.segments = segments;
    return filters;
  }

  #further() {
    const text = this.fields.further.value.trim();
    if (!text) return {};
    let further;
    try {
      further = JSON.parse(text);
    } catch (error) {
      throw new Error(`Further fields are no JSON: ${error.message}`);
    }
    if (further === null || typeof further !== "object" || Array.isArray(further)) {
      throw new Error("Further fields must be a JSON object.");
    }
    return further;
  }

  #offer(segments) {
    const box = document.getElementById("segments");
    const now = [...box.querySelectorAll("input")].map((input) => input.value);
    if (now.join("\n") === segments.join("\n")) return;
    const labels = segments.map((value) => make("label", {}, make("input", { type: "checkbox", value }), value));
    box.replaceChildren(box.firstElementChild, ...labels);
    box.hidden = !segments.length;
  }

  #showDeadline() {
    const deadline = DEADLINES_MS[this.fields.deadline.value];
    const text = deadline ? `${deadline} ms` : "none";
    document.getElementById("deadline-told").value = text;
    this.fields.deadline.setAttribute("aria-valuetext", text);
  }
}

/** Times of a history whose own are not known: an item a day, the last one now. */
function daily(count) {
  const now = Math.floor(Date.now() / 1000);
  return Array.from({ length: count }, (_, at) => now - DAY_S * (count - 1 - at));
}
