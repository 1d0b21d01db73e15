// How good forecasts were; nothing where nobody knows.

import { element, region, say } from "./elements.js";
import { percent, plural, whole } from "./words.js";

const INTERVALS = [50, 80, 90], FINISHES = 80;

export class Accuracy {
  #count = element("p", { class: "count" });
  #bars = element("ul", { class: "intervals", "aria-label": "Share of the ends inside each interval" });
  #median = element("p", { class: "median-error" });
  #alarm = element("p", { class: "verdict" });
  #drift = element("p", { class: "verdict" });

  constructor(id) {
    this.#bars.append(...INTERVALS.map(bar));
    this.section = region(
      `${id}-accuracy`,
      "Forecasts, last hour",
      [this.#count],
      this.#bars,
      element("div", { class: "words" }, this.#median, this.#alarm, this.#drift),
    );
  }

  update(accuracy) {
    this.section.hidden = !accuracy;
    if (!accuracy) return;
    say(this.#count, `${plural(accuracy.requests, "request")} scored`);
    accuracy.coverage.forEach((share, i) => fill(this.#bars.children[i], INTERVALS[i], share));
    say(this.#median, median(accuracy));
    verdict(this.#alarm, accuracy.alarm, "calibrated", "too few requests to judge the intervals");
    verdict(this.#drift, accuracy.drift, "no drift", "too early to see drift");
  }
}

// How forecasts and promises of when requests finish came out; nothing where none are made.
export class FinishTimes {
  #count = element("p", { class: "count" });
  #bars = element("ul", { class: "intervals", "aria-label": "Share of the finishes inside the interval" }, bar(FINISHES));
  #promises = element("p");

  constructor(id) {
    this.section = region(
      `${id}-finish-times`,
      "Finish times",
      [this.#count],
      this.#bars,
      element("div", { class: "words" }, this.#promises),
    );
  }

  update(finishes) {
    this.section.hidden = !finishes;
    if (!finishes) return;
    const { forecasts, held, kept, broken, refused } = finishes;
    say(this.#count, forecasts ? `latest ${plural(forecasts, "forecast")}` : "no forecast has come out yet");
    this.#bars.hidden = !forecasts;
    if (forecasts) fill(this.#bars.firstChild, FINISHES, held);
    const asked = kept + broken + refused;
    const came = `${whole(kept)} kept, ${whole(broken)} broken, ${whole(refused)} refused`;
    say(this.#promises, asked ? `Promises since the start: ${came}` : "No promise was asked for or has come due");
  }
}

// How good forecasts of lengths were that were made as requests arrived; nothing before any has come out.
export class LengthErrors {
  #list = element("ul");

  constructor(id) {
    const words = element("div", { class: "words" }, this.#list);
    this.section = region(`${id}-length-errors`, "Lengths on arrival", [], words);
  }

  update(errors = []) {
    this.section.hidden = !errors.length;
    while (this.#list.children.length > errors.length) this.#list.lastChild.remove();
    while (this.#list.children.length < errors.length) this.#list.append(element("li"));
    errors.forEach((one, i) => say(this.#list.children[i], lengthError(one)));
  }
}

const SOURCES = { prompt: "By the prompt", past: "By the past", both: "By both" };

function lengthError({ source, answers, factor }) {
  return `${SOURCES[source] ?? source}: half within a factor of ${factor.toFixed(1)}, latest ${plural(answers, "answer")}`;
}

// A row whose tick is what the interval promises, and whose bar is what it held.
function bar(level) {
  const tick = element("i", { class: "nominal" });
  tick.style.left = `${level}%`;
  const track = element("span", { class: "track", "aria-hidden": "true" }, element("i", { class: "held" }), tick);
  return element("li", {}, element("span"), track);
}

function fill(row, level, share) {
  const [text, track] = row.children;
  say(text, `${level}% held ${percent(share)}`);
  track.firstChild.style.width = `${100 * share}%`;
}

function median({ error, bias, late }) {
  const tokens = Math.round(Math.abs(bias));
  const way = bias > 0 ? "long" : "short";
  const biased = tokens ? `${whole(tokens)} too ${way} on average` : "neither too long nor too short";
  const after = `${percent(late)} of the ends came after it (calibrated: 50%)`;
  return `Median off by ${plural(Math.round(error), "token")}, ${biased}; ${after}`;
}

// What is wrong is said in words, empty when nothing is, and null while nobody can tell.
function verdict(where, wrong, fine, unknown) {
  const known = wrong !== null && wrong !== undefined;
  where.dataset.state = wrong ? "wrong" : known ? "fine" : "unknown";
  say(where, wrong ? `▲ ${wrong}` : known ? `✓ ${fine}` : `○ ${unknown}`);
}
