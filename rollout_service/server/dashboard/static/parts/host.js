// A node's sandboxes and the pressure on its host.
import {bytes, number} from "../lib/format.js";
import {html} from "../lib/ui.js";
import {Bar} from "../lib/widgets.js";

// Sandboxes in use, warm, up to the present target, and up to the ceiling, on one line.
export function Sandboxes({node}) {
  const part = (value) => `${(100 * Math.min(1, value / Math.max(1, node.ceiling))).toFixed(2)}%`;
  const label = `${node.in_use} in use, ${node.warm} warm, target ${node.target}, ceiling ${node.ceiling}`;
  return html`<div class="sandboxes" role="img" aria-label=${label} title=${label}>
    <span class="in-use" style=${{width: part(node.in_use)}}></span><span class="warm" style=${{width: part(node.warm)}}></span>
    <span class="target" style=${{left: part(node.target)}}></span></div>`;
}

const tone = (percent) => (percent >= 60 ? "bad" : percent >= 25 ? "warn" : "good");

// How long something waits for each resource of the host; `brief` leaves out what is free.
export function Pressure({node, brief = false}) {
  const {pressure} = node;
  if (!pressure) return html`<p class="empty">Not measured yet.</p>`;
  const rows = [["cpu", pressure.cpu_percent], ["memory", pressure.memory_percent], ["disk", pressure.io_percent]];
  return html`<div class=${brief ? "pressure brief" : "pressure"}>
    ${rows.map(([name, percent]) => html`<div key=${name}><span class="dim">${name}</span>
      <${Bar} value=${percent ?? 0} max=${100} tone=${tone(percent ?? 0)} label=${`${name} pressure ${number(percent, 1)} percent`} />
      <span class="number">${percent === null ? "–" : `${number(percent, percent < 10 ? 1 : 0)} %`}</span></div>`)}
    ${brief ? null : html`<dl class="pairs">
      <dt>Load</dt><dd>${number(pressure.load, 1)} of ${node.cpus} processors</dd>
      <dt>Memory free</dt><dd>${bytes(pressure.memory_available_bytes)} of ${bytes(node.memory_bytes)}</dd>
      ${Object.entries(pressure.disk_free_bytes).map(([folder, free]) => html`<dt key=${`t${folder}`} class="mono">${folder}</dt>
        <dd key=${folder}>${bytes(free)} free</dd>`)}</dl>`}
  </div>`;
}
