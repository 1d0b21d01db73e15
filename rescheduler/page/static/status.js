// Whether what is shown is what is.

import { say } from "./elements.js";

const place = document.getElementById("status");

export function status(state, text) {
  place.dataset.state = state;
  say(place, text);
}
