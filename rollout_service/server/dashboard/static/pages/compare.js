// Two rollouts side by side, as the samples of a group are: their rewards, the first token that differs, the tokens with
// one scroll position, and what their conversations say differently.
import {count, number, seconds} from "../lib/format.js";
import {go, href, segment} from "../lib/router.js";
import {colorings, legend} from "../lib/tokens/colors.js";
import {sharedStart} from "../lib/tokens/difference.js";
import {TokenSource} from "../lib/tokens/source.js";
import {Legend, TokenFacts, TokenLines, useLoaded} from "../lib/tokens/view.js";
import {Badge, Empty, Problem, Tabs} from "../lib/widgets.js";
import {html, useEffect, useMemo, useRef, useState} from "../lib/ui.js";
import {pathOf, useAnswer, useGroup, useSummary} from "./rollout/data.js";
import {Neighbors} from "./rollout/head.js";
import {Conversations} from "./compare/conversations.js";

// Return the first place that differs, segment by segment, as far as both are loaded; null if none does yet.
export function firstDifference(a, b) {
  for (let segment = 0; segment < Math.min(a.segments.length, b.segments.length); segment += 1) {
    const [one, two] = [a.segments[segment], b.segments[segment]];
    const token = sharedStart(one.ids.subarray(0, one.loaded), two.ids.subarray(0, two.loaded));
    if (token < Math.min(one.loaded, two.loaded)) return {segment, token};
    if (one.loaded < one.total || two.loaded < two.total) return null;
    if (one.total !== two.total) return {segment, token};
  }
  return null;
}

function Column({id, other, side}) {
  const {data: rollout, error} = useAnswer(pathOf(id));
  const summary = useSummary(rollout);
  const group = useGroup(summary);
  const to = (next) => href("/compare", {ids: side === 0 ? `${next},${other}` : `${other},${next}`});
  if (error) return html`<${Problem} error=${error} />`;
  if (!rollout) return html`<${Empty}>Loading<//>`;
  const {usage} = rollout;
  const spent = rollout.spans.reduce((sum, span) => sum + span.seconds, 0);
  return html`<div class="card compare-head">
    <div class="rollout-title"><${Badge} state=${rollout.state} /> <a class="mono ellipsis" href=${href(`/rollouts/${segment(id)}`)} title=${id}>${id}</a><span class="spacer"></span><${Neighbors} group=${group} id=${id} to=${to} skip=${other} /></div>
    <dl class="facts"><div class="fact"><dt>reward</dt><dd><span class="reward">${number(rollout.reward, 4)}</span></dd></div>
      ${Object.entries(rollout.reward_parts).map(([name, value]) => html`<div class="fact" key=${name}><dt>${name}</dt><dd>${number(value, 4)}</dd></div>`)}
      <div class="fact"><dt>stopped</dt><dd>${rollout.stop_reason?.replaceAll("_", " ") ?? "–"}</dd></div>
      <div class="fact"><dt>turns</dt><dd>${count(usage.turns)}</dd></div><div class="fact"><dt>sampled</dt><dd>${count(usage.sampled_tokens)}</dd></div>
      <div class="fact"><dt>tool calls</dt><dd>${count(usage.tool_calls)}</dd></div><div class="fact"><dt>worked</dt><dd>${seconds(spent)}</dd></div></dl>
    ${rollout.error ? html`<div class="problem"><strong>${rollout.error.code}</strong></div>` : null}</div>`;
}

function useTokens(id) {
  const {data, error} = useAnswer(pathOf(id, "/outline"));
  const source = useMemo(() => (data ? new TokenSource(id, data) : null), [data]);
  return {source, ...useLoaded(source), error};
}

// Scroll both panes together; a pane that was scrolled by the other one does not answer.
function useTogether(panes) {
  const leader = useRef(null);
  return (side) => () => {
    if (leader.current !== null && leader.current !== side) return;
    const [from, to] = [panes[side].current, panes[1 - side].current];
    if (!from || !to) return;
    leader.current = side;
    to.scroller.scrollTop = from.scroller.scrollTop;
    to.scroller.scrollLeft = from.scroller.scrollLeft;
    requestAnimationFrame(() => requestAnimationFrame(() => (leader.current = null)));
  };
}

function TokensBeside({ids}) {
  const all = [useTokens(ids[0]), useTokens(ids[1])];
  const panes = [useRef(null), useRef(null)];
  const follow = useTogether(panes);
  const [way, setWay] = useState("mask");
  const [here, setHere] = useState([null, null]);
  const [a, b] = all.map((one) => one.source);
  const found = useMemo(() => (a && b ? firstDifference(a, b) : null), [a, b, all[0].loaded, all[1].loaded]);
  const differs = useMemo(() => found, [found?.segment, found?.token]);
  const jump = () => panes.forEach((pane) => pane.current?.viewport.scrollTo(pane.current.rowOf(differs) - 4));
  const ready = a && b;
  const loadedAll = all.every((one) => one.source && one.loaded === one.source.total);
  useEffect(() => {
    if (differs) jump();
  }, [differs]);
  for (const one of all) if (one.error ?? one.problem) return html`<${Problem} error=${one.error ?? one.problem} />`;
  if (!ready) return html`<${Empty}>Loading<//>`;
  return html`<div class="tool-row"><span class="toggles" role="group" aria-label="Color by">${colorings(a).map(([name, label]) => html`<button type="button" key=${name} aria-pressed=${way === name ? "true" : "false"} onClick=${() => setWay(name)}>${label}</button>`)}</span>
      <${Legend} entries=${legend(way, a)} /><span class="spacer"></span>
      <span role="status">${differs === null ? (loadedAll ? "No token differs." : "Reading") : `The first token that differs is ${count(differs.token)}${a.segments.length > 1 ? ` of segment ${differs.segment}` : ""}.`}</span>
      <button type="button" disabled=${differs === null} onClick=${jump}>Go there</button></div>
    <div class="compare-columns">${all.map(({source, loaded}, side) => html`<div key=${ids[side]} class="compare-column">
      <${TokenLines} source=${source} loaded=${loaded} way=${way} differs=${differs} here=${here[side]} pane=${panes[side]} onScroll=${follow(side)} label=${`Tokens of ${ids[side]}`}
        onHere=${(place) => setHere((old) => old.map((one, index) => (index === side ? place : one)))} />
      <${TokenFacts} source=${source} place=${here[side]} /></div>`)}</div>`;
}

function Talks({ids}) {
  const answers = [useAnswer(pathOf(ids[0], "/messages")), useAnswer(pathOf(ids[1], "/messages"))];
  for (const {error} of answers) if (error) return html`<${Problem} error=${error} />`;
  if (!answers[0].data || !answers[1].data) return html`<${Empty}>Loading<//>`;
  return html`<${Conversations} first=${answers[0].data.messages} second=${answers[1].data.messages} />`;
}

export function Page({route}) {
  const ids = (route.query.ids ?? "").split(",").filter(Boolean);
  if (ids.length !== 2) return html`<h1>Compare</h1><${Empty}>Tick two rows in the list of <a href="#/rollouts">rollouts</a> to compare them.<//>`;
  const tab = route.query.tab === "conversation" ? "conversation" : "tokens";
  return html`<div class="compare-page"><h1>Compare</h1>
    <div class="compare-columns">${ids.map((id, side) => html`<${Column} key=${id} id=${id} other=${ids[1 - side]} side=${side} />`)}</div>
    <div class="card"><${Tabs} tabs=${[["tokens", "Tokens"], ["conversation", "Conversation"]]} current=${tab} label="What to compare" onChange=${(name) => go("/compare", {ids: ids.join(","), tab: name}, {replace: true})} />
      ${tab === "tokens" ? html`<${TokensBeside} key=${ids.join(",")} ids=${ids} />` : html`<${Talks} key=${ids.join(",")} ids=${ids} />`}</div></div>`;
}
