// The sub-agents of a rollout as a tree: what each was told, what it answered, and what it cost.
import {count, number, seconds} from "../../lib/format.js";
import {href, segment} from "../../lib/router.js";
import {treeOf} from "../../lib/tree.js";
import {LongText} from "../../lib/texts/view.js";
import {Badge, Empty, Problem, Visible} from "../../lib/widgets.js";
import {html, useMemo, useState} from "../../lib/ui.js";
import {pathOf, useAnswer} from "./data.js";

export const numberOf = (nodeId) => Number(nodeId.slice(nodeId.lastIndexOf("/") + 1));

function Work({work}) {
  if (!work) return null;
  const facts = [["critical steps", count(work.critical_steps)], ["all steps", count(work.total_steps)], ["waves", count(work.waves)], ["at once, at most", count(work.width_max)],
    ["balance", number(work.balance)], ["assigned", count(work.assigns.attempted)], ["valid", count(work.assigns.valid)], ["critical time", seconds(work.seconds.critical)], ["waiting for stragglers", seconds(work.seconds.straggler)]];
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div class="fact" key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function Node({node, depth, id, most}) {
  const [open, setOpen] = useState(false);
  const own = numberOf(node.node_id);
  const trajectory = href(`/rollouts/${segment(id)}`, {node: own, tab: "conversation"});
  const {worked, engine, tools, queued} = node.seconds;
  return html`<tr class="node-row">
      <td><span class="node-name"><span class="node-indent" style=${{width: `${depth * 18}px`}}></span><button type="button" class="quiet" aria-expanded=${open ? "true" : "false"} aria-label=${`Prompt and result of sub-agent ${own}`} onClick=${() => setOpen(!open)}>${open ? "▾" : "▸"}</button>
        <a href=${trajectory}>${own} <bdi><${Visible} text=${node.agent} /></bdi></a></span></td>
      <td>${node.parent.turn} / ${node.parent.wave}</td>
      <td><${Badge} state=${node.valid ? "completed" : "failed"}>${node.valid ? "valid" : node.invalid_because?.replaceAll("_", " ") ?? "not valid"}<//>${node.duplicate ? html` <${Badge} state="paused">duplicate<//>` : ""}</td>
      <td class="number">${count(node.usage.turns)}</td><td class="number">${count(node.usage.sampled_tokens)}</td>
      <td class="number">${seconds(queued)}</td>
      <td class="node-time"><span class="node-bar" title=${`engine ${seconds(engine)}, tools ${seconds(tools)}`}><span class="tone-engine" style=${{width: `${(100 * engine) / most}%`}}></span><span class="tone-tool" style=${{width: `${(100 * tools) / most}%`}}></span><span class="tone-other" style=${{width: `${(100 * Math.max(0, worked - engine - tools)) / most}%`}}></span></span> ${seconds(worked)}</td>
      <td>${node.pool}${node.versions.length ? html` <span class="dim">v${[...new Set(node.versions)].join("–")}</span>` : ""}</td>
    </tr>
    ${open ? html`<tr><td colspan="8"><div class="node-texts">
      <h3>Told</h3><div class="message-body"><${LongText} text=${node.prompt.user} label="Prompt" /></div>
      <h3>Answered</h3><div class="message-body">${node.result ? html`<${LongText} text=${node.result} label="Result" />` : html`<span class="dim">nothing</span>`}</div>
      ${node.error ? html`<div class="problem"><strong>${node.error.code}</strong> <${Visible} text=${node.error.message} /></div>` : null}</div></td></tr>` : null}`;
}

export function SubAgents({id}) {
  const {data, error, loading} = useAnswer(pathOf(id, "/nodes"));
  const rows = useMemo(() => treeOf(data?.nodes ?? [], (node) => node.node_id, (node) => node.parent.node_id), [data]);
  if (error) return html`<${Problem} error=${error} />`;
  if (loading) return html`<${Empty}>Loading<//>`;
  if (!rows.length) return html`<${Empty}>This rollout started no sub-agents.<//>`;
  const most = Math.max(0.001, ...rows.map(({item}) => item.seconds.worked));
  return html`<section class="subagents" aria-label="Sub-agents"><${Work} work=${data.work} />
    <table><thead><tr>${["Sub-agent", "Turn / wave", "Result", "Turns", "Tokens", "Queued", "Worked: engine, tools, rest", "Pool"].map((head) => html`<th scope="col" key=${head}>${head}</th>`)}</tr></thead>
      <tbody>${rows.map(({item, depth}) => html`<${Node} key=${item.node_id} node=${item} depth=${depth} id=${id} most=${most} />`)}</tbody></table></section>`;
}
