// One rollout: what became of it, when it did what, and its trajectory as a conversation, as tokens and as prompts.
import {seconds} from "../lib/format.js";
import {href, go, segment} from "../lib/router.js";
import {store, stored} from "../lib/stored.js";
import {Timeline} from "../lib/timeline/view.js";
import {timelineOf} from "../lib/timeline/model.js";
import {TokenSource} from "../lib/tokens/source.js";
import {TextWindow} from "../lib/texts/view.js";
import {Empty, Problem, Tabs} from "../lib/widgets.js";
import {html, useEffect, useMemo, useState} from "../lib/ui.js";
import {Branches, hasBranches} from "./rollout/branches.js";
import {Activity, Head} from "./rollout/head.js";
import {Conversation} from "./rollout/conversation.js";
import {ENDED, pathOf, turnSteps, useAnswer, useGroup, useSummary} from "./rollout/data.js";
import {Prompts} from "./rollout/prompts.js";
import {Session, marksOf} from "./rollout/session.js";
import {SubAgents} from "./rollout/subagents.js";
import {Tokens} from "./rollout/tokens.js";

const nodeQuery = (node) => (node === null ? "" : `?node=${node}`);

function useSource(id, node, wanted) {
  const {data, error, loading} = useAnswer(wanted ? pathOf(id, `/outline${nodeQuery(node)}`) : null);
  const source = useMemo(() => (data ? new TokenSource(id, data, node) : null), [data]);
  return {source, error, loading};
}

function Whole({what, children}) {
  if (what.error) return html`<${Problem} error=${what.error} />`;
  return what.source ? children(what.source) : html`<${Empty}>Loading<//>`;
}

function Talk({id, node, rollout, steps, marks}) {
  const {data, error, loading} = useAnswer(pathOf(id, `/messages${nodeQuery(node)}`));
  const turns = useMemo(() => turnSteps(steps, node, rollout.attempt), [steps, node]);
  if (loading) return html`<${Empty}>Loading<//>`;
  if (error) return html`<${Problem} error=${error} />`;
  const query = (turn) => ({tab: "tokens", turn, ...(node === null ? {} : {node})});
  return html`<${Conversation} messages=${data.messages} turns=${data.finish_reasons.length} steps=${steps} turnSteps=${turns} marks=${marks}
    tokensLink=${(turn) => href(`/rollouts/${segment(id)}`, query(turn))} />`;
}

function Body({tab, id, node, route, rollout, group, steps, marks}) {
  const raw = tab === "raw";
  const tokens = tab === "tokens" || tab === "prompts";
  const source = useSource(id, node, tokens);
  const text = useMemo(() => (raw ? JSON.stringify(rollout, null, 2) : ""), [raw, rollout]);
  if (raw) return html`<${TextWindow} text=${text} label="The rollout as JSON" rows=${38} />`;
  if (tab === "subagents") return html`<${SubAgents} id=${id} />`;
  if (tab === "branches") return html`<${Branches} group=${group} id=${id} />`;
  if (tab === "session") return html`<${Session} rollout=${rollout} />`;
  if (tab === "tokens") {
    const turn = /^[0-9]+$/.test(route.query.turn ?? "") ? Number(route.query.turn) : null;
    return html`<${Whole} what=${source}>${(loaded) => html`<${Tokens} key=${route.query.turn} source=${loaded} marks=${marks} startTurn=${turn} />`}<//>`;
  }
  if (tab === "prompts") return html`<${Whole} what=${source}>${(loaded) => html`<${Prompts} source=${loaded} />`}<//>`;
  return html`<${Talk} id=${id} node=${node} rollout=${rollout} steps=${steps} marks=${marks} />`;
}

const FOLDED = "rollout-timeline-folded";

// The timeline, which stays folded for whoever folded it.
function Times({model, onBar, dropped}) {
  const [open, setOpen] = useState(() => stored(FOLDED) === null);
  const toggle = () => {
    store(FOLDED, open ? "yes" : null);
    setOpen(!open);
  };
  return html`<section class="card" aria-label="When">
    <button type="button" class="quiet fold" aria-expanded=${open ? "true" : "false"} onClick=${toggle}>${open ? "▾" : "▸"} Timeline <span class="dim">${seconds(model.length)}</span></button>
    ${!open ? null : model.lanes.length ? html`<${Timeline} model=${model} onBar=${onBar} />` : html`<p class="empty">Nothing has begun yet.</p>`}
    ${dropped ? html`<p class="dim">${dropped} more steps were not recorded.</p>` : null}</section>`;
}

function tabsOf(rollout, ended, group) {
  const tabs = ended ? [["conversation", "Conversation"], ["tokens", "Tokens"], ["prompts", "Prompts"], ["subagents", "Sub-agents"]] : [];
  if (hasBranches(group)) tabs.push(["branches", "Branches"]);
  if (rollout.kind === "session") tabs.push(["session", "Session"]);
  return [...tabs, ["raw", "Raw"]];
}

export function Page({route}) {
  const id = route.parts[1];
  const node = /^[0-9]+$/.test(route.query.node ?? "") ? Number(route.query.node) : null;
  return html`<${Loaded} key=${id} id=${id} node=${node} route=${route} />`;
}

// Ask again only as long as the rollout is under way.
function useRollout(id) {
  const [ended, setEnded] = useState(false);
  const answer = useAnswer(pathOf(id), !ended);
  const now = answer.data !== null && ENDED.has(answer.data.state);
  useEffect(() => {
    if (now) setEnded(true);
  }, [now]);
  return answer;
}

function Loaded({id, node, route}) {
  const {data: rollout, error, loading} = useRollout(id);
  const ended = rollout !== null && ENDED.has(rollout.state);
  const live = rollout !== null && !ended;
  const steps = useAnswer(rollout ? pathOf(id, "/steps") : null, live);
  const activity = useAnswer(live ? pathOf(id, "/activity") : null, live);
  const summary = useSummary(rollout);
  const group = useGroup(summary);
  const marks = useMemo(() => marksOf(rollout?.turn_marks), [rollout]);
  const model = useMemo(() => rollout && timelineOf(rollout, steps.data?.steps ?? [], live ? activity.data : null), [rollout, steps.data, activity.data]);
  if (loading) return html`<${Empty}>Loading<//>`;
  if (!rollout) return html`<${Problem} error=${error} />`;
  const tabs = tabsOf(rollout, ended, group);
  const tab = tabs.some(([name]) => name === route.query.tab) ? route.query.tab : tabs[0][0];
  const own = node === null ? {} : {node};
  const to = (name) => go(`/rollouts/${segment(id)}`, {tab: name, ...own}, {replace: true});
  const openBar = (bar) => ended && typeof bar.step?.detail?.turn === "number" && bar.step.lane === "" && go(`/rollouts/${segment(id)}`, {tab: "tokens", turn: bar.step.detail.turn});
  return html`<div class="rollout-page">
    <${Head} rollout=${rollout} summary=${summary} group=${group} />
    ${live ? html`<${Activity} activity=${activity.data} error=${activity.error} />` : null}
    <${Times} model=${model} onBar=${openBar} dropped=${steps.data?.dropped} />
    <div class="card trajectory">
      ${node === null ? null : html`<p class="node-notice">This is the trajectory of sub-agent ${node}. <a href=${href(`/rollouts/${segment(id)}`, {tab: "subagents"})}>All sub-agents</a>, or <a href=${href(`/rollouts/${segment(id)}`)}>the agent's own</a>.</p>`}
      <${Tabs} tabs=${tabs} current=${tab} onChange=${to} label="Views of the trajectory" />
      ${live && tab === "raw" ? html`<p class="dim">The trajectory is stored when the rollout ends.</p>` : null}
      <${Body} key=${`${tab}/${node}`} tab=${tab} id=${id} node=${node} route=${route} rollout=${rollout} group=${group} steps=${steps.data?.steps} marks=${marks} />
    </div>
  </div>`;
}
