// SPDX-License-Identifier: Apache-2.0
// A live view of the server, from its /metrics: a tile for each figure, with its course over the last minutes.

import { inWords } from "./api.js";
import { bar, counted, draw, make, setOptions, shown } from "./dom.js";
import { Window, grouped, parse, select } from "./prometheus.js";

const EVERY_MS = 2000;
const TIMEOUT_MS = 10_000;
const KEPT = 150; // readings: five minutes
const WINDOW = 15; // readings that a figure is taken over: half a minute
const LEAST = 30; // readings that a course has room for
const HEIGHT = 36;
const WORK = /^\/v1\/((explain\/)?(recommend|rank)|rerank|score|users\/.*\/prefill)$|\/infer$|ModelInfer$/;
const COLOURS = 6;
const NONE = "none in this time";

const asked = { endpoint: (endpoint) => WORK.test(endpoint) };
const totals = (of) => ({ ...of, stage: "total" });
const percent = (value) => (value === null ? null : 100 * value);
const ms = (value) => (value === null ? null : 1000 * value);
const mb = (value) => (value === null ? null : value / 1e6);

/** Each figure: its value in a window, and a note. of: the labels of the model that is watched. */
const FIGURES = [
  {
    name: "Requests", unit: "/s",
    value: (w) => w.rate("jgr_requests_total", asked),
    note: (w) => byStatus(w),
  },
  {
    name: "Goodput", unit: "/s",
    value: (w) => w.rate("jgr_requests_total", { ...asked, status: "200" }),
    note: (w) => {
      const share = w.ratio(["jgr_requests_total", { ...asked, status: "200" }], ["jgr_requests_total", asked]);
      return share === null ? NONE : `${shown(100 * share)} % answered in time`;
    },
  },
  {
    name: "P50", unit: "ms",
    value: (w, of) => ms(w.quantile(0.5, "jgr_stage_seconds", totals(of))),
    note: (w, of) => `of ${shown(w.increase("jgr_stage_seconds_count", totals(of)), 6)} answers`,
  },
  {
    name: "P99", unit: "ms",
    value: (w, of) => ms(w.quantile(0.99, "jgr_stage_seconds", totals(of))),
    note: (w, of) => `queue ${shown(ms(w.quantile(0.99, "jgr_stage_seconds", { ...of, stage: "queue" })))} ms, ` +
      `device ${shown(ms(w.quantile(0.99, "jgr_stage_seconds", { ...of, stage: "device" })))} ms`,
  },
  {
    name: "Queue", unit: "requests",
    value: (w, of) => w.gauge("jgr_queue_depth", of),
    note: (w, of) => `${counted(w.gauge("jgr_in_flight", of), "run")} in flight`,
  },
  {
    name: "Batch fill", unit: "%",
    value: (w, of) => percent(w.ratio(["jgr_real_tokens_total", of], ["jgr_padded_tokens_total", of])),
    note: (w, of) => `mean batch size ${shown(w.ratio(["jgr_batch_size_sum", of], ["jgr_batch_size_count", of]))}`,
  },
  {
    name: "Device", unit: "% busy",
    value: (w, of) => percent(w.rate("jgr_device_seconds_total", of)),
    note: (w, of) => {
      const lost = w.ratio(["jgr_wasted_device_seconds_total", of], ["jgr_device_seconds_total", of]);
      return `${shown(percent(lost ?? 0))} % of it wasted`;
    },
  },
  {
    name: "Refused", unit: "/s",
    value: (w, of) => sum(w.rate("jgr_rejected_total", of), w.rate("jgr_refused_total")),
    note: (w, of) => {
      const reasons = { ...growth(w, "jgr_rejected_total", "reason", of), ...growth(w, "jgr_refused_total", "reason") };
      return listed(reasons) || "nothing";
    },
  },
  {
    name: "Late or failed", unit: "/s",
    value: (w, of) => sum(w.rate("jgr_deadline_expired_total", of), w.rate("jgr_executor_failures_total", of)),
    note: (w, of) => `${shown(w.increase("jgr_deadline_expired_total", of))} late, ` +
      `${shown(w.increase("jgr_executor_failures_total", of))} batches failed`,
  },
  {
    name: "Tokens from the cache", unit: "%",
    value: (w, of) =>
      percent(w.ratio(["jgr_prompt_tokens_total", { ...of, source: "cached" }], ["jgr_prompt_tokens_total", of])),
    note: (w, of) => `${shown(w.rate("jgr_prompt_tokens_total", of))} tokens/s`,
  },
  {
    name: "Pool in use", unit: "% of pages",
    value: (w, of) => {
      const pages = pagesOf(w, of);
      const all = sizeOf(pages);
      return all ? 100 * (1 - pages.free / all) : null;
    },
    parts: pagesOf,
    note: (w, of) => listed(grouped(w.now, "jgr_cache_entries", "kind", of), "entries ") || "no cache",
  },
  {
    name: "Embeddings on the device", unit: "% of rows asked for",
    value: (w, of) => {
      const [hits, misses] = ["hits", "misses"].map((event) => w.increase("jgr_embedding_rows_total", { ...of, event }));
      return hits + misses ? (100 * hits) / (hits + misses) : null;
    },
    note: (w, of) => {
      const { total, wanted, held } = grouped(w.now, "jgr_border_pages", "of", of);
      const moves = w.increase("jgr_border_moves_total", { ...of, of: "moves" });
      return total
        ? `border at ${shown((100 * wanted) / total)} % of ${counted(total, "page")}, rows hold ${shown(held, 6)}; ` +
          counted(moves, "move")
        : "no tables in pages";
    },
  },
  {
    name: "Fresh features", unit: "%",
    value: (w, of) => percent(w.ratio(["jgr_features_total", { ...of, state: "fresh" }], ["jgr_features_total", of])),
    note: (w, of) => listed(growth(w, "jgr_features_total", "state", of)) || "no feature store",
  },
  {
    name: "Drift, P99", unit: "",
    value: (w, of) => w.quantile(0.99, "jgr_shadow_drift", of),
    note: (w, of) => `${shown(w.increase("jgr_shadow_drift_count", of))} answers checked without the cache; ` +
      `in 8 bits ${shown(w.quantile(0.99, "jgr_quantize_drift", of))}, ` +
      `repaired ${shown(w.quantile(0.99, "jgr_repair_drift", of))}`,
  },
  {
    name: "Memory", unit: "MB",
    value: (w) => mb(w.gauge("process_resident_memory_bytes")),
    note: (w, of) => listed(scaled(grouped(w.now, "jgr_memory_bytes", "part", of), 1e-6)),
  },
];

function sum(...values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) : null;
}

/** The pages of the pool by holder. Each model tells of the whole pool, which they share, and calls the rest others. */
function pagesOf(w, of) {
  const [first] = select(w.now, "jgr_cache_pages", of);
  if (!first) return {};
  const told = grouped(w.now, "jgr_cache_pages", "holder", { model: first.labels.model });
  const { free, others, ...held } = grouped(w.now, "jgr_cache_pages", "holder", of);
  return { ...held, others: sizeOf(told) - told.free - sizeOf(held), free: told.free };
}

function sizeOf(parts) {
  return Object.values(parts).reduce((sum, size) => sum + size, 0);
}

/** How much each value of a label grew; those that did not are left out. */
function growth(w, name, label, of) {
  const values = Object.keys(grouped(w.now, name, label, of));
  const grown = values.map((value) => [value, w.increase(name, { ...of, [label]: value })]);
  return Object.fromEntries(grown.filter(([, count]) => count));
}

function byStatus(w) {
  const counts = Object.entries(growth(w, "jgr_requests_total", "status", asked));
  // With a colon: two numbers side by side, 200 545, read as one.
  return counts.length ? `status ${counts.map(([status, count]) => `${status}: ${shown(count, 6)}`).join(", ")}` : NONE;
}

function scaled(values, factor) {
  return Object.fromEntries(Object.entries(values).map(([name, value]) => [name, value * factor]));
}

function listed(values, before = "") {
  const entries = Object.entries(values).filter(([, value]) => value);
  return entries.length ? before + entries.map(([name, value]) => `${name} ${shown(value)}`).join(", ") : "";
}

export class Live {
  #readings = []; // {time, series}
  #timer = 0;
  #asking = false;
  #open = false;
  #another = false; // a key came while a reading was asked for

  constructor(api, { watched, told, trouble, tiles }) {
    Object.assign(this, { api, watched, told, trouble });
    this.tiles = FIGURES.map((figure) => new Tile(figure));
    tiles.append(...this.tiles.map((tile) => tile.root));
    watched.addEventListener("change", () => this.#show());
    document.addEventListener("visibilitychange", () => this.#schedule());
  }

  /** Read from now on, while the page can be seen; or stop. */
  watch(open) {
    this.#open = open;
    this.#schedule();
  }

  /** Another key, and so perhaps another answer. */
  retry() {
    this.#another = true;
    if (this.#open) this.#schedule();
  }

  #schedule(after = 0) {
    clearTimeout(this.#timer);
    if (this.#open && !document.hidden) this.#timer = setTimeout(() => this.#read(), after);
  }

  async #read() {
    if (this.#asking) return;
    this.#asking = true;
    this.#another = false;
    let again = true;
    try {
      const series = parse(await this.api.text("metrics", TIMEOUT_MS));
      this.#readings.push({ time: performance.now() / 1000, series });
      this.#readings.splice(0, this.#readings.length - KEPT);
      this.trouble.replaceChildren();
      this.#show();
    } catch (error) {
      again = this.#another || error.type !== "unauthorized"; // until there is another key
      this.trouble.replaceChildren(inWords(error));
    } finally {
      this.#asking = false;
    }
    if (again) this.#schedule(EVERY_MS);
  }

  #show() {
    const readings = this.#readings;
    const last = readings.at(-1);
    if (!last) return;
    const names = new Set(select(last.series, "jgr_model_info").map(({ labels }) => labels.model));
    setOptions(this.watched, [["", "all"], ...[...names].map((name) => [name, name])]);
    const chosen = this.watched.value;
    // With one model, series have no such label.
    const of = chosen ? { model: (label) => label === undefined || label === chosen } : {};
    const windows = readings.map((reading, at) => windowOf(readings, at));
    for (const tile of this.tiles) tile.show(windows, of);
    this.told.textContent = `Figures of the last ${Math.round(windows.at(-1).seconds)} s, courses of the last ` +
      `${Math.round(last.time - readings[0].time)} s.`;
  }
}

function windowOf(readings, at) {
  const from = readings[Math.max(0, at - WINDOW)];
  return new Window(from.series, readings[at].series, readings[at].time - from.time);
}

class Tile {
  constructor(figure) {
    this.figure = figure;
    this.number = make("b", {}, "–");
    this.note = make("p", { class: "note" });
    this.course = draw("svg", {
      class: "course",
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": "",
    });
    this.parts = make("div", { class: "parts" });
    this.root = make(
      "section",
      { class: "tile", "data-figure": figure.name },
      make("h2", {}, figure.name),
      make("p", { class: "value" }, this.number, ` ${figure.unit}`),
      this.course,
      this.parts,
      this.note,
    );
  }

  show(windows, of) {
    const { figure } = this;
    const values = windows.map((w) => figure.value(w, of));
    const now = windows.at(-1);
    this.number.textContent = shown(values.at(-1));
    this.note.textContent = figure.note(now, of);
    this.root.classList.toggle("empty", values.at(-1) === null);
    drawCourse(this.course, values, `${figure.name} ${figure.unit}`);
    if (figure.parts) this.#divide(figure.parts(now, of));
  }

  #divide(parts) {
    const all = sizeOf(parts);
    const entries = Object.entries(parts)
      .filter(([, value]) => value)
      .sort(([a], [b]) => (a === "free") - (b === "free") || (a < b ? -1 : 1));
    if (!all) return this.parts.replaceChildren();
    const picture = bar(entries.map(([name, size], at) => ({ name, size, colour: colour(name, at) })));
    const keys = entries.map(([name, value], at) =>
      make("span", { class: `key part-${colour(name, at)}` }, `${name} ${shown(value, 6)}`),
    );
    this.parts.replaceChildren(picture, make("p", {}, keys));
  }
}

function colour(name, at) {
  return name === "free" ? "free" : at % COLOURS;
}

/** A line through the values, the newest on the right; it is broken where there is none. */
function drawCourse(picture, values, name) {
  const known = values.filter((value) => value !== null);
  picture.setAttribute("aria-label", known.length
    ? `${name}: from ${shown(Math.min(...known))} to ${shown(Math.max(...known))}`
    : `${name}: no values`);
  const top = Math.max(...known, 0) || 1;
  const width = Math.max(values.length, LEAST);
  let path = "";
  let drawing = false;
  values.forEach((value, at) => {
    if (value !== null) {
      const x = width - values.length + at;
      const y = HEIGHT - 2 - ((HEIGHT - 4) * Math.max(value, 0)) / top;
      path += `${drawing ? "L" : "M"}${x} ${y.toFixed(2)}`;
    }
    drawing = value !== null;
  });
  picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  picture.replaceChildren(draw("path", { d: path }));
}
