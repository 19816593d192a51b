// The runs, the newest first: what each has, and whether it goes on.
import {ago, count, number, share} from "../lib/format.js";
import {useLive, useOverview} from "../lib/live.js";
import {href, segment} from "../lib/router.js";
import {html} from "../lib/ui.js";
import {Badge, Bar, Card, Empty, Problem, Visible} from "../lib/widgets.js";

const COLUMNS = [["Run"], ["State"], ["Accepted"], ["Version", "number"], ["Stale", "number"], ["Open", "number"], ["Ready", "number"],
  ["Batches", "number"], ["Dropped", "number"], ["Began"]];

export function Page() {
  const {data, error} = useLive("v1/runs");
  const now = useOverview();
  const stale = new Map(now?.runs.map((run) => [run.run_id, run.staleness]) ?? []);
  const runs = data?.runs.toReversed() ?? [];
  return html`<h1>Runs</h1><${Problem} error=${error} />
    ${data && !runs.length ? html`<${Empty}>There is no run. A trainer makes one with POST /v1/runs.<//>` : null}
    ${runs.length ? html`<${Card} label="Runs"><div class="sideways"><table class="runs">
      <thead><tr>${COLUMNS.map(([name, kind]) => html`<th scope="col" class=${kind} key=${name}>${name}</th>`)}</tr></thead>
      <tbody>${runs.map((run) => html`<${Row} key=${run.run_id} run=${run} staleness=${stale.get(run.run_id)} />`)}</tbody>
    </table></div><//>` : null}`;
}

const sum = (counts) => Object.values(counts).reduce((total, one) => total + one, 0);

function Row({run, staleness}) {
  const {counts} = run;
  const rate = run.acceptance_rate;
  return html`<tr><th scope="row"><a class="mono" href=${href(`/runs/${segment(run.run_id)}`)}>${run.run_id}</a>
      ${run.problem ? html`<div class="run-problem bad-text"><${Visible} text=${run.problem.message} /></div>` : null}</th>
    <td><${Badge} state=${run.state} /></td>
    <td class="nowrap"><span class="run-rate">${share(rate)}</span> <span class="run-bar"><${Bar} value=${rate}
      tone=${rate < 0.02 ? "bad" : rate < 0.1 ? "warn" : "good"} label=${`${share(rate)} of the groups are accepted`} /></span></td>
    <td class="number">${run.version}</td><td class="number">${number(staleness, 1)}</td>
    <td class="number">${count(counts.open)}</td><td class="number">${count(counts.ready)}</td>
    <td class="number">${count(counts.batches_acknowledged)}</td><td class="number">${count(sum(counts.dropped))}</td>
    <td class="dim nowrap">${ago(run.created_at)}</td></tr>`;
}
