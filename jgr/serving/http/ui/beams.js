// SPDX-License-Identifier: Apache-2.0
// Draws the beams on their way down the tree of semantic ids, a level a line.
//
// Beams stand in the order of their parents, so no two lines cross. The brighter a beam, the likelier it is among those
// of its level; the way to the best item is drawn in the accent's colour. The arrow keys walk from beam to beam.

import { counted, draw, make, score, shown } from "./dom.js";

const WIDTH = 1000;
const MARGIN = 52; // on both sides, for the names of the levels and the symbols of the outermost beams
const STEP = 96; // between levels
const TOP = 26;
const BOTTOM = 32;
const DRAWN = 512; // beams of a level
const ROOM = 48; // between the symbols that are written below beams
const LEAST = 0.2; // opacity of the least likely
const LATER_S = 0.2; // how much later each level arrives

/** A picture of the levels that /v1/explain/recommend tells, with a line on the beam that is chosen. */
export function beamsView(levels) {
  const placed = place(levels.map((level) => level.beams));
  const all = placed.flat();
  const told = make("p", { class: "told", role: "status" }, "Choose a beam, or walk by the arrow keys.");
  const picture = draw("svg", {
    class: "beams-picture",
    viewBox: `${-MARGIN} 0 ${WIDTH + 2 * MARGIN} ${TOP + STEP * (placed.length - 1) + BOTTOM}`,
    tabindex: "0",
    role: "application",
    "aria-label": "The beams, level by level. The arrow keys walk from beam to beam.",
  });
  const walk = new Walk(placed, told);
  // The deepest first, so that what is written at a level stands above the lines that leave it.
  placed.forEach((beams, depth) => picture.prepend(drawLevel(beams, depth, walk)));
  picture.addEventListener("keydown", (event) => walk.press(event));
  return make(
    "section",
    { class: "card" },
    make("h2", {}, "Beams"),
    make("p", { class: "hint" }, `${counted(placed.length, "level")}, ${counted(all.length, "beam")} drawn. ` +
      "Those that went no further are hollow."),
    make("div", { class: "scroll" }, picture),
    told,
    levelTable(levels, placed),
  );
}

/** The beams of every level with their places, from left to right. A wide level keeps its best. */
export function place(levels) {
  const placed = [];
  for (const beams of levels) {
    const above = new Map((placed.at(-1) ?? []).map((beam, place) => [beam.index, { beam, place }]));
    const best = beams
      .map((beam, index) => ({ ...beam, index, score: beam.score ?? -Infinity, onBest: false }))
      .sort(byScore)
      .slice(0, DRAWN);
    const top = best[0]?.score ?? 0;
    for (const beam of best) {
      const found = beam.parent === null ? undefined : above.get(beam.parent);
      beam.above = found?.beam;
      beam.place = found?.place ?? placed.length * DRAWN;
      beam.share = Number.isFinite(beam.score) ? Math.exp(beam.score - top) : 0;
    }
    best.sort((a, b) => a.place - b.place || byScore(a, b));
    best.forEach((beam, at) => (beam.x = (WIDTH * (at + 0.5)) / best.length));
    placed.push(best);
  }
  let beam = bestOf(placed.at(-1) ?? []);
  for (; beam; beam = beam.above) beam.onBest = true;
  return placed;
}

function byScore(a, b) {
  return b.score - a.score || a.index - b.index;
}

function bestOf(beams) {
  return beams.reduce((best, beam) => (best && byScore(best, beam) <= 0 ? best : beam), undefined);
}

function drawLevel(beams, depth, walk) {
  const y = TOP + STEP * depth;
  const radius = Math.min(7, Math.max(1.2, (0.42 * WIDTH) / beams.length));
  const group = draw("g", { class: "level", "data-level": depth });
  group.style.animationDelay = `${depth * LATER_S}s`;
  for (const beam of beams) {
    beam.y = y;
    beam.radius = beam.onBest ? Math.max(radius, 4) : radius;
    if (beam.above) group.append(edge(beam));
  }
  group.append(draw("text", { class: "depth", x: 4 - MARGIN, y: y - 12 }, `level ${depth + 1}`));
  const named = withRoom(beams);
  for (const beam of beams) {
    const classes = ["beam", beam.kept === false && "dropped", beam.onBest && "best"].filter(Boolean).join(" ");
    beam.dot = draw(
      "circle",
      {
        class: classes,
        cx: beam.x,
        cy: y,
        r: beam.radius,
        opacity: opacity(beam),
        click: () => walk.choose(depth, beam),
      },
      draw("title", {}, words(beam)),
    );
    group.append(beam.dot);
    if (named.has(beam)) group.append(label(beam, y + radius + 13));
  }
  return group;
}

/** The beams whose symbols are written: the best way's and the best ones, as far as there is room. */
function withRoom(beams) {
  const named = new Set();
  for (const beam of [...beams].sort((a, b) => b.onBest - a.onBest || byScore(a, b))) {
    if ([...named].every((other) => Math.abs(other.x - beam.x) >= ROOM)) named.add(beam);
  }
  return named;
}

/** From the rim of a dot to that of another: a pale dot would show a line that goes on inside. */
function edge(beam) {
  const { x, above } = beam;
  const [from, to] = [above.y + above.radius, beam.y - beam.radius];
  const middle = (from + to) / 2;
  return draw("path", {
    class: beam.onBest ? "edge best" : "edge",
    d: `M${above.x} ${from} C${above.x} ${middle} ${x} ${middle} ${x} ${to}`,
    opacity: opacity(beam),
  });
}

function label(beam, y) {
  return draw("text", { class: beam.onBest ? "symbol best" : "symbol", x: beam.x, y }, symbol(beam));
}

function opacity(beam) {
  return beam.onBest ? 1 : (LEAST + (1 - LEAST) * Math.sqrt(beam.share)).toFixed(3);
}

/** What a beam added to its id: the token's name where the server tells it, else its number. */
function symbol(beam) {
  return String(beam.token ?? beam.prefix.at(-1) ?? "");
}

function path(beam) {
  const steps = [];
  for (let at = beam; at; at = at.above) steps.unshift(symbol(at));
  return (steps.length === beam.prefix.length ? steps : beam.prefix).join(" › ");
}

function words(beam) {
  const fate = beam.kept === false ? ", went no further" : "";
  const answered = beam.item_ids?.length ? `: ${beam.item_ids.join(", ")}` : "";
  return `${path(beam)}: score ${score(beam.score)}, ${counted(beam.items, "item")} below${fate}${answered}`;
}

/** The beam that is chosen: told in words, and marked. */
class Walk {
  constructor(placed, told) {
    this.placed = placed;
    this.told = told;
    this.depth = -1;
    this.beam = undefined;
  }

  choose(depth, beam) {
    if (!beam) return;
    this.beam?.dot.classList.remove("chosen");
    this.beam = beam;
    this.depth = depth;
    beam.dot.classList.add("chosen");
    this.told.textContent = `Level ${depth + 1}: ${words(beam)}`;
  }

  press(event) {
    const { depth, beam, placed } = this;
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    if (!beam) return this.choose(0, bestOf(placed[0] ?? []));
    if (event.key === "ArrowUp") return this.choose(depth - 1, beam.above);
    if (event.key === "ArrowDown") {
      return this.choose(depth + 1, bestOf((placed[depth + 1] ?? []).filter((below) => below.above === beam)));
    }
    const level = placed[depth];
    this.choose(depth, level[level.indexOf(beam) + (event.key === "ArrowRight" ? 1 : -1)]);
  }
}

function levelTable(levels, placed) {
  const heads = ["Level", "Beams", "Went on", "Items below", "Best", "Score"];
  const rows = levels.map(({ beams }, depth) => {
    const best = bestOf(placed[depth]);
    const kept = beams.filter((beam) => beam.kept !== false);
    const below = kept.reduce((sum, beam) => sum + beam.items, 0);
    const cells = [
      depth + 1, beams.length, kept.length, shown(below, 9), best ? path(best) : "–", score(best?.score),
    ];
    return make("tr", {}, cells.map((text, at) => make("td", { class: heads[at] === "Best" ? "" : "number" }, String(text))));
  });
  return make(
    "div",
    { class: "scroll" },
    make(
      "table",
      { class: "levels" },
      make("thead", {}, make("tr", {}, heads.map((text) => make("th", { scope: "col" }, text)))),
      make("tbody", {}, rows),
    ),
  );
}
