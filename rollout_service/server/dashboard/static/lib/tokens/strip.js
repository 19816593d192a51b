// The whole trajectory as a strip: the least likely token of each pixel's width, turns and segments as marks.

// The least log-probability of each of `width` equal parts of the tokens that are there; NaN where none was sampled.
export function leastLogprobs(source, width) {
  const least = new Float32Array(width).fill(NaN);
  const scale = width / Math.max(1, source.total);
  let before = 0;
  for (const {logprobs, mask, loaded, total} of source.segments) {
    for (let i = 0; i < loaded; i += 1) {
      if (!mask[i]) continue;
      const column = Math.min(width - 1, Math.floor((before + i) * scale));
      const value = logprobs[i];
      if (!(least[column] <= value)) least[column] = value;
    }
    before += total;
  }
  return least;
}

// The place at a share of the strip's width.
export function placeAt(source, share) {
  let at = Math.min(source.total - 1, Math.max(0, Math.floor(share * source.total)));
  for (let segment = 0; segment < source.segments.length; segment += 1) {
    const {total, loaded} = source.segments[segment];
    if (at < total) return loaded ? {segment, token: Math.min(at, loaded - 1)} : null;
    at -= total;
  }
  return null;
}

// Where a place is on the strip, from 0 to 1.
export function shareOf(source, place) {
  let before = 0;
  for (let segment = 0; segment < place.segment; segment += 1) before += source.segments[segment].total;
  return (before + place.token) / Math.max(1, source.total);
}

const color = (style, name) => style.getPropertyValue(name).trim() || "gray";

// Draws the strip of what is loaded so far.
export function drawStrip(canvas, source) {
  const ratio = globalThis.devicePixelRatio || 1;
  const width = Math.max(1, Math.round(canvas.clientWidth * ratio));
  const height = Math.max(1, Math.round(canvas.clientHeight * ratio));
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const pen = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  pen.clearRect(0, 0, width, height);
  drawTurns(pen, source, width, height, color(style, "--line"));
  pen.fillStyle = color(style, "--accent");
  leastLogprobs(source, width).forEach((value, x) => {
    if (Number.isNaN(value)) return;
    const depth = Math.min(1, Math.max(0.04, -value / 8));
    pen.fillRect(x, height - depth * height, 1, depth * height);
  });
  drawSegments(pen, source, width, height, color(style, "--text"));
}

function drawTurns(pen, source, width, height, fill) {
  pen.fillStyle = fill;
  let before = 0;
  for (const {outline, total} of source.segments) {
    for (const turn of outline.turns) {
      const x = ((before + turn.start) / source.total) * width;
      pen.fillRect(x, 0, Math.max(1, ((turn.end - turn.start) / source.total) * width), height);
    }
    before += total;
  }
}

function drawSegments(pen, source, width, height, fill) {
  pen.fillStyle = fill;
  let before = 0;
  for (const {total} of source.segments) {
    if (before) pen.fillRect((before / source.total) * width, 0, 2, height);
    before += total;
  }
}
