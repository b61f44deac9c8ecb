// @ts-check
// One chart: lines, a band or stacked areas, drawn by uPlot in the page's colours.

import uPlot from "./vendor/uPlot.esm.js";

/**
 * @typedef {{name: string, meaning: string, healthy: string}} Words
 * @typedef {{name: string, label: string, words: Words | null, values: (number | null)[]}} Line
 * @typedef {{x: number[], steps: number[], lines: Line[], is_sampled: boolean}} Series
 * @typedef {{title: string, series: Series, band: Line[], is_stacked: boolean, is_share: boolean}} Chart
 * @typedef {{onBrush: (low: number, high: number) => void, onReset: () => void, onPoint: (step: number) => void}} Handlers
 */

export const COLORS = 8;
const HEIGHT = 150;
const FEW_POINTS = 40;
const SYNC = uPlot.sync("board");

/** @param {string} name */
function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** @param {number} index @param {number} [alpha] */
function color(index, alpha = 1) {
  const hex = css(`--s${index % COLORS}`);
  return alpha === 1 ? hex : `${hex}${Math.round(alpha * 255).toString(16).padStart(2, "0")}`;
}

/** @param {number | null | undefined} value */
export function numberText(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(size < 1 ? 3 : 4)));
}

/** @param {number} seconds */
function durationText(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/**
 * The running mean of a line, without the pull to 0 at its beginning.
 * @param {(number | null)[]} values @param {number} weight
 */
export function smooth(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + (1 - weight) * value;
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

/** The vertical range: some air around the values, and something to see where they are all equal. */
function paddedRange(/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, low + Math.abs(low) * 0.1];
  return uPlot.rangeNum(low, high, 0.1, true);
}

/** @param {(number | null)[][]} lines */
function stack(lines) {
  const below = new Array(lines[0]?.length ?? 0).fill(0);
  return lines.map((line) => line.map((value, i) => (below[i] += value ?? 0)));
}

/** A chart on the page, with the numbers it draws. */
export class ChartView {
  /**
   * @param {HTMLElement} place @param {Chart} chart
   * @param {{axis: string, smooth: number}} settings @param {Handlers} handlers
   */
  constructor(place, chart, settings, handlers) {
    this.chart = chart;
    this.settings = settings;
    this.handlers = handlers;
    this.place = place;
    this.legend = /** @type {HTMLElement[]} */ ([]);
    /** @type {[number, number] | null} */
    this.range = null;
    this.#build();
  }

  get isSmooth() {
    return this.settings.smooth > 0 && !this.chart.is_stacked;
  }

  /** uPlot's columns: x, the band's edges, raw lines, smooth lines. */
  #data() {
    const { series, band, is_stacked } = this.chart;
    const raw = series.lines.map((line) => line.values);
    const lines = is_stacked ? stack(raw).reverse() : raw;
    const smoothed = this.isSmooth ? raw.map((line) => smooth(line, this.settings.smooth)) : [];
    return /** @type {any} */ ([series.x, ...band.map((line) => line.values), ...lines, ...smoothed]);
  }

  #series() {
    const { series, band, is_stacked } = this.chart;
    const hasFew = series.x.length <= FEW_POINTS;
    const edges = band.map(() => ({ stroke: "transparent", points: { show: false }, spanGaps: true }));
    const lines = series.lines.map((line, i) => {
      const index = is_stacked ? series.lines.length - 1 - i : i;
      const isSparse = line.values.filter((value) => value !== null).length <= FEW_POINTS;
      return {
        stroke: color(index, this.isSmooth ? 0.3 : 1),
        fill: is_stacked ? color(index, 0.45) : undefined,
        width: this.isSmooth || is_stacked ? 1 : 1.5,
        spanGaps: true,
        points: { show: !is_stacked && (hasFew || isSparse), size: 4, fill: color(index, this.isSmooth ? 0.3 : 1) },
      };
    });
    const smoothed = this.isSmooth
      ? series.lines.map((_, i) => ({ stroke: color(i), width: 1.8, spanGaps: true, points: { show: false } }))
      : [];
    return [{}, ...edges, ...lines, ...smoothed];
  }

  #build() {
    const { is_share, band } = this.chart;
    const axis = { stroke: css("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false }, gap: 3 };
    const grid = { stroke: css("--grid"), width: 1 };
    const { axis: x } = this.settings;
    const texts = (/** @type {number[]} */ values) =>
      values.map((value) => (x === "time" ? durationText(value) : numberText(value)));
    /** @type {any} */
    const options = {
      width: Math.max(160, this.place.clientWidth),
      height: HEIGHT,
      padding: [6, 12, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) => this.range ?? (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { range: is_share ? [0, 1.02] : paddedRange },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 20, values: (/** @type {any} */ _, /** @type {number[]} */ v) => texts(v), space: 60 },
        { ...axis, grid, size: 46, values: (/** @type {any} */ _, /** @type {number[]} */ v) => v.map(numberText), space: 28 },
      ],
      series: this.#series(),
      bands: band.length === 2 ? [{ series: [2, 1], fill: css("--shade") }] : [],
      cursor: { sync: { key: SYNC.key, setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 6 }, y: false },
      hooks: {
        setSelect: [(/** @type {uPlot} */ u) => this.#brushed(u)],
        setCursor: [(/** @type {uPlot} */ u) => this.showValues(u.cursor.idx)],
      },
    };
    this.plot = new uPlot(options, this.#data(), this.place);
    this.plot.over.addEventListener("click", () => this.#clicked());
    this.plot.over.addEventListener("dblclick", () => this.handlers.onReset());
    this.showValues(null);
  }

  /** @param {any} u */
  #brushed(u) {
    if (u.select.width < 4) return;
    this.wasBrushed = true;
    const low = u.posToVal(u.select.left, "x");
    const high = u.posToVal(u.select.left + u.select.width, "x");
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.handlers.onBrush(low, high);
  }

  #clicked() {
    if (this.wasBrushed) {
      this.wasBrushed = false;
      return;
    }
    const at = this.plot?.cursor.idx;
    if (at !== null && at !== undefined) this.handlers.onPoint(this.chart.series.steps[at]);
  }

  /**
   * The values under the cursor, or the newest ones.
   * @param {number | null | undefined} at
   */
  showValues(at) {
    this.chart.series.lines.forEach((line, i) => {
      const target = this.legend[i];
      if (!target) return;
      const known = at === null || at === undefined ? line.values.findLast((v) => v !== null) : line.values[at];
      target.textContent = numberText(known);
    });
  }

  /** @param {[number, number] | null} range */
  zoom(range) {
    this.range = range;
    const xs = this.chart.series.x;
    if (!xs.length || !this.plot) return;
    this.plot.setData(this.#data());
  }

  redraw() {
    this.plot?.destroy();
    this.#build();
  }

  resize() {
    this.plot?.setSize({ width: Math.max(160, this.place.clientWidth), height: HEIGHT });
  }

  /**
   * Adds what a step has reported; false if the chart has to be read anew.
   * @param {number} step @param {Record<string, unknown>} row
   */
  append(step, row) {
    const { series, band } = this.chart;
    const lines = [...series.lines, ...band];
    if (!lines.some((line) => typeof row[line.name] === "number")) return;
    if (series.steps.at(-1) !== step) {
      series.steps.push(step);
      series.x.push(step);
      for (const line of lines) line.values.push(null);
    }
    for (const line of lines) {
      const value = row[line.name];
      if (typeof value === "number") line.values[line.values.length - 1] = value;
    }
    this.plot?.setData(this.#data());
    this.showValues(null);
  }
}
