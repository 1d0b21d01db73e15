// All instances at a glance, where there are too many lanes to see at once.

import { element, say } from "./elements.js";
import { percent, short } from "./words.js";

const FROM = 7;

export class Overview {
  #tiles = new Map();
  #id;

  constructor(id) {
    this.#id = id;
    this.list = element("ul", { class: "overview", "aria-label": "Instances", hidden: true });
  }

  update(instances) {
    this.list.hidden = instances.length < FROM;
    if (this.list.hidden) return;
    const highest = Math.max(1, ...instances.map((one) => one.kv_tokens));
    for (const [i, instance] of instances.entries()) {
      const tile = this.#tiles.get(instance.name) ?? this.#tile(instance.name, i);
      const limited = instance.kv_capacity > 0;
      const share = instance.kv_tokens / (limited ? instance.kv_capacity : highest);
      const risk = Math.max(0, ...instance.overflow);
      tile.fill.style.width = percent(Math.min(1, share)).replace("<", "").replace(">", "");
      const state = !instance.in_service ? "✕" : instance.draining ? "◐" : risk >= 0.01 ? "▲" : "";
      say(tile.state, state);
      say(tile.value, limited ? percent(share) : short(instance.kv_tokens));
      tile.link.dataset.state = state;
    }
    const names = new Set(instances.map((one) => one.name));
    for (const [name, tile] of this.#tiles) {
      if (names.has(name)) continue;
      tile.item.remove();
      this.#tiles.delete(name);
    }
  }

  #tile(name, i) {
    const fill = element("i", { class: "fill" });
    const state = element("b"), value = element("span", { class: "value" });
    const link = element("button", { type: "button" }, fill, element("span", {}, name), state, value);
    link.addEventListener("click", () => {
      document.getElementById(`${this.#id}-lane-${i}`)?.closest(".lane").scrollIntoView({ block: "start" });
    });
    const item = element("li", {}, link);
    const tile = { item, link, fill, state, value };
    this.#tiles.set(name, tile);
    this.list.append(item);
    return tile;
  }
}
