// Tables, bars and tiles of a job.

import { bytes, duration, element, number, percent } from "./charts.js";

// Columns: [heading, row => cell (text or element), kind: "right" | "wrap" | ""].
export function table(rows, columns, empty = "none") {
  if (!rows.length) return element("p", { class: "quiet" }, empty);
  return element("table", {},
    element("thead", {}, element("tr", {}, columns.map(([name, , kind]) => element("th", { class: kind, scope: "col" }, name)))),
    element("tbody", {}, rows.map((row) => element("tr", {}, columns.map(([, cell, kind]) => element("td", { class: kind }, cell(row) ?? "–"))))));
}

export function tiles(job) {
  const now = job.now ?? {};
  const waits = now.wait_ratio;
  return [
    [number(now.tokens_per_s), "tokens / s"],
    [number(now.steps_per_s), "steps / s"],
    [percent(waits), "of ranks' time waiting"],
    [number(job.step_released), "step released"],
    [number(job.tokens), "tokens so far"],
    [number(job.imbalance_last ?? job.imbalance), "imbalance, max / mean"],
    [percent(job.fill), "rows full"],
    [number(now.workers_cpus), "CPUs of workers"],
  ].map(([value, name]) => element("div", { class: "tile" }, element("b", {}, value), element("span", {}, name)));
}

export function verdict(host, job) {
  const found = job.verdict;
  const said = found ?? { level: "", summary: job.waiting_for_ranks?.length ? `waits for ranks ${job.waiting_for_ranks.slice(0, 12).join(", ")}` : `${job.state}: no verdict yet`, evidence: [], command: "" };
  host.className = `card ${said.level}`;
  const since = said.since ? `${said.side} · ${said.stage || said.cause} · for ${duration(Date.now() / 1000 - said.since)}` : job.state;
  host.replaceChildren(
    element("strong", {}, said.summary), element("p", { class: "quiet" }, since),
    said.evidence?.length ? element("ul", {}, said.evidence.map((line) => element("li", {}, line))) : "",
    said.command ? element("pre", {}, said.command) : "");
}

function bar(share, mark = null, held = false) {
  const fill = element("div", { class: held ? "fill held" : "fill" });
  fill.style.width = `${Math.min(100 * share, 100)}%`;
  const made = element("div", { class: "track" }, fill);
  if (mark !== null) {
    const line = element("div", { class: "mark" });
    line.style.left = `calc(${Math.min(100 * mark, 100)}% - 1.5px)`;
    made.append(line);
  }
  return made;
}

function line(name, track, text) {
  return element("div", { class: "mix" }, element("span", { class: "name", title: name }, name), track, element("span", { class: "number" }, text));
}

export function mixture(sources) {
  const most = Math.max(1e-9, ...sources.flatMap((it) => [it.wanted, it.realised]));
  const shown = [...sources].sort((a, b) => b.wanted - a.wanted || b.realised - a.realised).slice(0, 24);
  const rows = shown.map((it) => line(it.name, bar(it.realised / most, it.wanted / most), `${percent(it.realised)} of ${percent(it.wanted)}`));
  const rest = sources.length - shown.length;
  return [...rows, rest > 0 ? element("p", { class: "quiet" }, `and ${rest} more: see Sources`) : ""];
}

export function rings(job) {
  const found = job.rings ?? [];
  const rows = found.slice(0, 32).map((ring) => {
    const held = ring.slots - ring.free - ring.ready;
    const name = `dp ${ring.dp_group}${ring.stage && ring.stage !== "all" ? ` ${ring.stage}` : ""}`;
    return line(name, bar(ring.ready / ring.slots, null, ring.ready === 0), `${ring.ready} of ${ring.slots} ready, ${held} held`);
  });
  if (job.pool) {
    const used = job.pool.capacity_bytes - job.pool.free_bytes;
    rows.push(line("pool", bar(used / Math.max(job.pool.capacity_bytes, 1)), `${bytes(used)} of ${bytes(job.pool.capacity_bytes)}`));
  }
  const rest = found.length - 32;
  return [...(rows.length ? rows : [element("p", { class: "quiet" }, "none yet")]),
    rest > 0 ? element("p", { class: "quiet" }, `and ${rest} more rings`) : ""];
}

export function sources(job) {
  const now = new Map((job.sources_now ?? []).map((it) => [it.name, it]));
  const dropped = (it) => Object.entries(it.dropped ?? {}).map(([reason, count]) => `${number(count)} ${reason}`).join(", ");
  const columns = [
    ["source", (it) => it.name, ""],
    ["wanted", (it) => percent(it.wanted), "right"],
    ["realised", (it) => percent(it.realised), "right"],
    ["tokens", (it) => number(it.drawn_tokens), "right"],
    ["samples", (it) => number(it.drawn_samples), "right"],
    ["trained", (it) => number(it.valid_tokens), "right"],
    ["waited for", (it) => waited(now.get(it.name)), "right"],
    ["workers", (it) => (now.get(it.name)?.workers ?? []).join(", ") || "–", "right"],
    ["host", (it) => now.get(it.name)?.host || "–", ""],
    ["dropped", (it) => (it.dropped_records ? element("span", { class: "warn" }, dropped(it) || number(it.dropped_records)) : "0"), "wrap"],
  ];
  if (job.sources?.some((it) => it.cost?.samples)) {
    columns.splice(6, 0,
      ["work / sample", (it) => (it.cost?.samples ? milliseconds(it.cost.work_ns_per_sample) : "–"), "right"],
      ["read wait", (it) => (it.cost?.samples ? milliseconds(it.cost.wait_ns_per_sample) : "–"), "right"],
      ["read / sample", (it) => (it.cost?.samples ? bytes(it.cost.bytes_per_sample) : "–"), "right"]);
  }
  return table(job.sources ?? [], columns, "The job has not begun.");
}

const milliseconds = (ns) => (ns < 1e4 ? `${number(ns / 1e3, 2)} µs` : `${number(ns / 1e6, 2)} ms`);

function waited(now) {
  if (!now) return "–";
  const text = `${now.waited_for_s} s`;
  return now.is_waited_for ? element("span", { class: "warn" }, `${text}, now`) : text;
}

export function workers(job) {
  const memory = new Map((job.workers ?? []).map((it) => [it.pid, it.memory ?? {}]));
  const rows = job.workers_now?.length ? job.workers_now : (job.workers ?? []).map((it) => ({ ...it, activity: "", activity_s: 0 }));
  return table(rows, [
    ["worker", (it) => `${it.role}${it.number >= 0 && it.number !== undefined ? ` ${it.number}` : ""}`, ""],
    ["pid", (it) => it.pid, "right"],
    ["does", (it) => [it.activity, it.source].filter(Boolean).join(" ") || "–", ""],
    ["for", (it) => (it.activity_s ? `${it.activity_s} s` : "–"), "right"],
    ["shard", (it) => it.shard || "–", "wrap"],
    ["CPU", (it) => `${number(it.cpu_s)} s`, "right"],
    ["own memory", (it) => bytes(memory.get(it.pid)?.pss_anon), "right"],
    ["shared", (it) => bytes(memory.get(it.pid)?.pss_shmem), "right"],
  ]);
}

export function daemon(found, cluster, clusterError) {
  const rows = [{ role: "daemon", pid: found.pid, cpu_s: found.cpu_s, memory: found.memory }, ...(found.processes ?? [])];
  const made = [
    element("p", { class: "quiet" }, `msd-daemon ${found.version}, up ${duration(found.uptime_s)}, ${found.clients} clients, budget ${bytes(found.memory_budget_bytes)} for pools and rings, ${found.socket}`),
  ];
  if (found.is_draining) made.push(element("p", { class: "warn" }, "It is draining: no new ranks."));
  if (found.waiting_for) made.push(element("p", { class: "wrong" }, `It waits for ${found.waiting_for}.`));
  if (clusterError) made.push(element("p", { class: "wrong" }, clusterError));
  made.push(table(rows, [
    ["process", (it) => it.role, ""], ["pid", (it) => it.pid, "right"], ["CPU", (it) => `${number(it.cpu_s)} s`, "right"],
    ["own memory", (it) => bytes(it.memory?.pss_anon), "right"], ["shared", (it) => bytes(it.memory?.pss_shmem), "right"],
  ]));
  if (cluster?.nodes) {
    const keys = [...new Set(cluster.nodes.flatMap((it) => Object.keys(it)))].filter((key) => cluster.nodes.every((it) => typeof it[key] !== "object"));
    made.push(element("h3", {}, "Cluster"), table(cluster.nodes, keys.map((key) => [key.replaceAll("_", " "), (it) => String(it[key] ?? "–"), ""])));
  }
  return made;
}
