// @ts-check
// What every page has: the theme, keys, commands to copy, forms that send themselves.

const THEMES = ["auto", "light", "dark"];

function currentTheme() {
  return document.documentElement.dataset.theme ?? "auto";
}

/** @param {string} theme */
function setTheme(theme) {
  if (theme === "auto") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("palestra-theme");
  } else {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("palestra-theme", theme);
  }
  showTheme();
  document.dispatchEvent(new CustomEvent("theme-changed"));
}

function showTheme() {
  const name = document.getElementById("theme-name");
  if (name) name.textContent = currentTheme();
}

/** @param {EventTarget | null} target */
function isTyping(target) {
  return target instanceof HTMLElement && target.matches("input, textarea, select, [contenteditable]");
}

document.getElementById("theme")?.addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length]);
});
showTheme();

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && isTyping(event.target)) /** @type {HTMLElement} */ (event.target).blur();
  if (isTyping(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
  const target = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (!(target instanceof HTMLElement)) return;
  event.preventDefault();
  if (target instanceof HTMLInputElement) {
    target.focus();
    target.select();
  } else {
    target.click();
  }
});

document.addEventListener("click", (event) => {
  const code = event.target instanceof Element ? event.target.closest(".copy") : null;
  if (!(code instanceof HTMLElement) || getSelection()?.toString()) return;
  navigator.clipboard?.writeText(code.dataset.copy ?? code.textContent ?? "").then(() => {
    code.classList.add("copied");
    setTimeout(() => code.classList.remove("copied"), 900);
  });
});

document.addEventListener("change", (event) => {
  if (event.target instanceof HTMLSelectElement && "submits" in event.target.dataset) event.target.form?.requestSubmit();
});

// A choice that completes a command.
document.addEventListener("change", (event) => {
  if (!(event.target instanceof HTMLSelectElement) || !event.target.dataset.fills) return;
  const command = document.getElementById(event.target.dataset.fills);
  if (command) command.textContent = `${command.dataset.command} ${event.target.value}`;
});

// What a request to change something was refused with is worth knowing.
document.addEventListener("htmx:responseError", (event) => {
  const { xhr, requestConfig } = /** @type {CustomEvent} */ (event).detail;
  if (xhr.status === 401 || xhr.status === 403) location.reload();
  else if (requestConfig.verb !== "get") showRefusal(xhr.responseText);
});

/** @param {string} page the page that a browser without scripts would show */
function showRefusal(page) {
  const shown = document.getElementById("refusal") ?? document.createElement("p");
  shown.id = "refusal";
  shown.className = "warning";
  shown.setAttribute("role", "alert");
  shown.textContent = new DOMParser().parseFromString(page, "text/html").querySelector("main p")?.textContent ?? "This failed.";
  document.getElementById("main")?.prepend(shown);
}
