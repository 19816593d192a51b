// A small line of the last values, without axes; the number beside it is what is read.
import {html} from "../lib/ui.js";

export function Spark({values, width = 90, height = 22, max}) {
  if (values.length < 2) return html`<svg width=${width} height=${height} aria-hidden="true"></svg>`;
  const top = max ?? Math.max(...values, 1e-9);
  const at = (value, index) =>
    `${((index / (values.length - 1)) * width).toFixed(1)},${(height - 2 - (Math.min(value, top) / top) * (height - 4)).toFixed(1)}`;
  const line = values.map(at).join(" ");
  return html`<svg class="spark" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} aria-hidden="true">
    <polygon points=${`0,${height} ${line} ${width},${height}`} /><polyline points=${line} /></svg>`;
}
