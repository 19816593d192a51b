// A list of any length: only the rows that can be seen are in the document.
import {html, useEffect, useLayoutEffect, useRef, useState} from "./ui.js";
import {useKeys} from "./keys.js";

const SPARE = 6;
const TALLEST = 8_000_000; // browsers bound the height of an element; longer lists are scrolled in larger steps

// Draw `count` rows of `rowHeight` pixels: `render(index)` is the content of one. With `onOpen`, j and k move the
// selection and Enter opens it; `selected` and `onSelect` let the caller keep it. `onRange(first, last)` is called with
// the rows that are drawn, for lists that fetch as they are scrolled.
export function VirtualRows({count, rowHeight, render, label, selected, onSelect, onOpen, onRange, height = "100%"}) {
  const box = useRef(null);
  const [view, setView] = useState({top: 0, size: 600});
  const [own, setOwn] = useState(-1);
  const chosen = selected ?? own;
  const choose = onSelect ?? setOwn;
  const full = count * rowHeight;
  const drawn = Math.min(full, TALLEST);
  const stretch = drawn > view.size ? (full - view.size) / (drawn - view.size) : 1;
  const offset = view.top * stretch;
  const first = Math.max(0, Math.floor(offset / rowHeight) - SPARE);
  const last = Math.min(count, Math.ceil((offset + view.size) / rowHeight) + SPARE);

  useLayoutEffect(() => {
    const element = box.current;
    const look = () => setView({top: element.scrollTop, size: element.clientHeight});
    const observer = new ResizeObserver(look);
    observer.observe(element);
    look();
    return () => observer.disconnect();
  }, []);
  useEffect(() => onRange?.(first, last), [first, last, count]);

  const show = (index) => {
    const element = box.current;
    const top = index * rowHeight;
    if (top < offset) element.scrollTop = top / stretch;
    else if (top + rowHeight > offset + view.size) element.scrollTop = (top + rowHeight - view.size) / stretch;
  };
  const move = (step) => {
    if (!onOpen || !count) return false;
    const next = Math.min(count - 1, Math.max(0, chosen + step));
    choose(next);
    show(next);
    return true;
  };
  useKeys({
    j: {help: onOpen && "Next row", run: () => move(1)},
    k: {help: onOpen && "Previous row", run: () => move(-1)},
    Enter: {
      help: onOpen && "Open the row",
      run: () => (onOpen && chosen >= 0 && chosen < count ? void onOpen(chosen) : false),
    },
  });

  const rows = [];
  for (let index = first; index < last; index += 1) {
    const style = {height: `${rowHeight}px`, transform: `translateY(${index * rowHeight - offset + view.top}px)`};
    rows.push(html`<div key=${index} role="listitem" class=${index === chosen ? "row chosen" : "row"} style=${style}
      aria-setsize=${count} aria-posinset=${index + 1} aria-current=${index === chosen ? "true" : undefined}
      onClick=${onOpen && ((event) => (choose(index), event.target.closest("a, button, input, label") || onOpen(index)))}
      >${render(index)}</div>`);
  }
  return html`<div class="rows" ref=${box} tabindex="0" role="list" aria-label=${label} style=${{height}}
      onScroll=${(event) => setView({top: event.currentTarget.scrollTop, size: event.currentTarget.clientHeight})}>
    <div class="rows-all" role="presentation" style=${{height: `${drawn}px`}}>${rows}</div>
  </div>`;
}
