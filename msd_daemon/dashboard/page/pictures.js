// The place tree with ranks coloured by load, and where a step's tokens flow.

import { drawn, number, percent } from "./charts.js";

const COLOURS = ["#3b7dd8", "#d9822b", "#3a9d6a", "#9a5fc0", "#c94f6d", "#3aa0b0", "#8a8d2f", "#7a6a5c", "#5566cc", "#b0763a", "#5b9b3e", "#a8559b"];
const OTHERS = "#8a929c";
const GROUPS_MAX = 24;

function colour(variable) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
  return [1, 3, 5].map((begin) => parseInt(text.slice(begin, begin + 2), 16));
}

function blended(share) {
  const [low, high] = [colour("--load0"), colour("--load1")];
  return `rgb(${low.map((it, index) => Math.round(it + (high[index] - it) * share)).join(" ")})`;
}

export function places(host, job, node) {
  const stage = new Map(job.ranks.map((rank) => [rank.rank, rank.stage]));
  const now = job.ranks_now.length ? job.ranks_now : job.ranks.map((rank) => ({ ...rank, node, load: null, waiting_s: 0, state: "" }));
  const tree = new Map();
  for (const rank of now) {
    const groups = tree.get(rank.node) ?? tree.set(rank.node, new Map()).get(rank.node);
    (groups.get(rank.dp_group) ?? groups.set(rank.dp_group, []).get(rank.dp_group)).push(rank);
  }
  const width = Math.max(host.clientWidth, 260), cell = now.length > 256 ? 14 : 30, gap = 12;
  const parts = [];
  const mesh = job.mesh.map(([axis, size]) => `${axis} ${size}`).join(" × ") || "no mesh";
  const middle = width / 2;
  parts.push(drawn("rect", { class: "group", x: middle - 70, y: 1, width: 140, height: 24, rx: 12 }),
    drawn("text", { class: "strong", x: middle, y: 17, "text-anchor": "middle" }, mesh));
  let y = 44;
  for (const [name, groups] of tree) {
    parts.push(drawn("path", { class: "edge", d: `M${middle} 25V${y - 14}` }),
      drawn("text", { class: "strong", x: middle, y: y - 1, "text-anchor": "middle" }, name));
    const knot = y + 5;
    y += 30;
    let x = 0, tall = 0;
    const rows = [[]];
    for (const [group, ranks] of [...groups].sort((a, b) => a[0] - b[0])) {
      const wide = Math.max(Math.min(ranks.length, 8) * cell + 12, 52);
      if (x + wide > width && x > 0) { rows.push([]); x = 0; }
      rows.at(-1).push([group, ranks, wide]);
      x += wide + gap;
    }
    rows.forEach((row, number_) => {
      const total = row.reduce((sum, it) => sum + it[2] + gap, -gap);
      x = Math.max((width - total) / 2, 0);
      tall = 0;
      for (const [group, ranks, wide] of row) {
        const lines = Math.ceil(ranks.length / 8), high = lines * cell + 26;
        if (number_ === 0) parts.push(drawn("path", { class: "edge", d: `M${middle} ${knot}V${knot + 8}H${x + wide / 2}V${y}` }));
        parts.push(drawn("rect", { class: "group", x, y, width: wide, height: high, rx: 8 }),
          drawn("text", { x: x + wide / 2, y: y + high - 6, "text-anchor": "middle" }, cell < 20 ? String(group) : `dp ${group}`));
        ranks.sort((a, b) => a.rank - b.rank).forEach((rank, index) => parts.push(...rankCell(rank, stage.get(rank.rank), x + 6 + (index % 8) * cell + Math.max(0, (wide - 12 - Math.min(ranks.length, 8) * cell) / 2), y + 6 + Math.floor(index / 8) * cell, cell)));
        x += wide + gap;
        tall = Math.max(tall, high);
      }
      y += tall + gap;
    });
    y += 22;
  }
  host.replaceChildren(drawn("svg", { viewBox: `0 0 ${width} ${Math.max(y - 24, 30)}`, role: "img", "aria-label": "Ranks by node and DP group, coloured by load" }, parts));
}

function rankCell(rank, stage, x, y, cell) {
  const load = rank.load ?? 0;
  const state = "TtZ".includes(rank.state || "-") ? " stopped" : rank.waiting_s > 1 ? " waiting" : "";
  const said = [`rank ${rank.rank}`, stage && `stage ${stage}`, rank.load !== null && `load ${percent(load)} of the heaviest group's`,
    rank.waiting_s > 0 && `waits for ${rank.waiting_s} s`, state === " stopped" && "its process is stopped"].filter(Boolean).join(", ");
  const parts = [drawn("rect", { class: "cell" + state, x: x + 1, y: y + 1, width: cell - 2, height: cell - 2, rx: 4, fill: blended(load) }, drawn("title", {}, said))];
  if (cell >= 20) {
    const ink = load > 0.55 ? "--load-ink1" : "--load-ink0";
    const label = drawn("text", { x: x + cell / 2, y: y + cell / 2 + 4, "text-anchor": "middle", "pointer-events": "none" }, String(rank.rank));
    label.style.fill = `var(${ink})`;
    parts.push(label);
  }
  return parts;
}

// Sources on the left, DP groups on the right, a ribbon for the tokens that go from one to the other.
export function flow(host, step) {
  const sizes = new Map(), groups = new Map(), ribbons = new Map();
  for (const [source, , tokens] of step.flow) sizes.set(source, (sizes.get(source) ?? 0) + tokens);
  const ranked = [...sizes].sort((a, b) => b[1] - a[1]).map(([name]) => name);
  const kept = new Set(ranked.slice(0, COLOURS.length));
  const fold = Math.ceil(Math.max(step.groups.length, 1) / GROUPS_MAX);
  for (const [source, group, tokens] of step.flow) {
    const from = kept.has(source) ? source : "others", to = Math.floor(group / fold);
    const key = JSON.stringify([from, to]);
    ribbons.set(key, (ribbons.get(key) ?? 0) + tokens);
    groups.set(to, (groups.get(to) ?? 0) + tokens);
  }
  const names = [...ranked.slice(0, COLOURS.length), ...(ranked.length > COLOURS.length ? ["others"] : [])];
  const left = new Map(names.map((name) => [name, 0]));
  for (const [key, tokens] of ribbons) { const [from] = JSON.parse(key); left.set(from, left.get(from) + tokens); }
  const total = [...left.values()].reduce((sum, it) => sum + it, 0) || 1;
  const width = Math.max(host.clientWidth, 260), most = Math.max(names.length, groups.size);
  const height = Math.max(140, most * 22), pad = 4, inset = Math.min(150, width * 0.3), right = Math.min(110, width * 0.25);
  const scale = (height - pad * most) / total;
  const tops = new Map(), parts = [];
  let y = 0;
  names.forEach((name, index) => {
    const high = Math.max(left.get(name) * scale, 1), fill = name === "others" ? OTHERS : COLOURS[index];
    parts.push(drawn("rect", { x: inset, y, width: 8, height: high, fill }),
      drawn("text", { class: "strong", x: inset - 6, y: y + Math.min(high / 2 + 4, height - 2), "text-anchor": "end" }, shortened(name, inset)),
      drawn("title", {}, name));
    tops.set(name, [y, fill]);
    y += high + pad;
  });
  const ends = new Map();
  y = 0;
  for (const group of [...groups.keys()].sort((a, b) => a - b)) {
    const high = Math.max(groups.get(group) * scale, 1), last = Math.min((group + 1) * fold, step.groups.length) - 1;
    const label = fold === 1 ? `dp ${group}` : `dp ${group * fold}–${last}`;
    parts.push(drawn("rect", { x: width - right - 8, y, width: 8, height: high, fill: "currentColor", opacity: 0.5 }),
      drawn("text", { class: "strong", x: width - right + 6, y: y + high / 2 + 4 }, `${label}  ${number(groups.get(group))}`));
    ends.set(group, y);
    y += high + pad;
  }
  for (const name of names) {
    for (const group of [...groups.keys()].sort((a, b) => a - b)) {
      const tokens = ribbons.get(JSON.stringify([name, group]));
      if (!tokens) continue;
      const high = tokens * scale, [from, fill] = tops.get(name), to = ends.get(group);
      const [a, b] = [inset + 8, width - right - 8], middle = (a + b) / 2;
      parts.push(drawn("path", {
        class: "ribbon", fill,
        d: `M${a} ${from}C${middle} ${from} ${middle} ${to} ${b} ${to}V${to + high}C${middle} ${to + high} ${middle} ${from + high} ${a} ${from + high}Z`,
      }, drawn("title", {}, `${name} → dp ${group}: ${tokens.toLocaleString()} tokens`)));
      tops.set(name, [from + high, fill]);
      ends.set(group, to + high);
    }
  }
  host.replaceChildren(drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Tokens of step ${step.step} from sources to DP groups` }, parts));
}

function shortened(name, room) {
  const most = Math.max(Math.floor(room / 7), 6);
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
}
