// Sets the theme before anything is painted. Chosen on this machine; without a choice, as the system has it.
const chosen = localStorage.getItem("palestra-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
