// Finds out what there is to show, and shows it.

import { say, status } from "./elements.js";
import { live } from "./live.js";
import { replay } from "./replay.js";
import { RefusedError, ask, keepToken, readToken } from "./server.js";

const panels = document.getElementById("panels");
const unlock = document.getElementById("unlock");

async function start() {
  const token = readToken();
  if (!token) return unlockWith("");
  unlock.hidden = true;
  for (;;) {
    try {
      const page = await (await ask("/admin/page", token)).json();
      if (page.shows === "replay") await replay(token, panels, page.logs);
      else await live(token, panels);
      return undefined;
    } catch (error) {
      if (error instanceof RefusedError) return unlockWith(error.message);
      status("lost", `no answer; trying again (${error.message})`);
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

function unlockWith(why) {
  status("locked", "locked");
  panels.replaceChildren();
  unlock.hidden = false;
  if (why) {
    const where = "there is a new one after each start, unless HEADWAY_ADMIN_TOKEN is set";
    say(document.getElementById("unlock-why"), `Not accepted: ${why} (${where}). Paste its token.`);
  }
  document.getElementById("token").focus();
}

unlock.addEventListener("submit", (event) => {
  event.preventDefault();
  const field = document.getElementById("token");
  const pasted = field.value.trim();
  field.value = "";
  keepToken(new URLSearchParams(pasted.split("#")[1] ?? "").get("token") ?? pasted);
  start();
});

addEventListener("hashchange", () => location.reload());

start();
