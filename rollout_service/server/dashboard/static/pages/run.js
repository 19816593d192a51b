// One run: what it has, how it went, its groups, and the buttons that steer it.
import {ago, count, share, time} from "../lib/format.js";
import {send} from "../lib/api.js";
import {useLive} from "../lib/live.js";
import {href, segment} from "../lib/router.js";
import {Groups} from "../lib/run_groups.js";
import {History} from "../lib/run_plots.js";
import {html} from "../lib/ui.js";
import {Action, Badge, Bar, Card, Empty, Problem, Visible} from "../lib/widgets.js";

export function Page({route}) {
  const id = route.parts[1];
  const {data: run, error, reload} = useLive(`v1/runs/${segment(id)}`);
  return html`<div class="run-title"><h1 class="mono">${id}</h1>
      ${run ? html`<${Badge} state=${run.state} /><${Steer} run=${run} onDone=${reload} />` : null}</div>
    <${Problem} error=${error} />
    ${run ? html`<div class="stack">
      <${Problem} error=${run.problem && {...run.problem, detail: run.problem.message}} />
      ${run.warnings?.map((warning) => html`<p class="run-warning" key=${warning}><${Visible} text=${warning} /></p>`)}
      <${Facts} run=${run} />
      <${History} runId=${id} />
      <${Groups} run=${run} state=${route.query.state ?? ""} reason=${route.query.reason ?? ""} />
    </div>` : null}`;
}

// The buttons ask first, and are disabled where the key does not allow what they do.
function Steer({run, onDone}) {
  const path = `v1/runs/${segment(run.run_id)}`;
  const patch = (state) => async () => {
    await send("PATCH", path, {state});
    onDone();
  };
  if (run.state === "ended" || run.state === "finished") return null;
  return html`<div class="actions">
    ${run.state === "paused"
      ? html`<${Action} label="Resume" needs="submit" confirm=${`Resume ${run.run_id}?`} run=${patch("running")}>It begins new groups again.<//>`
      : html`<${Action} label="Pause" needs="submit" confirm=${`Pause ${run.run_id}?`} run=${patch("paused")}>No new group begins.
          Groups under way end, and the trainer still gets its batches.<//>`}
    <${Action} label="End" needs="submit" danger confirm=${`End ${run.run_id} for good?`} run=${patch("ended")}>Its rollouts under way are
      cancelled. Groups that are finished can still be leased. A run that has ended cannot be resumed.<//>
  </div>`;
}

function Facts({run}) {
  const {request, counts} = run;
  const taken = run.tasks === null ? `${count(run.cursor)} taken` : `${count(run.cursor)} taken of ${count(run.tasks)} an epoch`;
  const facts = [
    ["Accepted", html`${share(run.acceptance_rate)} <span class="run-bar"><${Bar} value=${run.acceptance_rate} tone="good"
      label=${`${share(run.acceptance_rate)} of the groups are accepted`} /></span>`],
    ["Pool", html`<a href="#/engines">${request.pool}</a>, version ${run.version}`],
    ["Group and batch", `${request.group_size} samples, ${request.batch_size} groups`],
    ["Tasks", `${taken}, from ${request.source.kind === "inline" ? "the trainer" : request.source.kind}`],
    ["Batches", `${count(counts.batches_acknowledged)} acknowledged`],
    ["Samples", `${count(counts.samples_masked)} masked, ${count(counts.samples_stale)} of them stale; ${count(counts.samples_retried)} repeated`],
    ["Began", `${time(run.created_at)}, ${ago(run.created_at)}`],
  ];
  if (run.ended_at) facts.push(["Ended", `${time(run.ended_at)}, ${ago(run.ended_at)}`]);
  return html`<div class="grid">
    <${Card} title="Now" class="run-facts" actions=${html`<a href=${href("/rollouts", {run: run.run_id})}>Its rollouts</a>`}>
      <${States} run=${run} />
      <dl class="fact-grid">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl><//>
    <${Dropped} run=${run} />
  </div>`;
}

function States({run}) {
  const path = `/runs/${segment(run.run_id)}`;
  return html`<p class="run-states">${["open", "ready", "batched", "acknowledged"].map((state) => html`<a key=${state} href=${href(path, {state})}>
    <strong>${count(run.counts[state])}</strong> <${Badge} state=${state} /></a>`)}</p>`;
}

function Dropped({run}) {
  const reasons = Object.entries(run.counts.dropped).sort((a, b) => b[1] - a[1]);
  const most = reasons[0]?.[1] ?? 0;
  const path = `/runs/${segment(run.run_id)}`;
  return html`<${Card} title="Dropped groups, by reason" class="run-dropped">
    ${reasons.length ? html`<table><tbody>${reasons.map(([reason, number]) => html`<tr key=${reason}>
      <th scope="row"><a href=${href(path, {state: "dropped", reason})}><${Visible} text=${reason} /></a></th><td class="number">${count(number)}</td>
      <td class="run-dropped-bar"><${Bar} value=${number} max=${most} tone="warn" label=${`${number} groups`} /></td></tr>`)}</tbody></table>`
      : html`<${Empty}>None.<//>`}<//>`;
}
