// The colours of tokens: for each way of colouring, the class of a token, and a legend that says what the classes mean.
// The mask is shown by an underline in every one of them, and an unlikely token by its weight: never by colour alone.

const LOGPROBS = [
  {above: -0.05, name: "lp0", label: "> 95 %"},
  {above: -0.7, name: "lp1", label: "50 to 95 %"},
  {above: -1.6, name: "lp2", label: "20 to 50 %"},
  {above: -3, name: "lp3", label: "5 to 20 %"},
  {above: -5, name: "lp4", label: "0.7 to 5 %"},
  {above: -Infinity, name: "lp5", label: "< 0.7 %"},
];
const ENTROPIES = [
  {below: 0.1, name: "lp0", label: "< 0.1 nats"},
  {below: 0.5, name: "lp1", label: "0.1 to 0.5"},
  {below: 1, name: "lp2", label: "0.5 to 1"},
  {below: 2, name: "lp3", label: "1 to 2"},
  {below: 3, name: "lp4", label: "2 to 3"},
  {below: Infinity, name: "lp5", label: "> 3 nats"},
];
const HUES = 8;

export const hue = (number) => `hue${((number % HUES) + HUES) % HUES}`;

export function logprobClass(value) {
  if (Number.isNaN(value)) return "";
  return (LOGPROBS.find((bucket) => value > bucket.above) ?? LOGPROBS[LOGPROBS.length - 1]).name;
}

export function entropyClass(value) {
  if (Number.isNaN(value)) return "";
  return ENTROPIES.find((bucket) => value < bucket.below).name;
}

// The ways of colouring that a trajectory allows, as [name, label].
export function colorings(source) {
  const ways = [["mask", "Mask"], ["logprob", "Log-probability"]];
  if (source.outline.has_entropy) ways.push(["entropy", "Entropy"]);
  ways.push(["version", "Weights"], ["turn", "Turn"], ["segment", "Segment"]);
  return ways;
}

// The class of token `i` of a segment.
export function colorClass(way, tokens, i) {
  if (way === "logprob") return tokens.mask[i] ? logprobClass(tokens.logprobs[i]) : "";
  if (way === "entropy") return entropyClass(tokens.entropy[i]);
  if (way === "version") return tokens.versions[i] < 0 ? "" : hue(tokens.versions[i]);
  if (way === "turn") return tokens.turns[i] < 0 ? "" : hue(tokens.turns[i]);
  if (way === "segment") return hue(tokens.index);
  return tokens.mask[i] ? "sampled" : "";
}

function numbered(values, word) {
  const all = [...values].sort((a, b) => a - b);
  const shown = all.slice(0, 12).map((value) => ({name: hue(value), label: `${word} ${value}`}));
  if (all.length > 12) shown.push({name: "", label: `and ${all.length - 12} more`});
  return shown;
}

function versionsOf(source) {
  const versions = new Set();
  for (const tokens of source.segments) for (const turn of tokens.outline.turns) versions.add(turn.version);
  return versions;
}

function turnsOf(source) {
  const turns = new Set();
  for (const tokens of source.segments) for (const turn of tokens.outline.turns) turns.add(turn.turn);
  return turns;
}

// What the colours mean: [{name, label}].
export function legend(way, source) {
  if (way === "logprob") return LOGPROBS;
  if (way === "entropy") return ENTROPIES;
  if (way === "version") return numbered(versionsOf(source), "version");
  if (way === "turn") return numbered(turnsOf(source), "turn");
  if (way === "segment") return numbered(source.segments.map((tokens) => tokens.index), "segment");
  return [{name: "sampled", label: "sampled by the policy: trained on"}, {name: "", label: "read: mask 0"}];
}
