// A timeline to look at: lanes of bars, a time axis, zoom, and the details of the bar that is pointed at or focused.

import {html, useEffect, useMemo, useRef, useState} from "../ui.js";
import {seconds} from "../format.js";
import {flat} from "../texts/rows.js";
import {Visible} from "../widgets.js";
import {TONES, ticks} from "./model.js";

const ROW = 18;
const GAP = 8;
const AXIS = 18;
const LABELS = 104;

function useWidth(ref) {
  const [width, setWidth] = useState(800);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(200, entry.contentRect.width)));
    observer.observe(ref.current);
    return () => observer.disconnect();
  }, []);
  return width;
}

const plain = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

// The facts of a bar as [name, value].
export function barFacts(bar) {
  const facts = [["took", `${seconds(bar.to - bar.from)}${bar.open ? " so far" : ""}`], ["began", `+${seconds(Math.max(0, bar.from))}`]];
  const {step, span} = bar;
  if (bar.error) facts.push(["error", bar.error]);
  if (span) facts.push(["attempt", String(span.attempt)]);
  if (span && !bar.title.startsWith("waits")) {
    for (const [name, value] of [["engine", span.engine_seconds], ["tools", span.tool_seconds], ["sandbox", span.sandbox_seconds]]) {
      if (value) facts.push([name, seconds(value)]);
    }
  }
  if (step) {
    if (step.stage) facts.push(["stage", step.stage]);
    if (step.lane) facts.push(["lane", step.lane]);
    for (const [name, value] of Object.entries(step.detail ?? {})) {
      if (value !== null && value !== undefined) facts.push([name.replaceAll("_", " "), plain(value)]);
    }
  }
  return facts;
}

function Details({bar}) {
  if (!bar) return html`<p class="timeline-details dim" aria-live="polite">Point at a bar, or use the arrow keys: left and right go from bar to bar, + and − zoom.</p>`;
  return html`<dl class="timeline-details" aria-live="polite"><div><dt class="bar-title"><bdi><${Visible} text=${bar.title} /></bdi></dt></div>
    ${barFacts(bar).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd><bdi><${Visible} text=${value} /></bdi></dd></div>`)}</dl>`;
}

function placed(model) {
  let top = AXIS;
  return model.lanes.map((lane) => {
    const at = top;
    top += lane.rows * ROW + GAP;
    return {...lane, top: at};
  });
}

// The bars in sight, without those that would be drawn over one another within a pixel.
function drawn(lane, view, width) {
  const scale = width / (view[1] - view[0]);
  const last = [];
  const bars = [];
  for (const bar of lane.bars) {
    if (bar.to < view[0] || bar.from > view[1]) continue;
    const x = (bar.from - view[0]) * scale;
    const end = (bar.to - view[0]) * scale;
    if (last[bar.row] !== undefined && end - last[bar.row] < 1 && !bar.error) continue;
    last[bar.row] = Math.max(end, x + 1.5);
    bars.push({bar, x: Math.max(-4, x), width: Math.max(2, Math.min(end, width + 4) - Math.max(-4, x))});
  }
  return bars;
}

export function Timeline({model, onBar}) {
  const box = useRef(null);
  const width = useWidth(box) - LABELS - 8;
  const [zoomed, setZoomed] = useState(null);
  const [current, setCurrent] = useState(null);
  const view = zoomed ?? [0, model.length];
  const lanes = useMemo(() => placed(model), [model]);
  const ordered = useMemo(() => lanes.flatMap((lane) => lane.bars).sort((a, b) => a.from - b.from), [lanes]);
  const bar = current === null ? null : ordered[Math.min(current, ordered.length - 1)];
  const height = lanes.reduce((sum, lane) => sum + lane.rows * ROW + GAP, AXIS);

  const zoom = (factor, middle = (view[0] + view[1]) / 2) => {
    const half = (view[1] - view[0]) * factor;
    if (half >= model.length) return setZoomed(null);
    const from = Math.max(0, Math.min(model.length - half, middle - half * ((middle - view[0]) / (view[1] - view[0]))));
    return setZoomed([from, from + Math.max(half, 0.001)]);
  };
  const pan = (share) => {
    const size = view[1] - view[0];
    const from = Math.max(0, Math.min(model.length - size, view[0] + share * size));
    setZoomed([from, from + size]);
  };
  const show = (index) => {
    const next = Math.max(0, Math.min(ordered.length - 1, index));
    setCurrent(next);
    const {from, to} = ordered[next] ?? {from: 0, to: 0};
    if (zoomed && (to < view[0] || from > view[1])) pan(((from + to) / 2 - (view[0] + view[1]) / 2) / (view[1] - view[0]));
  };
  const onKey = (event) => {
    const act = {
      ArrowRight: () => show((current ?? -1) + 1), ArrowLeft: () => show((current ?? 1) - 1),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => setZoomed(null),
      PageUp: () => pan(-0.5), PageDown: () => pan(0.5), Enter: () => bar && onBar?.(bar),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  };
  const onWheel = (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const x = event.clientX - box.current.getBoundingClientRect().left - LABELS;
    if (event.shiftKey) pan(event.deltaY > 0 ? 0.1 : -0.1);
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, view[0] + (x / width) * (view[1] - view[0]));
  };
  const scale = width / (view[1] - view[0]);
  return html`<section class="timeline" aria-label="Timeline">
    <div class="timeline-tools">
      <ul class="timeline-legend" aria-label="Legend">${TONES.map(([tone, label]) => html`<li key=${tone}><span class=${`swatch tone-${tone}`}></span>${label}</li>`)}</ul>
      <span class="spacer"></span>
      <button type="button" onClick=${() => zoom(0.5)} aria-label="Zoom in">+</button>
      <button type="button" onClick=${() => zoom(2)} aria-label="Zoom out">−</button>
      <button type="button" onClick=${() => setZoomed(null)} disabled=${!zoomed}>all</button>
    </div>
    <div class="timeline-box" ref=${box} tabindex="0" role="application" aria-label="Timeline; arrow keys go from bar to bar" onKeyDown=${onKey} onWheel=${onWheel}>
      <svg width=${width + LABELS + 8} height=${height} aria-hidden="true">
        <g transform=${`translate(${LABELS} 0)`}>
          ${ticks(view[0], view[1], width / 90).map((at) => html`<g key=${`t${at}`} class="tick" transform=${`translate(${(at - view[0]) * scale} 0)`}>
            <line y1="14" y2=${height} /><text y="10" text-anchor=${at === view[0] ? "start" : "middle"}>${at === 0 ? "0" : seconds(at)}</text></g>`)}
        </g>
        ${lanes.map((lane) => html`<g key=${lane.title} transform=${`translate(0 ${lane.top})`}>
          <text class="lane-title" x="0" y="13">${lane.title}</text>
          <svg x=${LABELS} y="0" width=${width} height=${lane.rows * ROW}>
            ${drawn(lane, view, width).map(({bar: one, x, width: wide}) => html`<${Bar} key=${`${one.from}-${one.row}`} bar=${one} x=${x} width=${wide}
              chosen=${one === bar} onPoint=${() => setCurrent(ordered.indexOf(one))} onChoose=${() => onBar?.(one)} />`)}
          </svg></g>`)}
        <g transform=${`translate(${LABELS} 0)`}>
          ${model.marks.filter((mark) => mark.at >= view[0] && mark.at <= view[1]).map((mark) => html`<g key=${mark.label + mark.at} class="version-mark"
            transform=${`translate(${(mark.at - view[0]) * scale} 0)`}><line y1=${AXIS - 4} y2=${height} /><text y=${height - 1} x="3">${mark.label}</text></g>`)}
        </g>
      </svg>
    </div>
    <${Details} bar=${bar} />
  </section>`;
}

function Bar({bar, x, width, chosen, onPoint, onChoose}) {
  const room = Math.floor((width - 6) / 6.2);
  const title = flat(bar.title.slice(0, 200));
  const label = title.length <= room ? title : room > 4 ? `${title.slice(0, room - 1)}…` : "";
  return html`<g class=${`tl-bar tone-${bar.tone} ${bar.error ? "failed" : ""} ${bar.open ? "open" : ""} ${chosen ? "chosen" : ""}`}
    onMouseOver=${onPoint} onClick=${onChoose} transform=${`translate(${x} ${bar.row * ROW})`}>
    <title>${title}</title><rect width=${width} height=${ROW - 3} rx="2" />${label ? html`<text x="4" y="11.5">${bar.error ? "✕ " : ""}${label}</text>` : null}</g>`;
}
