// @ts-check
// Chats with one model or two, streamed from the server's OpenAI endpoint, with the log-probability of every token.

import { element, safeText } from "./dom.js";
import { CallList, parseTools } from "./playground_tools.js";

/**
 * @typedef {{token: string, logprob: number}} Alternative
 * @typedef {Alternative & {top_logprobs: Alternative[]}} Token
 * @typedef {{role: string, content: string, tool_calls?: import("./playground_tools.js").ToolCall[], tool_call_id?: string}} Message
 */

const LOWEST_LOGPROB = -6;
const ALTERNATIVES = 5;

/** The data of server-sent events. @param {ReadableStream<Uint8Array>} body */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

/** An answer on the page while it comes. */
class Answer {
  /** @param {HTMLElement} column */
  constructor(column) {
    this.reasoning = element("div", "said");
    this.thoughts = element("details", "piece piece-reasoning", [element("summary", "", ["reasoning"]), this.reasoning]);
    this.thoughts.hidden = true;
    this.calls = new CallList();
    this.strip = element("div", "tokens");
    this.said = element("div", "said");
    this.footer = element("footer", "");
    this.place = element("article", "message role-assistant waiting", [
      element("h3", "", ["assistant"]), this.thoughts, this.strip, this.said, this.calls.place, this.footer,
    ]);
    column.append(this.place);
    this.content = "";
    this.thought = "";
    /** @type {number[]} */
    this.logprobs = [];
    this.begun = performance.now();
  }

  /** @param {any} choice */
  add(choice) {
    const { delta, logprobs } = choice;
    if (delta?.content) this.said.textContent = safeText((this.content += delta.content));
    const thought = delta?.reasoning_content ?? delta?.reasoning;
    if (thought) {
      this.thoughts.hidden = false;
      this.reasoning.textContent = safeText((this.thought += thought));
    }
    for (const part of delta?.tool_calls ?? []) this.calls.add(part);
    for (const token of logprobs?.content ?? []) this.#addToken(token);
  }

  /** @param {Token} token */
  #addToken(token) {
    const level = Math.round(8 * Math.min(1, Math.max(0, token.logprob / LOWEST_LOGPROB)));
    const span = element("span", `lp${level}`, [safeText(token.token) || "·"]);
    /** @type {any} */ (span).token = token;
    this.strip.append(span);
    this.logprobs.push(token.logprob);
  }

  /** @param {string} reason @param {string | undefined} trace */
  end(reason, trace) {
    const seconds = (performance.now() - this.begun) / 1000;
    const count = this.logprobs.length;
    const mean = this.logprobs.reduce((sum, one) => sum + one, 0) / (count || 1);
    this.place.classList.remove("waiting");
    const facts = [`${count} tokens`, `${seconds.toFixed(1)} s`, `${(count / seconds).toFixed(0)} tokens/s`, `mean log-probability ${mean.toFixed(3)}`, reason];
    this.footer.replaceChildren(...facts.map((fact) => element("span", "", [fact])));
    if (!trace) return;
    const link = /** @type {HTMLAnchorElement} */ (element("a", "", ["trace"]));
    link.href = `${columnsPlace.dataset.traces}${encodeURIComponent(trace)}`;
    this.footer.append(link);
  }

  /** @param {string} message */
  fail(message) {
    this.place.classList.remove("waiting");
    const text = element("p", "warning", [safeText(message)]);
    text.setAttribute("role", "alert");
    this.place.append(text);
  }
}

/** One model and the conversation with it. */
class Column {
  /** @param {string} model */
  constructor(model) {
    this.model = model;
    /** @type {Message[]} */
    this.messages = [];
    /** @type {Answer | null} */
    this.last = null;
    this.place = element("section", "column", [element("h2", "", [model])]);
    this.place.setAttribute("aria-label", `Conversation with ${model}`);
  }

  /** Adds what the tools returned, if the model waits for it, and what a person says, if anything; then the model goes on.
   * @param {string} text @param {Record<string, unknown>} settings @param {AbortSignal} signal */
  async say(text, settings, signal) {
    const known = this.messages.length;
    if (this.last?.calls.isPending) this.messages.push(...this.last.calls.take());
    if (text) {
      this.messages.push({ role: "user", content: text });
      this.place.append(element("article", "message role-user", [element("h3", "", ["user"]), element("div", "said", [safeText(text)])]));
    }
    const answer = new Answer(this.place);
    this.last = answer;
    answer.place.scrollIntoView({ block: "nearest" });
    try {
      await this.#stream(answer, settings, signal);
    } catch (error) {
      if (!signal.aborted) answer.fail(error instanceof Error ? error.message : String(error));
      else answer.end("stopped", undefined);
    }
    this.#keep(answer, known);
  }

  /** @param {Answer} answer @param {number} known */
  #keep(answer, known) {
    const { calls } = answer.calls;
    if (calls.length) {
      this.messages.push({ role: "assistant", content: answer.content, tool_calls: calls });
      answer.calls.ask(() => send([this], ""));
    } else if (answer.content) this.messages.push({ role: "assistant", content: answer.content });
    else if (!answer.logprobs.length) this.messages.length = known; // nothing came: the next attempt begins here
  }

  /** @param {Answer} answer @param {Record<string, unknown>} settings @param {AbortSignal} signal */
  async #stream(answer, settings, signal) {
    const { system, ...others } = settings;
    const messages = system ? [{ role: "system", content: system }, ...this.messages] : this.messages;
    const request = { model: this.model, messages, stream: true, logprobs: true, top_logprobs: ALTERNATIVES, ...others };
    const response = await fetch(columnsPlace.dataset.endpoint ?? "", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(request), signal,
    });
    if (!response.ok || !response.body) {
      if (response.status === 401) location.reload();
      throw new Error((await response.json()).error?.message ?? response.statusText);
    }
    let reason = "ended early";
    let trace;
    for await (const data of events(response.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      trace = chunk.trace_id ?? trace;
      for (const choice of chunk.choices ?? []) {
        answer.add(choice);
        reason = choice.finish_reason ?? reason;
      }
    }
    answer.end(reason, trace);
  }
}

const columnsPlace = /** @type {HTMLElement} */ (document.getElementById("columns"));
const settings = /** @type {HTMLFormElement} */ (document.getElementById("settings"));
const ask = /** @type {HTMLFormElement} */ (document.getElementById("ask"));
const text = /** @type {HTMLTextAreaElement} */ (document.getElementById("text"));
const sendButton = /** @type {HTMLButtonElement} */ (document.getElementById("send"));
const toolProblem = /** @type {HTMLElement} */ (document.getElementById("tool-problem"));
const stop = /** @type {HTMLButtonElement} */ (document.getElementById("stop"));
const tokenFacts = /** @type {HTMLElement} */ (document.getElementById("token-facts"));
/** @type {Column[]} */
let columns = [];
/** @type {AbortController | null} */
let running = null;

function begin() {
  const chosen = new FormData(settings);
  const names = [String(chosen.get("model")), String(chosen.get("beside"))].filter(Boolean);
  running?.abort();
  columns = names.map((name) => new Column(name));
  columnsPlace.replaceChildren(...columns.map((column) => column.place));
  const query = new URLSearchParams({ model: names[0], ...(names[1] ? { beside: names[1] } : {}) });
  history.replaceState(null, "", `?${query}`);
}

/** What the settings ask for; null, with a word about it on the page, if the tools cannot be read. */
function wanted() {
  const chosen = new FormData(settings);
  toolProblem.textContent = "";
  try {
    const tools = parseTools(String(chosen.get("tools") ?? ""));
    return {
      temperature: Number(chosen.get("temperature")),
      max_tokens: Number(chosen.get("max_tokens")),
      system: String(chosen.get("system") ?? ""),
      ...(tools.length ? { tools, tool_choice: String(chosen.get("tool_choice")) } : {}),
    };
  } catch (error) {
    toolProblem.textContent = `These tools cannot be read: ${error instanceof Error ? error.message : error}`;
    toolProblem.closest("details")?.setAttribute("open", "");
    return null;
  }
}

/** @param {Column[]} to @param {string} said */
async function send(to, said) {
  const asked = wanted();
  if (!asked || running) return;
  text.value = "";
  running = new AbortController();
  stop.hidden = false;
  sendButton.disabled = true;
  const { signal } = running;
  await Promise.all(to.map((column) => column.say(said, asked, signal)));
  running = null;
  stop.hidden = true;
  sendButton.disabled = false;
  (to[0].last?.calls.results[0] ?? text).focus();
}

function submit() {
  const said = text.value.trim();
  if (said) send(columns, said);
}

/** @param {Token} token */
function inspect(token) {
  const fact = (/** @type {string} */ name, /** @type {string} */ value) =>
    element("span", "", [element("span", "muted", [name]), ` ${value}`]);
  const one = (/** @type {Alternative} */ other) =>
    fact(JSON.stringify(safeText(other.token)), `${(100 * Math.exp(other.logprob)).toPrecision(3)} %`);
  const others = token.top_logprobs.filter((other) => other.token !== token.token);
  const head = fact("log-probability", token.logprob.toFixed(4));
  tokenFacts.replaceChildren(one(token), head, element("span", "muted", ["instead of:"]), ...others.map(one));
}

ask.addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
stop.addEventListener("click", () => running?.abort());
document.getElementById("clear")?.addEventListener("click", begin);
settings.addEventListener("submit", (event) => event.preventDefault());
settings.addEventListener("change", (event) => {
  const { name, value } = /** @type {HTMLInputElement} */ (event.target);
  if (name === "model" || name === "beside") begin();
  if (name === "form") columnsPlace.classList.toggle("as-tokens", value === "tokens");
});
columnsPlace.addEventListener("mouseover", (event) => {
  const token = /** @type {any} */ (event.target).token;
  if (token) inspect(token);
});
begin();
