// SPDX-License-Identifier: Apache-2.0
// Shows an answer: its items, what it cost, and what of its prompt came from the cache.

import { bar, counted, make, score, shown } from "./dom.js";
import { describe } from "./items.js";

const LISTED_SPANS = 60;
const STAGES = ["prepare", "queue", "device"];
const KINDS = {
  user: "User",
  item: "Candidate",
  probe: "Probe",
  instruction: "Instruction",
  preamble: "Preamble",
  context: "Context",
  structure: "Structure",
  review: "Text",
};

/** The items of an answer, best first. beside(item): what stands at the end of an item's line. */
export function itemTable(items, beside = () => null) {
  if (!items.length) return make("p", { class: "hint" }, "The answer has no items.");
  const tasks = Object.keys(items[0].scores ?? {});
  const heads = ["#", "Item", "Score", ...tasks, ""].map((text) => make("th", { scope: "col" }, text));
  const rows = items.map((item) =>
    make(
      "tr",
      { "data-item": item.item_id },
      make("td", { class: "place" }, String(item.rank)),
      make("td", {}, describe(item.item_id, item.metadata)),
      make("td", { class: "number" }, score(item.score)),
      tasks.map((task) => make("td", { class: "number" }, score(item.scores[task]))),
      make("td", {}, beside(item)),
    ),
  );
  return make(
    "div",
    { class: "scroll" },
    make("table", { class: "items" }, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, rows)),
  );
}

/** Which model and catalog answered, and what it took. */
export function costs(answer) {
  const { usage, timing_ms: timing } = answer;
  const facts = [
    `${counted(answer.items.length, "item")}`,
    usage.beam_width && `${counted(usage.beam_width, "beam")}`,
    usage.dead_beams && `${counted(usage.dead_beams, "beam")} found nothing`,
    usage.candidates && `${counted(usage.candidates, "candidate")} scored`,
    usage.parts > 1 && `in ${usage.parts} parts`,
    `${counted(usage.prompt_tokens, "token")}`,
    `layout ${usage.layout}`,
    usage.unknown_items && `${counted(usage.unknown_items, "item")} of the history not in the catalog`,
    usage.unknown_filter_items && `${counted(usage.unknown_filter_items, "item")} of the filters not in it`,
    usage.feature_missing && `${counted(usage.feature_missing, "candidate")} without features`,
  ].filter(Boolean);
  return make(
    "div",
    { class: "costs" },
    make("p", {}, make("strong", {}, answer.model), make("code", {}, `catalog ${answer.catalog_version}`)),
    make("p", {}, facts.join(" · ")),
    timeBar(timing),
  );
}

function timeBar(timing) {
  const rest = Math.max(0, timing.total - STAGES.reduce((sum, stage) => sum + timing[stage], 0));
  const parts = [...STAGES.map((stage) => [stage, timing[stage]]), ["other", rest]];
  return make(
    "div",
    { class: "times" },
    bar(parts.map(([name, ms]) => ({ name, size: ms, title: `${name} ${shown(ms)} ms` }))),
    make("p", {}, make("b", {}, `${shown(timing.total)} ms`), parts.map(([name, ms]) => key(name, `${shown(ms)} ms`))),
  );
}

/** Sources with a colour of their own beside the device's cache. */
const PLACES = ["host", "library"];

/** Where the tokens of the prompt came from. spans: as /v1/explain tells them, or those of `reused`. */
export function reuseView(usage, spans) {
  const { cached_tokens: cached, prompt_tokens: all } = usage;
  const whole = [
    { name: "cached", size: cached },
    { name: "computed", size: Math.max(0, all - cached) },
  ];
  const parts = spans.flatMap((span) => {
    const title = `${called(span)}: ${span.cached_tokens} of ${counted(span.tokens, "token")} from the cache`;
    return [
      { name: PLACES.includes(span.source) ? span.source : "cached", size: span.cached_tokens, title },
      { name: "computed", size: span.tokens - span.cached_tokens, title, ends: true },
    ];
  });
  const seen = PLACES.filter((place) => parts.some(({ name, size }) => name === place && size > 0));
  const names = ["cached", ...seen, "computed"];
  const text = `${shown(cached, 6)} of ${counted(all, "token")} came from the cache, ` +
    `${shown(usage.computed_tokens, 6)} ${usage.computed_tokens === 1 ? "was" : "were"} computed. ${fidelity(usage)}`;
  return make(
    "section",
    { class: "card" },
    make("h2", {}, "Cache"),
    bar(parts.length ? parts : whole),
    make("p", {}, text, names.map((name) => key(name, ""))),
    spans.length ? spanTable(spans) : null,
  );
}

/** What of the prompt is not what the whole one would give, on servers that approximate. */
function fidelity(usage) {
  if (usage.full_recompute) return "All was computed whole, since answers drifted too far. ";
  if (usage.approximate_tokens === undefined) return "";
  return `Approximate: ${shown(usage.approximate_tokens, 6)}, computed in their place: ` +
    `${shown(usage.repaired_tokens, 6)}, exact: ${shown(usage.exact_tokens, 6)}. `;
}

/** The spans that a plain answer tells of (its field `explain`). */
export function reused(answer) {
  return (answer.explain ?? []).map((part) => ({
    kind: part.segment,
    name: part.item_id ?? "history",
    tokens: part.tokens,
    cached_tokens: part.cached_tokens,
    source: source(part),
  }));
}

function source(part) {
  const where = part.cached_tokens === 0 ? "computed" : part.cached_tokens < part.tokens ? "extended" : "cache";
  const repaired = part.repaired_tokens ? `, ${part.repaired_tokens} repaired` : "";
  return where + repaired + (part.kept ? ", kept" : "");
}

function called(span) {
  return `${KINDS[span.kind] ?? span.kind} ${span.name}`;
}

function spanTable(spans) {
  const heads = ["Part", "Name", "Tokens", "From the cache", "Source"];
  const rows = spans.slice(0, LISTED_SPANS).map((span) =>
    make(
      "tr",
      {},
      make("td", {}, KINDS[span.kind] ?? String(span.kind)),
      make("td", {}, String(span.name)),
      make("td", { class: "number" }, String(span.tokens)),
      make("td", { class: "number" }, String(span.cached_tokens)),
      make("td", {}, String(span.source)),
    ),
  );
  const more = spans.length - rows.length;
  return make(
    "details",
    { open: spans.length <= 12 },
    make("summary", {}, counted(spans.length, "part")),
    make(
      "div",
      { class: "scroll" },
      make(
        "table",
        { class: "spans" },
        make("thead", {}, make("tr", {}, heads.map((text) => make("th", { scope: "col" }, text)))),
        make("tbody", {}, rows),
      ),
    ),
    more > 0 ? make("p", { class: "hint" }, `and ${shown(more)} more`) : null,
  );
}

function key(name, text) {
  return make("span", { class: `key part-${name}` }, `${name} ${text}`.trim());
}
