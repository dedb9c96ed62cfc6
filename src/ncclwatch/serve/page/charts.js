// Drawings over time: the timeline, and how long iterations took.

import { clock, count, duration, seconds } from "./dom.js";
import { colour, prepare, stateColour } from "./states.js";

/** Bars so much longer than usual are drawn as slow. */
const SLOW_FROM = 1.25;
const CLASSES = { running: "state-r", idle: "state-i", unknown: "state-w", "": "state-unseen" };

/** The colour of a class of verdicts. */
export function classColour(name) {
  return colour(CLASSES[name] ?? (name.startsWith("slow-") ? "state-s" : "state-X"));
}

/** Trouble over time: above how many ranks are in which state, below which verdict stood. `trouble` are the letters of the counts. */
export function drawTimeline(canvas, points, trouble, place) {
  const { draw, width, height, em } = prepare(canvas);
  const band = Math.round(em * 1.1), floor = height - band - Math.round(em * 1.3) - 3;
  draw.fillStyle = colour("sunk");
  draw.fillRect(0, 0, width, floor);
  if (points.length === 0) return;
  const begin = points[0][0], span = Math.max(points.at(-1)[0] - begin, 1e-3);
  // Each moment lasts until the next.
  const x = (at) => (at >= points.length ? width : ((points[at][0] - begin) / span) * width * (points.length / (points.length + 1)));
  points.forEach(([, name, , counts, total], at) => {
    const from = x(at), wide = Math.max(x(at + 1) - from + 0.3, 0.6);
    draw.fillStyle = classColour(name);
    draw.fillRect(from, floor + 2, wide, band);
    let up = floor;
    counts.forEach((number, which) => {
      if (number === 0) return;
      // One rank of thousands is to be seen, too.
      const tall = Math.max((number / Math.max(total, 1)) * floor, 2.5);
      draw.fillStyle = stateColour(trouble[which]);
      draw.fillRect(from, up - tall, wide, tall);
      up -= tall;
    });
  });
  const here = (x(place) + x(place + 1)) / 2;
  draw.fillStyle = colour("ink");
  draw.fillRect(here - 1.25, 0, 2.5, floor + band + 3);
  draw.fillStyle = colour("dim");
  draw.textBaseline = "bottom";
  draw.textAlign = "left";
  draw.fillText(clock(begin), 0, height);
  draw.textAlign = "right";
  draw.fillText(`${clock(points.at(-1)[0])}  (${duration(span)})`, width, height);
}

/** Which moment lies under a place of the drawing. */
export function timelineAt(points, share) {
  if (points.length === 0) return 0;
  const begin = points[0][0], span = Math.max(points.at(-1)[0] - begin, 1e-3), wanted = begin + (share * span * (points.length + 1)) / points.length;
  let at = points.length - 1;
  while (at > 0 && points[at][0] > wanted) at -= 1;
  return at;
}

/** A bar an iteration, against what is usual. Returns what it shows in words. */
export function drawIterations(canvas, { times, usual }) {
  canvas.parentElement.hidden = times.length === 0;
  if (times.length === 0) return "No iterations are known: the calls plane does not see this job, or nothing comes back in its calls.";
  const { draw, width, height, em } = prepare(canvas);
  const left = Math.round(em * 4.6), foot = Math.round(em * 1.6), floor = height - foot;
  const shown = times.slice(-Math.max(Math.floor((width - left) / 3), 10));
  const top = Math.max(...shown.map(([, took]) => took), usual ?? 0) * 1.08;
  const wide = Math.min((width - left) / shown.length, 26);
  shown.forEach(([, took], at) => {
    draw.fillStyle = usual !== null && took > usual * SLOW_FROM ? stateColour("s") : colour("accent");
    const tall = Math.max((took / top) * floor, 1);
    draw.fillRect(left + at * wide, floor - tall, Math.max(wide - 1, 1), tall);
  });
  draw.fillStyle = colour("dim");
  draw.textBaseline = "middle";
  draw.textAlign = "right";
  draw.fillText(seconds(top / 1.08), left - 6, floor - floor / 1.08);
  if (usual !== null) {
    const y = floor - (usual / top) * floor;
    if (y > em * 2.2) draw.fillText(seconds(usual), left - 6, y);
    draw.strokeStyle = colour("ink");
    draw.setLineDash([5, 4]);
    draw.beginPath();
    draw.moveTo(left, y);
    draw.lineTo(width, y);
    draw.stroke();
    draw.setLineDash([]);
  }
  draw.textBaseline = "bottom";
  draw.textAlign = "left";
  draw.fillText(clock(shown[0][0]), left, height);
  if (wide * shown.length > em * 12) {
    draw.textAlign = "right";
    draw.fillText(clock(shown.at(-1)[0]), left + wide * shown.length, height);
  }
  const last = shown.slice(-8).map(([, took]) => took), now = last.reduce((sum, took) => sum + took, 0) / last.length;
  const change = usual ? now / usual - 1 : 0;
  const compared = usual === null ? "" : `, usually ${seconds(usual)}${Math.abs(change) > 0.05 ? ` (${change > 0 ? "+" : "−"}${Math.round(Math.abs(change) * 100)}%)` : ""}`;
  return `Lately ${seconds(now)}${compared}; ${count(shown.length, "iteration")} shown, by the host call times of one rank.`;
}
