// Addresses within the page are behind `#`, so that no proxy and no server sees or needs them.
import {signal, useSignal} from "./ui.js";

const current = signal(parse(location.hash));
addEventListener("hashchange", () => (current.value = parse(location.hash)));

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

// Return {path, parts, query} of what is behind `#`: "#/rollouts/r-1?tab=tokens" has the parts ["rollouts", "r-1"].
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#?\/?/, "").split(/\?(.*)/s);
  const parts = path.split("/").filter(Boolean).map(decode);
  return {path: `/${parts.join("/")}`, parts, query: Object.fromEntries(new URLSearchParams(search))};
}

export const useRoute = () => useSignal(current);

// Return the link to a path; parts that are not text of ours belong through `segment`. Empty values are left out.
export function href(path, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = new URLSearchParams(kept).toString();
  return `#${path}${search ? `?${search}` : ""}`;
}

export const segment = (text) => encodeURIComponent(text);

// Go to a path; with `replace` the step back leads past the present one, as is right for filters.
export function go(path, query = {}, {replace = false} = {}) {
  const target = href(path, query);
  if (!replace) {
    location.hash = target;
    return;
  }
  history.replaceState(null, "", target);
  current.value = parse(target);
}
