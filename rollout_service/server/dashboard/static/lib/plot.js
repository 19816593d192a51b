// Plots over time. The canvas is one picture to a screen reader, with a sentence that sums it up; the values are in a table
// below it, for those who cannot see or want to copy them.
import uPlot from "../vendor/uplot.js";
import {html, useLayoutEffect, useMemo, useRef, useState} from "./ui.js";

const HEIGHT = 150;
const MOST_ROWS = 200;
const DAY = 86_400;

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const faded = (name, share) => color(name) + Math.round(share * 255).toString(16).padStart(2, "0"); // colors are #rrggbb

// Draw `series` of values over `at`, times of the API. A series is {label, values, color}, with `color` the name of a
// custom property; one with `low` and `high` also has a band. With `stacked` each is drawn on top of those before it.
// `format` makes a text of a value; `range` is [lowest, highest] of the axis, where null means as the data says.
export function Plot({title, at, series, format = String, range = [null, null], stacked = false, note}) {
  const box = useRef(null);
  const [index, setIndex] = useState(null);
  const times = useMemo(() => at.map((one) => Date.parse(one) / 1000), [at]);
  const columns = useMemo(() => drawn(series, stacked), [series, stacked]);

  useLayoutEffect(() => {
    let plot = null;
    const draw = () => {
      plot?.destroy();
      const width = Math.max(120, box.current.clientWidth);
      plot = new uPlot(options({width, series, columns, range, stacked, format, times, setIndex}), [times, ...columns.data], box.current);
    };
    draw();
    const observer = new ResizeObserver(() => {
      const width = box.current.clientWidth;
      if (plot && width > 0 && Math.abs(width - plot.width) > 1) plot.setSize({width, height: HEIGHT});
    });
    observer.observe(box.current);
    addEventListener("theme", draw);
    return () => (observer.disconnect(), removeEventListener("theme", draw), plot?.destroy());
  }, [times, columns]);

  const shown = index ?? times.length - 1;
  const latest = series.map(({label, values}) => `${label} ${text(values[shown], format)}`).join(", ");
  const summary = times.length ? `${title}, ${times.length} points. Last: ${latest}` : `${title}: no points yet`;
  return html`<figure class="plot">
    <figcaption><strong>${title}</strong>${note ? html` <span class="dim">${note}</span>` : null}</figcaption>
    <ul class="plot-legend">${series.map((one) => html`<li key=${one.label}>
      <span class="plot-swatch" style=${{background: `var(${one.color})`}}></span>${one.label}
      <span class="mono">${text(one.values[shown], format)}</span></li>`)}</ul>
    <div class="plot-box" role="img" aria-label=${summary} ref=${box} onMouseLeave=${() => setIndex(null)}></div>
    <${Values} title=${title} at=${at} series=${series} format=${format} />
  </figure>`;
}

const text = (value, format) => (value === null || value === undefined ? "\u2013" : format(value));

function Values({title, at, series, format}) {
  const [open, setOpen] = useState(false);
  const first = Math.max(0, at.length - MOST_ROWS);
  const rows = open ? at.slice(first).map((_, row) => first + row).toReversed() : [];
  return html`<details class="plot-values" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary aria-label=${`Values of ${title}`}>Values</summary>
    ${open ? html`<div class="plot-table" tabindex="0" role="region" aria-label=${`Table of ${title}`}><table>
      <thead><tr><th scope="col">Time</th>${series.map(({label}) => html`<th scope="col" class="number" key=${label}>${label}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row}><th scope="row">${new Date(at[row]).toLocaleString("en-GB")}</th>
        ${series.map(({label, values}) => html`<td class="number" key=${label}>${text(values[row], format)}</td>`)}</tr>`)}</tbody>
    </table></div>` : null}
  </details>`;
}

// Return the columns that uPlot draws, and between which of them it fills. Columns are numbered from 1.
function drawn(series, stacked) {
  const data = [], styles = [], bands = [];
  let below = null;
  for (const one of series) {
    const values = stacked ? one.values.map((value, index) => (value ?? 0) + (below?.[index] ?? 0)) : one.values;
    data.push(values);
    styles.push({color: one.color, line: true});
    const line = data.length;
    if (stacked) {
      if (below) bands.push({series: [line, line - 1], color: one.color});
      below = values;
    }
    if (one.low && one.high) {
      data.push(one.high, one.low);
      styles.push({color: one.color, line: false}, {color: one.color, line: false});
      bands.push({series: [line + 1, line + 2], color: one.color});
    }
  }
  return {data, styles, bands};
}

function options({width, columns, range, stacked, format, times, setIndex}) {
  const axis = {stroke: color("--dim"), grid: {stroke: color("--line"), width: 1}, ticks: {show: false}, font: "11px system-ui, sans-serif"};
  const few = times.length < 40;
  const [low, high] = range;
  return {
    width,
    height: HEIGHT,
    padding: [6, 8, 0, 0],
    legend: {show: false},
    cursor: {sync: {key: "plots"}, drag: {x: false, y: false}, points: {size: 6}},
    hooks: {setCursor: [(plot) => setIndex(plot.cursor.idx ?? null)]},
    scales: {
      x: {time: true, range: (_, from, to) => (from === to ? [from - 30, to + 30] : [from, to])},
      y: {range: (_, from, to) => limits(from ?? 0, to ?? 1, low, high)},
    },
    axes: [
      {...axis, size: 26, space: 80, values: (_, ticks) => ticks.map((tick) => clock(tick, times))},
      {...axis, size: 46, values: (_, ticks) => ticks.map((tick) => format(tick))},
    ],
    series: [
      {},
      ...columns.styles.map(({color: name, line}, index) => ({
        stroke: line ? color(name) : "transparent",
        width: line ? 1.6 : 0,
        points: {show: line && few, size: 4, fill: color(name)},
        // the lowest of a stack has no column below it to fill down to
        fill: stacked && index === 0 ? faded(name, 0.55) : undefined,
      })),
    ],
    bands: columns.bands.map(({series, color: name}) => ({series, fill: faded(name, stacked ? 0.55 : 0.16)})),
  };
}

// Return the ends of the axis: a little more than the values need, and some height where all are equal.
function limits(from, to, low, high) {
  const spare = (to - from) * 0.08 || Math.max(0.5, Math.abs(to) * 0.1);
  return [low ?? from - spare, high ?? to + spare];
}

function clock(tick, times) {
  const long = times.length > 1 && times.at(-1) - times[0] > DAY;
  const at = new Date(tick * 1000);
  const two = (number) => String(number).padStart(2, "0");
  const time = `${two(at.getHours())}:${two(at.getMinutes())}`;
  if (long) return `${two(at.getDate())}.${two(at.getMonth() + 1)} ${time}`;
  return times.length > 1 && times.at(-1) - times[0] < 600 ? `${time}:${two(at.getSeconds())}` : time;
}
