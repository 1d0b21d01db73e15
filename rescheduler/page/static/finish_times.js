// How forecasts and promises of when requests finish came out; nothing where none are made.

import { bar, fill } from "./accuracy.js";
import { element, say } from "./elements.js";
import { plural, whole } from "./words.js";

const LEVEL = 80;

export class FinishTimes {
  #count = element("p", { class: "count" });
  #bars = element("ul", { class: "intervals", "aria-label": "Share of the finishes inside the interval" }, bar(LEVEL));
  #promises = element("p");

  constructor(id) {
    const title = `${id}-finish-times`;
    this.section = element(
      "section",
      { class: "accuracy", "aria-labelledby": title, hidden: true },
      element("div", {}, element("h3", { id: title }, "Finish times"), this.#count),
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
    if (forecasts) fill(this.#bars.firstChild, LEVEL, held);
    const asked = kept + broken + refused;
    const came = `${whole(kept)} kept, ${whole(broken)} broken, ${whole(refused)} refused`;
    say(this.#promises, asked ? `Promises since the start: ${came}` : "No promise was asked for or has come due");
  }
}
