// Text that a model or a sandbox wrote, made safe to look at: what would be invisible, or would change the order in which
// text is read, becomes a mark.
const NAMES = {
  0x00ad: "SHY", 0x061c: "ALM", 0x180e: "MVS", 0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200d: "ZWJ", 0x200e: "LRM",
  0x200f: "RLM", 0x2028: "LS", 0x2029: "PS", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO",
  0x2060: "WJ", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0xfeff: "BOM",
};
const SPECIAL = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b-\\u200f" +
    "\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff9-\\ufffb]" +
    "|[\\u{e0000}-\\u{e0fff}]|\\p{Cs}",
  "gu",
);

// Return the name of a character that cannot be seen, such as "ESC", "RLO" or "U+E0041".
export function nameOf(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return NAMES[code] || `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

// Return a text as a list of strings and marks {mark, code}; line ends and tabs stay as they are.
export function visible(text) {
  const parts = [];
  let start = 0;
  for (const {0: found, index} of text.matchAll(SPECIAL)) {
    if (index > start) parts.push(text.slice(start, index));
    parts.push({mark: nameOf(found), code: found.codePointAt(0)});
    start = index + found.length;
  }
  if (start < text.length) parts.push(text.slice(start));
  return parts;
}

// Return a text with the marks as characters, for labels and titles, which cannot have elements.
export const plain = (text) => visible(String(text ?? "")).map((part) => (typeof part === "string" ? part : `[${part.mark}]`)).join("");
