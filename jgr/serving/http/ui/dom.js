// SPDX-License-Identifier: Apache-2.0
// Makes elements. Whatever is no element becomes text, so nothing that a server says is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. attributes: functions are listeners, of true only the name is set, of false and null nothing. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for an element of an SVG picture. */
export function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A bar of parts side by side. Each has a name, and a size. colour: default its name. ends: a line stands behind it. */
export function bar(parts) {
  const all = parts.reduce((sum, part) => sum + part.size, 0) || 1;
  const picture = draw("svg", {
    class: "bar-picture",
    viewBox: "0 0 1000 16",
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  let x = 0;
  for (const { name, size, colour = name, title = name, ends } of parts) {
    const width = (1000 * size) / all;
    picture.append(draw("rect", { class: `part-${colour}`, x, y: 0, width, height: 16 }, draw("title", {}, title)));
    x += width;
    if (ends) picture.append(draw("line", { class: "gap", x1: x, x2: x, y1: 0, y2: 16 }));
  }
  return picture;
}

/** The options of a <select>. entries: pairs of a value and its text. The choice stays, where it is still there. */
export function setOptions(select, entries) {
  const chosen = select.value;
  select.replaceChildren(...entries.map(([value, text]) => make("option", { value }, text)));
  if (entries.some(([value]) => value === chosen)) select.value = chosen;
}

/** A number for people: at most `digits` significant digits, thousands apart. */
export function shown(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1);
  const whole = Math.abs(value) >= 10 ** digits;
  return value.toLocaleString("en", whole ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits });
}

/** A score for people: always of four significant digits, so that they stand below each other. */
export function score(value) {
  if (!Number.isFinite(value)) return "–";
  return (value + 0).toLocaleString("en", { minimumSignificantDigits: 4, maximumSignificantDigits: 4 }); // no -0
}

/** A count with its noun. */
export function counted(count, noun) {
  return `${shown(count, 9)} ${noun}${count === 1 ? "" : "s"}`;
}
