// The picture of one instance, on a canvas. Left of the line "now": what is. Right of it: what is
// expected. Every request is a bar, and below them is the KV load, past and ahead.

import { palette } from "./colours.js";
import { MOVING, PLACED } from "./requests.js";
import { short } from "./words.js";

const EDGE = 10;
export const TOP = 16;
const AXIS = 17;
const GAP = 10;
const NORMAL_80 = 1.2816; // a normal variable is within so many deviations with probability 0.8

export function rowHeight(rows, compact) {
  if (rows <= 12) return compact ? 8 : 16;
  if (rows <= 24) return compact ? 5 : 13;
  if (rows <= 40) return compact ? 4 : 7;
  return compact ? 3 : 5;
}

export function pictureHeight(rows, compact) {
  return TOP + rows * rowHeight(rows, compact) + GAP + loadHeight(compact) + AXIS;
}

const loadHeight = (compact) => (compact ? 40 : 66);

// Where things are: the same for all instances, so that they can be compared.
export function scales(width, longest, horizon) {
  const now = Math.round(width * (horizon ? 0.44 : 0.97));
  const left = (now - EDGE) / Math.max(1, longest);
  const right = (width - EDGE - now) / Math.max(1, horizon);
  return { width, now, longest, horizon, left, right };
}

export function draw(canvas, lane, scale) {
  const ratio = devicePixelRatio || 1;
  const { width } = scale, height = pictureHeight(lane.rows, lane.compact);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const colours = palette();
  const bottom = height - AXIS, top = bottom - loadHeight(lane.compact);
  drawGrid(pen, colours, scale, bottom);
  drawRequests(pen, colours, scale, lane);
  drawLoad(pen, colours, scale, lane, top, bottom);
  drawNow(pen, colours, scale, bottom);
  if (!lane.compact) drawCaptions(pen, colours, scale);
}

function drawCaptions(pen, colours, scale) {
  pen.font = "10.5px system-ui, sans-serif";
  pen.textBaseline = "top";
  pen.fillStyle = colours.faint;
  pen.textAlign = "right";
  pen.fillText("tokens in the KV cache", scale.now - 8, 0);
  pen.textAlign = "left";
  if (scale.horizon) pen.fillText("tokens to come, one a decode step", scale.now + 8, 0);
}

function drawGrid(pen, colours, scale, bottom) {
  pen.font = "10.5px system-ui, sans-serif";
  pen.textBaseline = "top";
  pen.textAlign = "center";
  pen.strokeStyle = colours.grid;
  pen.fillStyle = colours.faint;
  pen.lineWidth = 1;
  const mark = (x, text) => {
    pen.beginPath();
    pen.moveTo(Math.round(x) + 0.5, TOP);
    pen.lineTo(Math.round(x) + 0.5, bottom);
    pen.stroke();
    pen.fillText(text, x, bottom + 4);
  };
  const before = step(scale.longest, (scale.now - EDGE) / 70);
  for (let t = before; t <= scale.longest; t += before) {
    const x = scale.now - t * scale.left;
    if (x > EDGE + 8) mark(x, short(t));
  }
  if (!scale.horizon) return;
  const after = step(scale.horizon, (scale.width - scale.now) / 70);
  for (let h = after; h < scale.horizon; h += after) {
    const x = scale.now + h * scale.right;
    if (x < scale.width - 22) mark(x, `+${short(h)}`);
  }
}

function drawNow(pen, colours, scale, bottom) {
  pen.strokeStyle = colours.text;
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(scale.now + 0.5, TOP - 14);
  pen.lineTo(scale.now + 0.5, bottom + 3);
  pen.stroke();
  pen.fillStyle = colours.text;
  pen.font = "600 10.5px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.fillText("now", scale.now, bottom + 4);
}

function drawRequests(pen, colours, scale, lane) {
  const height = rowHeight(lane.rows, lane.compact);
  const thick = height > 4 ? height - 2 : height - 1;
  for (const request of lane.requests) {
    const y = TOP + lane.rowOf(request) * height;
    drawPast(pen, colours, scale, request, y, thick, lane);
    drawAhead(pen, colours, scale, request, y, thick);
    if (lane.landed.has(request.number)) outline(pen, colours.moving, scale, request, y, thick, []);
  }
  for (const request of lane.coming) {
    const y = TOP + lane.rowOf(request) * height;
    outline(pen, colours.moving, scale, request, y, thick, [3, 2]);
  }
}

function drawPast(pen, colours, scale, request, y, thick, lane) {
  const tokens = Math.min(request.context, scale.longest);
  const x = scale.now - tokens * scale.left;
  pen.fillStyle = request.phase === MOVING ? colours.moving : colours.context;
  if (request.phase === PLACED) {
    pen.globalAlpha = 0.28;
    pen.fillRect(x, y, scale.now - x, thick);
    pen.globalAlpha = 1;
    pen.strokeStyle = colours.context;
    pen.lineWidth = 1;
    pen.strokeRect(x + 0.5, y + 0.5, scale.now - x - 1, thick - 1);
  } else {
    pen.fillRect(x, y, scale.now - x, thick);
  }
  if (thick < 11) return;
  let text = request.name;
  if (request.phase === MOVING) text += ` → ${lane.nameOf(request.target)}`;
  pen.font = `${thick < 13 ? 10 : 11}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  const fits = pen.measureText(text).width < scale.now - x - 10;
  pen.textAlign = "right";
  const outside = request.phase === PLACED ? colours.text : colours["context-text"];
  pen.fillStyle = fits ? outside : colours.text;
  pen.fillText(text, fits ? scale.now - 5 : x - 5, y + thick / 2 + 0.5);
  pen.textBaseline = "top";
}

// Sure to the lower end of the interval, and fading to its upper end.
function drawAhead(pen, colours, scale, request, y, thick) {
  if (request.high < 0 || !scale.horizon) return;
  const end = scale.now + scale.horizon * scale.right;
  const at = (h) => Math.min(end, scale.now + 1 + h * scale.right);
  const low = Math.round(at(request.low)), high = Math.max(at(request.high), low + 1);
  const median = at(request.median);
  pen.fillStyle = colours.forecast;
  pen.globalAlpha = 0.85;
  pen.fillRect(scale.now + 1, y, low - scale.now - 1, thick);
  const fade = pen.createLinearGradient(low, 0, high, 0);
  fade.addColorStop(0, colours.forecast);
  fade.addColorStop(1, `color-mix(in srgb, ${colours.forecast} 8%, transparent)`);
  pen.fillStyle = fade;
  pen.fillRect(low, y, high - low, thick);
  pen.globalAlpha = 1;
  if (thick >= 3 && median < end) {
    pen.fillStyle = colours.median;
    pen.fillRect(median - 1, y, 2, thick);
  }
}

function outline(pen, colour, scale, request, y, thick, dash) {
  const x = scale.now - Math.min(request.context, scale.longest) * scale.left;
  pen.strokeStyle = colour;
  pen.lineWidth = thick > 4 ? 2 : 1;
  pen.setLineDash(dash);
  pen.strokeRect(x, y, scale.now - x, thick);
  pen.setLineDash([]);
}

function drawLoad(pen, colours, scale, lane, top, bottom) {
  const { instance, history, points } = lane;
  const band = instance.deviation.map((d) => NORMAL_80 * d);
  const upper = instance.ahead.map((m, p) => m + band[p]);
  const reached = Math.max(instance.kv_tokens, ...history.map((h) => h.tokens), ...upper, 1);
  const capacity = instance.kv_capacity;
  const inSight = capacity > 0 && capacity < 6 * reached;
  const most = (inSight ? Math.max(reached, capacity) : reached) * 1.12;
  const y = (tokens) => bottom - (tokens / most) * (bottom - top);
  pen.fillStyle = colours.load;
  drawHistory(pen, scale, history, y, bottom, colours);
  if (points.length && scale.horizon) drawExpected(pen, scale, lane, y, bottom, colours, upper, band);
  pen.font = "10.5px system-ui, sans-serif";
  pen.textAlign = "left";
  if (inSight) {
    pen.strokeStyle = colours.capacity;
    pen.lineWidth = 1.5;
    pen.setLineDash([6, 3]);
    pen.beginPath();
    pen.moveTo(EDGE, y(capacity));
    pen.lineTo(scale.width - EDGE, y(capacity));
    pen.stroke();
    pen.setLineDash([]);
    label(pen, colours, `capacity ${short(capacity)}`, EDGE + 2, y(capacity) + 3);
  } else if (capacity > 0) {
    label(pen, colours, `capacity ${short(capacity)}, far above`, EDGE + 2, top + 2);
  }
}

function label(pen, colours, text, x, y) {
  const { width } = pen.measureText(text);
  pen.globalAlpha = 0.8;
  pen.fillStyle = colours.surface;
  pen.fillRect(x - 2, y - 1, width + 4, 13);
  pen.globalAlpha = 1;
  pen.fillStyle = colours.text;
  pen.fillText(text, x, y);
}

function drawHistory(pen, scale, history, y, bottom, colours) {
  if (history.length < 2) return;
  const last = history[history.length - 1].time;
  const span = Math.max(60, last - history[0].time);
  const x = (time) => scale.now - ((last - time) / span) * (scale.now - EDGE);
  pen.beginPath();
  pen.moveTo(x(history[0].time), bottom);
  for (const { time, tokens } of history) pen.lineTo(x(time), y(tokens));
  pen.lineTo(scale.now, bottom);
  pen.globalAlpha = 0.35;
  pen.fill();
  pen.globalAlpha = 1;
  pen.strokeStyle = colours.load;
  pen.lineWidth = 1.5;
  pen.beginPath();
  history.forEach(({ time, tokens }, i) => pen[i ? "lineTo" : "moveTo"](x(time), y(tokens)));
  pen.stroke();
}

function drawExpected(pen, scale, lane, y, bottom, colours, upper, band) {
  const { instance, points } = lane;
  const x = (p) => scale.now + points[p] * scale.right;
  const path = (values) =>
    values.forEach((value, p) => pen[p ? "lineTo" : "moveTo"](x(p), y(Math.max(0, value))));
  pen.beginPath();
  path(upper);
  for (let p = points.length - 1; p >= 0; p--) {
    pen.lineTo(x(p), y(Math.max(0, instance.ahead[p] - band[p])));
  }
  pen.globalAlpha = 0.22;
  pen.fillStyle = colours.load;
  pen.fill();
  pen.globalAlpha = 1;
  pen.strokeStyle = colours.load;
  pen.lineWidth = 1.5;
  pen.beginPath();
  path(instance.ahead);
  pen.stroke();
  drawOverflow(pen, scale, instance, points, y, colours);
}

// Above the capacity, the darker the likelier; striped, so that it does not need its colour.
function drawOverflow(pen, scale, instance, points, y, colours) {
  const top = y(instance.kv_capacity);
  instance.overflow.forEach((probability, p) => {
    if (probability < 0.01 || p + 1 >= points.length) return;
    const from = scale.now + points[p] * scale.right;
    const to = scale.now + points[p + 1] * scale.right;
    pen.fillStyle = colours.overflow;
    pen.globalAlpha = 0.2 + 0.8 * probability;
    for (let x = Math.ceil(from / 3) * 3; x < to; x += 3) pen.fillRect(x, top - 9, 1.6, 8);
    pen.globalAlpha = 1;
  });
}

// A round number, so that there are about so many of them up to a length.
function step(length, count) {
  const rough = length / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  return Math.max(1, [1, 2, 5, 10].find((f) => f * power >= rough) * power);
}
