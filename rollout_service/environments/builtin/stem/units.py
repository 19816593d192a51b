"""Units of measurement: their values in SI base units.

Guarantee: a unit is either read as a whole, or not at all. Its text is data, and reading it takes linear time.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from math import pi
from typing import Final

MAX_POWER: Final = 12
MAX_CHARS: Final = 80

BASES: Final = ("m", "kg", "s", "A", "K", "mol", "cd", "turn")
"""A turn is a base of its own, so that rules do not decide between `60 rpm` and any number of `rad/s`."""


@dataclass(frozen=True, slots=True)
class Unit:
    """`value * factor + offset` is the value in SI base units."""

    factor: float
    powers: tuple[int, ...] = (0,) * len(BASES)
    """In the order of `BASES`."""
    offset: float = 0.0

    def times(self, other: Unit, power: int) -> Unit:
        powers = tuple(a + b * power for a, b in zip(self.powers, other.powers, strict=True))
        return Unit(self.factor * other.factor**power, powers)


ONE: Final = Unit(1.0)


def _unit(factor: float, **powers: int) -> Unit:
    return Unit(factor, tuple(powers.get(base, 0) for base in BASES))


_JOULE = {"m": 2, "kg": 1, "s": -2}
_PASCAL = {"m": -1, "kg": 1, "s": -2}
PREFIXED: Final = {
    "m": _unit(1, m=1),
    "g": _unit(1e-3, kg=1),
    "s": _unit(1, s=1),
    "A": _unit(1, A=1),
    "K": _unit(1, K=1),
    "mol": _unit(1, mol=1),
    "cd": _unit(1, cd=1),
    "N": _unit(1, m=1, kg=1, s=-2),
    "J": _unit(1, **_JOULE),
    "W": _unit(1, m=2, kg=1, s=-3),
    "Pa": _unit(1, **_PASCAL),
    "Hz": _unit(1, s=-1),
    "C": _unit(1, A=1, s=1),
    "V": _unit(1, m=2, kg=1, s=-3, A=-1),
    "Ω": _unit(1, m=2, kg=1, s=-3, A=-2),
    "ohm": _unit(1, m=2, kg=1, s=-3, A=-2),
    "S": _unit(1, m=-2, kg=-1, s=3, A=2),
    "F": _unit(1, m=-2, kg=-1, s=4, A=2),
    "H": _unit(1, m=2, kg=1, s=-2, A=-2),
    "T": _unit(1, kg=1, s=-2, A=-1),
    "Wb": _unit(1, m=2, kg=1, s=-2, A=-1),
    "L": _unit(1e-3, m=3),
    "l": _unit(1e-3, m=3),
    "M": _unit(1e3, m=-3, mol=1),
    "eV": _unit(1.602176634e-19, **_JOULE),
    "cal": _unit(4.184, **_JOULE),
    "bar": _unit(1e5, **_PASCAL),
    "Bq": _unit(1, s=-1),
    "Gy": _unit(1, m=2, s=-2),
}
"""Prefixes may stand before these."""
PLAIN: Final = {
    "min": _unit(60, s=1),
    "h": _unit(3_600, s=1),
    "hr": _unit(3_600, s=1),
    "hour": _unit(3_600, s=1),
    "hours": _unit(3_600, s=1),
    "d": _unit(86_400, s=1),
    "day": _unit(86_400, s=1),
    "days": _unit(86_400, s=1),
    "year": _unit(31_557_600, s=1),
    "years": _unit(31_557_600, s=1),
    "yr": _unit(31_557_600, s=1),
    "second": _unit(1, s=1),
    "seconds": _unit(1, s=1),
    "minutes": _unit(60, s=1),
    "atm": _unit(101_325, **_PASCAL),
    "mmHg": _unit(133.322387415, **_PASCAL),
    "torr": _unit(101_325 / 760, **_PASCAL),
    "u": _unit(1.66053906892e-27, kg=1),
    "Å": _unit(1e-10, m=1),
    "AU": _unit(149_597_870_700, m=1),
    "ly": _unit(9_460_730_472_580_800, m=1),
    "pc": _unit(3.0856775814913673e16, m=1),
    "t": _unit(1e3, kg=1),
    "meters": _unit(1, m=1),
    "meter": _unit(1, m=1),
    "rad": ONE,
    "°": Unit(pi / 180),
    "deg": Unit(pi / 180),
    "degrees": Unit(pi / 180),
    "%": Unit(0.01),
    "rpm": _unit(1 / 60, turn=1, s=-1),
    "°C": Unit(1.0, _unit(1, K=1).powers, 273.15),
    "°F": Unit(5 / 9, _unit(1, K=1).powers, 459.67 * 5 / 9),
}
PREFIXES: Final = {
    "p": 1e-12,
    "n": 1e-9,
    "µ": 1e-6,
    "m": 1e-3,
    "c": 1e-2,
    "d": 1e-1,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "f": 1e-15,
    "P": 1e15,
}
_TOKEN = re.compile(r"\s*([*/])?\s*(?:([()])|([A-Za-zµΩÅ°%]+)(?:\^?(\()?([+-]?\d{1,3})(?(4)\)))?)")

_Token = tuple[str | None, str | None, str | None, str | None]
"""A sign, and then a parenthesis, or a symbol and its power."""


def read_unit(text: str) -> Unit | None:
    """Read a text such as `kg m^2/s^2` or `J/(mol K)`."""
    text = text.strip()
    if len(text) > MAX_CHARS:
        return None
    if (single := _symbol(text)) is not None:
        return single
    tokens: deque[_Token] = deque()
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        tokens.append((token[1], token[2], token[3], token[5]))
        at = token.end()
    return _product(tokens)


def _product(tokens: deque[_Token], *, is_nested: bool = False) -> Unit | None:
    """Read up to the closing parenthesis, or to the end."""
    unit = ONE
    while tokens:
        sign, parenthesis, symbol, power = tokens.popleft()
        if parenthesis == ")":
            return unit if is_nested and sign is None else None
        factor = _symbol(symbol) if symbol else _product(tokens, is_nested=True)
        exponent = int(power or 1) * (-1 if sign == "/" else 1)
        if factor is None or factor.offset or abs(exponent) > MAX_POWER:
            return None
        unit = unit.times(factor, exponent)
    return None if is_nested else unit


def _symbol(symbol: str) -> Unit | None:
    found = PREFIXED.get(symbol) or PLAIN.get(symbol)
    if found is not None:
        return found
    prefix, rest = PREFIXES.get(symbol[:1]), PREFIXED.get(symbol[1:])
    return None if prefix is None or rest is None else Unit(prefix * rest.factor, rest.powers)
