// Asks for the node's snapshot once a second and paints what changed.

import { Chart, bytes, element, number, percent } from "./charts.js";
import { flow, places } from "./pictures.js";
import * as tables from "./tables.js";

const by = (id) => document.getElementById(id);
const LOOK_MS = 1000, LIVE_MAX = 400, HISTORY_LOOK_S = 30;
const state = { job: null, span: 300, live: new Map(), history: [], historyAt: 0, historyOf: "", last: null, painted: new Map() };

const charts = [
  new Chart(by("charts"), { title: "tokens / s", keys: ["tokens_per_s"], format: number }),
  new Chart(by("charts"), { title: "ranks waiting, mean / worst", keys: ["wait_ratio", "wait_ratio_max"], format: percent, top: 1 }),
  new Chart(by("charts"), { title: "slots ready or held", keys: ["ready_ratio"], format: percent, top: 1 }),
  new Chart(by("charts"), { title: "pool used", keys: ["pool_used_bytes"], format: (it) => bytes(Math.round(it ?? 0)) }),
  new Chart(by("charts"), { title: "CPUs of workers", keys: ["workers_cpus"], format: number }),
  new Chart(by("charts"), { title: "steps / s", keys: ["steps_per_s"], format: number }),
];

async function ask(path) {
  const answer = await fetch(path, { credentials: "same-origin", cache: "no-store" });
  const body = await answer.json().catch(() => ({ error: `answer ${answer.status}` }));
  if (!answer.ok) throw new Error(body.error ?? `answer ${answer.status}`);
  return body;
}

function told(kind, text) {
  const link = by("link");
  link.firstElementChild.className = `dot ${kind}`;
  link.lastElementChild.textContent = text;
}

// Paints a part only where its data changed, so that a selection or an open tooltip stays.
function part(name, data, paint) {
  const print = JSON.stringify(data);
  if (state.painted.get(name) === print) return;
  state.painted.set(name, print);
  paint();
}

function chosen(snapshot) {
  const jobs = snapshot.jobs, pick = by("job");
  part("jobs", [jobs.map((job) => [job.id, job.name, job.state]), state.job], () => {
    if (!jobs.some((job) => job.id === state.job)) state.job = jobs[0]?.id ?? null;
    pick.replaceChildren(...jobs.map((job) => element("option", { value: job.id, selected: job.id === state.job }, `${job.name} (${job.state})`)));
    pick.disabled = !jobs.length;
  });
  return jobs.find((job) => job.id === state.job) ?? null;
}

function remember(snapshot) {
  for (const job of snapshot.jobs) {
    if (!job.now?.at) continue;
    const points = state.live.get(job.id) ?? [];
    if (points.at(-1)?.at !== job.now.at) points.push(job.now);
    state.live.set(job.id, points.slice(-LIVE_MAX));
  }
}

function paintCharts(job, at) {
  const live = state.live.get(job.id) ?? [];
  const first = live[0]?.at ?? Infinity;
  const old = state.historyOf === job.id ? state.history : [];
  const points = state.span > 600 ? [...old, ...live.filter((it) => it.at > (old.at(-1)?.at ?? 0)).filter((_, index) => index % 10 === 9)] : [...old.filter((it) => it.at < first), ...live];
  // A job that is younger than the span has the whole width, from a minute on.
  const begin = Math.max(at - state.span, Math.min(points[0]?.at ?? at, at - 60));
  const shown = points.filter((it) => it.at >= begin);
  for (const chart of charts) chart.show(shown, begin, at);
}

function paintJob(job, snapshot) {
  tables.verdict(by("verdict"), job);
  by("figures").replaceChildren(...tables.tiles(job));
  paintCharts(job, snapshot.at);
  by("mixunit").textContent = `bars: what was drawn, by ${job.mixture_unit ?? "–"}; lines: what is wanted`;
  part("mixture", [job.id, job.sources], () => by("mixture").replaceChildren(...tables.mixture(job.sources ?? [])));
  part("rings", [job.id, job.rings, job.pool], () => by("rings").replaceChildren(...tables.rings(job)));
  const wide = by("places").clientWidth, theme = document.documentElement.dataset.theme ?? matchMedia("(prefers-color-scheme: dark)").matches;
  part("places", [job.id, job.ranks, job.ranks_now.map((it) => [it.rank, it.load, it.waiting_s > 1, it.state]), wide, theme], () => places(by("places"), job, snapshot.node));
  by("placesnote").textContent = "Ranks of this node by DP group; the darker, the more attention pairs of the last planned step; an orange frame: waits for data; red: stopped.";
  part("graph", [job.id, job.step, wide], () => {
    if (job.step) flow(by("graph"), job.step);
    else by("graph").replaceChildren(element("p", { class: "quiet" }, "No step is planned yet."));
  });
  by("stepnote").textContent = job.step ? `step ${job.step.step}: ${number(job.step.rows)} rows, ${number(job.step.valid_tokens)} valid tokens; drawn from sources, packed into rows, balanced over DP groups` : "";
  part("sources", [job.id, job.sources, job.sources_now], () => by("sources").replaceChildren(tables.sources(job)));
  part("workers", [job.id, job.workers_now, job.workers], () => by("workers").replaceChildren(tables.workers(job)));
  part("sourcenames", [job.id, (job.sources ?? []).map((it) => it.name)], () =>
    by("byrecord").elements.source.replaceChildren(...(job.sources ?? []).map((it) => element("option", {}, it.name))));
}

function paint(snapshot) {
  state.last = snapshot;
  remember(snapshot);
  const job = chosen(snapshot);
  by("idle").hidden = job !== null;
  by("jobview").hidden = job === null;
  by("node").textContent = snapshot.node;
  document.title = job?.verdict ? `${job.verdict.level} · msd ${snapshot.node}` : `msd ${snapshot.node}`;
  if (job) paintJob(job, snapshot);
  by("daemon").replaceChildren(...tables.daemon(snapshot.daemon, snapshot.cluster, snapshot.cluster_error));
}

async function look() {
  if (document.hidden) return;
  try {
    const now = Date.now() / 1000;
    const wants = state.span > 600 || !state.historyAt ? now - state.historyAt > HISTORY_LOOK_S : state.historyOf !== state.job;
    const snapshot = await ask(wants ? `api/snapshot?history_s=${Math.max(state.span, 600)}` : "api/snapshot");
    if (wants) {
      const job = snapshot.jobs.find((it) => it.id === state.job) ?? snapshot.jobs[0];
      Object.assign(state, { history: job?.history ?? [], historyAt: now, historyOf: job?.id ?? "" });
    }
    paint(snapshot);
    const draining = snapshot.daemon.is_draining || snapshot.daemon.waiting_for;
    told(draining ? "slow" : "good", draining ? "needs a look" : "live");
  } catch (error) {
    told("bad", error.message.slice(0, 160));
  }
}

async function search(form, path, note, show) {
  const where = by("lineagenote");
  where.textContent = "reads the journal and the records …";
  by("lineage").replaceChildren();
  try {
    const asked = new URLSearchParams(new FormData(form));
    asked.set("job", state.last?.jobs.find((it) => it.id === state.job)?.name ?? "");
    const found = await ask(`${path}?${asked}`);
    where.textContent = note(found);
    by("lineage").replaceChildren(show(found));
  } catch (error) {
    where.textContent = error.message;
  }
}

by("bystep").addEventListener("submit", (event) => {
  event.preventDefault();
  search(event.target, "api/lineage", (found) => `step ${found.step}, generation ${found.generation}: ${found.total} segments; digest ${found.digest.slice(0, 16)} as journalled`,
    (found) => tables.table(found.rows, [
      ["dp", (it) => it.dp_group, "right"], ["microbatch", (it) => it.microbatch, "right"], ["row", (it) => it.row, "right"],
      ["column", (it) => it.column, "right"], ["tokens", (it) => it.length, "right"], ["source", (it) => it.source, ""],
      ["key", (it) => it.key || "–", ""], ["place", (it) => `${it.place_name} ${it.place}`, ""], ["shard", (it) => it.shard, "wrap"],
      ["epoch", (it) => it.epoch, "right"], ["ranks", (it) => it.ranks.join(", "), "wrap"],
    ]));
});

by("byrecord").addEventListener("submit", (event) => {
  event.preventDefault();
  search(event.target, "api/find", (found) => `${found.total} occurrences of ${found.key} in ${found.source}`,
    (found) => tables.table(found.occurrences.flatMap((it) => (it.deliveries.length ? it.deliveries.map((at) => ({ ...it, ...at })) : [it])), [
      ["generation", (it) => it.generation, "right"], ["fate", (it) => [it.fate, it.reason].filter(Boolean).join(": "), ""],
      ["step", (it) => it.step, "right"], ["dp", (it) => it.dp_group, "right"], ["row", (it) => it.row, "right"],
      ["tokens", (it) => it.length ?? it.tokens, "right"], ["epoch", (it) => it.epoch, "right"],
      ["shard", (it) => it.name?.shard, "wrap"], ["ranks", (it) => (it.ranks ?? []).join(", "), "wrap"],
    ], "It was not delivered in what the journal keeps."));
});

by("loadbad").addEventListener("click", async () => {
  try {
    const job = state.last?.jobs.find((it) => it.id === state.job)?.name ?? "";
    const page = await ask(`api/bad?job=${encodeURIComponent(job)}`);
    by("bad").replaceChildren(
      element("p", { class: "quiet" }, `${page.total} in all${page.total > page.records.length ? `, the first ${page.records.length} here; msdctl bad lists more` : ""}`),
      tables.table(page.records, [
        ["source", (it) => it.source, ""], ["status", (it) => it.status, ""], ["drawn", (it) => (it.is_drawn ? "yes" : "ahead"), ""],
        ["key", (it) => it.key || "–", ""], ["place", (it) => `${it.place_name} ${it.place}`, ""],
        ["what is wrong", (it) => it.text, "wrap"], ["shard", (it) => it.shard, "wrap"],
      ], "No bad record so far."));
  } catch (error) {
    by("bad").replaceChildren(element("p", { class: "wrong" }, error.message));
  }
});

by("job").addEventListener("change", (event) => { state.job = event.target.value; state.historyAt = 0; look(); });
for (const button of by("spans").children) {
  button.addEventListener("click", () => {
    state.span = Number(button.dataset.span);
    state.historyAt = 0;
    for (const other of by("spans").children) other.setAttribute("aria-pressed", String(other === button));
    look();
  });
}

const THEMES = ["system", "light", "dark"];
function themed(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  by("theme").textContent = `theme: ${name}`;
}
by("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % THEMES.length];
  localStorage.setItem("msd-theme", next);
  themed(next);
});
themed(new URLSearchParams(location.search).get("theme") ?? localStorage.getItem("msd-theme") ?? "system");
addEventListener("resize", () => { if (state.last) paint(state.last); });

(async () => {
  for (;;) {
    await look();
    await new Promise((done) => setTimeout(done, LOOK_MS));
  }
})();
