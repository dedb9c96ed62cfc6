// What is known of the job that is looked at: moments, whole or as what changed, put together.

/** A moment of a whole message. Letters are a byte a rank. */
export function whole(message) {
  const moment = { job: message.job, n: message.n, time: message.time, point: message.point, parts: { ...message.parts } };
  moment.letters = letters(message.parts.grid);
  return moment;
}

/** The next moment, or null where the message builds on one that is not here. */
export function following(moment, message) {
  if (message.after === null) return whole(message);
  if (moment === null || moment.n !== message.after || moment.job !== message.job) return null;
  const next = { job: message.job, n: message.n, time: message.time, point: message.point, parts: { ...moment.parts, ...message.parts } };
  next.letters = message.parts.grid ? letters(message.parts.grid) : moment.letters;
  if (message.cells) {
    next.letters = moment.letters.slice();
    for (const [at, letter] of message.cells) next.letters[at] = letter.charCodeAt(0);
  }
  return next;
}

/** "3rX" as bytes of "rrrX". */
function letters(grid) {
  const found = new Uint8Array(grid.count);
  let at = 0, run = 0;
  for (const ch of grid.letters) {
    const code = ch.charCodeAt(0);
    if (code >= 48 && code <= 57) run = run * 10 + code - 48;
    else {
      found.fill(code, at, at += run || 1);
      run = 0;
    }
  }
  return found;
}

/** The rank of a cell, or null where it is not known. */
export function rankOf(moment, place) {
  const ranks = moment.parts.grid.ranks;
  return ranks === null ? place : ranks[place];
}

export function placeOf(moment, rank) {
  const ranks = moment.parts.grid.ranks;
  const place = ranks === null ? rank : ranks.indexOf(rank);
  return place >= 0 && place < moment.letters.length ? place : -1;
}

// --- the server ------------------------------------------------------------------------------------------------------

/** JSON of an address, or an error whose message is for people. */
export async function ask(path, parameters = {}) {
  const query = new URLSearchParams(parameters);
  const answer = await fetch(`${path}?${query}`, { credentials: "same-origin", headers: { accept: "application/json" } });
  if (answer.status === 401) {
    location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
    throw new Error("not signed in");
  }
  const data = await answer.json().catch(() => ({ error: `the server said ${answer.status}` }));
  if (!answer.ok) throw new Error(data.error ?? `the server said ${answer.status}`);
  return data;
}

/** The stream of what changes. It is let go while nobody looks at the page, and taken up again where that ends. */
export class Stream {
  constructor(told) {
    this.told = told;
    this.job = "";
    this.source = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open(this.job)));
  }

  open(job) {
    this.job = job;
    this.close();
    this.told.state("wait");
    const source = new EventSource(`/api/events?${new URLSearchParams({ job })}`);
    source.addEventListener("open", () => this.told.state("live"));
    source.addEventListener("error", () => {
      this.told.state("lost");
      // A stream that was refused does not come back by itself.
      if (source.readyState === EventSource.CLOSED && this.source === source) {
        ask("/api/jobs").catch(() => null);
        setTimeout(() => this.source === source && this.open(this.job), 3000);
      }
    });
    source.addEventListener("jobs", (event) => this.told.jobs(JSON.parse(event.data)));
    source.addEventListener("moment", (event) => this.told.moment(JSON.parse(event.data)));
    this.source = source;
  }

  close() {
    this.source?.close();
    this.source = null;
  }
}
