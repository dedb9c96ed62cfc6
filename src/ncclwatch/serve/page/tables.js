// Tables and lists: ranks in trouble, one rank in full, open operations, what is watched, what happened.

import { byId, clock, count, duration, el, show } from "./dom.js";
import { STATES, WORDS, stateClass } from "./states.js";

const key = (letter) => el("i", { class: stateClass(letter), "aria-hidden": "true" }, letter);

export function showLegend(letters, summary) {
  const counts = new Map();
  for (const code of letters) counts.set(code, (counts.get(code) ?? 0) + 1);
  show(byId("legend"), STATES.filter(([letter]) => counts.has(letter.charCodeAt(0))).map(([letter, word]) =>
    el("span", {}, key(letter), `${counts.get(letter.charCodeAt(0)).toLocaleString("en")} ${word}`)), summary && el("span", { class: "dim" }, summary));
}

/** What the counts of the timeline are. */
export function showTimeLegend(trouble) {
  show(byId("time-legend"), trouble.map((letter) => el("span", {}, key(letter), WORDS.get(letter))));
}

function table(heads, rows) {
  return el("table", {}, el("thead", {}, el("tr", {}, heads.map(([text, kind]) => el("th", { scope: "col", class: kind }, text)))), el("tbody", {}, rows));
}

const steps = (row) => (row.total ? `${row.done}/${row.total}` : "");
const age = (row) => (row.age === null ? "" : `${row.at_least ? "≥ " : ""}${duration(row.age)}`);
const rate = (value) => (value === null ? "" : value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));

export function showRows(rows, total) {
  show(byId("table"), table([["rank"], ["state"], ["host"], ["pid", "n"], ["GPU", "n"], ["operation"], ["open for", "n"], ["steps", "n"], ["no step for", "n"],
    ["operations/s", "n"], ["problem"]],
  rows.map((row) => el("tr", {},
    el("td", {}, row.rank === null ? "?" : el("button", { type: "button", "data-rank": row.rank, "aria-label": `open rank ${row.rank}` }, row.rank)),
    el("td", {}, el("span", { class: "legend" }, el("span", {}, key(row.letter), row.state))),
    el("td", {}, row.host), el("td", { class: "n" }, row.pid), el("td", { class: "n" }, row.gpu ?? ""), el("td", { class: "t" }, row.operation || (row.last && `last ${row.last}`)),
    el("td", { class: "n" }, age(row)), el("td", { class: "n" }, steps(row)), el("td", { class: "n" }, row.still === null ? "" : duration(row.still)),
    el("td", { class: "n" }, rate(row.rate)), el("td", { class: "t" }, row.problem)))),
  rows.length < total && el("p", { class: "dim" }, `${(total - rows.length).toLocaleString("en")} more ranks: open them in the grid`));
}

/** One rank: `row` is what the moment says of it, `detail` what the server knows of it now, where it was asked. */
export function showRank(rank, letter, row, detail, past) {
  if (rank === null) {
    show(byId("rank-title"), "Rank");
    show(byId("rank"), el("p", { class: "dim" }, "Open a rank in the grid, in a verdict or in a table, to see what it does."));
    return;
  }
  show(byId("rank-title"), `Rank ${rank}`);
  const found = row ?? (past ? null : detail);
  const facts = [["state", letter ? el("span", { class: "legend" }, el("span", {}, key(letter), WORDS.get(letter))) : "not in this job"]];
  if (found) {
    facts.push(["host", found.host], ["process", `pid ${found.pid}, ${found.name}${found.gpu === null ? "" : `, GPU ${found.gpu}`}`]);
    if (found.operation) facts.push(["operation", `${found.operation}, open for ${age(found)}${found.total ? `, ${steps(found)} steps` : ""}`]);
    if (found.last) facts.push(["last call", `${found.last}, ${duration(found.last_age)} ago`]);
    if (found.still !== null) facts.push(["no step for", duration(found.still)]);
    if (found.problem) facts.push(["problem", found.problem]);
  } else if (past && letter) facts.push(["more", "of this moment only the state of this rank is kept"]);
  if (detail && !past) {
    if (detail.command) facts.push(["command", el("code", {}, detail.command)]);
    const some = (ranks) => el("span", { class: "pair" }, ranks.slice(0, 12).map((one) => el("button", { type: "button", "data-rank": one, "aria-label": `open rank ${one}` }, one)), ranks.length > 12 && ` and ${ranks.length - 12} more`);
    if (detail.waits_for.length) facts.push(["waits for", some(detail.waits_for)]);
    if (detail.waited_by.length) facts.push(["waited for by", some(detail.waited_by)]);
  }
  show(byId("rank"), el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    detail && !past && detail.communicators && el("div", {}, el("h3", {}, "Communicators"), el("ul", {}, detail.communicators.map((one) =>
      el("li", {}, el("code", {}, one.hash), ` rank ${one.rank} of ${one.nranks}${one.role ? `, ${one.role}` : ""}`)))),
    detail && !past && detail.transfers && detail.transfers.length > 0 && el("div", { class: "scroll tall" }, el("h3", {}, "Unfinished transfers"),
      table([["operation"], ["channel", "n"], ["peer"], ["steps", "n"], ["waits for"]], detail.transfers.map((one) => el("tr", {},
        el("td", {}, one.operation), el("td", { class: "n" }, one.channel), el("td", {}, `${one.direction === "send" ? "to" : "from"} ${one.peer}`),
        el("td", { class: "n" }, steps(one)), el("td", { class: "t" }, one.waits))))),
    el("p", {}, el("button", { type: "button", "data-close": "rank" }, "Close")));
}

export function showOperations(operations) {
  show(byId("operations"), operations.length === 0 ? el("p", { class: "dim" }, "No operation is open.")
    : table([["operation"], ["communicator"], ["on", "n"], ["open for", "n"], ["steps", "n"]], operations.map((one) => el("tr", {},
      el("td", {}, one.sequence === null ? one.name : `${one.name} #${one.sequence}`), el("td", {}, el("code", {}, one.communicator)),
      el("td", { class: "n" }, one.nranks ? `${one.on}/${one.nranks}` : one.on), el("td", { class: "n" }, duration(one.age)),
      el("td", { class: "n" }, one.total ? `${one.done}${one.most > one.done ? `–${one.most}` : ""}/${one.total}` : "")))));
}

/** Where those whom verdicts named were seen to stand. */
export function showStacks(stacks) {
  show(byId("stacks"), stacks.length === 0 ? el("p", { class: "dim" }, "Looked at once a verdict names somebody, where the agents may.")
    : stacks.map((one) => el("article", { class: "stack" },
      el("h3", {}, one.rank === null ? "" : el("button", { type: "button", "data-rank": one.rank, "aria-label": `open rank ${one.rank}` }, `rank ${one.rank}`), ` ${one.host}, pid ${one.pid}`),
      el("p", {}, one.doing.join("; "), el("span", { class: "dim" }, ` seen ${clock(one.time)}`)),
      one.frames.length > 0 && el("ol", { class: "frames" }, one.frames.map((frame) => el("li", {}, el("code", {}, frame)))),
      one.holder.length > 0 && el("div", {}, el("p", {}, "another thread holds the GIL:"), el("ol", { class: "frames" }, one.holder.map((frame) => el("li", {}, el("code", {}, frame))))),
      one.kernel && el("p", {}, "kernel: ", el("code", {}, one.kernel)),
      one.problem && el("p", { class: "dim" }, one.problem))));
}

export function showAbout(about) {
  const facts = [["ranks", `${about.observed.toLocaleString("en")} of ${about.ranks.toLocaleString("en")} observed, on ${count(about.hosts, "host")}`]];
  if (about.layout) facts.push(["layout", about.layout]);
  if (about.versions.length) facts.push(["NCCL", about.versions.join(", ")]);
  for (const plane of about.planes) facts.push([`${plane.name} plane`, plane.running ? `runs${plane.reason ? `; ${plane.reason}` : ""}` : `off: ${plane.reason}`]);
  if (about.lost) facts.push(["lost", `${count(about.lost, "call record")}: rates of then are too low`]);
  if (about.own_share !== null) facts.push(["cost of watching", `${(about.own_share * 100).toFixed(1)}% of a core on the node where it is most`]);
  if (about.behind > 0.5) facts.push(["engine", `behind by ${duration(about.behind)}: it is overloaded`]);
  const silent = about.nodes.filter((node) => node.silent);
  if (about.nodes.length) facts.push(["nodes", silent.length ? `silent: ${silent.slice(0, 8).map((node) => node.name).join(", ")}${silent.length > 8 ? ` and ${silent.length - 8} more` : ""}` : "all are heard"]);
  show(byId("about"), el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
}

export function showLog(log) {
  show(byId("log"), log.length === 0 ? el("p", { class: "dim" }, "Nothing yet.")
    : table([["time"], ["kind"], ["what"]], [...log].reverse().map(([time, kind, text]) => el("tr", {}, el("td", {}, clock(time)), el("td", {}, kind), el("td", { class: "t" }, text)))));
}
