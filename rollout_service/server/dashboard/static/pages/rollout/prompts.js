// The prompts of two turns compared by their ids: where they first differ, and what was taken out and put in there.
import {count} from "../../lib/format.js";
import {difference} from "../../lib/tokens/difference.js";
import {shownText, useLoaded} from "../../lib/tokens/view.js";
import {TextWindow} from "../../lib/texts/view.js";
import {Problem} from "../../lib/widgets.js";
import {html, useMemo, useState} from "../../lib/ui.js";

const AROUND = 60; // tokens shown of what is the same, at each end
const SHORT = 4000;

// Return the prompts that there are: one for each turn of each segment.
export function promptsOf(source) {
  return source.segments.flatMap((tokens, segment) => tokens.outline.turns.map((range) => ({
    key: `${segment}:${range.turn}`, segment, turn: range.turn, end: range.start,
    label: `turn ${range.turn}${source.segments.length > 1 ? `, segment ${segment}` : ""}: ${count(range.start)} tokens`,
  })));
}

// Return the two prompts to begin with: those on both sides of the first fork, else those of the first two turns.
export function beginWith(source, prompts) {
  const fork = source.segments.find((tokens) => tokens.outline.parent !== null && tokens.outline.parent !== undefined);
  if (fork) {
    const before = prompts.filter((prompt) => source.segments[prompt.segment].index === fork.outline.parent);
    const after = prompts.find((prompt) => source.segments[prompt.segment] === fork);
    if (before.length && after) return [before[before.length - 1].key, after.key];
  }
  return [prompts[0]?.key, (prompts[1] ?? prompts[0])?.key];
}

const textOf = (tokens, [from, to]) => tokens.text.slice(tokens.begin(from), to > from ? tokens.ends[to - 1] : tokens.begin(from));

function Part({part, a, b}) {
  const from = part.kind === "added" ? b : a;
  const range = part.kind === "added" ? part.b : part.a;
  const length = range[1] - range[0];
  const word = {same: "the same", removed: "only in the first", added: "only in the second"}[part.kind];
  const sign = {same: " ", removed: "−", added: "+"}[part.kind];
  const cut = part.kind === "same" && length > 2 * AROUND;
  const show = (of) => {
    const text = textOf(from, of);
    return text.length > SHORT ? html`<${TextWindow} text=${text} label=${word} />` : html`<bdi class="diff-text">${shownText(text, true)}</bdi>`;
  };
  return html`<div class=${`diff-part ${part.kind}`} role="group" aria-label=${word}>
    <div class="diff-side"><span aria-hidden="true">${sign}</span> ${count(length)} <span class="dim">${word}, from ${count(range[0])}</span></div>
    <div class="diff-body">${cut ? html`${show([range[0], range[0] + AROUND])}<div class="dim">… ${count(length - 2 * AROUND)} tokens …</div>${show([range[1] - AROUND, range[1]])}` : show(range)}</div>
  </div>`;
}

function FirstIds({first, a, b, endA, endB}) {
  const ids = (tokens, end) => Array.from(tokens.ids.subarray(first, Math.min(end, first + 12))).join(" ") || "the prompt ends here";
  return html`<dl class="facts"><div class="fact"><dt>first id that differs</dt><dd>at ${count(first)}</dd></div>
    <div class="fact"><dt>first prompt</dt><dd class="mono">${ids(a, endA)}</dd></div><div class="fact"><dt>second prompt</dt><dd class="mono">${ids(b, endB)}</dd></div></dl>`;
}

export function Prompts({source}) {
  const {loaded, problem} = useLoaded(source);
  const prompts = useMemo(() => promptsOf(source), [source]);
  const [chosen, setChosen] = useState(() => beginWith(source, prompts));
  const [first, second] = chosen.map((key) => prompts.find((prompt) => prompt.key === key));
  const ready = first && second && [first, second].every((prompt) => source.segments[prompt.segment].loaded >= prompt.end);
  const result = useMemo(() => ready && difference(
    source.segments[first.segment].ids.subarray(0, first.end), source.segments[second.segment].ids.subarray(0, second.end)),
  [source, ready, ...chosen]);
  if (!prompts.length) return html`<p class="empty">Nothing was sampled, so there are no prompts.</p>`;
  const select = (side, label) => html`<label class="filter">${label}<select value=${chosen[side]} onChange=${(event) => setChosen(chosen.map((old, at) => (at === side ? event.currentTarget.value : old)))}>
    ${prompts.map((prompt) => html`<option key=${prompt.key} value=${prompt.key}>${prompt.label}</option>`)}</select></label>`;
  const fork = second && source.segments[second.segment].outline;
  return html`<section class="prompts" aria-label="Prompts">
    <div class="tool-row">${select(0, "First")} ${select(1, "Second")}
      <button type="button" onClick=${() => setChosen([chosen[1], chosen[0]])}>Swap</button>
      ${fork && first.segment !== second.segment ? html`<span class="badge warn">segment ${fork.index} began: ${fork.fork_reason.replaceAll("_", " ")}</span>` : null}</div>
    <${Problem} error=${problem} />
    ${!ready ? html`<p class="empty" role="status">${count(loaded)} tokens read</p>`
      : html`${result.first === null ? html`<p role="status">The prompts are the same, id for id.</p>`
        : result.first === first.end ? html`<p role="status">The second prompt extends the first, id for id, by ${count(second.end - first.end)} tokens.</p>`
          : html`<${FirstIds} first=${result.first} a=${source.segments[first.segment]} b=${source.segments[second.segment]} endA=${first.end} endB=${second.end} />`}
        ${result.parts.slice(0, 400).map((part, at) => html`<${Part} key=${at} part=${part} a=${source.segments[first.segment]} b=${source.segments[second.segment]} />`)}
        ${result.parts.length > 400 ? html`<p class="dim">and ${count(result.parts.length - 400)} more parts</p>` : null}`}
  </section>`;
}
