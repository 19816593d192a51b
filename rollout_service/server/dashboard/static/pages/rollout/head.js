// The head of a rollout: what became of it, why, and what it cost.
import {ago, count, number, seconds, share, time} from "../../lib/format.js";
import {href, segment} from "../../lib/router.js";
import {Badge, Copy, Problem, Visible} from "../../lib/widgets.js";
import {html, useState} from "../../lib/ui.js";
import {download, isSaved, url} from "../../lib/api.js";
import {ENDED, pathOf} from "./data.js";

const words = (text) => String(text).replaceAll("_", " ");

const Fact = ({name, children, title}) => html`<div class="fact" title=${title}><dt>${name}</dt><dd>${children}</dd></div>`;

function Failure({error, title}) {
  return html`<div class="problem" role=${title ? undefined : "alert"}>
    ${title ? html`<span class="dim">${title} </span>` : null}<strong>${error.code}</strong>
    <span class="dim"> at ${error.boundary}${error.stage ? `, in ${error.stage}` : ""}${error.attempt ? `, attempt ${error.attempt}` : ""}</span>
    <div class="failure-text"><${Visible} text=${error.message} /></div>
    ${error.hint ? html`<div class="failure-text"><strong>What to do: </strong><${Visible} text=${error.hint} /></div>` : null}
    ${(error.frames ?? []).map((frame) => html`<div class="failure-text">at <${Visible} text=${frame} /></div>`)}</div>`;
}

// Links to the samples of its group before and after it.
export function Neighbors({group, id, skip = null, to = (other) => href(`/rollouts/${segment(other)}`)}) {
  const at = group.findIndex((row) => row.rollout_id === id);
  if (at < 0 || group.length < 2) return null;
  const link = (row, label) => row
    ? html`<a href=${to(row.rollout_id)} title=${row.rollout_id}>${label} ${row.reward === null ? "" : html`<span class="dim">(reward ${number(row.reward, 3)})</span>`}</a>`
    : html`<span class="dim">${label}</span>`;
  const beside = (by) => (group[at + by]?.rollout_id === skip ? group[at + 2 * by] : group[at + by]);
  return html`<span class="neighbors">${link(beside(-1), "← previous")} <span class="dim">sample ${at + 1} of ${group.length}</span> ${link(beside(1), "next →")}
    ${skip === null ? html` <a href=${href("/compare", {ids: `${id},${group[(at + 1) % group.length].rollout_id}`})}>compare</a>` : null}</span>`;
}

// A button that saves the page as a file, which needs neither the service nor a network.
function Save({id}) {
  const [state, setState] = useState({busy: false, error: null});
  const save = async () => {
    setState({busy: true, error: null});
    const error = await download(pathOf(id, "/page"), `${id}.html`).catch((failed) => failed);
    setState({busy: false, error});
  };
  return html`<button type="button" class="quiet" disabled=${state.busy} onClick=${save} title="One file with this page, to send or to keep">Save as HTML</button>
    <${Problem} error=${state.error} />`;
}

function Links({rollout}) {
  if (isSaved) return null;
  return html`<a href=${url(pathOf(rollout.rollout_id))} target="_blank" rel="noreferrer">JSON</a>
    ${ENDED.has(rollout.state) ? html`<${Save} id=${rollout.rollout_id} />` : null}`;
}

function RunAndGroup({run, group}) {
  if (isSaved) return `${run} / ${group}`;
  return html`<a href=${href(`/runs/${segment(run)}`)}>${run}</a>${" / "}<a href=${href("/rollouts", {run, group})}>${group}</a>`;
}

function Source({branch}) {
  const id = isSaved ? branch.rollout_id : html`<a href=${href(`/rollouts/${segment(branch.rollout_id)}`)}>${branch.rollout_id}</a>`;
  return html`${id} at turn ${branch.turn}`;
}

export function Head({rollout, summary, group}) {
  const {usage, state} = rollout;
  const spent = rollout.spans.reduce((sum, span) => sum + span.seconds, 0);
  const parts = Object.entries(rollout.reward_parts ?? {});
  return html`<header class="rollout-head card">
    <div class="rollout-title">
      <h1><${Badge} state=${state} /> <span class="mono">${rollout.rollout_id}</span></h1>
      <${Copy} text=${rollout.rollout_id} label="Copy id" />
      <${Links} rollout=${rollout} />
      <span class="spacer"></span>
      <${Neighbors} group=${group} id=${rollout.rollout_id} />
    </div>
    <dl class="facts">
      <${Fact} name="reward"><span class="reward">${number(rollout.reward, 4)}</span><//>
      ${parts.map(([name, value]) => html`<${Fact} key=${name} name=${name}>${number(value, 4)}<//>`)}
      <${Fact} name="environment">${rollout.task.environment}<//>
      ${summary?.run_id ? html`<${Fact} name="run / group"><${RunAndGroup} run=${summary.run_id} group=${summary.group} /><//>` : null}
      ${rollout.branch_of ? html`<${Fact} name="branch of"><${Source} branch=${rollout.branch_of} /><//>` : null}
      <${Fact} name="pool">${rollout.pool}<//>
      <${Fact} name="attempt">${rollout.attempt}<//>
      ${rollout.stop_reason ? html`<${Fact} name="stopped">${words(rollout.stop_reason)}<//>` : null}
      <${Fact} name="turns">${count(usage.turns)}<//>
      <${Fact} name="sampled">${count(usage.sampled_tokens)} tokens<//>
      <${Fact} name="prompts" title="Prompt tokens sent to the engine, over all turns">${count(usage.prompt_tokens)}${usage.prompt_tokens ? html` <span class="dim">${share(usage.cached_tokens / usage.prompt_tokens)} cached</span>` : ""}<//>
      <${Fact} name="tool calls">${count(usage.tool_calls)}${usage.malformed_calls ? html` <span class="bad-text">${usage.malformed_calls} malformed</span>` : ""}<//>
      <${Fact} name="worked">${seconds(spent)}<//>
      <${Fact} name="created" title=${rollout.created_at}>${time(rollout.created_at)} <span class="dim">${ago(rollout.created_at)}</span><//>
      ${rollout.finished_at ? html`<${Fact} name="ended" title=${rollout.finished_at}>${time(rollout.finished_at)}<//>` : null}
    </dl>
    ${rollout.error ? html`<${Failure} error=${rollout.error} />` : null}
    ${rollout.retries.map((error, index) => html`<${Failure} key=${index} error=${error} title=${`Attempt ${error.attempt ?? index + 1} failed and was tried again:`} />`)}
    ${rollout.notes.length ? html`<ul class="notes">${rollout.notes.map((note) => html`<li><${Visible} text=${note} /></li>`)}</ul>` : null}
  </header>`;
}

// What a rollout under way does and waits for now.
export function Activity({activity, error}) {
  if (error && error.status !== 404) return html`<${Problem} error=${error} />`;
  if (!activity) return null;
  const waits = activity.waits;
  return html`<section class="activity card" aria-label="Now">
    <h2>Now <span class="dim">attempt ${activity.attempt} at node ${activity.node}${activity.stage ? `, in ${activity.stage}` : ""}</span></h2>
    ${waits.length ? html`<ul>${waits.map((wait) => html`<li key=${`${wait.kind}${wait.lane}${wait.since}`}><strong>${words(wait.kind)}</strong> <bdi><${Visible} text=${wait.name} /></bdi> for ${seconds(wait.seconds)}
      ${wait.lane ? html` <span class="dim">lane ${wait.lane}</span>` : ""}
      ${wait.progress_seconds === null ? "" : html` <span class="dim">last progress ${seconds(wait.progress_seconds)} ago</span>`}</li>`)}</ul>`
      : html`<p class="dim">Nothing that is recorded: the service's own work.</p>`}
    ${activity.stack.length ? html`<details><summary>Where it is in the code</summary><ol class="stack-frames mono">
      ${activity.stack.map((frame) => html`<li class=${frame.ours ? "" : "dim"}>${frame.function} <span class="dim">${frame.file}:${frame.line}</span></li>`)}</ol></details>` : null}
  </section>`;
}
