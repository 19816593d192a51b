// What a rollout did and when, as lanes of bars on one axis of seconds since its beginning. Bars of one row never overlap.

const SANDBOX = new Set(["host", "sandbox_start", "session", "sandbox_end", "artifacts"]);
const TOOLS = new Set(["tool"]);
const WAITS = new Set(["place", "worker", "host", "pool_queue", "paused_pool", "subagent"]);

// What the bars of a kind look like, and what they are called.
export const TONES = [
  ["engine", "engine"],
  ["tool", "tool"],
  ["sandbox", "sandbox"],
  ["grade", "grading"],
  ["wait", "waits for a place"],
  ["other", "other"],
];

export function toneOf(kind) {
  if (WAITS.has(kind)) return "wait";
  if (SANDBOX.has(kind) || kind === "setup") return "sandbox";
  if (kind === "engine" || kind === "agent") return kind === "engine" ? "engine" : "other";
  if (kind === "tool") return "tool";
  return kind === "grader" || kind === "judge" ? "grade" : "other";
}

const isNumber = (lane) => /^[0-9]+$/.test(lane);

// The lane that a step is drawn in, as [order, title].
export function laneOf(step) {
  const [owner] = step.lane.split("/");
  if (isNumber(owner)) return [10 + Number(owner), `sub-agent ${owner}`];
  if (SANDBOX.has(step.kind)) return [3, "sandbox"];
  if (TOOLS.has(step.kind)) return [2, "tools"];
  return [1, "agent"];
}

// Puts bars into rows: one that begins before all others of a row have ended goes to the next row.
export function pack(bars) {
  const ends = [];
  for (const bar of [...bars].sort((a, b) => a.from - b.from || b.to - a.to)) {
    let row = ends.findIndex((end) => end <= bar.from + 1e-6);
    if (row < 0) row = ends.push(0) - 1;
    ends[row] = bar.to;
    bar.row = row;
  }
  return ends.length;
}

const since = (iso, start) => (Date.parse(iso) - start) / 1000;

function stageBars(rollout, start) {
  const bars = [];
  for (const span of rollout.spans ?? []) {
    const from = since(span.started_at, start);
    if (span.queued_seconds > 0.001) {
      bars.push({title: `waits for ${span.stage}`, tone: "wait", from: from - span.queued_seconds, to: from, span});
    }
    bars.push({title: span.stage, tone: `stage-${span.stage}`, from, to: from + span.seconds, error: span.error, span});
  }
  return bars;
}

function stepBar(step, start, extra = {}) {
  const from = since(step.started_at ?? step.since, start);
  const title = step.name ? `${step.kind.replaceAll("_", " ")} ${step.name}` : step.kind.replaceAll("_", " ");
  return {title, tone: toneOf(step.kind), from, to: from + step.seconds, error: step.error, step, ...extra};
}

function marksOf(steps, start) {
  const marks = [];
  let version = null;
  for (const step of steps) {
    const now = step.kind === "engine" ? step.detail?.version : undefined;
    if (typeof now !== "number" || now === version) continue;
    marks.push({at: since(step.started_at, start), label: `v${now}`, version: now});
    version = now;
  }
  return marks;
}

// {length, lanes: [{title, rows, bars}], marks}; times are seconds since `rollout.created_at`.
export function timelineOf(rollout, steps = [], activity = null, now = Date.now()) {
  const start = Date.parse(rollout.created_at);
  const lanes = new Map([["stages", {order: 0, title: "stages", bars: stageBars(rollout, start)}]]);
  const put = (step, bar) => {
    const [order, title] = laneOf(step);
    if (!lanes.has(title)) lanes.set(title, {order, title, bars: []});
    lanes.get(title).bars.push(bar);
  };
  for (const step of steps) put(step, stepBar(step, start));
  for (const wait of activity?.waits ?? []) put(wait, stepBar(wait, start, {open: true}));
  const all = [...lanes.values()].filter((lane) => lane.bars.length).sort((a, b) => a.order - b.order);
  for (const lane of all) lane.rows = pack(lane.bars);
  const latest = all.flatMap((lane) => lane.bars).reduce((most, bar) => Math.max(most, bar.to), 0);
  const ended = rollout.finished_at ? since(rollout.finished_at, start) : (now - start) / 1000;
  return {start, length: Math.max(latest, activity || !rollout.finished_at ? ended : 0, 0.001), lanes: all, marks: marksOf(steps, start)};
}

// Round times for an axis from `from` to `to` with about `most` marks.
export function ticks(from, to, most) {
  const rough = (to - from) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough) ?? 10 * power;
  const values = [];
  for (let at = Math.ceil(from / size) * size; at <= to + 1e-9; at += size) values.push(Number(at.toPrecision(12)));
  return values;
}
