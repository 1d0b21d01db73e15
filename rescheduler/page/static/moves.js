// Moves: those that are in sight, and the latest.

import { element, say } from "./elements.js";
import { OUTCOMES, clock, seconds, whole } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const SHOWN_SECONDS = 4, SHOWN_GONE = 6, LISTED = 14;

// Arrows between lanes that are in sight: of requests on their way, and of those just arrived.
export class MoveArcs {
  #picture = document.createElementNS(SVG, "svg");
  #paths = new Map();
  #moves = [];
  #laneOf = () => null;
  #lanes;

  constructor(lanes) {
    this.#lanes = lanes;
    this.#picture.setAttribute("class", "arcs");
    this.#picture.setAttribute("aria-hidden", "true");
    lanes.append(this.#picture);
  }

  update(snapshot, requests, laneOf) {
    const name = (i) => snapshot.instances[i].name;
    const going = requests.coming.flatMap((many) =>
      many.map((one) => ({ key: `going-${one.number}`, from: name(one.instance), to: name(one.target), going: true })),
    );
    const gone = snapshot.moves
      .filter((one) => one.outcome === "moved" && Math.abs(snapshot.time - one.time) < SHOWN_SECONDS)
      .slice(-SHOWN_GONE)
      .map((one) => ({ key: `gone-${one.name}-${one.time}`, from: one.source, to: one.target, going: false }));
    this.#moves = [...going, ...gone];
    this.#laneOf = laneOf;
  }

  draw() {
    const keys = new Set(this.#moves.map((one) => one.key));
    for (const [key, path] of this.#paths) {
      if (keys.has(key)) continue;
      path.remove();
      this.#paths.delete(key);
    }
    const box = this.#lanes.getBoundingClientRect();
    this.#moves.forEach((move, i) => {
      const from = this.#laneOf(move.from), to = this.#laneOf(move.to);
      let path = this.#paths.get(move.key);
      if (!from || !to) {
        path?.remove();
        this.#paths.delete(move.key);
        return;
      }
      if (!path) {
        path = document.createElementNS(SVG, "path");
        path.setAttribute("class", move.going ? "going" : "gone");
        this.#paths.set(move.key, path);
        this.#picture.append(path);
      }
      path.setAttribute("d", arc(from.getBoundingClientRect(), to.getBoundingClientRect(), box, i));
    });
  }
}

function arc(from, to, box, i) {
  const down = to.top > from.top, spread = 6 * (i % 5);
  const y1 = (down ? from.bottom - 14 : from.top + 18) - box.top;
  const y2 = (down ? to.top + 18 : to.bottom - 14) - box.top;
  const x1 = from.left - box.left + 2, x2 = to.left - box.left + 2;
  const bulge = Math.min(x1, x2) - 16 - spread;
  const head = `M${x2 - 7} ${y2 - 5}L${x2 + 1} ${y2}L${x2 - 7} ${y2 + 5}`;
  return `M${x1} ${y1}C${bulge} ${y1} ${bulge} ${y2} ${x2} ${y2}${head}`;
}

// The latest moves, newest first.
export class MoveList {
  #list = element("ol", { tabIndex: 0, "aria-label": "Latest moves" });
  #title = element("h3", {}, "Moves");
  #shown = "";

  constructor() {
    this.section = element("section", { class: "moves" }, this.#title, this.#list);
  }

  update(snapshot, about) {
    const moves = snapshot.moves.slice(-LISTED).reverse();
    const shown = JSON.stringify(moves);
    if (shown === this.#shown && this.#list.children.length) return;
    this.#shown = shown;
    if (!moves.length) {
      this.#list.replaceChildren(element("li", { class: "none" }, "none so far"));
      return;
    }
    this.#list.replaceChildren(...moves.map((move) => this.#item(move, about)));
  }

  #item(move, about) {
    const moved = move.outcome === "moved";
    const outcome = OUTCOMES[move.outcome] ?? move.outcome;
    const pause = move.pause === null ? "" : `, paused ${seconds(move.pause)}`;
    return element(
      "li",
      { class: moved ? "moved" : "stayed" },
      element(
        "p",
        {},
        element("b", {}, `${moved ? "✓" : "✕"} ${move.name}`),
        element("time", {}, clock(move, about)),
      ),
      element("p", {}, `${move.source} → ${move.target} after ${whole(move.tokens)} tokens`),
      element("p", { class: "why" }, `${outcome}${pause} · ${move.reason}`),
    );
  }
}
