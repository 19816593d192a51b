// Light or dark: what the system says, until a person says otherwise.
const STORED = "rollout-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return localStorage.getItem(STORED);
  } catch {
    return null; // storage may be forbidden
  }
}

function apply() {
  document.documentElement.dataset.theme = chosen() ?? (dark.matches ? "dark" : "light");
  dispatchEvent(new CustomEvent("theme"));
}

// Charts, which draw their colors themselves, listen to the window's event "theme".
export const isDark = () => document.documentElement.dataset.theme === "dark";

export function toggleTheme() {
  try {
    localStorage.setItem(STORED, isDark() ? "light" : "dark");
  } catch {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    dispatchEvent(new CustomEvent("theme"));
    return;
  }
  apply();
}

dark.addEventListener("change", apply);
apply();
