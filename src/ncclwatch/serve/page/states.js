// States of ranks: letters as the command line has them, words, and colours as the style sheet has them.

export const STATES = [
  ["X", "culprit"], ["D", "ended"], ["T", "stopped"], ["?", "unreadable"], ["s", "still"], ["w", "waiting"], [".", "not observed"],
  ["i", "idle"], ["r", "running"],
];
export const WORDS = new Map(STATES);
export const URGENCY = new Map(STATES.map(([letter], at) => [letter, at]));
/** Letters whose colour takes the light letter. */
export const STRONG = new Set(["X", "D", "T"]);

const NAMES = { "?": "unread", ".": "unseen" };

/** The class of a state in the style sheet. */
export const stateClass = (letter) => `k-${NAMES[letter] ?? letter}`;

const probe = document.createElement("i");
const known = new Map();

/** A colour of the style sheet as the browser resolves it now; forgotten when the theme changes. */
export function colour(name) {
  if (!known.has(name)) {
    if (!probe.isConnected) {
      probe.hidden = true;
      document.body.append(probe);
    }
    probe.style.color = `var(--${name})`;
    known.set(name, getComputedStyle(probe).color);
  }
  return known.get(name);
}

export const stateColour = (letter) => colour(`state-${NAMES[letter] ?? letter}`);

/** [red, green, blue] of a resolved colour. */
export function channels(text) {
  return text.match(/[\d.]+/g).slice(0, 3).map(Number);
}

export function forgetColours() {
  known.clear();
}

/** Make a canvas as large as its box, sharp on any screen; the context, in CSS pixels, with width and height. */
export function prepare(canvas, height) {
  const box = canvas.parentElement;
  const width = Math.max(box.clientWidth, 40);
  const tall = Math.max(Math.round(height ?? box.clientHeight), 10);
  const scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(tall * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(tall * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${tall}px`;
  }
  const draw = canvas.getContext("2d");
  draw.setTransform(scale, 0, 0, scale, 0, 0);
  draw.clearRect(0, 0, width, tall);
  const size = parseFloat(getComputedStyle(document.documentElement).fontSize);
  draw.font = `${Math.round(size * 0.75)}px system-ui, "DejaVu Sans", sans-serif`;
  return { draw, width, height: tall, em: size * 0.75, scale };
}
