// @ts-check
// The token strip: every token of a rollout in its place, coloured by what is asked for. Only the rows that are seen are
// in the page, so that 32,000 tokens scroll like 300.

/**
 * @typedef {{ids: number[], texts: string[], origins: number[], turns: number[], versions: (number | null)[], logprobs: (number | null)[],
 *   trainer_logprobs: (number | null)[], advantages: (number | null)[], advantage_divisor: number | null, entropies: (number | null)[],
 *   has_texts: boolean}} Tokens
 * @typedef {{token: number, text: string}} Piece
 */

const ROW_PX = 20;
const MAX_SPANS = 1500;
const MAX_COLUMNS = 72;
const LOWEST_LOGPROB = -6; // about one in 400: what is rarer looks the same
const HIGHEST_ENTROPY = 3; // about 20 equally likely tokens: what is more open looks the same
const GAPS = [1e-4, 1e-3, 1e-2, 1e-1];
const ORIGINS = ["prompt", "observation", "sampled"];
const LEGENDS = {
  mask: "Filled: trained on. Underlined: sampled, not trained on. Coloured text: an observation. Faint: the prompt.",
  logprob: `The darker, the less likely when it was drawn; darkest at a log-probability of ${LOWEST_LOGPROB} and below.`,
  advantage: "Blue: made more likely. Orange: made less likely. The stronger, the larger the advantage.",
  entropy: `How open the choice was to the trainer just before the update: darkest at ${HIGHEST_ENTROPY} nats and above. Plain: certain, or not trained on.`,
  gap: `Log-probability by the trainer minus the sampler's: blue above, orange below; steps at ${GAPS.join(", ")}.`,
};

/** @param {string} text */
function columnsOf(text) {
  let columns = 0;
  for (const char of text) columns += /** @type {number} */ (char.codePointAt(0)) >= 0x1100 ? 2 : 1;
  return columns;
}

/**
 * Rows of a fixed width, broken where tokens break lines.
 * @param {string[]} texts @param {number} columns @returns {Piece[][]}
 */
export function layOut(texts, columns) {
  /** @type {Piece[][]} */
  const rows = [[]];
  let used = 0;
  const add = (/** @type {number} */ token, /** @type {string} */ text) => {
    const width = columnsOf(text);
    if (used + width > columns && used > 0) {
      rows.push([]);
      used = 0;
    }
    if (width <= columns) {
      rows[rows.length - 1].push({ token, text });
      used += width;
      return;
    }
    const chars = [...text]; // longer than a row
    const size = Math.max(1, Math.floor(columns / (width > chars.length ? 2 : 1)));
    for (let at = 0; at < chars.length; at += size) add(token, chars.slice(at, at + size).join(""));
  };
  texts.forEach((text, token) => {
    const lines = text.replaceAll("\t", "→").split("\n");
    lines.forEach((line, i) => {
      const isBroken = i < lines.length - 1;
      if (line || isBroken || lines.length === 1) add(token, line + (isBroken ? "↵" : ""));
      if (isBroken) {
        rows.push([]);
        used = 0;
      }
    });
  });
  return rows;
}

/** @param {number | null | undefined} value */
function numberText(value) {
  return value === null || value === undefined ? "–" : String(Number(value.toPrecision(4)));
}

/**
 * The sampled tokens that other weights drew than the sampled token before them.
 * @param {(number | null)[]} versions
 */
export function seamsOf(versions) {
  /** @type {Set<number>} */
  const seams = new Set();
  /** @type {number | null} */
  let last = null;
  versions.forEach((version, token) => {
    if (version === null) return;
    if (last !== null && version !== last) seams.add(token);
    last = version;
  });
  return seams;
}

class TokenStrip {
  /** @param {HTMLElement} section */
  constructor(section) {
    this.section = section;
    this.view = /** @type {HTMLElement} */ (section.querySelector("#strip"));
    this.minimap = /** @type {HTMLCanvasElement} */ (section.querySelector("#minimap"));
    this.inspector = /** @type {HTMLElement} */ (section.querySelector("#inspector"));
    this.mode = localStorage.getItem("palestra-token-color") ?? "mask";
    this.space = document.createElement("div");
    this.space.className = "strip-space";
    this.window = document.createElement("div");
    this.window.className = "strip-window";
    this.space.append(this.window);
    this.view.append(this.space);
    /** @type {Tokens | null} */
    this.tokens = null;
    /** @type {Piece[][]} */
    this.rows = [];
    /** @type {Set<number>} */
    this.seams = new Set();
    this.largest = 0;
    this.chosen = -1;
    this.columns = 0;
    this.drawn = "";
    this.view.addEventListener("scroll", () => this.draw(), { passive: true });
    this.view.addEventListener("mouseover", (event) => {
      const token = event.target instanceof HTMLElement ? event.target.dataset.token : undefined;
      if (token !== undefined) this.choose(Number(token), false);
    });
    this.view.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || !this.tokens) return;
      event.preventDefault();
      this.choose(Math.min(this.tokens.ids.length - 1, Math.max(0, this.chosen + step)), true);
    });
    this.minimap.addEventListener("click", (event) => {
      this.view.scrollTop = (event.offsetY / this.minimap.clientHeight) * this.rows.length * ROW_PX - this.view.clientHeight / 2;
    });
    new ResizeObserver(() => this.lay()).observe(this.view);
  }

  /** @param {string} id */
  async read(id) {
    const answer = await fetch(`${this.section.dataset.api}&id=${encodeURIComponent(id)}`);
    if (!answer.ok) {
      this.view.textContent = (await answer.json()).error?.message ?? answer.statusText;
      return;
    }
    this.tokens = /** @type {Tokens} */ (await answer.json());
    this.seams = seamsOf(this.tokens.versions);
    this.largest = 0;
    for (const value of this.tokens.advantages) this.largest = Math.max(this.largest, Math.abs(value ?? 0));
    this.offer("gap", this.tokens.trainer_logprobs, "This run did not keep the trainer's log-probabilities");
    this.offer("entropy", this.tokens.entropies, "The trainer's entropies were not recorded with this rollout");
    this.setMode(this.mode);
    this.lay();
    const first = this.tokens.origins.indexOf(2);
    if (first > 0) this.show(first);
  }

  /** Offers a colour if there is something to show. @param {string} mode @param {(number | null)[]} values @param {string} why */
  offer(mode, values, why) {
    const input = /** @type {HTMLInputElement} */ (this.section.querySelector(`input[value=${mode}]`));
    input.disabled = !values.some((value) => value !== null);
    const label = /** @type {HTMLElement} */ (input.parentElement);
    label.title = input.disabled ? why : "";
    if (input.disabled && this.mode === mode) this.mode = "mask";
  }

  lay() {
    if (!this.tokens) return;
    const probe = document.createElement("span");
    probe.textContent = "0".repeat(40);
    this.window.replaceChildren(probe);
    const width = probe.getBoundingClientRect().width / 40 || 7.2;
    const columns = Math.max(20, Math.min(MAX_COLUMNS, Math.floor((this.view.clientWidth - 12) / width)));
    if (columns !== this.columns || !this.rows.length) this.rows = layOut(this.tokens.texts, columns);
    this.columns = columns;
    this.space.style.height = `${this.rows.length * ROW_PX}px`;
    this.drawn = "";
    this.draw();
    this.drawMinimap();
  }

  /** @param {string} mode */
  setMode(mode) {
    this.mode = mode;
    localStorage.setItem("palestra-token-color", mode);
    const legend = document.getElementById("token-legend");
    if (legend) legend.textContent = LEGENDS[/** @type {keyof typeof LEGENDS} */ (mode)] ?? "";
    for (const input of this.section.querySelectorAll("input[name=color]")) {
      /** @type {HTMLInputElement} */ (input).checked = /** @type {HTMLInputElement} */ (input).value === mode;
    }
    this.drawn = "";
    this.draw();
    this.drawMinimap();
  }

  /** The class of a token's colour. @param {number} i */
  kind(i) {
    const { origins, logprobs, advantages, entropies, trainer_logprobs } = /** @type {Tokens} */ (this.tokens);
    if (origins[i] === 0) return "tk-prompt";
    if (origins[i] === 1) return "tk-observation";
    const logprob = logprobs[i];
    const advantage = advantages[i];
    if (this.mode === "logprob") {
      return logprob === null ? "" : `lp${Math.round(8 * Math.min(1, Math.max(0, logprob / LOWEST_LOGPROB)))}`;
    }
    if (this.mode === "advantage") {
      if (advantage === null || !advantage || !this.largest) return "";
      return `${advantage > 0 ? "pos" : "neg"}${Math.max(1, Math.round((4 * Math.abs(advantage)) / this.largest))}`;
    }
    if (this.mode === "entropy") {
      const entropy = entropies[i];
      return entropy === null ? "" : `lp${Math.round(8 * Math.min(1, Math.max(0, entropy / HIGHEST_ENTROPY)))}`;
    }
    if (this.mode === "gap") {
      const trainer = trainer_logprobs[i];
      if (trainer === null || logprob === null) return "";
      const level = GAPS.filter((edge) => Math.abs(trainer - logprob) >= edge).length;
      return level ? `${trainer > logprob ? "pos" : "neg"}${level}` : "";
    }
    return advantage === null ? "tk-sampled" : "tk-trained";
  }

  draw() {
    if (!this.tokens) return;
    const first = Math.max(0, Math.floor(this.view.scrollTop / ROW_PX) - 4);
    const seen = Math.ceil(this.view.clientHeight / ROW_PX) + 8;
    const key = `${first}/${seen}/${this.chosen}`;
    if (key === this.drawn) return;
    this.drawn = key;
    const made = [];
    let spans = 0;
    for (const row of this.rows.slice(first, first + seen)) {
      if (spans > MAX_SPANS) break;
      const line = document.createElement("div");
      line.className = "strip-row";
      for (const { token, text } of row) {
        const span = document.createElement("span");
        span.textContent = text || "·";
        span.dataset.token = String(token);
        span.className = this.kind(token);
        if (token === this.chosen) span.classList.add("chosen");
        if (this.seams.has(token)) span.classList.add("seam");
        line.append(span);
      }
      spans += row.length;
      made.push(line);
    }
    this.window.style.transform = `translateY(${first * ROW_PX}px)`;
    this.window.replaceChildren(...made);
  }

  drawMinimap() {
    const pen = this.minimap.getContext("2d");
    if (!pen || !this.tokens || !this.rows.length) return;
    const height = (this.minimap.height = Math.max(1, this.view.clientHeight));
    pen.clearRect(0, 0, 18, height);
    const probe = document.createElement("span");
    this.window.append(probe);
    /** @type {Map<string, string>} */
    const colors = new Map();
    const each = this.rows.length / height;
    for (let y = 0; y < height; y++) {
      const row = this.rows[Math.min(this.rows.length - 1, Math.floor(y * each))];
      if (!row?.length) continue;
      const kind = this.kind(row[Math.floor(row.length / 2)].token);
      if (!colors.has(kind)) {
        probe.className = kind;
        colors.set(kind, getComputedStyle(probe).backgroundColor);
      }
      pen.fillStyle = /** @type {string} */ (colors.get(kind));
      pen.fillRect(0, y, 18, 1);
    }
    probe.remove();
  }

  /** @param {number} token */
  show(token) {
    const row = this.rows.findIndex((pieces) => pieces.some((piece) => piece.token === token));
    if (row < 0) return;
    const top = row * ROW_PX;
    if (top < this.view.scrollTop || top > this.view.scrollTop + this.view.clientHeight - 2 * ROW_PX) {
      this.view.scrollTop = top - 3 * ROW_PX;
    }
  }

  /** @param {number} token @param {boolean} isByKey */
  choose(token, isByKey) {
    const tokens = this.tokens;
    if (!tokens || token === this.chosen) return;
    this.chosen = token;
    for (const span of this.window.querySelectorAll(".chosen")) span.classList.remove("chosen");
    if (isByKey) this.show(token);
    for (const span of this.window.querySelectorAll(`[data-token="${token}"]`)) span.classList.add("chosen");
    const logprob = tokens.logprobs[token];
    const trainer = tokens.trainer_logprobs[token];
    const advantage = tokens.advantages[token];
    const divisor = tokens.advantage_divisor;
    const facts = {
      token: JSON.stringify(tokens.texts[token]),
      id: String(tokens.ids[token]),
      place: `${token} of ${tokens.ids.length}`,
      origin: `${ORIGINS[tokens.origins[token]]}${tokens.turns[token] ? `, turn ${tokens.turns[token]}` : ""}`,
      ...(this.seams.size && tokens.versions[token] !== null ? { weights: String(tokens.versions[token]) } : {}),
      sampler: logprob === null ? "–" : `${numberText(logprob)} (${numberText(100 * Math.exp(logprob))} %)`,
      trainer: numberText(trainer),
      gap: trainer === null || logprob === null ? "–" : numberText(trainer - logprob),
      entropy: numberText(tokens.entropies[token]),
      advantage: numberText(advantage),
      ...(advantage !== null && divisor ? { "in the loss": numberText(advantage / divisor) } : {}),
    };
    const list = document.createElement("dl");
    list.className = "facts";
    list.append(
      ...Object.entries(facts).map(([name, text]) => {
        const entry = document.createElement("div");
        const term = document.createElement("dt");
        const value = document.createElement("dd");
        term.textContent = name;
        value.textContent = text;
        entry.append(term, value);
        return entry;
      }),
    );
    this.inspector.replaceChildren(list);
  }
}

const section = document.getElementById("tokens");
if (section) {
  const strip = new TokenStrip(section);
  const row = /** @type {HTMLInputElement | HTMLSelectElement} */ (document.getElementById("token-row"));
  row.addEventListener("change", () => strip.read(row.value));
  for (const input of section.querySelectorAll("input[name=color]")) {
    input.addEventListener("change", () => strip.setMode(/** @type {HTMLInputElement} */ (input).value));
  }
  document.addEventListener("theme-changed", () => strip.drawMinimap());
  strip.read(row.value);
}

const copy = document.getElementById("test-case");
copy?.addEventListener("click", async () => {
  const text = await (await fetch(copy.dataset.source ?? "")).text();
  await navigator.clipboard.writeText(text);
  copy.textContent = "Copied";
  setTimeout(() => (copy.textContent = "Copy as test case"), 1200);
});
