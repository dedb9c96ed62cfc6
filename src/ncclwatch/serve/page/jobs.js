// The list of all jobs: who is in trouble first.

import { byId, costText, count, duration, el, looks, show } from "./dom.js";

const ORDER = { bad: 0, slow: 1, odd: 2, off: 3, calm: 4 };
const AWAY = { connecting: "connecting", waiting: "no agent heard yet", silent: "engine silent", unreachable: "engine unreachable",
  reading: "being read", unreadable: "unreadable" };

/** Jobs in the order in which they are listed. */
export function ordered(jobs) {
  return [...jobs.values()].sort((a, b) => ORDER[looks(a)] - ORDER[looks(b)] || (a.job < b.job ? -1 : 1));
}

export function showJobs(jobs) {
  const list = ordered(jobs);
  const wrong = list.filter((job) => job.accuses).length;
  show(byId("jobs-sum"), list.length ? `${count(list.length, "job")}, ${wrong ? `${wrong} with somebody to blame` : "nobody is blamed"}` : "no job");
  show(byId("job-list"), list.map((job) => {
    const kind = looks(job);
    const facts = [job.ranks !== undefined && count(job.ranks, "rank"), job.hosts && count(job.hosts, "host"),
      job.accuses && job.since && job.time && `for ${duration(job.time - job.since)}`].filter(Boolean);
    const away = AWAY[job.state];
    return el("li", {}, el("a", { href: `/?${new URLSearchParams({ job: job.job })}`, class: kind, "data-go": "job", "data-job": job.job },
      el("span", { class: "name" }, job.job),
      el("span", { class: `badge ${kind}` }, job.class ? job.class.replaceAll("-", " ") : job.kind),
      el("span", { class: "said" }, job.summary || job.text || job.about),
      el("span", { class: "facts" }, facts.map((fact) => el("span", {}, fact)), job.kind === "recording" && el("span", {}, "recording"),
        away && el("span", { class: "odd" }, job.state === "reading" ? job.text : away),
        job.cost && el("span", { class: "cost" }, costText(job.cost)))));
  }));
}
