// @ts-check
// Elements and texts for scripts that build parts of a page.

/** Control codes, invisible characters and those that turn the direction of text are written out. @param {string} text */
export function safeText(text) {
  return text.replaceAll(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu, (char) => {
    if (char === "\n" || char === "\t") return char;
    const code = /** @type {number} */ (char.codePointAt(0));
    if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
    return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
  });
}

/** @param {string} tag @param {string} className @param {(Node | string)[]} [content] */
export function element(tag, className, content = []) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content);
  return made;
}
