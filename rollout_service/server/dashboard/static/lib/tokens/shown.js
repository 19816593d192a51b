// How a token is shown: what cannot be seen or would move other text becomes a mark, and bytes that are no text become
// hexadecimal. It only ever makes text nodes.

import {visible} from "../text.js";

const PRINTABLE = /^[\u0020-\u007e]*$/;
export const LINE_BREAK = "⏎";
const NAMED = new Map([["\n", LINE_BREAK], ["\t", "⇥"], ["\r", "␍"]]);
const MOST = 400;

const plain = (text) => ({text, mark: false});
const hidden = (text) => ({text, mark: true});

// Splits a token's text into [{text, mark}]; `mark` is true for what stands for a character that is not seen.
export function tokenParts(text) {
  if (PRINTABLE.test(text)) return [plain(text)];
  const parts = [];
  for (const piece of text.split(/([\n\t\r])/)) {
    if (piece === "") continue;
    if (NAMED.has(piece)) parts.push(hidden(NAMED.get(piece)));
    else for (const part of visible(piece)) parts.push(typeof part === "string" ? plain(part) : hidden(part.mark));
  }
  return parts;
}

function wide(code) {
  return code >= 0x1100 && (code <= 0x115f || (code >= 0x2e80 && code <= 0xa4cf) || (code >= 0xac00 && code <= 0xd7a3)
    || (code >= 0xf900 && code <= 0xfaff) || (code >= 0xfe30 && code <= 0xfe6f) || (code >= 0xff00 && code <= 0xff60)
    || (code >= 0x1f300 && code <= 0x1faff) || (code >= 0x20000 && code <= 0x3fffd));
}

function columns(text) {
  let sum = 0;
  for (const character of text) sum += wide(character.codePointAt(0)) ? 2 : 1;
  return sum;
}

// The columns that a text takes with its marks, at most MOST + 1.
export function shownWidth(text) {
  const short = text.length > MOST ? text.slice(0, MOST) : text;
  if (PRINTABLE.test(short)) return short.length;
  return Math.min(MOST + 1, tokenParts(short).reduce((sum, part) => sum + columns(part.text), 0));
}

function append(node, text) {
  for (const part of tokenParts(text)) {
    if (!part.mark) node.append(part.text);
    else {
      const mark = document.createElement("span");
      mark.className = "mark";
      mark.textContent = part.text;
      node.append(mark);
    }
  }
}

// Fills an element with token `i`, and returns whether it is nothing but printable ASCII. A part of a character is shown
// as its bytes; the last part as the character too.
export function fillToken(node, tokens, i) {
  const begin = tokens.begin(i);
  const end = tokens.ends[i];
  const piece = tokens.pieces.get(i);
  if (piece !== undefined) {
    const bytes = document.createElement("span");
    bytes.className = "bytes";
    bytes.textContent = piece;
    node.append(bytes);
  }
  const text = tokens.text.slice(begin, Math.min(end, begin + MOST));
  if (text) append(node, text);
  if (end - begin > MOST) node.append("…");
  return piece === undefined && PRINTABLE.test(text);
}

// The bytes of a token in hexadecimal, as far as its text tells.
export function bytesOf(tokens, i) {
  const piece = tokens.pieces.get(i);
  if (piece !== undefined) return piece.replace(/(..)(?=.)/g, "$1 ");
  const bytes = new TextEncoder().encode(tokens.textOf(i).slice(0, 32));
  return [...bytes].slice(0, 32).map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
}
