// A cluster: its figures, its instances as lanes, the moves between them, and who waits.

import { Accuracy, FinishTimes, LengthErrors } from "./accuracy.js";
import { onPaletteChange } from "./colours.js";
import { element, say } from "./elements.js";
import { Lane } from "./lane.js";
import { scales } from "./lane_picture.js";
import { LoadAhead } from "./load_ahead.js";
import { MoveArcs, MoveList } from "./moves.js";
import { Overview } from "./overview.js";
import { byInstance } from "./requests.js";
import { showTip, hideTip } from "./tip.js";
import { energy, percent, plural, seconds, short, whole } from "./words.js";

const COMPACT_FROM = 5;
const HISTORY_SECONDS = 300;
const LANDED_SECONDS = 4;
const SHOWN_WAITING = 12;
let panels = 0;

export class Panel {
  #id = `panel-${panels++}`;
  #title = element("h2");
  #figures = element("dl", { class: "figures" });
  #accuracy = new Accuracy(this.#id);
  #finishTimes = new FinishTimes(this.#id);
  #lengthErrors = new LengthErrors(this.#id);
  #loadAhead = new LoadAhead(this.#id);
  #overview = new Overview(this.#id);
  #prefills = element("ul", { class: "prefills", "aria-label": "Prefill instances" });
  #lanes = element("div", { class: "lanes" });
  #arcs = new MoveArcs(this.#lanes);
  #moves = new MoveList();
  #waiting = element("ul", { class: "waiting" });
  #waitingTitle = element("h3");
  #byName = new Map();
  #histories = new Map();
  #snapshot = null;
  #frame = 0;
  #onDrain;
  #about;
  #longest = 64;
  #scale;
  #seen = new IntersectionObserver((entries) => this.#sawLanes(entries), { rootMargin: "200px" });

  // Panels that are compared share a scale: a map from each to what it needs room for.
  constructor(about, { onDrain = null, name = "", scale = new Map() } = {}) {
    this.#about = about;
    this.#onDrain = onDrain;
    this.#scale = scale;
    const label = [about.title, name].filter(Boolean).join(", ");
    const policy = [name, about.routing, about.migration].filter(Boolean).join(" · ");
    this.#title.append(element("span", {}, about.title), element("small", {}, policy));
    this.section = element(
      "section",
      { class: "panel", "aria-label": label },
      element("header", {}, this.#title, this.#figures),
      this.#accuracy.section,
      this.#finishTimes.section,
      this.#lengthErrors.section,
      this.#loadAhead.section,
      this.#overview.list,
      element(
        "div",
        { class: "columns" },
        element("div", { class: "main" }, this.#prefills, this.#lanes),
        element(
          "aside",
          { "aria-label": `Moves and waiting requests of ${label}` },
          this.#moves.section,
          element("section", {}, this.#waitingTitle, this.#waiting),
        ),
      ),
    );
    new ResizeObserver(() => this.#schedule()).observe(this.#lanes);
    onPaletteChange(() => this.#schedule());
  }

  get snapshot() {
    return this.#snapshot;
  }

  // What came before is no longer the past of what comes next.
  forget() {
    this.#histories.clear();
    this.#loadAhead.forget();
  }

  update(snapshot) {
    this.#snapshot = snapshot;
    const requests = byInstance(snapshot);
    const decodes = snapshot.instances.flatMap((one, i) => (one.role === "decode" ? [i] : []));
    const compact = decodes.length >= COMPACT_FROM;
    this.#lanes.classList.toggle("many", compact);
    this.#keepLanes(decodes.map((i) => snapshot.instances[i]));
    const landed = new Set(
      snapshot.moves
        .filter((one) => one.outcome === "moved" && Math.abs(snapshot.time - one.time) < LANDED_SECONDS)
        .map((one) => one.number),
    );
    let longest = 64;
    for (const i of decodes) {
      const instance = snapshot.instances[i];
      for (const one of requests.here[i]) longest = Math.max(longest, one.context);
      this.#byName.get(instance.name).update({
        instance,
        compact,
        landed,
        requests: requests.here[i],
        coming: requests.coming[i],
        points: snapshot.points,
        stepSeconds: instance.step_seconds ?? snapshot.step_seconds,
        history: this.#history(instance, snapshot.time),
        nameOf: (target) => snapshot.instances[target]?.name ?? "?",
      });
    }
    // Shrinks slowly, so that the picture does not jump when the longest request ends.
    this.#longest = Math.max(longest, this.#longest * 0.98);
    this.#scale.set(this, { longest: this.#longest, horizon: snapshot.points.at(-1) ?? 0 });
    this.#accuracy.update(snapshot.accuracy);
    this.#finishTimes.update(snapshot.finishes);
    this.#lengthErrors.update(snapshot.length_errors);
    this.#loadAhead.update(snapshot);
    this.#overview.update(decodes.map((i) => snapshot.instances[i]));
    this.#sayFigures(snapshot, requests, decodes);
    this.#sayPrefills(snapshot, requests);
    this.#sayWaiting(snapshot, requests.waiting);
    this.#moves.update(snapshot, this.#about);
    this.#arcs.update(snapshot, requests, (name) => {
      const lane = this.#byName.get(name);
      return lane?.visible ? lane.section : null;
    });
    for (const panel of this.#scale.keys()) panel.#schedule();
  }

  #keepLanes(instances) {
    const names = new Set(instances.map((one) => one.name));
    for (const [name, lane] of this.#byName) {
      if (names.has(name)) continue;
      this.#seen.unobserve(lane.section);
      lane.section.remove();
      this.#byName.delete(name);
    }
    for (const [i, instance] of instances.entries()) {
      if (this.#byName.has(instance.name)) continue;
      const lane = new Lane(instance, `${this.#id}-lane-${i}`, this.#onDrain);
      this.#byName.set(instance.name, lane);
      this.#lanes.append(lane.section);
      this.#seen.observe(lane.section);
      lane.canvas.addEventListener("pointermove", (event) => this.#point(lane, event));
      lane.canvas.addEventListener("pointerleave", hideTip);
    }
  }

  #history(instance, time) {
    const history = this.#histories.get(instance.name) ?? [];
    if (history.length && time < history[history.length - 1].time) history.length = 0;
    history.push({ time, tokens: instance.kv_tokens });
    while (history[0].time < time - HISTORY_SECONDS) history.shift();
    this.#histories.set(instance.name, history);
    return history;
  }

  #sayFigures(snapshot, requests, decodes) {
    const on = decodes.reduce((sum, i) => sum + requests.here[i].length, 0);
    const tokens = decodes.reduce((sum, i) => sum + snapshot.instances[i].kv_tokens, 0);
    const limits = decodes.map((i) => snapshot.instances[i].kv_capacity);
    const room = limits.every((k) => k > 0) ? limits.reduce((a, b) => a + b, 0) : 0;
    const figures = [
      ["running", whole(on)],
      ["waiting", whole(requests.waiting.length + snapshot.further_waiting)],
      ["KV cache", room ? percent(tokens / room) : `${short(tokens)} tokens`],
      ["decode step", seconds(snapshot.step_seconds)],
    ];
    if (Number.isFinite(snapshot.joules)) figures.push(["energy", energy(snapshot.joules)]);
    if (this.#figures.children.length !== figures.length) {
      this.#figures.replaceChildren(
        ...figures.map(([name]) => element("div", {}, element("dt", {}, name), element("dd"))),
      );
    }
    figures.forEach(([, value], i) => say(this.#figures.children[i].lastChild, value));
  }

  #sayPrefills(snapshot, requests) {
    const lines = snapshot.instances.flatMap((one, i) => {
      if (one.role !== "prefill") return [];
      const state = one.in_service ? (one.draining ? " · draining" : "") : " · out of service";
      const prompts = plural(requests.here[i].length, "prompt");
      return [`${one.name}: ${prompts}, ${short(one.kv_tokens)} tokens${state}`];
    });
    this.#prefills.hidden = !lines.length;
    setLines(this.#prefills, lines);
  }

  #sayWaiting(snapshot, waiting) {
    const all = waiting.length + snapshot.further_waiting;
    say(this.#waitingTitle, all ? `Waiting: ${whole(all)}` : "Waiting");
    const lines = waiting.slice(0, SHOWN_WAITING).map((one) => {
      const yet = one.high >= 0 ? `, expected ${short(one.low)} – ${short(one.high)}` : "";
      return `${one.name}: ${short(one.context)} tokens${yet}; no instance chosen yet`;
    });
    const further = all - Math.min(waiting.length, SHOWN_WAITING);
    const stage = waiting.length > SHOWN_WAITING ? "" : this.#about.source === "proxy" ? " for prefill" : "";
    if (further) lines.push(`${lines.length ? "and " : ""}${whole(further)}${lines.length ? " more" : ""}${stage}`);
    setLines(this.#waiting, lines.length ? lines : ["nothing waits"]);
  }

  #point(lane, event) {
    const request = lane.picture && lane.requestAt(event.offsetY);
    if (request) showTip(request, event, lane.picture.nameOf);
    else hideTip();
  }

  #sawLanes(entries) {
    const lanes = new Map([...this.#byName.values()].map((lane) => [lane.section, lane]));
    for (const { target, isIntersecting } of entries) {
      const lane = lanes.get(target);
      if (lane) lane.visible = isIntersecting;
    }
    this.#schedule();
  }

  #schedule() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw();
    });
  }

  // Only what is in sight: of thousands of requests that is what takes time.
  #draw() {
    if (!this.#snapshot) return;
    const longest = Math.max(...[...this.#scale.values()].map((one) => one.longest));
    const horizon = Math.max(...[...this.#scale.values()].map((one) => one.horizon));
    for (const lane of this.#byName.values()) {
      const width = lane.visible ? lane.canvas.clientWidth : 0;
      if (width) lane.draw(scales(width, longest, horizon));
    }
    this.#arcs.draw();
  }
}

function setLines(list, lines) {
  while (list.children.length > lines.length) list.lastChild.remove();
  while (list.children.length < lines.length) list.append(element("li"));
  lines.forEach((line, i) => say(list.children[i], line));
}
