// The pipeline as it is now: what is stored, the queue and the workers of each stage, and what leaves as batches. A
// filled square is a worker that works, colored by what its rollout waits for.
import {count, seconds} from "../lib/format.js";
import {href} from "../lib/router.js";
import {html} from "../lib/ui.js";
import {Bar} from "../lib/widgets.js";
import {plural, waitTone, waitWords} from "../lib/words.js";

const MOST_SLOTS = 128;
const SLOT = 9;
const GAP = 3;
const PER_ROW = 16;
const PIPE = {width: 64, height: 26};

export function Pipeline({now}) {
  const sum = (field) => now.runs.reduce((total, run) => total + run[field], 0);
  return html`<div class="pipeline">
    <a class="end" href=${href("/rollouts", {state: "queued"})}><span class="end-name">Store</span>
      <span class="end-number">${count(now.counts.queued ?? 0)}</span><span class="dim">queued</span></a>
    ${now.stages.map((stage) => html`<${Queue} key=${`q-${stage.stage}`} stage=${stage} /><${Stage} key=${stage.stage} stage=${stage} />`)}
    <${Arrow} />
    <a class="end" href="#/runs"><span class="end-name">Groups</span>
      <span class="end-number">${count(sum("ready_groups"))}</span><span class="dim">ready</span>
      <span class="dim">${count(sum("open_groups"))} open</span></a>
  </div>`;
}

// The queue before a stage: the pipe fills from the stage's side.
function Queue({stage}) {
  const full = stage.places > 0 && stage.waiting >= stage.places;
  const part = stage.places > 0 ? Math.min(1, stage.waiting / stage.places) : 0;
  const {width, height} = PIPE;
  return html`<div class=${full ? "queue full" : "queue"}>
    <span class="dim">queue</span>
    <svg viewBox=${`0 0 ${width} ${height}`} width=${width} height=${height} role="img"
        aria-label=${`${stage.waiting} of ${stage.places} wait for ${stage.stage}`}>
      <rect class="pipe" x="0.5" y="5.5" width=${width - 13} height="15" rx="4" />
      <rect class="pipe-fill" x=${1 + (width - 14) * (1 - part)} y="6" width=${(width - 14) * part} height="14" rx="3" />
      <path class="tip" d=${`M${width - 10} 5 L${width - 2} 13 L${width - 10} 21`} />
    </svg>
    <span>${stage.waiting} <span class="dim">of ${stage.places}</span></span>
    ${full ? html`<span class="warn-text" title="Rollouts before it keep their workers until there is a place">full</span>` : null}
  </div>`;
}

const Arrow = () => html`<div class="queue" aria-hidden="true"><svg viewBox="0 0 30 26" width="30" height="26">
  <path class="pipe-line" d="M2 13 H22" /><path class="tip" d="M18 5 L26 13 L18 21" /></svg></div>`;

function Stage({stage}) {
  // Those that wait for a worker are in the queue beside it.
  const waits = Object.entries(stage.waits_for).filter(([kind]) => kind !== "worker").sort((a, b) => b[1] - a[1]);
  return html`<section class=${`stage ${stage.stage}`} aria-label=${stage.stage}>
    <header><h3>${stage.stage}</h3><span><strong>${stage.working}</strong> <span class="dim">of ${stage.workers}</span></span></header>
    <${Workers} stage=${stage} waits=${waits} />
    ${waits.length ? html`<ul class="waits" aria-label="What they wait for">${waits.map(([kind, number]) => html`<li key=${kind}>
      <span class=${`wait-key ${waitTone(kind)}`}></span><span class="ellipsis">${waitWords(kind)}</span>
      <${Bar} value=${number} max=${stage.working} tone=${waitTone(kind)} label=${`${number} of ${stage.working}`} />
      <span class="number">${number}</span></li>`)}</ul>` : html`<p class="empty">idle</p>`}
    ${stage.working ? html`<p class="oldest dim">oldest ${seconds(stage.oldest_seconds)}</p>` : null}
  </section>`;
}

function Workers({stage, waits}) {
  const each = Math.max(1, Math.ceil(Math.max(stage.workers, stage.working) / MOST_SLOTS));
  const slots = Math.ceil(Math.max(stage.workers, stage.working) / each);
  const tones = waits.flatMap(([kind, number]) => Array(Math.round(number / each)).fill(waitTone(kind)));
  const working = Math.min(slots, Math.ceil(stage.working / each));
  const rows = Math.max(1, Math.ceil(slots / PER_ROW));
  const [width, height] = [PER_ROW * (SLOT + GAP), rows * (SLOT + GAP)];
  const label = `${plural(stage.working, "worker")} of ${stage.workers} at work`;
  return html`<svg class="workers" viewBox=${`0 0 ${width} ${height}`} role="img" aria-label=${label}>
    ${each > 1 ? html`<title>A square is ${each} workers</title>` : null}
    ${Array.from({length: slots}, (_, index) => html`<rect key=${index} width=${SLOT} height=${SLOT} rx="2"
      x=${(index % PER_ROW) * (SLOT + GAP)} y=${Math.floor(index / PER_ROW) * (SLOT + GAP)}
      class=${index < working ? `slot ${tones[index] ?? "queued"}` : "slot free"} />`)}
  </svg>`;
}
