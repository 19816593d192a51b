// Keys: single ones ("j", "?", "Escape") and two after each other ("g o"). Whoever is drawn last comes first; nothing is
// taken from fields in which a person types, nor while a dialog is open.
import {signal, useEffect, useRef} from "./ui.js";

const layers = [];
const PATIENCE = 1200;
let first = "";
let pressed = 0;
export const helpOpen = signal(false);

// Use keys while the component is drawn: {"j": {help: "Next row", run: () => ...}}. A `run` that returns false leaves
// the key to others.
export function useKeys(keys) {
  const layer = useRef(null);
  if (layer.current === null) layer.current = {};
  layer.current.keys = keys;
  useEffect(() => {
    const mine = layer.current;
    layers.push(mine);
    return () => layers.splice(layers.indexOf(mine), 1);
  }, []);
}

// Return [[key, help]] of what may be pressed now.
export function knownKeys() {
  const found = new Map();
  for (const layer of layers.toReversed()) {
    for (const [key, {help}] of Object.entries(layer.keys)) if (help && !found.has(key)) found.set(key, help);
  }
  return [...found];
}

const isTyping = (target) => target instanceof Element && target.closest("input, textarea, select, [contenteditable]");

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (document.querySelector("dialog[open]")) return;
  if (isTyping(event.target)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  // Enter and space belong to what has the focus, if it does something with them.
  if ((event.key === "Enter" || event.key === " ") && event.target.closest?.("a, button, summary")) return;
  const pair = event.timeStamp - pressed < PATIENCE ? `${first} ${event.key}` : "";
  first = event.key;
  pressed = event.timeStamp;
  for (const key of pair ? [pair, event.key] : [event.key]) {
    for (const layer of layers.toReversed()) {
      if (layer.keys[key] && layer.keys[key].run(event) !== false) {
        event.preventDefault();
        first = "";
        return;
      }
    }
  }
});
