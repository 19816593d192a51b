r"""Numbers with units, as people and models write them: `3.0e8 m/s`, `$3 \times 10^{8}\,\mathrm{m/s}$`, `12 %`.

Guarantee: a text is either read as a whole, or not at all; nothing in it is evaluated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Final

from rollout_service.environments.builtin.stem.units import ONE, Unit, read_unit

MAX_CHARS: Final = 200
LOOKS: Final = r"text(?:rm|bf|it)?|math(?:rm|bf|it)|boldsymbol|operatorname|mbox"
"""Commands of LaTeX that only change the look of their argument."""
_WRAPPERS = re.compile(rf"\\(?:{LOOKS}|rm|bf|unit|si|left|right)\b\s*")
_SIGNS: Final = {
    r"\times": "*",
    r"\cdot": "*",
    r"\Omega": "Ω",
    r"\omega": "ω",
    r"\AA": "Å",
    r"\degree": "°",
    r"^\circ": "°",
    r"^{\circ}": "°",
    r"\circ": "°",
    r"\%": "%",
    r"\approx": "=",
    "μ": "µ",
    "\u2126": "Ω",
    "\u212b": "Å",
    "\u2212": "-",
    "\u00d7": "*",
    "·": "*",
    "⋅": "*",
    "≈": "=",
    "²": "^2",
    "³": "^3",
    "⁻¹": "^-1",
    "⁻²": "^-2",
}
SPACES = re.compile(r"\\[,;:! ]|~|\\quad")
_MICRO = re.compile(r"\\mu\s*")
_BRACES = re.compile(r"[{}$]")
_NUMBER = re.compile(
    r"\s*([+-]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d*)?)(?:[eE]([+-]?\d{1,3})|\s*\*\s*10\s*\^\s*\(?([+-]?\d{1,3})\)?)?"
)
_LISTED = re.compile(r"\d.*(?:\bor\b|\band\b|[,;])", re.IGNORECASE)
_ROUNDED: Final = 0.02
"""Relative difference of quantities that may be one, rounded."""
_POWER_OF_TEN = re.compile(r"\s*([+-]?)10\s*\^\s*\(?([+-]?\d{1,3})\)?(?![\d.])")


@dataclass(frozen=True, slots=True)
class Quantity:
    value: float
    unit: Unit
    is_bare: bool
    """Written without a unit."""
    is_integer: bool
    """Written as digits alone."""

    def equals(self, given: Quantity, tolerance: float) -> bool | None:
        """Compare within a relative tolerance; None if the quantities cannot be compared.

        A bare number can only be the same as one with a percent sign or an angle, such as 0.25 and 25 %; otherwise it
        may have been meant in that unit, whichever of the two is bare.
        """
        if self.unit.powers != given.unit.powers:
            return None
        value = (given.value * given.unit.factor + given.unit.offset - self.unit.offset) / self.unit.factor
        is_same = isclose(value, self.value, rel_tol=tolerance, abs_tol=tolerance if self.value == 0 else 0.0)
        return is_same or (None if given.is_bare is not self.is_bare else False)

    def in_unit(self, unit: Unit) -> Quantity:
        return Quantity(self.value, unit, is_bare=unit is ONE, is_integer=self.is_integer)


def read_quantity(text: str) -> Quantity | None:
    """Read a quantity, possibly after `x =`."""
    if len(text) > MAX_CHARS:
        return None
    *before, text = (side.strip() for side in _plain(text).split("="))
    quantity = _read_side(text.rstrip("."))
    if quantity is None or any(_says_otherwise(side, quantity) for side in before):
        return None
    return quantity


def _says_otherwise(side: str, quantity: Quantity) -> bool:
    """Return whether a side of an equation is another quantity, or lists one, as in `3 m or x`."""
    given = _read_side(side)
    return _LISTED.search(side) is not None if given is None else quantity.equals(given, _ROUNDED) is False


def _read_side(text: str) -> Quantity | None:
    number = _POWER_OF_TEN.match(text)
    if number is not None:
        digits, power = f"{number[1]}1", number[2]
    else:
        number = _NUMBER.match(text)
        if number is None:
            return None
        digits, power = number[1].replace(",", ""), number[2] or number[3] or "0"
    if not any(character.isdigit() for character in digits):
        return None
    rest = text[number.end() :]
    unit = read_unit(rest)
    value = float(f"{digits}e{power}")
    if unit is None or not isfinite(value) or (rest and rest[0].isdigit()):
        return None
    is_integer = "." not in digits and power == "0"
    return Quantity(value, unit, is_bare=not rest.strip(), is_integer=is_integer)


def _plain(text: str) -> str:
    """Return LaTeX as plain text, where only notation differs."""
    text = _WRAPPERS.sub("", text)
    text = _MICRO.sub("µ", SPACES.sub(" ", text))
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    return _BRACES.sub("", text).strip()
