// Elements, numbers for people, and line charts over time. Text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  return filled(made, attributes, children);
}

export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return (value / (letter === "k" ? 1e3 : unit)).toPrecision(digits) + " " + letter;
  }
  if (size < 1e-3) return "0";
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(digits)));
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let rest = value;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(rest) < 1024 || unit === "TiB") return `${unit === "B" ? rest : rest.toPrecision(3)} ${unit}`;
    rest /= 1024;
  }
  return "";
}

export const percent = (value) =>
  value === null || value === undefined ? "–" : `${(100 * value).toFixed(Math.abs(value) < 0.1 ? 1 : 0)} %`;

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 90) return `${whole} s`;
  if (whole < 5400) return `${Math.round(whole / 60)} min`;
  return `${Math.floor(whole / 3600)} h ${Math.round((whole % 3600) / 60)} min`;
}

const clock = (at, span) =>
  new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(span < 900 ? { second: "2-digit" } : {}) });

function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((it) => it * power).find((it) => it >= value);
}

// A chart of one or two curves of points {at, ...}; a gap where nothing was told for a while.
export class Chart {
  constructor(host, { title, keys, format, top = null }) {
    this.keys = keys;
    this.format = format;
    this.top = top;
    this.value = element("b");
    this.holder = element("div");
    this.figure = element("figure", {}, element("figcaption", {}, title, this.value), this.holder);
    this.holder.addEventListener("pointermove", (event) => this.point(event));
    this.holder.addEventListener("pointerleave", () => { this.at = null; this.paint(); });
    new ResizeObserver(() => this.paint()).observe(this.holder);
    this.at = null;
    this.points = [];
    host.append(this.figure);
  }

  show(points, begin, end) {
    Object.assign(this, { points, begin, end });
    this.paint();
  }

  point(event) {
    const box = this.holder.getBoundingClientRect();
    this.at = this.begin + ((event.clientX - box.left) / box.width) * (this.end - this.begin);
    this.paint();
  }

  paint() {
    const width = Math.max(this.holder.clientWidth, 120), height = 120, foot = 16;
    const { points, begin, end } = this;
    if (!(end > begin)) return;
    const most = Math.max(0, ...points.flatMap((point) => this.keys.map((key) => point[key] ?? 0)));
    const top = this.top ?? niceTop(most);
    const x = (at) => ((at - begin) / (end - begin)) * width;
    const y = (value) => (height - foot) * (1 - Math.min(value / top, 1));
    const parts = [
      drawn("path", { class: "axis", d: `M0 ${y(0)}H${width}M0 ${y(top / 2)}H${width}M0 0.5H${width}` }),
      drawn("text", { x: 0, y: 11 }, this.format(top)),
      drawn("text", { x: 0, y: height - 3 }, clock(begin, end - begin)),
      drawn("text", { x: width, y: height - 3, "text-anchor": "end" }, clock(end, end - begin)),
    ];
    const limit = Math.max(25, (end - begin) / 60);
    this.keys.forEach((key, which) => {
      let line = "", area = "", last = null, first = null;
      const close = () => { if (first !== null) area += `L${x(last.at)} ${y(0)}L${x(first)} ${y(0)}Z`; };
      for (const point of points) {
        if (point[key] === undefined || point[key] === null) continue;
        const joins = last !== null && point.at - last.at < limit;
        if (!joins) { close(); first = point.at; }
        const place = `${x(point.at).toFixed(1)} ${y(point[key]).toFixed(1)}`;
        line += (joins ? "L" : "M") + place;
        area += (joins ? "L" : `M${x(point.at).toFixed(1)} ${y(0)}L`) + place;
        last = point;
      }
      close();
      if (which === 0) parts.push(drawn("path", { class: "under", d: area }));
      parts.push(drawn("path", { class: which ? "curve second" : "curve", d: line }));
    });
    let shown = points.at(-1), note = "";
    if (this.at !== null && points.length) {
      shown = points.reduce((best, it) => (Math.abs(it.at - this.at) < Math.abs(best.at - this.at) ? it : best));
      parts.push(drawn("path", { class: "cross", d: `M${x(shown.at)} 0V${y(0)}` }));
      note = clock(shown.at, 0) + "  ";
    }
    this.value.textContent = shown ? note + this.keys.map((key) => this.format(shown[key])).join(" / ") : "–";
    this.holder.replaceChildren(
      drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.value.textContent }, parts));
  }
}
