// The few things of the vendored libraries that pages use. `html` makes elements from templates; what is put into a
// template becomes a text node or an attribute, never markup.
import {Component, h, render} from "../vendor/preact.js";
import {useCallback, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState} from "../vendor/hooks.js";
import htm from "../vendor/htm.js";
import {batch, computed, effect, signal} from "../vendor/signals.js";

export const html = htm.bind(h);
export {Component, render, batch, computed, effect, signal};
export {useCallback, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState};

// Return the value of a signal; the component is drawn again when it is another than what was drawn.
export function useSignal(source) {
  const [, redraw] = useState(0);
  const drawn = useRef();
  drawn.current = source.peek();
  useEffect(() => effect(() => {
    if (source.value !== drawn.current) redraw((count) => count + 1);
  }), [source]);
  return drawn.current;
}
