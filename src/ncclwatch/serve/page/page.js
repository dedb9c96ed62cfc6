// The page: which job, rank and moment are shown (the address says so), what comes from the server, and keys.

import { drawIterations, drawTimeline, timelineAt } from "./charts.js";
import { byId, clock, day, duration, show } from "./dom.js";
import { Grid } from "./grid.js";
import { ordered, showJobs } from "./jobs.js";
import { Stream, ask, following, placeOf, whole } from "./moments.js";
import { forgetColours } from "./states.js";
import { askHistory, showHistory, showHistoryLink } from "./history.js";
import { showAbout, showLegend, showLog, showOperations, showRank, showRows, showStacks, showTimeLegend } from "./tables.js";
import { showVerdicts } from "./verdict.js";
import { showMatrix, showWay } from "./waits.js";

const MAX_POINTS = 4000, ASK_RANK_MS = 1000, PLAY_MS = 350;

const state = {
  jobs: new Map(), job: "", rank: null,
  view: "", node: "", history: null, // the history, of one node where one is named
  time: null, // the moment that is looked at; null: the newest
  newest: null, past: null, points: [], trouble: [], detail: null, detailAt: -Infinity, playing: 0, shown: new Map(), wanted: null, asking: false, why: false,
};

const matrixCanvas = byId("matrix").firstElementChild;
const timelineCanvas = byId("timeline").firstElementChild;
const iterationsCanvas = byId("iterations").firstElementChild;
const grid = new Grid(byId("grid").firstElementChild, (text) => show(byId("grid-says"), text), (rank) => openRank(rank));

// --- what comes ------------------------------------------------------------------------------------------------------

const stream = new Stream({
  state(name) {
    const words = { live: "connected", lost: "connection lost: what is shown is old", wait: "connecting" };
    byId("connection").dataset.state = name;
    show(byId("connection"), words[name]);
  },
  jobs(lines) {
    for (const line of lines) state.jobs.set(line.job, line);
    if (!state.job && !state.view && state.jobs.size === 1 && !state.everywhere) return go({ job: lines[0].job }, true);
    later("jobs");
  },
  moment(message) {
    if (message.job !== state.job) return;
    const next = message.after === null ? whole(message) : following(state.newest, message);
    if (next === null) return stream.open(state.job);
    const first = state.newest === null;
    state.newest = next;
    addPoint(next.point);
    if (first && state.time === null) loadTimeline();
    later("moment");
  },
});

function addPoint(point) {
  const last = state.points.at(-1);
  if (last && point[0] <= last[0]) return;
  // The server keeps one a second, and thins what is long ago: so does this.
  if (last && point[0] - last[0] < 0.99 && last[2] === point[2]) return;
  // Mostly only the time is another: what is equal is kept once, for a tab may be open for days.
  state.points.push(last ? point.map((value, at) => (String(value) === String(last[at]) ? last[at] : value)) : point);
  if (state.points.length > MAX_POINTS) state.points = state.points.filter((_, at) => at % 2 === 0 || at > MAX_POINTS / 2);
}

async function loadTimeline() {
  const { job } = state;
  try {
    const { points } = await ask("/api/timeline", { job });
    if (job !== state.job) return;
    const newest = points.at(-1)?.[0] ?? 0;
    state.points = [...points, ...state.points.filter(([time]) => time > newest)];
    later("moment");
  } catch (error) {
    toast(error.message);
  }
}

async function loadHistory() {
  const { node } = state;
  state.history = null;
  const found = await askHistory(node);
  if (state.view === "" || node !== state.node) return;
  state.history = found;
  later("history");
}

async function loadPast() {
  // Only the newest wish counts: a slider says more than a server can answer.
  if (state.asking) return;
  state.asking = true;
  try {
    while (state.time !== null && state.wanted !== null) {
      const { job } = state, time = state.wanted;
      state.wanted = null;
      const found = whole(await ask("/api/moment", { job, t: time }));
      if (job === state.job && state.time !== null) state.past = found;
      later("moment");
    }
  } catch (error) {
    toast(error.message);
  } finally {
    state.asking = false;
  }
}

async function loadRank() {
  const { job, rank } = state;
  if (rank === null || state.time !== null || performance.now() - state.detailAt < ASK_RANK_MS) return;
  state.detailAt = performance.now();
  const found = await ask("/api/rank", { job, rank }).catch(() => null);
  if (job !== state.job || rank !== state.rank) return;
  state.detail = found;
  later("rank");
}

// --- what is shown ---------------------------------------------------------------------------------------------------

const due = new Set();

/** Draw something with the next frame, once, however often it was asked for. */
function later(what) {
  if (due.size === 0) requestAnimationFrame(render);
  due.add(what);
}

function render() {
  const now = new Set(due);
  due.clear();
  byId("history").hidden = state.view !== "history";
  byId("jobs").hidden = state.job !== "" || state.view !== "";
  byId("job").hidden = state.job === "";
  if (state.view === "history") {
    document.title = `${state.node || "history"} - ncclwatch`;
    if (now.has("all") || now.has("history")) showHistory(state.node, state.history);
    return;
  }
  if (state.job === "") {
    document.title = "ncclwatch";
    showJobs(state.jobs);
    return;
  }
  const moment = state.time === null ? state.newest : state.past;
  const line = state.jobs.get(state.job);
  showHead(line, moment);
  if (moment === null) {
    // A recording that is still being read, or an engine that has not been reached.
    show(byId("verdicts"), line ? line.text || line.state : state.jobs.size ? "There is no job of this name here." : "");
    return;
  }
  const all = now.has("all");
  part(moment, ["verdicts", "cost"], all, () => showVerdicts(moment));
  if (all || now.has("why")) byId("verdicts").querySelectorAll("details.why").forEach((each) => { each.open = state.why; });
  if (all || now.has("moment") || now.has("rank")) grid.show(moment, state.rank);
  if (all || now.has("moment")) showLegend(moment.letters, grid.summary());
  if (all || now.has("moment")) showTime(moment);
  part(moment, ["iterations"], all, () => show(byId("iterations-says"), drawIterations(iterationsCanvas, moment.parts.iterations)));
  part(moment, ["waits"], all, () => {
    showWay(moment.parts.waits);
    showMatrix(matrixCanvas, moment.parts.waits);
  });
  part(moment, ["rows"], all, () => showRows(moment.parts.rows, moment.letters.length));
  part(moment, ["stacks"], all, () => showStacks(moment.parts.stacks));
  part(moment, ["operations"], all, () => showOperations(moment.parts.operations));
  part(moment, ["about"], all, () => showAbout(moment.parts.about));
  part(moment, ["log"], all, () => showLog(moment.parts.log));
  showOne(moment);
  loadRank();
}

/** Draw what depends on these parts, where one of them is another than what is drawn. */
function part(moment, names, always, draw) {
  if (!always && names.every((name) => state.shown.get(name) === moment.parts[name])) return;
  for (const name of names) state.shown.set(name, moment.parts[name]);
  draw();
}

function showHead(line, moment) {
  const verdict = moment?.parts.verdicts[0];
  document.title = `${verdict ? `${verdict.class.replaceAll("-", " ")}: ` : ""}${state.job} - ncclwatch`;
  show(byId("job-title"), state.job);
  show(byId("job-about"), line ? [line.kind === "recording" ? "recording " : "", line.about, line.state === "reading" ? `: ${line.text}` : ""].join("") : "");
  byId("back").hidden = state.jobs.size < 2;
  const notice = byId("notice");
  const old = line && ["silent", "unreachable", "unreadable"].includes(line.state) ? line.text : "";
  const shown = state.time !== null && moment && Math.abs(moment.time - state.time) > 5 ? ` That moment is not kept: this is ${day(moment.time)}.` : "";
  notice.hidden = !old && !shown;
  show(notice, old, shown);
}

function showTime(moment) {
  const place = placeInTime(moment.time);
  drawTimeline(timelineCanvas, state.points, state.trouble, place);
  const slider = byId("scrub");
  slider.max = String(Math.max(state.points.length - 1, 0));
  slider.value = String(place);
  const age = state.newest ? state.newest.time - moment.time : 0;
  const recorded = state.jobs.get(state.job)?.kind === "recording";
  const words = state.time === null ? `${day(moment.time)}, ${recorded ? "the end" : "now"}` : `${day(moment.time)}, ${duration(age)} before ${recorded ? "the end" : "now"}`;
  show(byId("moment"), words);
  slider.setAttribute("aria-valuetext", `${clock(moment.time)}, ${moment.point[1] || "not judged"}`);
  byId("live").disabled = state.time === null;
  byId("play").setAttribute("aria-pressed", String(state.playing !== 0));
  show(byId("play"), state.playing ? "Hold" : "Play");
}

/** The place of the last point at or before a time. */
function placeInTime(time) {
  let at = state.points.length - 1;
  while (at > 0 && state.points[at][0] > time + 0.002) at -= 1;
  return Math.max(at, 0);
}

function showOne(moment) {
  const place = state.rank === null ? -1 : placeOf(moment, state.rank);
  const letter = place >= 0 ? String.fromCharCode(moment.letters[place]) : "";
  const row = state.rank === null ? null : moment.parts.rows.find((one) => one.rank === state.rank);
  showRank(state.rank, letter, row, state.detail, state.time !== null);
}

// --- where one is ----------------------------------------------------------------------------------------------------

function read() {
  const query = new URLSearchParams(location.search);
  const number = (name) => (query.get(name) !== null && Number.isFinite(Number(query.get(name))) && query.get(name) !== "" ? Number(query.get(name)) : null);
  const job = query.get("job") ?? "";
  state.node = query.get("node") ?? "";
  state.view = job ? "" : state.node || query.get("view") === "history" ? "history" : "";
  if (state.view) loadHistory();
  const other = job !== state.job;
  state.job = job;
  state.rank = number("rank");
  state.why = query.has("why");
  state.detail = null;
  state.detailAt = -Infinity;
  hold();
  if (other || stream.source === null) {
    Object.assign(state, { newest: null, past: null, points: [] });
    state.shown.clear();
    grid.cursor = -1;
    grid.moment = null;
    stream.open(job);
    if (job && number("t") !== null) loadTimeline();
  }
  moveTo(number("t"));
  later("all");
}

function address(changes = {}) {
  const now = { job: state.job || null, rank: state.rank, t: state.time, why: state.why ? 1 : null, ...changes };
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(now)) if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  const text = query.toString();
  return text ? `/?${text}` : "/";
}

/** Go to another job, or to the list. */
function go(where, instead = false) {
  state.everywhere = !where.job;
  const query = new URLSearchParams(where).toString();
  const to = query ? `/?${query}` : "/";
  history[instead ? "replaceState" : "pushState"](null, "", to);
  read();
  window.scrollTo(0, 0);
  if (!instead) byId("main").focus({ preventScroll: true });
}

let written = 0;
/** Write where one is into the address, not more often than browsers allow. */
function write() {
  clearTimeout(written);
  written = setTimeout(() => history.replaceState(null, "", address()), 250);
}

function openRank(rank) {
  state.rank = rank;
  state.detail = null;
  state.detailAt = -Infinity;
  write();
  later("rank");
}

function moveTo(time) {
  state.time = time;
  if (time !== null) {
    state.wanted = time;
    loadPast();
  } else state.past = null;
  later("moment");
}

function moveToPlace(place) {
  if (state.points.length === 0) return;
  const at = Math.max(0, Math.min(place, state.points.length - 1));
  moveTo(state.points[at][0]);
  write();
}

function step(by) {
  const moment = state.time === null ? state.newest : state.past;
  if (moment) moveToPlace(placeInTime(state.wanted ?? moment.time) + by);
}

function newest() {
  hold();
  moveTo(null);
  write();
}

function hold() {
  clearInterval(state.playing);
  state.playing = 0;
  later("moment");
}

function play() {
  if (state.playing) return hold();
  // From the newest moment on there is nothing to play: then from the beginning.
  if (state.time === null) moveToPlace(0);
  state.playing = setInterval(() => {
    const place = placeInTime(state.time ?? 0);
    if (place + 1 >= state.points.length) newest();
    else moveToPlace(place + 1);
  }, PLAY_MS);
  later("moment");
}

async function copyLink() {
  const moment = state.time === null ? state.newest : state.past;
  const link = new URL(address({ t: moment ? moment.time : null }), location.href).href;
  try {
    await navigator.clipboard.writeText(link);
    toast("Link copied: it holds the job, the rank and the moment.");
  } catch {
    // Browsers give the clipboard to pages of HTTPS and of this machine alone.
    byId("link-text").value = link;
    byId("link-dialog").showModal();
    byId("link-text").select();
  }
}

let toasted = 0;
function toast(text) {
  byId("toast").hidden = false;
  show(byId("toast"), text);
  clearTimeout(toasted);
  toasted = setTimeout(() => { byId("toast").hidden = true; }, 3500);
}

// --- look ------------------------------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];
const remembered = { get: () => { try { return localStorage.getItem("theme"); } catch { return null; } },
  set: (name) => { try { localStorage.setItem("theme", name); } catch { /* It is forgotten with the tab. */ } } };

function setTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  show(byId("theme"), `Theme: ${name}`);
  remembered.set(name);
  redraw();
}

function redraw() {
  forgetColours();
  later("all");
}

// --- hands -----------------------------------------------------------------------------------------------------------

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-go],[data-rank],[data-close]");
  if (!target || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const places = { job: { job: target.dataset.job }, node: { node: target.dataset.node }, history: { view: "history" }, jobs: {} };
  if (target.dataset.go) go(places[target.dataset.go]);
  else if (target.dataset.rank) openRank(Number(target.dataset.rank));
  else openRank(null);
  event.preventDefault();
});
document.addEventListener("toggle", (event) => {
  if (!event.target.matches?.("details.why")) return;
  state.why = event.target.open;
  write();
}, true);

byId("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(remembered.get() ?? "system") + 1) % 3]));
byId("keys").addEventListener("click", () => byId("keys-dialog").showModal());
byId("copy").addEventListener("click", copyLink);
byId("earlier").addEventListener("click", () => { hold(); step(-1); });
byId("later").addEventListener("click", () => { hold(); step(1); });
byId("live").addEventListener("click", newest);
byId("play").addEventListener("click", play);
byId("scrub").addEventListener("input", (event) => { hold(); moveToPlace(Number(event.target.value)); });
byId("timeline").addEventListener("pointerdown", (event) => {
  const pick = (moved) => {
    const box = byId("timeline").getBoundingClientRect();
    moveToPlace(timelineAt(state.points, Math.max(0, Math.min(1, (moved.clientX - box.left) / box.width))));
  };
  hold();
  pick(event);
  byId("timeline").setPointerCapture(event.pointerId);
  byId("timeline").onpointermove = pick;
});
byId("timeline").addEventListener("pointerup", () => { byId("timeline").onpointermove = null; });

function neighbour(by) {
  const names = ordered(state.jobs).map((job) => job.job);
  if (names.length) go({ job: names[(Math.max(names.indexOf(state.job), by < 0 ? 0 : -1) + by + names.length) % names.length] });
}

const KEYS = {
  h: () => byId("to-history").hidden || go({ view: "history" }),
  j: () => neighbour(1), k: () => neighbour(-1), a: () => go({}), g: () => byId("grid").firstElementChild.focus(),
  w: () => { state.why = !state.why; write(); later("why"); }, "[": () => { hold(); step(-1); }, "]": () => { hold(); step(1); },
  "{": () => { hold(); step(-10); }, "}": () => { hold(); step(10); }, " ": play, l: newest, c: copyLink,
  t: () => byId("theme").click(), "?": () => byId("keys-dialog").showModal(), Escape: () => openRank(null),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const { target } = event;
  if (target.matches("input:not([type=range]),textarea,select")) return;
  // Space and Enter on a button or a link are that button's.
  if (event.key === " " && target.closest("button,a,summary,[role=region]")) return;
  if (!(event.key in KEYS) || (state.job === "" && !"jkaht?".includes(event.key))) return;
  KEYS[event.key]();
  event.preventDefault();
});

window.addEventListener("popstate", read);
new ResizeObserver(() => later("all")).observe(byId("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

setTheme(THEMES.includes(remembered.get()) ? remembered.get() : "system");
showHistoryLink().then((kept) => kept && later("all"));
ask("/api/jobs").then(({ jobs, trouble }) => {
  state.trouble = trouble;
  showTimeLegend(trouble);
  for (const line of jobs) state.jobs.set(line.job, line);
  const asked = new URLSearchParams(location.search);
  if (jobs.length === 1 && !["job", "node", "view"].some((name) => asked.has(name))) go({ job: jobs[0].job }, true);
  else read();
}).catch((error) => toast(error.message));
