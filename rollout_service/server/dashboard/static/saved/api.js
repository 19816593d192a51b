// The answers of the API that are in this file: it stands in for the module that asks the service. There is one block of
// JSON for each, and each is parsed when it is asked for.
import {ApiError} from "../lib/errors.js";
import {signal} from "../lib/ui.js";

export const isSaved = true;
export const TOKENS_AT_ONCE = {first: Infinity, next: Infinity}; // an answer is a whole segment
export const keyRequest = signal(null);
export const hasKey = () => false;

const blocks = new Map(Array.from(document.querySelectorAll("script[data-path]"), (block) => [block.dataset.path, block]));

// A list has the rows of this rollout alone, however it is filtered.
const nameOf = (path) => (path.startsWith("v1/summaries?") ? "v1/summaries" : decodeURIComponent(path));

export async function get(path) {
  const block = blocks.get(nameOf(path));
  if (!block) throw new ApiError(404, "not_found", "The service did not have this when the file was saved.");
  return JSON.parse(block.textContent);
}

export async function send() {
  throw new ApiError(405, "saved", "This is a file: nothing can be changed here.");
}

export const download = send;
export const url = (path) => path; // nothing links to the service

export async function stream() {
  // nothing happens anymore
}
