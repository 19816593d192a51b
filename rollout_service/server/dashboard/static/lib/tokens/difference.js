// How two lists of token ids differ: what they share at both ends, and in between what was taken out and put in.
import {diffArrays} from "../../vendor/diff.js";

const MOST = 6000; // more than this between the shared ends is shown as replaced as a whole
const MOST_EDITS = 2000;

// Return the number of leading entries that are equal.
export function sharedStart(a, b) {
  const end = Math.min(a.length, b.length);
  let at = 0;
  while (at < end && a[at] === b[at]) at += 1;
  return at;
}

function sharedEnd(a, b, from) {
  const most = Math.min(a.length, b.length) - from;
  let same = 0;
  while (same < most && a[a.length - 1 - same] === b[b.length - 1 - same]) same += 1;
  return same;
}

function between(a, b) {
  if (a.length + b.length > MOST) return null;
  return diffArrays(Array.from(a), Array.from(b), {maxEditLength: MOST_EDITS}) ?? null;
}

// Return {first, parts} with parts {kind: "same" | "removed" | "added", a: [from, to], b: [from, to]}; `first` is the
// first index that differs, or null if the lists are equal.
export function difference(a, b) {
  const start = sharedStart(a, b);
  if (start === a.length && start === b.length) return {first: null, parts: [{kind: "same", a: [0, start], b: [0, start]}]};
  const tail = sharedEnd(a, b, start);
  const parts = [];
  const put = (kind, fromA, toA, fromB, toB) => {
    if (toA > fromA || toB > fromB) parts.push({kind, a: [fromA, toA], b: [fromB, toB]});
  };
  put("same", 0, start, 0, start);
  const endA = a.length - tail;
  const endB = b.length - tail;
  const changes = between(a.slice(start, endA), b.slice(start, endB)) ?? [
    {removed: true, count: endA - start}, {added: true, count: endB - start},
  ];
  let atA = start;
  let atB = start;
  for (const {added, removed, count} of changes) {
    if (removed) put("removed", atA, (atA += count), atB, atB);
    else if (added) put("added", atA, atA, atB, (atB += count));
    else put("same", atA, (atA += count), atB, (atB += count));
  }
  put("same", endA, a.length, endB, b.length);
  return {first: start, parts};
}
