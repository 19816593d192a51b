// The nodes that share the store.
import {html} from "../lib/ui.js";
import {useOverview} from "../lib/live.js";
import {Badge, Card, Empty} from "../lib/widgets.js";

export function Page() {
  const now = useOverview();
  if (!now) return html`<${Empty}>Waiting for the service<//>`;
  return html`<h1>Nodes</h1><div class="stack">${now.nodes.map((node) => html`<${Card} key=${node.node} title=${node.node}
      actions=${html`<${Badge} state=${node.state} />`}>
    <p>${node.in_use} of ${node.target} sandboxes in use, ${node.warm} warm, ${node.waiting} rollouts wait for one.</p>
    ${node.holds.map((hold) => html`<p key=${hold.resource} class="warn-text">${hold.reason}</p>`)}<//>`)}</div>`;
}
