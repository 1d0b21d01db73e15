// The colours of the style sheet, for canvases; they change with the system's light or dark mode.

const NAMES = [
  "text", "faint", "line", "grid", "context", "context-text", "forecast", "median", "moving",
  "load", "capacity", "overflow", "surface",
];

let colours = null;

export function palette() {
  if (!colours) {
    const style = getComputedStyle(document.documentElement);
    colours = Object.fromEntries(NAMES.map((n) => [n, style.getPropertyValue(`--${n}`).trim()]));
  }
  return colours;
}

export function onPaletteChange(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colours = null;
    redraw();
  });
}
