// Who waits for whom: the way to the culprits, and the delay matrix.

import { byId, el, show, svg } from "./dom.js";
import { channels, colour, prepare } from "./states.js";

const MAX_MATRIX = 96, IN_COLUMN = 12, COLUMNS = 8;

/** The waits that lead to the culprits: each box waits for the one its arrow points to. */
export function showWay({ way, culprits }) {
  const columns = [culprits.slice(0, IN_COLUMN)];
  for (const [rank, , depth] of way) (columns[depth] ??= []).push(rank);
  const shown = columns.filter(Boolean).slice(0, COLUMNS);
  if (culprits.length === 0 || way.length === 0) {
    show(byId("way-says"), culprits.length ? "No transfer was seen in which another rank waits for a culprit." : "Nobody is blamed.");
    show(byId("way"));
    return;
  }
  const wide = 96, tall = 28, across = 44, between = 8, place = new Map();
  const lines = Math.max(...shown.map((column) => Math.min(column.length, IN_COLUMN)));
  shown.forEach((column, at) => column.slice(0, IN_COLUMN).forEach((rank, row) => {
    const middle = (lines - Math.min(column.length, IN_COLUMN)) / 2;
    place.set(rank, [4 + at * (wide + across), 4 + (row + middle) * (tall + between)]);
  }));
  const edges = way.filter(([rank, other]) => place.has(rank) && place.has(other)).map(([rank, other]) => {
    const [x1, y1] = place.get(rank), [x2, y2] = place.get(other), end = x2 + wide;
    const from = y1 + tall / 2, to = y2 + tall / 2;
    return [svg("path", { class: "edge", d: `M${x1} ${from}C${x1 - 24} ${from} ${end + 26} ${to} ${end + 7} ${to}` }),
      svg("path", { class: "tip", d: `M${end + 1} ${to}l8 -4v8z` })];
  });
  const boxes = [...place].map(([rank, [x, y]]) => svg("a", { href: "#rank-title", "data-rank": rank, "aria-label": `rank ${rank}` },
    svg("rect", { class: `box${culprits.includes(rank) ? " culprit-box" : ""}`, x, y, width: wide, height: tall, rx: 6 }),
    svg("text", { x: x + wide / 2, y: y + tall / 2 + 4.5, "text-anchor": "middle" }, `rank ${rank}`)));
  const width = 8 + shown.length * (wide + across) - across, height = 8 + lines * (tall + between);
  show(byId("way"), svg("svg", { viewBox: `0 0 ${width} ${height}`, width: `${width / 16}em`, height: `${height / 16}em` }, edges, boxes));
  const hidden = way.length + culprits.length - place.size;
  show(byId("way-says"), `Each waits for the one its arrow points to${hidden > 0 ? `; ${hidden} more ranks wait behind these` : ""}.`);
}

/** Rows wait for columns; the fuller the colour, the larger the share of samples. Of many ranks those that wait most. */
export function showMatrix(canvas, { pairs, samples, ranks, more }) {
  const weight = new Map();
  for (const [waiter, other, share] of pairs) {
    weight.set(waiter, (weight.get(waiter) ?? 0) + share);
    weight.set(other, (weight.get(other) ?? 0) + share);
  }
  const most = [...weight].sort((a, b) => b[1] - a[1]).slice(0, MAX_MATRIX).map(([rank]) => rank).sort((a, b) => a - b);
  const says = samples === 0 ? "No sample of ranks' own counters is kept of this job."
    : pairs.length === 0 ? "Nobody was seen to wait for another through a network proxy or shared memory."
      : `Rows wait for columns; share of ${samples} samples${most.length < ranks ? `; the ${most.length} ranks that wait most, of ${ranks}` : ""}${more ? `; ${more} pairs more` : ""}.`;
  show(byId("matrix-says"), says);
  canvas.parentElement.hidden = most.length === 0;
  if (most.length > 0) drawMatrix(canvas, pairs, most);
  show(byId("matrix-table"), el("table", {},
    el("thead", {}, el("tr", {}, ["waiting", "for", "share"].map((text, at) => el("th", { scope: "col", class: at === 2 && "n" }, text)))),
    el("tbody", {}, pairs.slice(0, 24).map(([waiter, other, share]) => el("tr", {}, el("td", {}, `rank ${waiter}`), el("td", {}, `rank ${other}`),
      el("td", { class: "n" }, `${Math.round(share * 100)}%`))))));
}

function drawMatrix(canvas, pairs, most) {
  const width = Math.max(canvas.parentElement.clientWidth, 40);
  const left = 44, size = Math.min((width - left - 2) / most.length, 30);
  const { draw } = prepare(canvas, left * 0.6 + size * most.length + 4);
  const top = left * 0.6, place = new Map(most.map((rank, at) => [rank, at]));
  draw.fillStyle = colour("sunk");
  draw.fillRect(left, top, size * most.length, size * most.length);
  const hot = channels(colour("heat")), cold = channels(colour("sunk"));
  for (const [waiter, other, share] of pairs) {
    if (!place.has(waiter) || !place.has(other)) continue;
    const strength = 0.2 + 0.8 * share;
    draw.fillStyle = `rgb(${hot.map((value, at) => Math.round(value * strength + cold[at] * (1 - strength))).join(",")})`;
    draw.fillRect(left + place.get(other) * size, top + place.get(waiter) * size, Math.max(size - (size > 5 ? 1 : 0), 1), Math.max(size - (size > 5 ? 1 : 0), 1));
  }
  const step = Math.max(1, Math.ceil(20 / size));
  draw.fillStyle = colour("dim");
  draw.font = '12px system-ui, "DejaVu Sans", sans-serif';
  draw.textBaseline = "middle";
  most.forEach((rank, at) => {
    if (at % step) return;
    draw.textAlign = "right";
    draw.fillText(String(rank), left - 6, top + (at + 0.5) * size);
    draw.textAlign = "center";
    if (size * step > 9 * String(rank).length) draw.fillText(String(rank), left + (at + 0.5) * size, top - 9);
  });
}
