// What is shown of the API's enumerations, in words.
export const WAITS = {
  place: ["place in next queue", "held"],
  worker: ["worker", "held"],
  host: ["room on the host", "held"],
  pool_queue: ["room at the engines", "held"],
  paused_pool: ["paused pool", "held"],
  subagent: ["sub-agent's slot", "held"],
  sandbox_start: ["sandbox start", "init"],
  session: ["session start", "init"],
  setup: ["task setup", "init"],
  engine: ["engine", "rollout"],
  agent: ["agent program", "rollout"],
  tool: ["tool", "evaluate"],
  artifacts: ["agent's files", "evaluate"],
  grader: ["grader", "good"],
  judge: ["judge", "good"],
  sandbox_end: ["sandbox end", "queued"],
  store: ["store", "queued"],
  event_loop: ["event loop", "held"],
  run: ["groups to keep", "held"],
  weights: ["the given weights", "held"],
};

// What a wait is for, and the tone that it is drawn in everywhere.
export const waitWords = (kind) => WAITS[kind]?.[0] ?? kind.replaceAll("_", " ");
export const waitTone = (kind) => WAITS[kind]?.[1] ?? "queued";

// A count with its noun: plural(1, "rollout") is "1 rollout".
export const plural = (number, one, many = `${one}s`) => `${number.toLocaleString("en-US")} ${number === 1 ? one : many}`;
