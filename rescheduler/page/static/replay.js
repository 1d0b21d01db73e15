// A log, or two beside each other, at a time that is chosen.

import { Panel } from "./panel.js";
import { element, say, status } from "./elements.js";
import { ask } from "./server.js";
import { seconds } from "./words.js";

const SPEEDS = [0.5, 1, 2, 5, 10, 50];
const PAST = 24; // snapshots before the chosen one that are read for the load's past

export async function replay(token, place, logs) {
  const scale = new Map();
  const shown = logs.map((log, i) => new Shown(log, i, token, scale));
  place.replaceChildren(...shown.map((one) => one.panel.section));
  const player = new Player(Math.max(...logs.map((log) => log.times.at(-1))), (time) =>
    Promise.all(shown.map((one) => one.show(time))),
  );
  document.title = `${logs.map((log) => log.about.title).join(" and ")} · Headway`;
  await player.start();
}

class Shown {
  #log;
  #at = -1;
  #i;
  #token;

  constructor(log, i, token, scale) {
    this.#log = log;
    this.#i = i;
    this.#token = token;
    this.panel = new Panel(log.about, { name: log.name, scale });
  }

  async show(time) {
    const at = before(this.#log.times, time);
    if (at === this.#at) return;
    const follows = at > this.#at && at - this.#at <= PAST;
    const from = follows ? this.#at + 1 : Math.max(0, at - PAST);
    if (!follows) this.panel.forget();
    this.#at = at;
    const read = [];
    for (let k = from; k <= at; k++) read.push(this.#read(k));
    for (const snapshot of await Promise.all(read)) this.panel.update(snapshot);
  }

  async #read(k) {
    return (await ask(`/admin/snapshots/${this.#i}/${k}`, this.#token)).json();
  }
}

class Player {
  #slider = element("input", { type: "range", min: 0, step: "any", "aria-label": "Time" });
  #play = element("button", { type: "button" });
  #speed = element("select", { "aria-label": "Speed" });
  #time = element("output");
  #length;
  #show;
  #playing = false;

  constructor(length, show) {
    this.#length = length;
    this.#show = show;
    this.#slider.max = length;
    this.#slider.value = 0;
    this.#speed.append(
      ...SPEEDS.map((s) => element("option", { value: s, selected: s === 1 }, `${s} ×`)),
    );
    this.#play.addEventListener("click", () => this.#toggle(!this.#playing));
    this.#slider.addEventListener("input", () => this.#toggle(false));
    const place = document.getElementById("player");
    place.replaceChildren(this.#play, this.#slider, this.#speed, this.#time);
    place.hidden = false;
    document.body.onkeydown = (event) => {
      if (event.key === " " && event.target === document.body) {
        event.preventDefault();
        this.#toggle(!this.#playing);
      }
    };
    this.#toggle(false);
  }

  // Shows whatever time is chosen, one after the other, so that none overtakes another.
  async start() {
    let shown = -1, last = performance.now();
    for (;;) {
      const now = await new Promise((resolve) => setTimeout(() => resolve(performance.now()), 60));
      let time = Number(this.#slider.value);
      if (this.#playing) {
        time = Math.min(this.#length, time + ((now - last) / 1000) * Number(this.#speed.value));
        this.#slider.value = time;
        if (time >= this.#length) this.#toggle(false);
      }
      last = now;
      if (time === shown) continue;
      const text = `${seconds(time)} of ${seconds(this.#length)}`;
      say(this.#time, text);
      this.#slider.setAttribute("aria-valuetext", text);
      await this.#show(time);
      await new Promise(requestAnimationFrame); // in which it is drawn
      this.#time.dataset.time = time;
      shown = time;
    }
  }

  #toggle(playing) {
    if (playing && Number(this.#slider.value) >= this.#length) this.#slider.value = 0;
    this.#playing = playing;
    say(this.#play, playing ? "❚❚ Pause" : "▶ Play");
    status(playing ? "live" : "paused", playing ? "replaying a log" : "replay paused");
  }
}

// Index of the last time that is not after the given one; the times ascend from 0.
function before(times, time) {
  let low = 0, high = times.length - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (times[middle] <= time + 1e-9) low = middle;
    else high = middle - 1;
  }
  return low;
}
