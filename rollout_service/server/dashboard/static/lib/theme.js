// Light or dark: what the system says, until a person says otherwise.
import {store, stored} from "./stored.js";

const STORED = "rollout-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function apply(chosen = stored(STORED)) {
  document.documentElement.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
  dispatchEvent(new CustomEvent("theme"));
}

// Charts, which draw their colors themselves, listen to the window's event "theme".
export const isDark = () => document.documentElement.dataset.theme === "dark";

export function toggleTheme() {
  const chosen = isDark() ? "light" : "dark";
  store(STORED, chosen);
  apply(chosen);
}

dark.addEventListener("change", () => apply());
apply();
