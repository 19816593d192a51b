// The height of a line of tokens, which `styles/tokens.css` has too.

export const ROW_HEIGHT = 22;
