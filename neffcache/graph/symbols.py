"""Symbolic sizes by place, not by name: renamed S0, S1, ... and listed with all that is known about them.

PyTorch derives symbol names from source names, and sympy orders the terms of a sum by those names; so expressions are
printed by a printer of our own, which sorts the operands of commutative operators by their printed form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from neffcache.graph.torch_internals import assumptions, symbol_facts, symbolic
from neffcache.graph.uncacheable import Uncacheable

_COMMUTATIVE = frozenset({"Add", "Mul", "And", "Or", "Xor", "Equality", "Unequality", "Max", "Min"})
_INFIX = {"Add": "+", "Mul": "*"}

SymbolicNumber = torch.SymInt | torch.SymFloat | torch.SymBool


def expression_text(expr: Any, name: Callable[[Any], str]) -> str:
    """`expr` in prefix form (sums and products infix), symbols by `name`; Uncacheable for an atom of unknown kind."""
    if isinstance(expr, sympy.Symbol):
        return name(expr)
    if isinstance(expr, sympy.Integer):
        return str(int(expr))
    if isinstance(expr, sympy.Float):
        return str(sympy.srepr(expr))  # all digits and the precision
    if isinstance(expr, sympy.Rational):
        return f"{int(expr.p)}/{int(expr.q)}"
    kind = type(expr).__name__
    if not expr.args:
        if isinstance(expr, (sympy.Number, sympy.NumberSymbol)) or expr in (sympy.true, sympy.false):
            return str(expr)
        raise Uncacheable(f"a symbolic expression holds {expr!r} of type {kind}")
    owner = "" if type(expr).__module__.startswith("sympy.") else f"{type(expr).__module__}."
    operands = [expression_text(item, name) for item in expr.args]
    if kind in _COMMUTATIVE:
        operands.sort()
    if not owner and kind in _INFIX:
        return "(" + _INFIX[kind].join(operands) + ")"
    return f"{owner}{kind}({','.join(operands)})"


def _natural(name: str) -> tuple[str, int]:
    number = re.search(r"\d+$", name)
    return (name[: number.start()], int(number.group())) if number else (name, -1)


@dataclass
class SymbolTable:
    """Sees every expression of a graph once, then names the symbols, then prints."""

    env: Any = None
    _seen: list[Any] = field(default_factory=list)
    _names: dict[Any, str] | None = None

    def text(self, value: SymbolicNumber) -> str:
        """The printed expression; before `settle` only a mark, because later lines decide on the names."""
        found = symbolic(value)
        if found is None:
            raise Uncacheable(f"a {type(value).__name__} that is no expression over sizes")
        if self._names is not None:
            return expression_text(found.expr, self._names.__getitem__)
        if found.expr.free_symbols:
            if self.env is not None and found.env is not self.env:
                raise Uncacheable("symbols of two shape environments in one graph")
            self.env = found.env
        self._seen.append(found.expr)
        return "S"

    @property
    def used(self) -> bool:
        """Whether any symbolic number was met, a constant one included."""
        return bool(self._seen)

    @property
    def names(self) -> dict[Any, str]:
        return dict(self._names or {})

    def settle(self) -> None:
        """Name the symbols: first those that stand alone, in order of appearance, then those only in expressions."""
        order: list[Any] = []
        for expr in self._seen:
            if isinstance(expr, sympy.Symbol) and expr not in order:
                order.append(expr)
        for expr in self._seen:
            while new := [symbol for symbol in expr.free_symbols if symbol not in order]:
                order.append(min(new, key=lambda symbol, expr=expr: self._place(expr, symbol, order)))  # type: ignore[misc]
        self._names = {symbol: f"S{number}" for number, symbol in enumerate(order)}

    def _place(self, expr: Any, symbol: Any, order: list[Any]) -> tuple[str, str, tuple[str, int]]:
        """Where `symbol` stands in `expr`, told without original names; those only break a tie of equals."""

        def mark(other: Any) -> str:
            return "$" if other == symbol else f"S{order.index(other)}" if other in order else "?"

        return expression_text(expr, mark), self._facts(symbol, lambda _: "?"), _natural(str(symbol))

    def _facts(self, symbol: Any, name: Callable[[Any], str]) -> str:
        facts = symbol_facts(self.env, symbol)
        if facts is None:
            raise Uncacheable(f"nothing is known about the symbol {symbol}")
        kind = "int" if symbol.is_integer else "float"
        sign = "positive" if symbol.is_positive else "nonnegative" if symbol.is_nonnegative else "any"
        lower, upper = expression_text(facts.lower, name), expression_text(facts.upper, name)
        words = [kind, sign, f"{lower}..{upper}"]
        words.append("unbacked" if facts.hint is None else f"hint {expression_text(facts.hint, name)}")
        if facts.override is not None:
            words.append(f"override {facts.override!r}")
        if facts.size_like:
            words.append("size")
        return " ".join(words)

    def header(self) -> list[str]:
        """One line a symbol, then the sorted guards that speak of these symbols only."""
        names = self._names or {}
        if not names:
            return []
        lines = [f"symbol {name} {self._facts(symbol, names.__getitem__)}" for symbol, name in names.items()]
        guards = {
            expression_text(fact, names.__getitem__)
            for fact in assumptions(self.env)
            if fact.free_symbols and fact.free_symbols <= names.keys()
        }
        return lines + [f"guard {guard}" for guard in sorted(guards)]
