// The samples of a group as a tree: where each branch left another rollout, and what came of both.
import {count, number} from "../../lib/format.js";
import {href, segment} from "../../lib/router.js";
import {treeOf} from "../../lib/tree.js";
import {Badge} from "../../lib/widgets.js";
import {html, useMemo} from "../../lib/ui.js";

export const hasBranches = (group) => group.length > 1 && group.some((row) => row.branch_of);

const byTurn = (one, other) => (one.branch_of?.turn ?? -1) - (other.branch_of?.turn ?? -1);

function Source({id, branch}) {
  const tokens = href(`/rollouts/${segment(branch.rollout_id)}`, {tab: "tokens", turn: branch.turn});
  return html`<a href=${tokens} title=${`Turn ${branch.turn} of ${branch.rollout_id}`}>turn ${branch.turn}</a>
    <a href=${href("/compare", {ids: `${branch.rollout_id},${id}`})} aria-label=${`Compare ${id} with ${branch.rollout_id}`}>compare</a>`;
}

function Sample({row, depth, isOpen}) {
  const id = row.rollout_id;
  return html`<tr class="branch-row" aria-current=${isOpen ? "true" : undefined}>
    <td><span class="node-name"><span class="node-indent" style=${{width: `${depth * 18}px`}}></span>${isOpen ? html`<strong class="mono">${id}</strong>`
      : html`<a class="mono" href=${href(`/rollouts/${segment(id)}`, {tab: "branches"})}>${id}</a>`}</span></td>
    <td class="branch-source">${row.branch_of ? html`<${Source} id=${id} branch=${row.branch_of} />` : html`<span class="dim">the task</span>`}</td>
    <td><${Badge} state=${row.state} /></td>
    <td class="number strong">${number(row.reward, 3)}</td>
    <td class="number">${count(row.turns)}</td><td class="number">${count(row.tokens)}</td></tr>`;
}

export function Branches({group, id}) {
  const rows = useMemo(() => treeOf([...group].sort(byTurn), (row) => row.rollout_id, (row) => row.branch_of?.rollout_id), [group]);
  return html`<section aria-label="Branches">
    <table><thead><tr>${["Rollout", "Begins at", "State"].map((head) => html`<th scope="col" key=${head}>${head}</th>`)}
      ${["Reward", "Turns", "Tokens"].map((head) => html`<th scope="col" class="number" key=${head}>${head}</th>`)}</tr></thead>
      <tbody>${rows.map(({item, depth}) => html`<${Sample} key=${item.rollout_id} row=${item} depth=${depth} isOpen=${item.rollout_id === id} />`)}</tbody></table></section>`;
}
