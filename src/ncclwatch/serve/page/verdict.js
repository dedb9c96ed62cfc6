// The verdicts of a job: who, what, how it is known, what to do; and why.

import { byId, clock, costText, day, duration, el, looks, show } from "./dom.js";

export function showVerdicts(moment) {
  const { verdicts, cost } = moment.parts;
  show(byId("verdicts"), verdicts.length
    ? verdicts.map((verdict, at) => card(verdict, at === 0 ? cost : null, moment.time))
    : el("div", { class: "verdict" }, el("p", { class: "summary" }, "nothing was judged yet")));
}

function card(verdict, cost, now) {
  const kind = looks(verdict);
  const [first, ...others] = verdict.next_steps;
  return el("article", { class: `verdict is-${kind}`, "data-id": verdict.id },
    el("span", { class: `badge ${kind}` }, verdict.class.replaceAll("-", " ")),
    el("p", { class: "summary" }, verdict.summary),
    el("div", { class: "facts-row" },
      verdict.since && el("span", {}, "since ", el("b", {}, verdict.since > now - 43200 ? clock(verdict.since) : day(verdict.since)), ` (${duration(now - verdict.since)})`),
      verdict.accuses && el("span", {}, "confidence ", el("b", {}, `${Math.round(verdict.confidence * 100)}%`)),
      cost && el("span", {}, "cost ", el("b", {}, costText(cost))),
      verdict.waiting_count > 0 && el("span", {}, "waiting ", el("b", {}, `${verdict.waiting_count === 1 ? "rank" : "ranks"} ${verdict.waiting}`)),
      verdict.where.map(([label, text]) => el("span", {}, `${label} `, el("b", {}, text))),
      verdict.accuses && el("span", { class: "dim" }, "id ", el("code", {}, verdict.id))),
    first && el("p", { class: "next" }, el("b", {}, "Next:"), first),
    el("div", { class: "halves" },
      verdict.culprits.length > 0 && el("div", {}, el("h3", {}, verdict.culprits.length === 1 ? "Culprit" : "Culprits"),
        verdict.culprits.map(culprit), verdict.more_culprits > 0 && el("p", { class: "dim" }, `… and ${verdict.more_culprits} more`)),
      lines("Evidence", verdict.evidence), lines("Unlike its peers", verdict.differences),
      lines("Not observed", verdict.unobserved), lines("More steps", others, "ol")),
    verdict.known.length > 0 && el("details", {}, el("summary", {}, `Known of this (${verdict.known.length})`), verdict.known.map(known)),
    el("details", { class: "why" }, el("summary", {}, "Why: how the verdict came about"),
      verdict.why.map((part) => el("div", {}, el("h4", {}, part.heading), part.because && el("p", { class: "because" }, `because: ${part.because}`),
        part.lines.length > 0 && el("ul", {}, part.lines.map((line) => el("li", {}, line)))))));
}

/** Whether there is a history to ask: then culprits lead to that of their node. */
export const past = { kept: false };

function culprit(one) {
  return past.kept && one.host ? [named(one), el("p", { class: "dim" }, el("a", { href: `/?${new URLSearchParams({ node: one.host })}`, "data-go": "node", "data-node": one.host }, `history of ${one.host}`))] : named(one);
}

function named(one) {
  const inside = [one.name, one.about.map((line) => el("span", {}, line)), one.ticket && el("span", {}, one.ticket)];
  return one.rank === null ? el("div", { class: "culprit" }, inside)
    : el("button", { type: "button", class: "culprit", "data-rank": one.rank }, inside);
}

function lines(heading, texts, tag = "ul") {
  return texts.length > 0 && el("div", {}, el("h3", {}, heading), el(tag, {}, texts.map((text) => el("li", {}, text))));
}

function known(one) {
  const judged = one.defect ? `perhaps this known defect of NCCL${one.fixed_in ? `, fixed in ${one.fixed_in}` : ", no release has the fix"}`
    : `judged ${Math.round(one.likely * 100)}% likely`;
  return el("div", {}, el("h3", {}, `${one.row} (${judged})`), el("ul", {}, el("li", {}, `seen: ${one.seen}`), el("li", {}, `likely: ${one.cause}`),
    one.check && el("li", {}, `to tell: ${one.check}`), one.do.map((step) => el("li", {}, `→ ${step}`))));
}
