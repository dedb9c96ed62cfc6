// What was kept: nodes that were blamed before, and one of them in full.

import { byId, count, day, duration, el, show } from "./dom.js";
import { ask } from "./moments.js";
import { past } from "./verdict.js";

/** Whether this server keeps a history; without one nothing leads there. */
export async function showHistoryLink() {
  const { history } = await ask("/api/about").catch(() => ({ history: false }));
  past.kept = history;
  byId("to-history").hidden = !history;
  return history;
}

/** All nodes that were blamed, or one; what went wrong is an answer too. */
export async function askHistory(node) {
  try {
    return await ask(node ? "/api/node" : "/api/nodes", node ? { node } : {});
  } catch (error) {
    return { error: error.message };
  }
}

const link = (node) => el("a", { href: `/?${new URLSearchParams({ node })}`, "data-go": "node", "data-node": node }, node);

function table(heads, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": "history-title" }, el("table", {},
    el("thead", {}, el("tr", {}, heads.map(([text, kind]) => el("th", { scope: "col", class: kind }, text)))), el("tbody", {}, rows)));
}

export function showHistory(node, found) {
  show(byId("history-title"), node ? `History of ${node}` : "History");
  if (found === null || found.error) {
    show(byId("history-says"), found === null ? "asking" : found.error);
    show(byId("history-found"));
  } else if (node) showNode(found);
  else showNodes(found);
}

function showNodes(found) {
  show(byId("history-says"), found.nodes.length ? `${count(found.nodes.length, "node")} blamed since ${day(found.since)}, the most often first` : `no node was blamed since ${day(found.since)}`);
  show(byId("history-found"), found.nodes.length > 0 && table([["node"], ["times", "n"], ["jobs", "n"], ["mostly"], ["stood for", "n"], ["last"]], found.nodes.map((one) => el("tr", {},
    el("td", {}, link(one.node)), el("td", { class: "n" }, one.times), el("td", { class: "n" }, one.jobs), el("td", {}, one.mostly.replaceAll("-", " ")),
    el("td", { class: "n" }, duration(one.stood)), el("td", {}, day(one.last))))));
}

function showNode(found) {
  const why = found.reasons.map(([reason, times]) => `${reason} (${times})`).join(", ");
  show(byId("history-says"), found.incidents.length ? `blamed ${count(found.incidents.length, "time")} since ${day(found.since)}: ${why}`
    : `not blamed since ${day(found.since)}`, found.others.length > 0 && el("span", {}, "; blamed were ", found.others.map((one) => [link(one), " "])));
  show(byId("history-found"),
    found.incidents.length > 0 && table([["told"], ["job"], ["class"], ["sure", "n"], ["nodes"], ["ranks"], ["ended"], ["what"]], found.incidents.map((one) => el("tr", {},
      el("td", {}, day(one.time)), el("td", {}, one.job), el("td", {}, one.class.replaceAll("-", " ")), el("td", { class: "n" }, one.sure === null ? "" : `${Math.round(one.sure * 100)}%`),
      el("td", {}, one.nodes.map((name) => [link(name), " "])), el("td", {}, one.ranks), el("td", {}, one.ended), el("td", { class: "t" }, one.summary)))),
    found.health.length > 0 && el("h2", {}, "What its parts showed"),
    found.health.length > 0 && table([["part"], ["times", "n"], ["last"], ["what"]], found.health.map((one) => el("tr", {},
      el("td", {}, one.part), el("td", { class: "n" }, one.times), el("td", {}, day(one.last)), el("td", { class: "t" }, one.what)))));
}
