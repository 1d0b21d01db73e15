// Numbers and states in words.

const WHOLE = new Intl.NumberFormat("en");
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const whole = (n) => WHOLE.format(Math.round(n));
export const short = (n) => SHORT.format(n);
export const plural = (n, what) => `${whole(n)} ${what}${n === 1 ? "" : "s"}`;

export function percent(share) {
  if (share > 0 && share < 0.01) return "<1%";
  if (share < 1 && share > 0.99) return ">99%";
  return `${Math.round(100 * share)}%`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${Math.round(1000 * s)} ms`;
  if (s < 120) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
}

export function energy(joules) {
  if (joules < 1000) return `${Math.round(joules)} J`;
  const [value, unit] = joules < 1e6 ? [joules / 1000, "kJ"] : [joules / 1e6, "MJ"];
  return `${value < 100 ? value.toFixed(1) : whole(value)} ${unit}`;
}

export function clock(snapshot, about) {
  if (about.source === "simulation") return `${snapshot.time.toFixed(1)} s`;
  return new Date(1000 * snapshot.time).toLocaleTimeString();
}

export const OUTCOMES = {
  moved: "moved",
  no_room: "stayed: no room there",
  unlike: "stayed: unlike engines",
  not_copied: "stayed: not copied",
  not_frozen: "stayed: not frozen",
  ended: "stayed: ended by itself",
  gone: "stayed: no longer possible",
  no_answer: "stayed: the source did not answer",
  rolled_back: "returned to its source",
  refused: "stayed: refused by its proxy",
};
