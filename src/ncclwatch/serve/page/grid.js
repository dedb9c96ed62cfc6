// All ranks on a canvas, from one to a hundred thousand: a cell a rank while there is room, else a cell for several, the worst shown.

import { count } from "./dom.js";
import { rankOf } from "./moments.js";
import { STRONG, URGENCY, WORDS, channels, colour, prepare, stateColour } from "./states.js";

const LARGEST_EM = 3.25, SMALLEST = 3, LETTER = 15, NUMBER = 30, GAP = 7;
const MANY_CULPRITS = 300;

export class Grid {
  /** `says` is told what the cursor is on, `open` the rank that is opened. */
  constructor(canvas, says, open) {
    this.canvas = canvas;
    this.says = says;
    this.open = open;
    this.moment = null;
    this.cursor = -1;
    this.chosen = null;
    this.plan = { columns: 1, size: SMALLEST, group: 1, cells: 0, left: 0 };
    this.small = document.createElement("canvas");
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("pointermove", (event) => this.tell(this.at(event)));
    canvas.addEventListener("pointerleave", () => this.tell(this.cursor));
    canvas.addEventListener("click", (event) => this.choose(this.at(event)));
    canvas.addEventListener("focus", () => this.draw());
    canvas.addEventListener("blur", () => this.draw());
  }

  show(moment, chosen) {
    this.moment = moment;
    this.chosen = chosen;
    this.draw();
  }

  /** The most columns, a multiple of eight where there are several nodes, and the largest cells that fit. */
  arrange(total) {
    const width = Math.max(this.canvas.parentElement.clientWidth, 40);
    const height = Math.max(220, Math.min(window.innerHeight * 0.62, width * 1.1));
    const largest = Math.round(LARGEST_EM * parseFloat(getComputedStyle(document.documentElement).fontSize));
    const left = total > 64 ? Math.min(64, 10 + 9 * String(total).length) : 0;
    for (let group = 1; ; group *= 2) {
      const cells = Math.ceil(total / group);
      for (let size = largest; size >= SMALLEST; size -= size > 12 ? 2 : size > 6 ? 1 : 0.5) {
        let columns = Math.floor((width - left) / size);
        if (columns < 1) continue;
        if (columns > 8) columns -= columns % 8;
        columns = Math.min(columns, Math.max(cells, 1));
        if (Math.ceil(cells / columns) * size <= height) return { columns, size, group, cells, left, total };
      }
    }
  }

  /** The worst letter of a cell, as a code. */
  worst(cell) {
    const { letters } = this.moment;
    const { group } = this.plan;
    let found = letters[cell * group];
    for (let at = cell * group + 1; at < Math.min((cell + 1) * group, letters.length); at += 1) {
      if (URGENT[letters[at]] < URGENT[found]) found = letters[at];
    }
    return found;
  }

  draw() {
    if (!this.moment) return;
    const plan = this.plan = this.arrange(this.moment.letters.length);
    this.cursor = Math.min(this.cursor, plan.cells - 1);
    const rows = Math.ceil(plan.cells / plan.columns);
    const { draw, width, em } = prepare(this.canvas, rows * plan.size + 2);
    this.width = width;
    if (plan.size >= GAP) this.boxes(draw);
    else this.pixels(draw, rows);
    if (plan.left) this.labels(draw, rows, em);
    this.marks(draw, plan);
  }

  boxes(draw) {
    const { columns, size, cells, left } = this.plan;
    const gap = size > 20 ? 3 : size > 10 ? 1.5 : 1;
    draw.textAlign = "center";
    draw.textBaseline = "middle";
    for (let cell = 0; cell < cells; cell += 1) {
      const letter = String.fromCharCode(this.worst(cell));
      const x = left + (cell % columns) * size, y = Math.floor(cell / columns) * size;
      draw.fillStyle = stateColour(letter);
      draw.beginPath();
      draw.roundRect(x, y, size - gap, size - gap, size > 20 ? 5 : 1.5);
      draw.fill();
      if (size < LETTER) continue;
      draw.fillStyle = letter === "." ? colour("ink") : colour(STRONG.has(letter) ? "letter-light" : "letter");
      const rank = this.plan.group === 1 ? rankOf(this.moment, cell) : null;
      draw.font = `600 ${Math.min(Math.round(size * 0.42), 17)}px system-ui, "DejaVu Sans", sans-serif`;
      if (size >= NUMBER && rank !== null) {
        draw.fillText(letter, x + (size - gap) / 2, y + (size - gap) * 0.32);
        draw.font = `${Math.min(Math.round(size * 0.32), 14)}px system-ui, "DejaVu Sans", sans-serif`;
        draw.fillText(String(rank), x + (size - gap) / 2, y + (size - gap) * 0.72);
      } else draw.fillText(letter, x + (size - gap) / 2, y + (size - gap) / 2 + 0.5);
    }
  }

  /** Cells too small to be drawn one by one: a picture with a pixel each, enlarged. */
  pixels(draw, rows) {
    const { columns, size, cells, left } = this.plan;
    this.small.width = columns;
    this.small.height = rows;
    const context = this.small.getContext("2d");
    const picture = context.createImageData(columns, rows);
    const words = new Uint32Array(picture.data.buffer);
    const colours = new Uint32Array(128);
    for (const letter of WORDS.keys()) {
      const [r, g, b] = channels(stateColour(letter));
      colours[letter.charCodeAt(0)] = (255 << 24) | (b << 16) | (g << 8) | r;
    }
    for (let cell = 0; cell < cells; cell += 1) words[cell] = colours[this.worst(cell)];
    context.putImageData(picture, 0, 0);
    draw.imageSmoothingEnabled = false;
    draw.drawImage(this.small, left, 0, columns * size, rows * size);
    // One of a hundred thousand is not to be overlooked.
    const found = [];
    for (let cell = 0; cell < cells && found.length <= MANY_CULPRITS; cell += 1) if (this.worst(cell) === X) found.push(cell);
    if (found.length > MANY_CULPRITS) return;
    for (const cell of found) {
      const x = left + (cell % columns + 0.5) * size, y = (Math.floor(cell / columns) + 0.5) * size;
      draw.lineWidth = 5;
      draw.strokeStyle = colour("card");
      draw.beginPath();
      draw.arc(x, y, 8, 0, 7);
      draw.stroke();
      draw.lineWidth = 2.5;
      draw.strokeStyle = stateColour("X");
      draw.stroke();
      draw.fillStyle = stateColour("X");
      draw.beginPath();
      draw.arc(x, y, 3.5, 0, 7);
      draw.fill();
    }
  }

  labels(draw, rows, em) {
    const { columns, size, group, left } = this.plan;
    draw.textAlign = "right";
    draw.textBaseline = "middle";
    draw.fillStyle = colour("dim");
    draw.font = `${Math.round(Math.min(em, 13))}px system-ui, "DejaVu Sans", sans-serif`;
    const step = Math.max(1, Math.ceil(18 / size));
    for (let row = 0; row < rows; row += step) {
      const rank = rankOf(this.moment, row * columns * group);
      if (rank !== null && rank !== undefined) draw.fillText(String(rank), left - 6, Math.max((row + 0.5) * size, 7));
    }
  }

  /** The cursor, while the grid has the focus, and the rank that is open. */
  marks(draw, { columns, size, group, left }) {
    const ring = (cell, name, wide) => {
      const grown = Math.max(size, 9), x = left + (cell % columns + 0.5) * size - grown / 2, y = (Math.floor(cell / columns) + 0.5) * size - grown / 2;
      draw.lineWidth = wide;
      draw.strokeStyle = colour(name);
      draw.strokeRect(x, y, grown - (size >= GAP ? 1 : 0), grown - (size >= GAP ? 1 : 0));
    };
    if (this.chosen !== null) {
      const ranks = this.moment.parts.grid.ranks;
      const place = ranks === null ? this.chosen : ranks.indexOf(this.chosen);
      if (place >= 0 && place < this.moment.letters.length) ring(Math.floor(place / group), "ink", 3);
    }
    if (this.cursor >= 0 && document.activeElement === this.canvas) ring(this.cursor, "accent", 3);
  }

  at(event) {
    const { columns, size, cells, left } = this.plan;
    const column = Math.floor((event.offsetX - left) / size), cell = Math.floor(event.offsetY / size) * columns + column;
    return column >= 0 && column < columns && cell >= 0 && cell < cells ? cell : -1;
  }

  /** Say what a cell is. */
  tell(cell) {
    if (!this.moment || cell < 0) return this.says("");
    const { group } = this.plan, from = cell * group, to = Math.min(from + group, this.moment.letters.length);
    const letter = String.fromCharCode(this.worst(cell));
    if (group > 1) return this.says(`ranks ${rankOf(this.moment, from) ?? "?"} to ${rankOf(this.moment, to - 1) ?? "?"}: at worst ${WORDS.get(letter)}`);
    const rank = rankOf(this.moment, from);
    const row = this.moment.parts.rows.find((one) => one.rank === rank && rank !== null);
    return this.says(`rank ${rank ?? "?"}: ${WORDS.get(letter)}${row ? `, ${row.host}, pid ${row.pid}${row.operation ? `, ${row.operation}` : ""}` : ""}`);
  }

  choose(cell) {
    if (!this.moment || cell < 0) return;
    this.cursor = cell;
    const { group } = this.plan;
    let best = cell * group;
    for (let at = best; at < Math.min((cell + 1) * group, this.moment.letters.length); at += 1) {
      if (URGENT[this.moment.letters[at]] < URGENT[this.moment.letters[best]]) best = at;
    }
    const rank = rankOf(this.moment, best);
    if (rank !== null && rank !== undefined) this.open(rank);
  }

  key(event) {
    const { columns, cells } = this.plan;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -cells, End: cells, PageUp: -8 * columns, PageDown: 8 * columns };
    if (event.key in moves) this.cursor = Math.max(0, Math.min(cells - 1, Math.max(this.cursor, 0) + moves[event.key]));
    else if (event.key === "Enter") this.choose(Math.max(this.cursor, 0));
    else return;
    event.preventDefault();
    event.stopPropagation();
    this.draw();
    this.tell(this.cursor);
  }

  summary() {
    return this.plan.group > 1 ? `a cell is ${count(this.plan.group, "rank")}, the worst shown` : "";
  }
}

const X = "X".charCodeAt(0);
const URGENT = new Uint8Array(128).fill(99);
for (const [letter, at] of URGENCY) URGENT[letter.charCodeAt(0)] = at;
