// SPDX-License-Identifier: Apache-2.0
// A list of items that is picked by searching the catalog, or typed or pasted as ids.

import { make } from "./dom.js";
import { describe, nameOf } from "./items.js";

const WAIT_MS = 150;
const SEARCHED_CHARS = 256; // as many as the server takes; what is longer is a pasted list
const LOOKED_UP = 64; // titles are asked for so many of a list's items, the last ones
let made = 0;

export class Picker {
  #ids = [];
  #found = [];
  #at = -1;
  #asked = 0;
  #timer = 0;

  /** root: an empty element, with the label as data-label. */
  constructor(root, catalog) {
    this.catalog = catalog;
    const id = `picker-${(made += 1)}`;
    this.list = make("ol", { class: "chips", "aria-label": root.dataset.label });
    this.options = make("ul", { id: `${id}-options`, role: "listbox", "aria-label": "Items found", hidden: true });
    this.input = make("input", {
      id,
      role: "combobox",
      autocomplete: "off",
      spellcheck: "false",
      placeholder: "search, or paste ids",
      "aria-expanded": "false",
      "aria-autocomplete": "list",
      "aria-controls": this.options.id,
      input: () => this.#typed(),
      focus: () => this.#typed(),
      blur: () => this.#close(),
      keydown: (event) => this.#pressed(event),
    });
    const clear = make("button", { type: "button", class: "quiet", click: () => this.set([]) }, "clear");
    clear.setAttribute("aria-label", `Clear: ${root.dataset.label}`);
    root.classList.add("picker");
    root.append(
      make("div", { class: "head" }, make("label", { for: id }, root.dataset.label), clear),
      this.list,
      this.input,
      this.options,
    );
    this.clear = clear;
    this.#show();
  }

  get ids() {
    return [...this.#ids];
  }

  set(ids) {
    this.#ids = [...ids];
    this.#show();
  }

  add(...ids) {
    this.set([...this.#ids, ...ids]);
  }

  /** Show the names of the catalog that is chosen now. */
  refresh() {
    this.#show();
  }

  #remove(at) {
    this.#ids.splice(at, 1);
    this.#show();
    this.input.focus();
  }

  #show() {
    this.clear.hidden = !this.#ids.length;
    this.list.hidden = !this.#ids.length;
    this.list.replaceChildren(...this.#ids.map((id, at) => this.#chip(id, at)));
    this.#name(new Set(this.#ids.slice(-LOOKED_UP)));
  }

  #chip(id, at) {
    const metadata = this.catalog.of(id);
    const name = nameOf(id, metadata);
    const title = metadata === null ? `${id}: not in the catalog` : id;
    return make(
      "li",
      { title, class: metadata === null ? "unknown" : null },
      make("span", {}, name),
      make("button", { type: "button", "aria-label": `Remove ${name}`, click: () => this.#remove(at) }, "×"),
    );
  }

  async #name(ids) {
    const nameless = [...ids].filter((id) => this.catalog.of(id) === undefined);
    await this.catalog.look(nameless);
    const named = new Set(nameless.filter((id) => this.catalog.of(id) !== undefined));
    this.#ids.forEach((id, at) => named.has(id) && this.list.children[at].replaceWith(this.#chip(id, at)));
  }

  #typed() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#search(this.input.value.trim()), WAIT_MS);
  }

  async #search(text) {
    const asked = (this.#asked += 1);
    let found = [];
    try {
      if (text.length <= SEARCHED_CHARS) found = await this.catalog.find(text);
    } catch {
      // Ids can be typed all the same; what is wrong is told when they are asked with.
    }
    if (asked !== this.#asked || document.activeElement !== this.input) return;
    this.#found = found;
    this.#at = -1;
    this.options.replaceChildren(...found.map((item, at) => this.#option(item, at)));
    this.#open(found.length > 0);
  }

  #option({ item_id: id, metadata }, at) {
    const pick = (event) => {
      event.preventDefault(); // the input keeps the focus
      this.#pick(at);
    };
    return make(
      "li",
      { id: `${this.input.id}-${at}`, role: "option", "aria-selected": "false", mousedown: pick },
      describe(id, metadata),
    );
  }

  #open(isOpen) {
    this.options.hidden = !isOpen;
    this.input.setAttribute("aria-expanded", isOpen);
    if (!isOpen) this.input.removeAttribute("aria-activedescendant");
  }

  #close() {
    clearTimeout(this.#timer);
    this.#asked += 1;
    this.#at = -1;
    this.#open(false);
  }

  #pick(at) {
    this.add(this.#found[at].item_id);
    this.input.value = "";
    this.#close();
  }

  #pressed(event) {
    const open = !this.options.hidden;
    if (open && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      event.preventDefault();
      this.#move(event.key === "ArrowDown" ? 1 : -1);
    } else if (event.key === "Escape" && open) {
      this.#close();
    } else if (event.key === "Enter" && (this.#at >= 0 || this.input.value.trim())) {
      event.preventDefault();
      if (this.#at >= 0) return this.#pick(this.#at);
      this.add(...this.input.value.split(/[\s,]+/).filter(Boolean));
      this.input.value = "";
      this.#close();
    } else if (event.key === "Backspace" && !this.input.value && this.#ids.length) {
      this.#remove(this.#ids.length - 1);
    }
  }

  #move(step) {
    const options = [...this.options.children];
    options[this.#at]?.setAttribute("aria-selected", "false");
    this.#at = (this.#at + step + options.length + (this.#at < 0 && step < 0)) % options.length;
    const chosen = options[this.#at];
    chosen.setAttribute("aria-selected", "true");
    chosen.scrollIntoView({ block: "nearest" });
    this.input.setAttribute("aria-activedescendant", chosen.id);
  }
}
