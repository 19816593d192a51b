// Long texts as rows of bounded width, so that a line of a megabyte is some thousand rows and not one.

import {visible} from "../text.js";

export const WIDTH = 160;

// Return a text as one string, with the names of characters that cannot be seen in their place: for what has to be a
// string, such as the label of a shape.
export const flat = (text) => visible(text).map((part) => (typeof part === "string" ? part : part.mark)).join("");

const isLow = (code) => code >= 0xdc00 && code <= 0xdfff;

// Return where each row of a text begins. Rows end after a line break, or after `width` characters, never within a pair.
export function rowStarts(text, width = WIDTH) {
  const starts = [];
  let at = 0;
  while (at < text.length) {
    starts.push(at);
    const line = text.indexOf("\n", at);
    const end = line < 0 ? text.length : line + 1;
    let next = Math.min(end, at + width);
    if (next < end && isLow(text.charCodeAt(next))) next += 1;
    if (next === end - 1 && line >= 0) next = end;
    at = next;
  }
  return starts;
}

// Return the row that a position is in.
export function rowAt(starts, position) {
  let low = 0;
  let high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= position) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Return where a text occurs in another, in either case, at most `most` times.
export function occurrences(text, wanted, most = 1000) {
  const found = [];
  if (!wanted) return found;
  const pattern = new RegExp(wanted.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&"), "gi");
  for (const match of text.matchAll(pattern)) {
    found.push(match.index);
    if (found.length >= most) break;
  }
  return found;
}
