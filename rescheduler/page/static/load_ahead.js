// The load that was expected, and the one that came; nothing where nobody forecasts it.

import { element, region, say } from "./elements.js";
import { plural, seconds, short, whole } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300, HEIGHT = 48;
const PAST_SECONDS = 300;

export class LoadAhead {
  #expected = element("p", { class: "count" });
  #came = element("p");
  #wanted = element("p", { class: "verdict" });
  #picture = document.createElementNS(SVG, "svg");
  #band = path("band");
  #median = path("foretold");
  #now = path("now");
  #past = [];

  constructor(id) {
    for (const [name, value] of Object.entries({
      class: "spark", role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none",
    })) this.#picture.setAttribute(name, value);
    this.#picture.append(this.#band, this.#median, this.#now);
    this.section = region(
      `${id}-load-ahead`,
      "Load ahead",
      [this.#expected],
      this.#picture,
      element("div", { class: "words" }, this.#came, this.#wanted),
    );
  }

  // What came before is no longer the past of what comes next.
  forget() {
    this.#past.length = 0;
  }

  update({ outlook, time, instances }) {
    this.section.hidden = !outlook;
    if (!outlook) return;
    const decodes = instances.filter((one) => one.role === "decode");
    const tokens = decodes.reduce((sum, one) => sum + one.kv_tokens, 0);
    this.#keep({ time, tokens, foretold: outlook.foretold ?? [] });
    const [low, median, high] = outlook.tokens;
    say(
      this.#expected,
      `${short(median)} tokens in ${seconds(outlook.seconds)} (80%: ${short(low)} – ${short(high)})`,
    );
    const came = this.#sayCame(tokens, outlook);
    this.#sayWanted(outlook.wanted, decodes.filter((one) => one.in_service && !one.draining).length);
    this.#picture.setAttribute("aria-label", `Context tokens of the past minutes. ${came}`);
    this.#draw();
  }

  #keep(point) {
    const past = this.#past;
    if (past.length && point.time < past.at(-1).time) past.length = 0;
    past.push(point);
    while (past[0].time < point.time - PAST_SECONDS) past.shift();
  }

  #sayCame(tokens, { foretold = [], seconds: before }) {
    const [low, , high] = foretold;
    const expected = foretold.length
      ? `${short(low)} – ${short(high)} were expected ${seconds(before)} ago`
      : `what was expected of now shows after ${seconds(before)}`;
    const text = `Now ${short(tokens)} tokens; ${expected}`;
    say(this.#came, text);
    return text;
  }

  #sayWanted(wanted, serving) {
    this.#wanted.hidden = !Number.isFinite(wanted);
    if (this.#wanted.hidden) return;
    const few = wanted > serving;
    this.#wanted.dataset.state = few ? "wrong" : "fine";
    say(this.#wanted, `${few ? "▲" : "✓"} ${plural(wanted, "instance")} wanted, ${whole(serving)} in service`);
  }

  #draw() {
    const past = this.#past, foretold = past.filter((one) => one.foretold.length);
    const most = Math.max(1, ...past.map((one) => one.tokens), ...foretold.map((one) => one.foretold[2]));
    const first = past[0].time, span = Math.max(1, past.at(-1).time - first);
    const at = (time, tokens) =>
      `${((WIDTH * (time - first)) / span).toFixed(1)} ${(HEIGHT - 2 - ((HEIGHT - 4) * tokens) / most).toFixed(1)}`;
    const line = (points) => (points.length ? `M${points.join("L")}` : "");
    const quantile = (q) => foretold.map((one) => at(one.time, one.foretold[q]));
    const band = [...quantile(0), ...quantile(2).reverse()];
    this.#band.setAttribute("d", band.length ? `${line(band)}Z` : "");
    this.#median.setAttribute("d", line(quantile(1)));
    this.#now.setAttribute("d", line(past.map((one) => at(one.time, one.tokens))));
  }
}

function path(name) {
  const made = document.createElementNS(SVG, "path");
  made.setAttribute("class", name);
  return made;
}
