// Elements are made here, and text only ever becomes text: names come from clients.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name in made && !name.startsWith("aria")) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// A titled part of a panel, hidden until there is something to say.
export function region(id, title, below, ...children) {
  const heading = element("div", {}, element("h3", { id }, title), ...below);
  return element("section", { class: "accuracy", "aria-labelledby": id, hidden: true }, heading, ...children);
}

export function say(where, text) {
  if (where.textContent !== text) where.textContent = text;
}

// Whether what is shown is what is.
export function status(state, text) {
  const place = document.getElementById("status");
  place.dataset.state = state;
  say(place, text);
}

// A question that has to be answered before anything happens.
export function askFirst({ title, text, yes }) {
  const dialog = document.getElementById("ask");
  say(document.getElementById("ask-title"), title);
  say(document.getElementById("ask-text"), text);
  say(document.getElementById("ask-yes"), yes);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
