// Two conversations message by message: what both say once, and where they differ, what each says.
import {diffArrays} from "../../vendor/diff.js";
import {count} from "../../lib/format.js";
import {LongText} from "../../lib/texts/view.js";
import {Visible} from "../../lib/widgets.js";
import {html, useMemo, useState} from "../../lib/ui.js";

const MOST = 20_000; // longer texts are shown whole on both sides
const MOST_EDITS = 1500;

// Return everything that a message says, as one text.
export function wholeText(message) {
  const calls = message.tool_calls.map((call) => call.raw);
  return [message.reasoning, message.content, ...calls].filter(Boolean).join("\n");
}

// Return rows of messages that stand beside each other: {a, b, same}. Both begin with the same prompt, so they go by
// their number, and the longer conversation stands alone at its end.
export function pairs(first, second) {
  const rows = [];
  for (let at = 0; at < Math.max(first.length, second.length); at += 1) {
    const [a, b] = [first[at] ?? null, second[at] ?? null];
    rows.push({at, a, b, same: a !== null && b !== null && a.role === b.role && wholeText(a) === wholeText(b)});
  }
  return rows;
}

const wordsOf = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

// Return the changes between two texts word by word, or null if they are too long or too different to be worth it.
export function changes(a, b) {
  if (a.length + b.length > MOST) return null;
  const found = diffArrays(wordsOf(a), wordsOf(b), {maxEditLength: MOST_EDITS});
  return found?.map(({value, added, removed}) => ({text: value.join(""), added, removed})) ?? null;
}

function Side({message, parts, drop}) {
  if (!message) return html`<div class="pair-side dim">no message</div>`;
  return html`<div class=${`pair-side role-${message.role}`}><strong>${message.role}</strong>
    ${parts ? html`<div class="prose-text">${parts.filter((part) => !part[drop]).map((part, at) => part.added || part.removed
      ? html`<mark key=${at} class=${part.added ? "added" : "removed"}><${Visible} text=${part.text} /></mark>` : html`<${Visible} key=${at} text=${part.text} />`)}</div>`
      : html`<${LongText} text=${wholeText(message)} label="Text" />`}</div>`;
}

function Pair({row}) {
  const parts = useMemo(() => (row.a && row.b && !row.same ? changes(wholeText(row.a), wholeText(row.b)) : null), [row]);
  if (row.same) return html`<div class="pair same"><div class="pair-side"><strong>${row.a.role}</strong> <span class="dim">the same on both sides</span><${LongText} text=${wholeText(row.a)} label="Text" /></div></div>`;
  return html`<div class="pair"><${Side} message=${row.a} parts=${parts} drop="added" /><${Side} message=${row.b} parts=${parts} drop="removed" /></div>`;
}

export function Conversations({first, second}) {
  const rows = useMemo(() => pairs(first, second), [first, second]);
  const [all, setAll] = useState(false);
  const [limit, setLimit] = useState(200);
  const differ = rows.filter((row) => !row.same).length;
  const shown = rows.filter((row) => all || !row.same);
  return html`<section aria-label="Conversations" class="pairs">
    <div class="tool-row"><label class="filter"><input type="checkbox" checked=${all} onChange=${() => setAll(!all)} />what is the same too</label>
      <span class="dim" role="status">${differ ? `${count(differ)} of ${count(rows.length)} messages differ` : "The conversations are the same."}</span></div>
    ${shown.slice(0, limit).map((row) => html`<${Pair} key=${row.at} row=${row} />`)}
    ${shown.length > limit ? html`<button type="button" onClick=${() => setLimit(limit + 200)}>Show more</button>` : null}
  </section>`;
}
