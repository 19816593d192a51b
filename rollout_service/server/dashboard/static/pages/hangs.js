// What takes longer than its own history says: what it waits for, where, and what ends it.
import {ago, seconds} from "../lib/format.js";
import {useLive, useOverview} from "../lib/live.js";
import {href, segment} from "../lib/router.js";
import {html, useState} from "../lib/ui.js";
import {plain} from "../lib/text.js";
import {Badge, Card, Empty, Problem, Visible} from "../lib/widgets.js";
import {plural, waitWords} from "../lib/words.js";

export function Page() {
  const now = useOverview();
  const {data, error} = useLive("v1/hangs", {every: 3});
  const findings = data?.findings ?? now?.findings ?? [];
  const counts = Object.groupBy(findings, (finding) => finding.verdict);
  return html`<h1>Hangs</h1><${Problem} error=${error} />
    ${data ? html`<p class="dim">${plural(data.working, "rollout")} under way at ${data.node}. The event loop was late by
      ${" "}${seconds(data.loop_lag_seconds)} at most in the last 10 s. ${Object.entries(counts).map(([verdict, some]) => `${some.length} ${verdict}`).join(", ")}</p>` : null}
    ${data && !findings.length ? html`<${Empty}>Nothing takes longer than its history says.<//>` : null}
    <div class="stack">${findings.map((finding) => html`<${Finding} key=${finding.finding_id} finding=${finding} />`)}</div>`;
}

function Finding({finding}) {
  const {usual} = finding;
  return html`<${Card} class=${`finding ${finding.verdict}`} label=${plain(finding.message)}
      title=${html`<${Badge} state=${finding.verdict} /> <span class="finding-text"><${Visible} text=${finding.message} /></span>`}>
    <div class="finding-body"><div>
      <p class="advice"><${Visible} text=${finding.hint} /></p>
      <dl class="pairs">
        <dt>Waits for</dt><dd>${waitWords(finding.kind)}${finding.stage ? ` in ${finding.stage}` : ""}${finding.environment ? `, ${finding.environment}` : ""}</dd>
        <dt>About</dt><dd class="mono"><${Visible} text=${finding.subject} />${finding.responds === false ? html` <span class="bad-text">does not answer</span>`
          : finding.responds ? html` <span class="good-text">answers</span>` : null}</dd>
        <dt>For</dt><dd><strong>${seconds(finding.seconds)}</strong>${usual ? html` <span class="dim">usually ${seconds(usual.p50)}, at most ${seconds(usual.p99)} in 99 %
          of ${usual.count.toLocaleString("en-US")}</span>` : html` <span class="dim">too few before to compare</span>`}</dd>
        ${Object.entries(finding.detail).map(([name, value]) => html`<dt key=${`t${name}`}>${name}</dt><dd key=${name} class="mono"><${Visible}
          text=${typeof value === "string" ? value : JSON.stringify(value)} /></dd>`)}
        <dt>Rollouts</dt><dd>${finding.rollouts.map((id) => html`<${Waiting} key=${id} id=${id} />`)}
          ${finding.count > finding.rollouts.length ? html`<span class="dim">and ${finding.count - finding.rollouts.length} more</span>` : null}</dd>
      </dl></div>
      ${finding.stack.length ? html`<${Stack} frames=${finding.stack} />` : null}
    </div><//>`;
}

// The frames of the task that waits; those of libraries are folded away at first.
export function Stack({frames}) {
  const [all, setAll] = useState(false);
  const shown = all ? frames : frames.filter((frame) => frame.ours);
  const folded = frames.length - shown.length;
  return html`<div class="stack-trace"><h3>Where it waits</h3><ol>${shown.map((frame, index) => html`<li key=${index} class=${frame.ours ? "" : "dim"}>
      <span class="mono">${frame.function}</span> <span class="mono dim">${frame.file}:${frame.line}</span></li>`)}</ol>
    ${folded || all ? html`<button type="button" class="quiet" onClick=${() => setAll(!all)}>${all ? "Fold libraries" : `${plural(folded, "frame")} of libraries`}</button>` : null}</div>`;
}

// One rollout that waits, and what it does in detail once it is opened.
function Waiting({id}) {
  const [open, setOpen] = useState(false);
  return html`<span class=${open ? "waiting open" : "waiting"}><a class="mono" href=${href(`/rollouts/${segment(id)}`)}>${id}</a>
    <button type="button" class="quiet" aria-expanded=${open ? "true" : "false"} aria-label=${`What ${id} does`} title="What it does"
      onClick=${() => setOpen(!open)}>${open ? "\u25be" : "\u25b8"}</button>${open ? html`<${Activity} id=${id} />` : null}</span>`;
}

export function Activity({id}) {
  const {data, error} = useLive(`v1/rollouts/${encodeURIComponent(id)}/activity`, {every: 3});
  if (!data) return html`<${Problem} error=${error} />`;
  return html`<div class="waiting-now"><p class="dim">${data.environment}, attempt ${data.attempt} at ${data.node}, begun ${ago(data.since)}</p>
    <ol>${data.waits.map((wait, index) => html`<li key=${index}>${waitWords(wait.kind)} <span class="mono"><${Visible} text=${wait.name} /></span>${" "}for ${seconds(wait.seconds)}${wait.progress_seconds === null ? "" : html`, <span class="dim">moved ${seconds(wait.progress_seconds)} ago</span>`}</li>`)}</ol>
    ${data.stack.length ? html`<${Stack} frames=${data.stack} />` : null}</div>`;
}
