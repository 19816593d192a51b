// What can be jumped to in a trajectory: the text that was searched for, turns, segments, and unlikely tokens. A place is
// {segment, token}; places are in reading order.

export const MOST_MATCHES = 10_000;

const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");

// A pattern that finds the text as it is written, in either case.
export function patternOf(text) {
  return new RegExp(escaped(text), "gi");
}

// The matches of a text: [{segment, token, end}], with the tokens that a match lies in as [token, end).
export function findText(source, text, most = MOST_MATCHES) {
  const matches = [];
  if (!text) return matches;
  source.segments.forEach((tokens, segment) => {
    const pattern = patternOf(text);
    const shared = tokens.outline.shared_prefix ?? 0;
    let match;
    while (matches.length < most && (match = pattern.exec(tokens.text)) !== null) {
      const token = tokens.tokenAt(match.index);
      const end = tokens.tokenAt(match.index + match[0].length - 1) + 1;
      if (end > shared) matches.push({segment, token, end});
    }
  });
  return matches;
}

// The first token of each turn in each segment.
export function turnPlaces(source) {
  const places = [];
  source.segments.forEach((tokens, segment) => {
    for (const turn of tokens.outline.turns) {
      if (turn.start >= (tokens.outline.shared_prefix ?? 0)) places.push({segment, token: turn.start, turn: turn.turn});
    }
  });
  return places;
}

export function segmentPlaces(source) {
  return source.segments.map((tokens, segment) => ({segment, token: tokens.outline.shared_prefix ?? 0}));
}

// The sampled tokens whose log-probability is at most `limit`.
export function unlikelyPlaces(source, limit = -3, most = MOST_MATCHES) {
  const places = [];
  source.segments.forEach((tokens, segment) => {
    const {logprobs, mask, loaded} = tokens;
    for (let i = 0; i < loaded && places.length < most; i += 1) {
      if (mask[i] && logprobs[i] <= limit) places.push({segment, token: i});
    }
  });
  return places;
}

const before = (a, b) => a.segment < b.segment || (a.segment === b.segment && a.token < b.token);

// The next place after `here`, or the one before it; at the end it begins again.
export function step(places, here, forward) {
  if (!places.length) return null;
  if (!here) return forward ? places[0] : places[places.length - 1];
  if (forward) return places.find((place) => before(here, place)) ?? places[0];
  for (let i = places.length - 1; i >= 0; i -= 1) if (before(places[i], here)) return places[i];
  return places[places.length - 1];
}
