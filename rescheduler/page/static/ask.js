// A question that has to be answered before anything happens.

import { say } from "./elements.js";

const dialog = document.getElementById("ask");

export function askFirst({ title, text, yes }) {
  say(document.getElementById("ask-title"), title);
  say(document.getElementById("ask-text"), text);
  say(document.getElementById("ask-yes"), yes);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
