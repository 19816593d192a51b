// What a browser remembers of a person's choices; nothing where storage is forbidden.
export function stored(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

// Keep a value, or forget it if it is null, and return whether that was possible.
export function store(name, value) {
  try {
    if (value === null) localStorage.removeItem(name);
    else localStorage.setItem(name, value);
    return true;
  } catch {
    return false;
  }
}
