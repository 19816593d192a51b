// Return items in the order of their tree, as {item, depth}. `idOf` and `parentOf` tell an item's id and that of the one
// it is under; an item whose parent is not among them is a root.
export function treeOf(items, idOf, parentOf) {
  const ids = new Set(items.map(idOf));
  const children = new Map();
  for (const item of items) {
    const parent = ids.has(parentOf(item)) ? parentOf(item) : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(item);
  }
  const rows = [];
  const walk = (id, depth) => {
    for (const item of children.get(id) ?? []) {
      rows.push({item, depth});
      walk(idOf(item), depth + 1);
    }
  };
  walk(null, 0);
  return rows;
}
