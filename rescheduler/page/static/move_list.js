// The latest moves, newest first.

import { element, say } from "./elements.js";
import { OUTCOMES, clock, seconds, whole } from "./words.js";

const SHOWN = 14;

export class MoveList {
  #list = element("ol", { tabIndex: 0, "aria-label": "Latest moves" });
  #title = element("h3", {}, "Moves");
  #shown = "";

  constructor() {
    this.section = element("section", { class: "moves" }, this.#title, this.#list);
  }

  update(snapshot, about) {
    const moves = snapshot.moves.slice(-SHOWN).reverse();
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
