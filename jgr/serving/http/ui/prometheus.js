// SPDX-License-Identifier: Apache-2.0
// Reads the text of /metrics, and computes from two readings what Prometheus would: rates, shares, quantiles.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?$/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ESCAPED = { n: "\n" };
const VALUES = { "+Inf": Infinity, "-Inf": -Infinity, NaN };

/** The series by their names: Map of name to a list of {labels, value}. */
export function parse(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!found) continue;
    const [, name, inside = "", value] = found;
    const labels = {};
    for (const [, label, raw] of inside.matchAll(LABEL)) {
      labels[label] = raw.replace(/\\(.)/g, (_, char) => ESCAPED[char] ?? char);
    }
    if (!series.has(name)) series.set(name, []);
    series.get(name).push({ labels, value: VALUES[value] ?? Number(value) });
  }
  return series;
}

/** The series of one name whose labels fit. where: the value of each label, or a function of it. */
export function select(series, name, where = {}) {
  const tests = Object.entries(where);
  const fits = ({ labels }) =>
    tests.every(([label, want]) => (typeof want === "function" ? want(labels[label]) : labels[label] === want));
  return (series.get(name) ?? []).filter(fits);
}

/** The sum of these series; null where there are none. */
export function total(series, name, where) {
  const found = select(series, name, where);
  return found.length ? found.reduce((sum, { value }) => sum + value, 0) : null;
}

/** The sums of these series by the values of a label. */
export function grouped(series, name, label, where) {
  const sums = {};
  for (const { labels, value } of select(series, name, where)) {
    sums[labels[label]] = (sums[labels[label]] ?? 0) + value;
  }
  return sums;
}

/** What lies between two readings, which are so many seconds apart. Counters that fell began anew at 0. */
export class Window {
  constructor(before, now, seconds) {
    Object.assign(this, { before, now, seconds });
  }

  gauge(name, where) {
    return total(this.now, name, where);
  }

  /** How much counters grew; null where there are none. */
  increase(name, where) {
    const now = total(this.now, name, where);
    return now === null ? null : grown(total(this.before, name, where) ?? 0, now);
  }

  rate(name, where) {
    const increase = this.increase(name, where);
    return increase === null || !this.seconds ? null : increase / this.seconds;
  }

  /** One increase over another; null where the other is 0. */
  ratio([name, where], [ofName, ofWhere]) {
    const part = this.increase(name, where);
    const whole = this.increase(ofName, ofWhere);
    return part === null || !whole ? null : part / whole;
  }

  /** A quantile of what a histogram took in; null where that is nothing. */
  quantile(q, name, where) {
    const before = buckets(this.before, name, where);
    const now = buckets(this.now, name, where);
    return quantile(q, [...now].map(([bound, count]) => [bound, grown(before.get(bound) ?? 0, count)]));
  }
}

function grown(before, now) {
  return now < before ? now : now - before;
}

function buckets(series, name, where) {
  const sums = grouped(series, `${name}_bucket`, "le", where);
  const bounds = Object.entries(sums).map(([bound, count]) => [VALUES[bound] ?? Number(bound), count]);
  return new Map(bounds.sort(([a], [b]) => a - b));
}

/** Prometheus's histogram_quantile. counts: pairs of a bound and how many are at most that, ascending, to Infinity. */
export function quantile(q, counts) {
  const all = counts.at(-1)?.[1] ?? 0;
  if (!all) return null;
  const at = counts.findIndex(([, count]) => count >= q * all);
  const [bound, count] = counts[at];
  if (bound === Infinity) return counts.length > 1 ? counts.at(-2)[0] : null;
  if (at === 0 && bound <= 0) return bound;
  const [from, below] = at ? counts[at - 1] : [0, 0];
  return from + ((bound - from) * (q * all - below)) / (count - below || 1);
}
