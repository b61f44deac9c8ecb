// @ts-check
// Tools of the playground: definitions that are pasted, calls of the model, results that a person types.

import { element, safeText } from "./dom.js";

/**
 * @typedef {{id: string, type: "function", function: {name: string, arguments: string}}} ToolCall
 * @typedef {{role: "tool", tool_call_id: string, content: string}} ToolMessage
 */

/** Tool definitions from text: OpenAI's form, or bare functions; one or a list. Throws what is wrong with it.
 * @param {string} text */
export function parseTools(text) {
  if (!text.trim()) return [];
  const found = JSON.parse(text);
  return (Array.isArray(found) ? found : [found]).map((one) => {
    const tool = one?.function ? one : { type: "function", function: one };
    if (typeof tool.function?.name !== "string") throw new Error(`a tool has no name: ${JSON.stringify(one).slice(0, 100)}`);
    return tool;
  });
}

/** Calls of one answer, while they come and while their results are typed. */
export class CallList {
  constructor() {
    this.place = element("div", "calls");
    /** @type {ToolCall[]} */
    this.calls = [];
    /** @type {HTMLTextAreaElement[]} */
    this.results = [];
    this.isAnswered = false;
  }

  /** A part of a call, as it is streamed. @param {any} part */
  add(part) {
    const index = part.index ?? this.calls.length;
    if (!this.calls[index]) this.#begin(index);
    const call = this.calls[index];
    call.id = part.id ?? call.id;
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
    const [head, text] = this.place.children[index].children;
    head.textContent = safeText(call.function.name);
    text.textContent = safeText(call.function.arguments);
  }

  /** @param {number} index */
  #begin(index) {
    this.calls[index] = { id: `call_${index}`, type: "function", function: { name: "", arguments: "" } };
    this.place.append(element("div", "piece piece-call open-call", [element("b", "mono"), element("div", "said mono")]));
  }

  /** Fields for the results, and a button that sends them. @param {() => void} send */
  ask(send) {
    this.results = this.calls.map((call, index) => {
      const field = document.createElement("textarea");
      field.rows = 2;
      field.placeholder = "What the tool returns";
      field.setAttribute("aria-label", `Result of ${call.function.name}`);
      this.place.children[index].append(field);
      return field;
    });
    const button = element("button", "", [this.calls.length > 1 ? "Send the results" : "Send the result"]);
    button.addEventListener("click", send);
    this.place.append(button);
  }

  get isPending() {
    return this.results.length > 0 && !this.isAnswered;
  }

  /** The results as messages; they cannot be changed any more. @returns {ToolMessage[]} */
  take() {
    this.isAnswered = true;
    this.place.querySelector("button")?.remove();
    for (const field of this.results) field.readOnly = true;
    return this.calls.map((call, index) => ({ role: "tool", tool_call_id: call.id, content: this.results[index].value }));
  }
}
