// SPDX-License-Identifier: Apache-2.0
// What the catalog tells of items, and how an item looks.

import { make } from "./dom.js";

const FOUND = 12;
const NAMES = ["title", "name"];

/** The catalog of the model that is chosen, as far as it was asked for. */
export class Catalog {
  #known = new Map();
  #asked = new Set();

  constructor(api) {
    this.api = api;
    this.model = "";
  }

  /** Another model's catalog. */
  choose(model) {
    if (model === this.model) return;
    this.model = model;
    this.#known.clear();
    this.#asked.clear();
  }

  /** Items whose id begins with the text, or that have it in their metadata. */
  async find(query) {
    const { data } = await this.api.get("v1/items", { query, limit: FOUND, model: this.model });
    for (const item of data) this.learn(item);
    return data;
  }

  learn({ item_id, metadata }) {
    if (metadata) this.#known.set(item_id, metadata);
  }

  /** What is known of an item: its metadata; null where the catalog has no such item; undefined while nobody asked. */
  of(id) {
    return this.#known.get(id);
  }

  /** Ask for items, 100 at most: each once, and all of them in one call. Nothing is thrown: what is not known is shown
   * as an id. */
  async look(ids) {
    const { model } = this;
    const fresh = ids.filter((id) => !this.#known.has(id) && !this.#asked.has(id));
    if (!fresh.length) return;
    for (const id of fresh) this.#asked.add(id);
    try {
      const { data } = await this.api.get("v1/items", { item_id: fresh, model });
      if (model !== this.model) return; // another catalog was chosen meanwhile
      for (const id of fresh) this.#known.set(id, null);
      for (const item of data) this.learn(item);
    } catch {
      if (model === this.model) for (const id of fresh) this.#asked.delete(id);
    }
  }
}

/** What an item is called. */
export function nameOf(id, metadata) {
  const given = NAMES.map((name) => metadata?.[name]).find((text) => typeof text === "string" && text);
  return given ?? id;
}

/** An item with its name, its id and whatever else its metadata has. */
export function describe(id, metadata) {
  const name = nameOf(id, metadata);
  const rest = Object.entries(metadata ?? {}).filter(([key, value]) => value !== name && !NAMES.includes(key));
  return [
    make("span", { class: "name" }, name),
    name === id ? null : make("code", {}, id),
    make("span", { class: "metadata" }, rest.map(([key, value]) => make("span", {}, `${key} ${plain(value)}`))),
  ];
}

function plain(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
