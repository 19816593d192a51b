// Texts of models and sandboxes: short ones as they are, long ones folded, and windowed once they are opened. Everything
// becomes text nodes, and what cannot be seen becomes a mark.
import {Viewport} from "../tokens/viewport.js";
import {count} from "../format.js";
import {visible} from "../text.js";
import {Visible} from "../widgets.js";
import {html, useEffect, useMemo, useRef, useState} from "../ui.js";
import {occurrences, rowAt, rowStarts} from "./rows.js";

const SHORT = 3000;
const FOLDED = 1200;
const ROW = 19;

// Return the pieces of a text as [text, found], with what was searched for marked as found.
export function pieces(text, wanted) {
  const found = occurrences(text, wanted);
  const parts = [];
  let at = 0;
  for (const start of found) {
    if (start > at) parts.push([text.slice(at, start), false]);
    parts.push([text.slice(start, start + wanted.length), true]);
    at = start + wanted.length;
  }
  if (at < text.length) parts.push([text.slice(at), false]);
  return parts;
}

export const Found = ({text, wanted}) => pieces(text, wanted).map(([part, found]) =>
  found ? html`<mark class="found"><${Visible} text=${part} /></mark>` : html`<${Visible} text=${part} />`);

function appendVisible(node, text) {
  for (const part of visible(text)) {
    if (typeof part === "string") node.append(part);
    else {
      const mark = document.createElement("span");
      mark.className = "mark";
      mark.textContent = part.mark;
      node.append(mark);
    }
  }
}

function textRow(text, wanted, tone) {
  const row = document.createElement("div");
  row.className = `text-row ${tone ?? ""}`;
  for (const [part, found] of pieces(text.replace(/\n$/, ""), wanted)) {
    if (!found) appendVisible(row, part);
    else {
      const mark = document.createElement("mark");
      mark.className = "found";
      appendVisible(mark, part);
      row.append(mark);
    }
  }
  return row;
}

// A text of any length in a box with the rows in sight. `at` is a position to bring into sight.
export function TextWindow({text, wanted = "", at = null, label = "Text", rows = 30, tone}) {
  const box = useRef(null);
  const view = useRef(null);
  const starts = useMemo(() => rowStarts(text), [text]);
  useEffect(() => {
    const made = new Viewport(box.current, ROW, (row) => textRow(text.slice(starts[row], starts[row + 1] ?? text.length), wanted, tone?.(row)));
    made.setCount(starts.length);
    view.current = made;
    return () => made.close();
  }, [text, wanted, tone]);
  useEffect(() => {
    if (at !== null && starts.length) view.current.reveal(rowAt(starts, at));
  }, [at, text, wanted]);
  return html`<div class="text-window" ref=${box} tabindex="0" role="region" aria-label=${label} style=${{height: `${Math.min(rows, starts.length) * ROW + 12}px`}}></div>`;
}

// A text that is folded if it is long. `at` opens it at a position.
export function LongText({text, wanted = "", at = null, label}) {
  const [open, setOpen] = useState(false);
  useEffect(() => {
    if (at !== null && at > FOLDED) setOpen(true);
  }, [at]);
  if (text.length <= SHORT) return html`<div class="prose-text"><${Found} text=${text} wanted=${wanted} /></div>`;
  const toggle = html`<button type="button" class="quiet" onClick=${() => setOpen(!open)} aria-expanded=${open ? "true" : "false"}>${open ? "Fold" : `Show all ${count(text.length)} characters`}</button>`;
  if (open) return html`<${TextWindow} text=${text} wanted=${wanted} at=${at} label=${label} />${toggle}`;
  return html`<div class="prose-text"><${Found} text=${text.slice(0, FOLDED)} wanted=${wanted} /><span class="dim"> …</span></div>${toggle}`;
}
