// Building and changing the document. Text of a job is text and nothing else: no function here reads markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes (class, data-..., aria-...) and children: nodes, or anything else as text. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** Make a node's children look like these, changing as little as can be: focus, selection and what is unfolded stay. */
export function show(node, ...wanted) {
  const list = wanted.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
  while (node.childNodes.length > list.length) node.lastChild.remove();
  list.forEach((child, at) => {
    const old = node.childNodes[at];
    if (old === undefined) node.append(child);
    else if (old.nodeType !== child.nodeType || old.nodeName !== child.nodeName) old.replaceWith(child);
    else if (old.nodeType === Node.TEXT_NODE) {
      if (old.data !== child.data) old.data = child.data;
    } else {
      for (const { name } of [...old.attributes]) if (!child.hasAttribute(name) && name !== "open") old.removeAttribute(name);
      for (const { name, value } of child.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
      show(old, [...child.childNodes]);
    }
  });
}

export const byId = (id) => document.getElementById(id);

// --- words ---------------------------------------------------------------------------------------------------------

/** "0.2s", "12s", "4m05s", "2h03m", "3d02h", as the command line writes them. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 9.95) return `${Math.max(seconds, 0).toFixed(1)}s`;
  const whole = Math.round(seconds);
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)}d${two(Math.floor((whole % 86400) / 3600))}h`;
}

/** Time of day of seconds since the epoch, where the reader is. */
export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

export function day(time) {
  const date = new Date(time * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(time)}`;
}

export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

export function seconds(value) {
  return value < 0.001 ? `${(value * 1e6).toFixed(0)} µs` : value < 1 ? `${(value * 1000).toPrecision(3)} ms` : `${value.toPrecision(3)} s`;
}

/** What slowness or a standstill costs, in words. */
export function costText(cost) {
  if (!cost) return "";
  const hours = cost.rank_seconds / 3600;
  const lost = hours < 0.1 ? `${Math.round(cost.rank_seconds)} GPU s` : `${hours < 10 ? hours.toFixed(1) : Math.round(hours).toLocaleString("en")} GPU h`;
  const share = cost.share < 1 ? `${Math.round(cost.share * 100)}% of its time, ` : "";
  return `${share}${lost} lost`;
}

/** How a job's class looks: the name of its colour. */
export function looks(verdict) {
  if (!verdict || !verdict.class) return "off";
  if (verdict.slow) return "slow";
  if (verdict.accuses) return "bad";
  return verdict.class === "unknown" ? "odd" : "calm";
}
