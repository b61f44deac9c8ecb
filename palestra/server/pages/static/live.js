// @ts-check
// The page of the server: charts that go on by server-sent events, tables that are read again.

import { ChartView } from "../charts.js";

/** @typedef {import("../charts.js").Chart} Chart */

const MOST_POINTS = 1800; // an hour
const TABLES_EVERY_MS = 2000;
const NOTHING = { onBrush: () => {}, onReset: () => {}, onPoint: () => {} };

/** @param {HTMLElement} place @param {Record<string, Chart[]>} charts */
function draw(place, charts) {
  /** @type {ChartView[]} */
  const views = [];
  for (const section of place.querySelectorAll("section[data-engine]")) {
    const known = charts[/** @type {HTMLElement} */ (section).dataset.engine ?? ""] ?? [];
    for (const chart of known) {
      const card = section.querySelector(`[data-chart="${CSS.escape(chart.title)}"]`);
      const plot = card?.querySelector(".plot");
      if (!(plot instanceof HTMLElement)) continue;
      const view = new ChartView(plot, chart, { axis: "time", smooth: 0 }, NOTHING);
      view.legend = [...card.querySelectorAll(".legend b")].map((value) => /** @type {HTMLElement} */ (value));
      view.showValues(null);
      views.push(view);
    }
  }
  return views;
}

/** @param {ChartView[]} views @param {Record<string, number>} row */
function add(views, row) {
  for (const view of views) {
    const { series } = view.chart;
    if (series.x.length >= MOST_POINTS) {
      series.x.shift();
      series.steps.shift();
      for (const line of series.lines) line.values.shift();
    }
    view.append(row.at, row);
  }
}

/** Follows the server while the page is seen. @param {string} api @param {ChartView[]} views */
function follow(api, views) {
  const sign = document.getElementById("live");
  /** @type {EventSource | null} */
  let source = null;
  let readAt = 0;
  const stop = () => {
    source?.close();
    source = null;
  };
  const start = () => {
    stop();
    source = new EventSource(`${api}/live`);
    source.addEventListener("point", (event) => {
      if (sign) sign.textContent = "live";
      add(views, JSON.parse(event.data));
      if (Date.now() - readAt < TABLES_EVERY_MS) return;
      readAt = Date.now();
      document.body.dispatchEvent(new CustomEvent("server-changed"));
    });
    source.onerror = () => {
      if (sign) sign.textContent = "reconnecting…";
    };
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
  if (!document.hidden) start();
}

const place = document.getElementById("server");
if (place) {
  const api = place.dataset.api ?? "";
  const answer = await fetch(`${api}/charts`);
  const views = draw(place, answer.ok ? await answer.json() : {});
  const redraw = () => views.forEach((view) => view.redraw());
  document.addEventListener("theme-changed", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(() => views.forEach((view) => view.resize())).observe(place);
  follow(api, views);
}
