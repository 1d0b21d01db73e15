// What is known of the request under the pointer.

import { element } from "./elements.js";
import { whole } from "./words.js";

const tip = document.getElementById("tip");

export function showTip(request, event, nameOf) {
  const lines = [`${whole(request.prompt)} of the prompt, ${whole(request.generated)} generated`];
  if (request.high >= 0) {
    lines.push(`${whole(request.median)} more expected, ${whole(request.low)} – ${whole(request.high)} with 80%`);
  }
  if (request.target >= 0) lines.push(`moving to ${nameOf(request.target)}`);
  tip.replaceChildren(
    element("strong", {}, request.name),
    ...lines.map((line) => element("span", {}, line)),
  );
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  const x = Math.min(event.clientX + 14, innerWidth - width - 8);
  const y = event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18;
  tip.style.transform = `translate(${Math.max(4, x)}px, ${Math.max(4, y)}px)`;
}

export function hideTip() {
  tip.hidden = true;
}

addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
addEventListener("scroll", hideTip, { passive: true });
