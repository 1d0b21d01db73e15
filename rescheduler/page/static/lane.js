// One instance: its heading, its picture, and its requests as a table.

import { TOP, draw, pictureHeight, rowHeight } from "./lane_picture.js";
import { element, say } from "./elements.js";
import { Rows } from "./requests.js";
import { percent, plural, seconds, short, whole } from "./words.js";

const PHASES = ["waiting", "in prefill", "placed", "generating", "moving"];

export class Lane {
  #name = element("h3");
  #state = element("span", { class: "badge" });
  #figures = element("p", { class: "lane-figures" });
  #risk = element("p", { class: "risk", hidden: true });
  #drain = element("button", { type: "button", class: "quiet" });
  #canvas = element("canvas", { role: "img" });
  #list = element("details", { class: "requests" });
  #body = element("tbody");
  #rows = new Rows();
  #picture = null;
  #draining = false;

  constructor(instance, id, onDrain) {
    this.#name.id = id;
    say(this.#name, instance.name);
    this.#drain.hidden = !onDrain;
    this.#drain.addEventListener("click", () => onDrain(instance.name, this.#draining));
    const head = ["Request", "State", "Prompt", "Generated", "Expected yet", "80% interval"];
    this.#list.append(
      element("summary", {}, "Requests"),
      element(
        "div",
        { class: "table", tabIndex: 0, role: "group", "aria-label": `Requests on ${instance.name}` },
        element(
          "table",
          {},
          element("thead", {}, element("tr", {}, ...head.map((h) => element("th", { scope: "col" }, h)))),
          this.#body,
        ),
      ),
    );
    this.#list.addEventListener("toggle", () => this.#fillTable());
    const heading = element(
      "header",
      {},
      this.#name,
      this.#state,
      this.#figures,
      this.#risk,
      this.#drain,
    );
    this.section = element(
      "article",
      { class: "lane", "aria-labelledby": id },
      heading,
      this.#canvas,
      this.#list,
    );
    this.visible = false;
  }

  get canvas() {
    return this.#canvas;
  }

  get picture() {
    return this.#picture;
  }

  update(lane) {
    const { instance, requests, coming, points, stepSeconds } = lane;
    const rows = Math.max(3, this.#rows.place([...requests, ...coming]));
    this.#picture = { ...lane, rows, rowOf: (request) => this.#rows.of(request) };
    this.#draining = instance.draining;
    this.#say(instance, requests, points, stepSeconds);
    if (!this.visible) this.#canvas.style.height = `${pictureHeight(rows, lane.compact)}px`;
    if (this.#list.open) this.#fillTable();
  }

  draw(scale) {
    if (this.#picture) draw(this.#canvas, this.#picture, scale);
  }

  // The request under a point of the canvas.
  requestAt(y) {
    const { requests, rows, compact, rowOf } = this.#picture;
    const row = Math.floor((y - TOP) / rowHeight(rows, compact));
    return requests.find((one) => rowOf(one) === row);
  }

  #say(instance, requests, points, stepSeconds) {
    const state = !instance.in_service ? "out" : instance.draining ? "draining" : "up";
    const words = { out: "✕ out of service", draining: "◐ draining", up: "● in service" };
    this.#state.dataset.state = state;
    say(this.#state, words[state]);
    say(this.#drain, instance.draining ? "Undrain…" : "Drain…");
    this.#drain.setAttribute(
      "aria-label",
      `${instance.draining ? "Undrain" : "Drain"} ${instance.name}`,
    );
    const share = instance.kv_capacity > 0 ? instance.kv_tokens / instance.kv_capacity : null;
    const of = share === null ? "" : ` of ${short(instance.kv_capacity)} · ${percent(share)}`;
    const step = instance.step_seconds ? `step ${seconds(instance.step_seconds)}` : "";
    say(
      this.#figures,
      `${plural(requests.length, "request")} · ${short(instance.kv_tokens)}${of} tokens` +
        (step ? ` · ${step}` : "") +
        (instance.other_requests ? ` · ${whole(instance.other_requests)} of other clients` : "") +
        (instance.without?.length ? ` · no ${instance.without.join(", no ")}` : ""),
    );
    const risk = worst(instance, points, stepSeconds);
    this.#risk.hidden = !risk;
    say(this.#risk, risk);
    this.#canvas.setAttribute(
      "aria-label",
      `${instance.name}: ${plural(requests.length, "request")}, ${whole(instance.kv_tokens)}` +
        `${share === null ? "" : ` of ${whole(instance.kv_capacity)}`} tokens of KV cache` +
        `${step ? `, ${step}` : ""}` +
        `${risk ? `, ${risk}` : ""}. The table of requests below has the same numbers.`,
    );
  }

  #fillTable() {
    if (!this.#list.open || !this.#picture) return;
    const rows = this.#picture.requests.map((one) => {
      const forecast = one.high >= 0;
      const moving = one.target >= 0 ? ` to ${this.#picture.nameOf(one.target)}` : "";
      return element(
        "tr",
        {},
        element("th", { scope: "row" }, one.name),
        element("td", {}, PHASES[one.phase] + moving),
        element("td", {}, whole(one.prompt)),
        element("td", {}, whole(one.generated)),
        element("td", {}, forecast ? whole(one.median) : "–"),
        element("td", {}, forecast ? `${whole(one.low)} – ${whole(one.high)}` : "–"),
      );
    });
    this.#body.replaceChildren(...rows);
  }
}

function worst(instance, points, stepSeconds) {
  const most = Math.max(0, ...instance.overflow);
  if (most < 0.01) return "";
  const steps = points[instance.overflow.indexOf(most)];
  const when = stepSeconds ? ` (${seconds(steps * stepSeconds)})` : "";
  return `▲ overflow: ${percent(most)}${steps ? ` in ${whole(steps)} steps${when}` : " now"}`;
}
