// @ts-check
// The board of charts on a run's page: read once, then fed by what the run writes.

import { ChartView, COLORS } from "./charts.js";

/**
 * @typedef {import("./charts.js").Chart} Chart
 * @typedef {{title: string, question: string, charts: Chart[]}} Row
 * @typedef {{axis: string, rows: Row[], others: string[], last_step: number | null, position: number,
 *   names: string[], zeros: string[]}} BoardData
 */

const MANY_LINES = 4;
const OWN = new Set(["step", "time", "attempt"]);

class Board {
  /** @param {HTMLElement} place */
  constructor(place) {
    this.place = place;
    this.api = place.dataset.api; // of one run, which can be followed
    this.settings = { axis: "step", smooth: Number(localStorage.getItem("palestra-smooth") ?? 0) };
    /** @type {ChartView[]} */
    this.views = [];
    /** @type {[number, number] | null} */
    this.range = null;
    /** @type {BoardData | null} */
    this.data = null;
    this.position = 0;
    this.attempt = /** @type {unknown} */ (undefined);
    this.handlers = {
      onBrush: (/** @type {number} */ low, /** @type {number} */ high) => this.zoom([low, high]),
      onReset: () => this.zoom(null),
      onPoint: (/** @type {number} */ step) => this.openStep(step, false),
    };
  }

  async read() {
    const query = new URLSearchParams({ x: this.settings.axis, points: "1000" });
    if (this.range) {
      query.set("low", String(this.range[0]));
      query.set("high", String(this.range[1]));
    }
    const charts = place?.dataset.charts ?? "";
    const answer = await fetch(`${charts}${charts.includes("?") ? "&" : "?"}${query}`);
    if (!answer.ok) return this.complain((await answer.json()).error?.message ?? answer.statusText);
    this.data = /** @type {BoardData} */ (await answer.json());
    this.position = this.data.position;
    this.build();
  }

  /** @param {string} message */
  complain(message) {
    const text = document.createElement("p");
    text.className = "empty";
    text.textContent = message;
    this.place.replaceChildren(text);
    this.place.setAttribute("aria-busy", "false");
  }

  build() {
    const data = this.data;
    if (!data) return;
    for (const view of this.views) view.plot?.destroy();
    this.views = [];
    this.place.replaceChildren();
    this.place.setAttribute("aria-busy", "false");
    if (!data.rows.length) return this.complain("No step is done yet. The charts appear with the first one.");
    for (const row of data.rows) this.place.append(this.#section(row));
    if (data.others.length) this.place.append(this.#others(data.others));
    // The places have a width only when they are on the page.
    for (const make of this.waiting.splice(0)) make();
  }

  /** @type {(() => void)[]} */
  waiting = [];

  /** @param {Row} row */
  #section(row) {
    const section = document.createElement("section");
    const head = element("div", "row-title", [element("h2", "", [row.title]), element("span", "muted", [row.question])]);
    const grid = element("div", "charts", row.charts.map((chart) => this.#card(chart)));
    section.append(head, grid);
    return section;
  }

  /** @param {Chart} chart */
  #card(chart) {
    const about = element("div", "", [explanations(chart)]);
    about.popover = "auto";
    about.id = `about-${chart.title.replaceAll(/\W+/g, "-")}`;
    const ask = /** @type {HTMLButtonElement} */ (element("button", "", ["?"]));
    ask.type = "button";
    ask.setAttribute("aria-label", `What ${chart.title} means`);
    ask.popoverTargetElement = about;
    const values = chart.series.lines.map(() => element("b", "", []));
    const legend = element("ul", "legend", chart.series.lines.map((line, i) =>
      element("li", "", [element("span", `swatch swatch-${i % COLORS}`, []), named(line.label), values[i]])));
    const plot = element("div", "plot", []);
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `Chart of ${chart.title}: ${chart.series.lines.map((line) => line.label).join(", ")}`);
    const card = element("article", "chart", [
      element("div", "chart-head", [element("h3", "", [chart.title]), ask]), legend, plot, about,
    ]);
    card.dataset.chart = chart.title;
    if (chart.series.lines.length > MANY_LINES) card.classList.add("wide");
    this.waiting.push(() => {
      const isEval = chart.series.lines.every((line) => line.name.startsWith("eval/"));
      const handlers = { ...this.handlers, onPoint: (/** @type {number} */ step) => this.openStep(step, isEval) };
      const view = new ChartView(plot, chart, this.settings, handlers);
      view.legend = values;
      view.range = this.range;
      view.showValues(null);
      this.views.push(view);
    });
    return card;
  }

  /** @param {string[]} names */
  #others(names) {
    const grid = element("div", "charts", []);
    const details = /** @type {HTMLDetailsElement} */ (
      element("details", "others", [element("summary", "", [`Every other metric (${names.length})`]), grid])
    );
    details.addEventListener("toggle", async () => {
      if (!details.open || grid.childElementCount) return;
      for (let at = 0; at < names.length; at += 40) {
        const query = new URLSearchParams({ x: this.settings.axis, points: "5000" });
        for (const name of names.slice(at, at + 40)) query.append("name", name);
        /** @type {import("./charts.js").Series} */
        const series = await (await fetch(`${this.api}/series?${query}`)).json();
        for (const line of series.lines) {
          const chart = { title: line.name, series: { ...series, lines: [line] }, band: [], is_stacked: false, is_share: false };
          grid.append(this.#card(chart));
        }
        for (const make of this.waiting.splice(0)) make();
      }
    });
    return details;
  }

  /** @param {[number, number] | null} range */
  zoom(range) {
    this.range = range;
    this.place.dataset.range = range ? range.join(" ") : "";
    const button = document.getElementById("unzoom");
    if (button) button.hidden = range === null;
    const isSampled = this.data?.rows.some((row) => row.charts.some((chart) => chart.series.is_sampled));
    if (isSampled || this.wasSampled) {
      this.wasSampled = true; // points that were left out are worth having now, and all of them later
      this.read();
    } else {
      for (const view of this.views) view.zoom(range);
    }
  }

  /** @param {number} step @param {boolean} isEval */
  openStep(step, isEval) {
    if (!this.place.dataset.rollouts) return;
    location.href = `${this.place.dataset.rollouts}?step=${step}${isEval ? "&part=eval" : ""}`;
  }

  /** Whether a metric was not there, or left out so far. @param {string} name @param {unknown} value */
  #isNews(name, value) {
    return !this.data?.names.includes(name) || (value !== 0 && this.data.zeros.includes(name));
  }

  /** @param {Record<string, unknown>} row */
  add(row) {
    const step = Number(row.step);
    const last = this.data?.last_step ?? -1;
    const isNew = Object.keys(row).some((name) => !OWN.has(name) && typeof row[name] === "number" && this.#isNews(name, row[name]));
    const isAgain = this.attempt !== undefined && row.attempt !== this.attempt;
    this.attempt = row.attempt;
    if (!this.data || isNew || isAgain || step < last || this.settings.axis !== "step" || this.range) {
      clearTimeout(this.later);
      this.later = setTimeout(() => this.read(), 300);
      return;
    }
    this.data.last_step = step;
    for (const view of this.views) view.append(step, row);
  }
}

/** A line's name, which is shortened where it is longer than the chart is wide. @param {string} label */
function named(label) {
  const name = element("span", "line-name", [label]);
  name.title = label;
  return name;
}

/** @param {Chart} chart */
function explanations(chart) {
  const list = document.createElement("dl");
  const seen = new Set();
  for (const line of [...chart.series.lines, ...chart.band]) {
    const known = line.description?.name ?? line.name;
    if (seen.has(known)) continue;
    seen.add(known);
    list.append(element("dt", "", [known]));
    list.append(element("dd", "", line.description ? withCode(line.description.meaning) : ["The environment's own metric."]));
    if (line.description?.healthy) list.append(element("dd", "", ["Healthy: ", ...withCode(line.description.healthy)]));
  }
  return list;
}

/** @param {string} text */
function withCode(text) {
  return text.split("`").map((part, i) => (i % 2 ? element("code", "", [part]) : part));
}

/** @param {string} tag @param {string} className @param {(Node | string)[]} content */
function element(tag, className, content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

/** Follows the run while the page is seen: a browser has few connections to one server. @param {Board} board */
function follow(board) {
  const sign = document.getElementById("live");
  /** @type {EventSource | null} */
  let source = null;
  const stop = () => {
    source?.close();
    source = null;
  };
  const start = () => {
    stop();
    source = new EventSource(`${board.api}/live?after=${board.position}`);
    source.addEventListener("metrics", (event) => {
      board.position = Number(event.lastEventId);
      board.add(JSON.parse(event.data));
      document.body.dispatchEvent(new CustomEvent("run-changed"));
    });
    source.addEventListener("state", (event) => {
      const { status } = JSON.parse(event.data);
      if (sign) sign.textContent = status === "running" ? "live" : "";
      if (known !== undefined && known !== status) document.body.dispatchEvent(new CustomEvent("run-changed"));
      known = status;
    });
    source.addEventListener("gone", () => {
      stop();
      board.complain("The folder of this run was deleted.");
    });
    source.onerror = () => {
      if (sign) sign.textContent = "reconnecting…";
    };
  };
  /** @type {string | undefined} */
  let known;
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  if (!document.hidden) start();
}

const place = document.getElementById("board");
if (place) {
  const board = new Board(place);
  const slider = /** @type {HTMLInputElement} */ (document.getElementById("smooth"));
  slider.value = String(board.settings.smooth);
  slider.addEventListener("input", () => {
    board.settings.smooth = Number(slider.value);
    localStorage.setItem("palestra-smooth", slider.value);
    for (const view of board.views) view.redraw();
  });
  for (const choice of document.querySelectorAll("input[name=axis]")) {
    choice.addEventListener("change", () => {
      board.settings.axis = /** @type {HTMLInputElement} */ (choice).value;
      board.range = null;
      board.zoom(null);
      board.read();
    });
  }
  document.getElementById("unzoom")?.addEventListener("click", () => board.zoom(null));
  document.addEventListener("theme-changed", () => board.views.forEach((view) => view.redraw()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => board.views.forEach((view) => view.redraw()));
  new ResizeObserver(() => board.views.forEach((view) => view.resize())).observe(place);
  board.read().then(() => board.api && follow(board));
}
