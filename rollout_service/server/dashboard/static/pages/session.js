// One live session: its turns, the value of each, and the rollouts that its parts became.
import {ago, count, number, time} from "../lib/format.js";
import {useLive} from "../lib/live.js";
import {href, segment} from "../lib/router.js";
import {html} from "../lib/ui.js";
import {Action, Badge, Card, Empty, Problem, Visible, sends} from "../lib/widgets.js";
import {Reasons, dropped} from "./sessions.js";

export function Page({route}) {
  const id = route.parts.slice(1).join("/");
  const path = `v1/sessions/${segment(id)}`;
  const {data: session, error, reload} = useLive(path);
  const end = async () => {
    await sends("POST", `${path}/end`)();
    reload();
  };
  return html`<div class="run-title"><h1 class="mono"><${Visible} text=${id} /></h1>
      ${session ? html`<${Badge} state=${session.state} />` : null}
      ${session?.state === "open" ? html`<div class="actions"><${Action} label="End" needs="submit" danger confirm="End this session?" run=${end}>
        Its requests are answered with 410 from now on; its last turns are judged and delivered.<//></div>` : null}</div>
    <${Problem} error=${error} />
    ${session ? html`<div class="stack"><${Facts} session=${session} /><${Parts} parts=${session.handed_over ?? []} />
      <${Turns} session=${session} /></div>` : null}`;
}

const linked = (id) => html`<a class="mono" href=${href(`/sessions/${segment(id)}`)}><${Visible} text=${id} /></a>`;

function Facts({session}) {
  const {counts} = session;
  const facts = [
    ["User", html`<span class="mono ellipsis" title="A salted hash">${session.user.slice(0, 16)}</span>`],
    ["Tenant", session.tenant],
    ["Pool", html`<a href="#/engines">${session.pool}</a>`],
    ["May be trained on", session.train ? "yes" : "no"],
    ["Opened", `${time(session.opened_at)}, ${ago(session.opened_at)}`],
    ["Last request", ago(session.used_at)],
    ["Turns", `${count(counts.served)} served, ${count(counts.judged)} judged, ${count(counts.delivered)} delivered, ${count(counts.waiting)} waiting, ${count(dropped(counts))} dropped`],
  ];
  if (session.closed_at) facts.push(["Closed", `${time(session.closed_at)}, ${session.closed_because ?? ""}`]);
  if (session.continues) facts.push(["Goes on from", linked(session.continues)]);
  if (session.group) facts.push(["Group", html`<span class="mono">${session.group}</span>`]);
  return html`<${Card} title="Session"><dl class="fact-grid">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <${Reasons} counts=${counts} /><//>`;
}

function Parts({parts}) {
  return html`<${Card} title="Parts that were handed to runs">
    ${parts.length ? html`<table><thead><tr><th scope="col">Part</th><th scope="col">Run</th><th scope="col">Rollout</th><th scope="col">Turns</th>
      <th scope="col">Handed over</th></tr></thead><tbody>${parts.map((part) => html`<tr key=${part.part}><td>${part.part}</td>
        <td><a class="mono" href=${href(`/runs/${segment(part.run_id)}`)}>${part.run_id}</a></td>
        <td>${part.rollout_id ? html`<a class="mono" href=${href(`/rollouts/${segment(part.rollout_id)}`)}>${part.rollout_id}</a>` : html`<span class="dim">waits for others</span>`}</td>
        <td>${part.turns.join(", ")}</td><td class="dim nowrap">${ago(part.closed_at)}</td></tr>`)}</tbody></table>`
      : html`<${Empty}>None yet.<//>`}<//>`;
}

const tone = (value) => (value > 0 ? "good-text" : value < 0 ? "bad-text" : "dim");
const signed = (value) => (value === null || value === undefined ? "\u2013" : value > 0 ? `+${number(value)}` : number(value));

function Turns({session}) {
  const turns = session.turns ?? [];
  return html`<${Card} title="Turns">
    ${turns.length ? html`<div class="sideways"><table><thead><tr><th scope="col" class="number">Turn</th><th scope="col">Kind</th><th scope="col" class="number">Value</th>
      <th scope="col">Rests on</th><th scope="col">Votes</th><th scope="col">Followed by</th><th scope="col">Training</th></tr></thead>
      <tbody>${turns.map((turn) => html`<${Turn} key=${turn.turn} turn=${turn} />`)}</tbody></table></div>`
      : html`<${Empty}>No turn is stored.<//>`}<//>`;
}

function Turn({turn}) {
  const votes = turn.votes && `${turn.votes.plus} + / ${turn.votes.zero} 0 / ${turn.votes.minus} \u2212${turn.votes.failed ? ` / ${turn.votes.failed} failed` : ""}`;
  const next = turn.next_state && `${turn.next_state.role}, ${count(turn.next_state.chars)} characters`;
  return html`<tr><td class="number">${turn.turn}</td><td>${turn.kind}</td><td class=${`number ${tone(turn.value ?? 0)}`}>${signed(turn.value)}</td>
    <td>${[...new Set([turn.source, turn.reason])].filter(Boolean).join(", ").replaceAll("_", " ") || html`<span class="dim">nothing yet</span>`}</td>
    <td class="nowrap">${votes ?? ""}</td><td>${next ?? ""}</td>
    <td>${turn.masked_because ? html`<${Badge} state="masked">${turn.masked_because.replaceAll("_", " ")}<//>`
      : turn.usable ? html`<${Badge} state="ready">usable<//>` : html`<span class="dim">undecided</span>`}</td></tr>`;
}
