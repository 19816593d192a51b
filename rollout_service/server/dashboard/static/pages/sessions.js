// The live sessions, the newest first, and what became of all served turns.
import {ago, count} from "../lib/format.js";
import {useLive} from "../lib/live.js";
import {go, href, segment} from "../lib/router.js";
import {html} from "../lib/ui.js";
import {Badge, Card, Empty, Problem, Tabs, Visible} from "../lib/widgets.js";

const COLUMNS = [["Session"], ["State"], ["Tenant"], ["Pool"], ["Trains"], ["Served", "number"], ["Judged", "number"],
  ["Delivered", "number"], ["Waiting", "number"], ["Dropped", "number"], ["Parts", "number"], ["Last request"]];
const SHOWN = 200;

export const dropped = (counts) => Object.values(counts.dropped).reduce((total, one) => total + one, 0);

export function Page({route}) {
  const shown = route.query.show ?? "all";
  const query = shown === "all" ? "" : `&open=${shown === "open"}`;
  const {data, error} = useLive(`v1/sessions?limit=${SHOWN}${query}`);
  return html`<h1>Sessions</h1><${Problem} error=${error} />
    <div class="stack">${data ? html`<${Funnel} counts=${data.counts} />` : null}
    <${Card} label="Sessions">
      <${Tabs} label="Which sessions" tabs=${[["all", "All"], ["open", "Open"], ["closed", "Closed"]]} current=${shown}
        onChange=${(show) => go("/sessions", show === "all" ? {} : {show}, {replace: true})} />
      ${data && !data.sessions.length ? html`<${Empty}>There is no ${shown === "all" ? "live" : shown} session.<//>` : null}
      ${data?.sessions.length ? html`<div class="sideways"><table><thead><tr>${COLUMNS.map(([name, kind]) =>
        html`<th scope="col" class=${kind} key=${name}>${name}</th>`)}</tr></thead>
        <tbody>${data.sessions.map((session) => html`<${Row} key=${session.session_id} session=${session} />`)}</tbody></table></div>` : null}
      ${data?.next_cursor ? html`<p class="dim">The newest ${SHOWN} are shown. <code>rollout-service sessions list</code> lists all.</p>` : null}
    <//></div>`;
}

function Funnel({counts}) {
  const figures = [["served", counts.served], ["recorded", counts.recorded], ["judged", counts.judged], ["delivered", counts.delivered],
    ["waiting", counts.waiting], ["dropped", dropped(counts)]];
  return html`<${Card} title="Turns of all sessions" class="funnel"><dl class="fact-grid">${figures.map(([name, number]) => html`<div key=${name}>
    <dt>${name}</dt><dd><strong>${count(number)}</strong></dd></div>`)}</dl>
    <${Reasons} counts=${counts} /><//>`;
}

export function Reasons({counts}) {
  const reasons = Object.entries(counts.dropped).filter(([, number]) => number).sort((a, b) => b[1] - a[1]);
  return reasons.length ? html`<p class="dim">Dropped: ${reasons.map(([reason, number]) => `${reason.replaceAll("_", " ")} ${count(number)}`).join(", ")}</p>` : null;
}

function Row({session}) {
  const {counts} = session;
  return html`<tr><th scope="row" class="mono session-id"><a href=${href(`/sessions/${segment(session.session_id)}`)}><${Visible} text=${session.session_id} /></a></th>
    <td><${Badge} state=${session.state} /></td><td>${session.tenant}</td><td>${session.pool}</td><td>${session.train ? "yes" : "no"}</td>
    <td class="number">${count(counts.served)}</td><td class="number">${count(counts.judged)}</td><td class="number">${count(counts.delivered)}</td>
    <td class="number">${count(counts.waiting)}</td><td class="number">${count(dropped(counts))}</td><td class="number">${session.parts}</td>
    <td class="dim nowrap">${ago(session.used_at)}</td></tr>`;
}
