// The proxy as it is now, for as long as the page is looked at; again after it was lost.

import { askFirst, status } from "./elements.js";
import { Panel } from "./panel.js";
import { RefusedError, ask, events } from "./server.js";

const FIRST_DELAY = 500, LONGEST_DELAY = 5000, SILENCE = 10000;

export async function live(token, place) {
  const shown = new Shown(token, place);
  let delay = FIRST_DELAY;
  for (;;) {
    await untilVisible();
    const ending = new AbortController();
    const hide = () => document.hidden && ending.abort();
    document.addEventListener("visibilitychange", hide);
    let silence = setTimeout(() => ending.abort(), SILENCE);
    try {
      for await (const { kind, data } of events("/admin/snapshots", token, ending.signal)) {
        clearTimeout(silence);
        silence = setTimeout(() => ending.abort(), SILENCE);
        delay = FIRST_DELAY;
        if (kind === "about") shown.begin(data);
        else shown.update(data);
      }
    } catch (error) {
      if (error instanceof RefusedError) throw error;
    } finally {
      clearTimeout(silence);
      document.removeEventListener("visibilitychange", hide);
    }
    if (document.hidden) continue;
    status("lost", "no connection; trying again");
    await new Promise((resolve) => setTimeout(resolve, delay));
    delay = Math.min(2 * delay, LONGEST_DELAY);
  }
}

// The panel stays when the connection is lost, unless something else is served afterwards.
class Shown {
  #about = "";
  #panel = null;
  #token;
  #place;

  constructor(token, place) {
    this.#token = token;
    this.#place = place;
  }

  begin(about) {
    if (this.#about === JSON.stringify(about)) return;
    this.#about = JSON.stringify(about);
    const onDrain = (name, draining) => drain(name, draining, this.#token);
    this.#panel = new Panel(about, { onDrain });
    document.title = `${about.title} · Headway`;
    this.#place.replaceChildren(this.#panel.section);
  }

  // A failure to draw is no lost connection.
  update(snapshot) {
    try {
      this.#panel.update(snapshot);
      status("live", "live");
    } catch (error) {
      console.error(error);
      status("lost", "the page failed; reload it");
    }
  }
}

async function drain(name, draining, token) {
  const question = draining
    ? { title: `Undrain ${name}?`, text: "It receives new requests again.", yes: "Undrain" }
    : {
        title: `Drain ${name}?`,
        text:
          "It receives no new requests, and its running ones move to other instances. Those that " +
          "cannot move finish where they are.",
        yes: "Drain",
      };
  if (!(await askFirst(question))) return;
  const verb = draining ? "undrain" : "drain";
  try {
    await ask(`/admin/${verb}/${encodeURIComponent(name)}`, token, { method: "POST" });
  } catch (error) {
    status("lost", `${name} was not ${verb}ed: ${error.message}`);
  }
}

function untilVisible() {
  if (!document.hidden) return Promise.resolve();
  status("paused", "paused while hidden");
  return new Promise((resolve) => {
    document.addEventListener("visibilitychange", function look() {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    });
  });
}
