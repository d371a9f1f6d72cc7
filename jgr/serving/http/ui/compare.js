// SPDX-License-Identifier: Apache-2.0
// One request to two models, or to two layouts of the prompt, side by side.

import { inWords } from "./api.js";
import { costs, itemTable } from "./answer.js";
import { make, setOptions, shown } from "./dom.js";
import { LAYOUT_OPTIONS } from "./question.js";

export class Comparison {
  #asked = 0; // the last question's number: an older one's answers are dropped

  /** root: where the two sides go. told: where what they have in common is said. */
  constructor(root, told, api, question) {
    Object.assign(this, { told, api, question });
    this.sides = ["First", "Second"].map((name) => {
      const model = make("select", { name: `${name} model` });
      const layout = make("select", { name: `${name} layout` });
      setOptions(layout, LAYOUT_OPTIONS);
      const layoutField = make("label", {}, "Layout ", layout);
      const answer = make("div", { class: "answer" });
      const head = make("div", { class: "bar" }, make("label", {}, `${name} model `, model), layoutField);
      root.append(make("section", { class: "side", "aria-label": name }, head, answer));
      return { model, layout, layoutField, answer };
    });
  }

  /** Offer the models that do what is asked for. At first the second side has the second of them. */
  adapt() {
    const names = this.question.able.map((info) => info.id);
    const [, second] = this.sides;
    const fresh = !second.model.options.length;
    for (const side of this.sides) {
      setOptions(side.model, names.map((name) => [name, name]));
      side.layoutField.hidden = this.question.kind !== "rank";
    }
    if (fresh && names.length > 1) second.model.value = names[1];
  }

  async ask() {
    const number = (this.#asked += 1);
    this.told.textContent = "";
    for (const { answer } of this.sides) answer.replaceChildren(make("p", { class: "hint" }, "asked …"));
    const answers = await Promise.all(this.sides.map((side) => this.#askOne(side, number)));
    if (number !== this.#asked) return;
    const [first, second] = answers.map((answer) => answer?.items ?? []);
    this.#show(0, answers[0], second);
    this.#show(1, answers[1], first);
    if (answers.every(Boolean)) this.told.textContent = common(first, second);
  }

  async #askOne({ model, layout, answer }, number) {
    const { question } = this;
    const info = question.infos.find(({ id }) => id === model.value);
    try {
      return await this.api.post(`v1/${question.kind}`, question.body(info, layout.value));
    } catch (error) {
      if (number === this.#asked) answer.replaceChildren(inWords(error));
      return null;
    }
  }

  #show(at, answer, others) {
    if (!answer) return;
    const places = new Map(others.map((item) => [item.item_id, item.rank]));
    const table = itemTable(answer.items, (item) => moved(item.rank, places.get(item.item_id)));
    this.sides[at].answer.replaceChildren(costs(answer), table);
  }
}

/** How much better an item's place is than on the other side. */
function moved(place, other) {
  if (other === undefined) return make("span", { class: "move only" }, "only here");
  const by = other - place;
  if (!by) return make("span", { class: "move" }, "=");
  const words = `${Math.abs(by)} ${by > 0 ? "better" : "worse"} than on the other side`;
  const kind = by > 0 ? "up" : "down";
  return make("span", { class: `move ${kind}`, title: words, "aria-label": words }, `${by > 0 ? "▲" : "▼"}${Math.abs(by)}`);
}

function common(first, second) {
  const ids = new Set(first.map((item) => item.item_id));
  const both = second.filter((item) => ids.has(item.item_id)).length;
  return `${shown(both, 6)} of ${shown(Math.max(first.length, second.length), 6)} items are on both sides.`;
}
