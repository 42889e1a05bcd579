"""Callables by name, code and everything that is bound into them."""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from neffcache.graph.callables import code_digest, describe, describe_json
from neffcache.graph.uncacheable import Uncacheable
from tests.graph import functions
from tests.graph.building import with_argument
from tests.graph.functions import adder, counting, lambdas, other, plain, with_default

pytestmark = pytest.mark.fast


def closed(value: Any) -> Any:
    """What may be bound in these tests."""
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise Uncacheable(f"no {type(value).__name__} here")
    return value


def text(fn: Any) -> str:
    return describe(fn, lambda value: repr(closed(value)))


def document(fn: Any) -> dict[str, Any]:
    return describe_json(fn, closed)


partial = functools.partial

DIFFERENT: dict[str, list[Any]] = {
    "name": [plain, other, operator.add, operator.sub, math.sqrt, math.sin],
    "builtin and torch": [torch.sym_max, torch.sym_min, torch.add, torch.relu, torch.nn.functional.relu, len, int],
    "bound argument": [plain, partial(plain), *(partial(plain, x) for x in (1, 2, 1.0, "1")), partial(plain, x=1)],
    "bound function": [partial(plain, other), partial(other, plain), partial(plain, plain)],
    "nested partial": [partial(partial(with_default, 1), 2), partial(partial(with_default, 2), 1)],
    "closure": [adder(1), adder(2), adder(1.0), adder("1"), adder(None), adder(plain), adder(other), adder(adder(1))],
    "lambda": [lambdas("one"), lambdas("two")],
    "recursion": [counting(1), counting(2)],
    "method of a value": ["a".upper, "b".upper, "a".lower],
}  # fmt: skip


@pytest.mark.parametrize("describer", [text, lambda fn: repr(document(fn))], ids=["text", "json"])
@pytest.mark.parametrize("kind", DIFFERENT)
def test_callables_that_differ_have_descriptions_that_differ(kind: str, describer: Callable[[Any], str]) -> None:
    descriptions = [describer(fn) for fn in DIFFERENT[kind]]
    assert len(set(descriptions)) == len(descriptions)


@pytest.mark.parametrize("describer", [text, document], ids=["text", "json"])
def test_callables_made_twice_have_one_description(describer: Callable[[Any], Any]) -> None:
    for make in (
        lambda: adder(1),
        lambda: lambdas("one"),
        lambda: counting(3),
        lambda: partial(adder("a"), 1),
        lambda: "a".upper,
        lambda: functions.remembered,
    ):
        assert describer(make()) == describer(make())
    assert describer(partial(with_default, y=1, z=2)) == describer(partial(with_default, z=2, y=1))


def rebuilt(fn: types.FunctionType, **changes: Any) -> types.FunctionType:
    """`fn` with another part: defaults, code or globals."""
    code = changes.pop("code", fn.__code__)
    new = types.FunctionType(code, {**fn.__globals__, **changes.pop("globals", {})}, fn.__name__)
    new.__qualname__, new.__module__ = fn.__qualname__, fn.__module__
    new.__defaults__ = changes.pop("defaults", fn.__defaults__)
    new.__kwdefaults__ = changes.pop("kwdefaults", fn.__kwdefaults__)
    new.__dict__.update(changes)
    return new


def test_defaults_count() -> None:
    alike = rebuilt(with_default)
    assert text(alike) == text(with_default)
    assert document(alike) == document(with_default)
    for changed in (rebuilt(with_default, defaults=(2.0,)), rebuilt(with_default, kwdefaults={"z": 3.0})):
        assert text(changed) != text(with_default)
        assert document(changed) != document(with_default)


def test_code_counts_but_not_where_it_stands() -> None:
    assert text(rebuilt(plain, code=other.__code__.replace(co_name="plain"))) != text(plain)
    moved = plain.__code__.replace(co_filename="/elsewhere/module.py", co_firstlineno=999)
    assert text(rebuilt(plain, code=moved)) == text(plain)


def test_sets_among_the_constants_of_code_have_one_order() -> None:
    left = (lambda x: x in {"a", "b", "c"}).__code__
    right = left.replace(
        co_consts=tuple(frozenset(["c", "b", "a"]) if isinstance(c, frozenset) else c for c in left.co_consts)
    )
    assert code_digest(left) == code_digest(right)
    assert code_digest(left) != code_digest((lambda x: x in {"a", "b", "d"}).__code__)


def test_globals_that_a_function_reads_count() -> None:
    assert text(functions.scaled) != text(rebuilt(functions.scaled, globals={"SCALE": 3.0}))
    assert text(functions.scaled) == text(rebuilt(functions.scaled, globals={"UNREAD": 3.0}))
    assert text(functions.calling) != text(rebuilt(functions.calling, globals={"plain": other}))


def test_attributes_of_a_function_count() -> None:
    assert len({text(plain), text(rebuilt(plain, scale=1)), text(rebuilt(plain, scale=2))}) == 3


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (functions.reaching_out, "tests.graph.building"),
        (functions.importing, "tests.graph.building"),
        (functions.evaluating, "eval"),
        (functions.Callee(), "Callee"),
        (functions.Callee().method, "Callee"),
        (functions.Callee, "Callee"),
        (partial(plain, object()), "object"),
        (adder(object()), "object"),
        ([].append, "list"),
    ],
)
def test_what_could_hide_something_is_refused(fn: Any, word: str) -> None:
    with pytest.raises(Uncacheable, match=word):
        text(fn)


@pytest.mark.parametrize("describer", [text, document], ids=["text", "json"])
def test_functions_without_a_source_file_are_refused(describer: Callable[[Any], Any]) -> None:
    namespace: dict[str, Any] = {"__name__": "made"}
    exec("def typed(x):\n    return x", namespace)
    with pytest.raises(Uncacheable, match="<string>"):
        describer(namespace["typed"])


def test_a_document_refuses_what_its_encoder_refuses() -> None:
    def strict(value: Any) -> Any:
        raise ValueError(f"no {value!r}")

    for fn in (adder(1), partial(plain, 1), with_default, "a".upper):
        with pytest.raises(ValueError, match="no "):
            describe_json(fn, strict)
    assert describe_json(plain, strict) == {"function": "tests.graph.functions.plain"}


def test_a_document_holds_everything_that_is_bound() -> None:
    assert document(partial(with_default, 1, z=adder(2))) == {
        "partial": {
            "function": "tests.graph.functions.with_default",
            "defaults": [1.0],
            "keyword_defaults": {"z": 2.0},
        },
        "args": [1],
        "keywords": {
            "z": {
                "function": "tests.graph.functions.adder.<locals>.add",
                "code": code_digest(adder(2).__code__),
                "closure": {"amount": [2]},
            }
        },
    }
    assert document(functions.Callee) == {"class": "tests.graph.functions.Callee"}


def test_a_cell_that_is_still_empty_is_no_value() -> None:
    def outer(fill: bool) -> Callable[[], Any]:
        if fill:
            late = None
        return lambda: late

    assert text(outer(False)) != text(outer(True))
    assert document(outer(False)) != document(outer(True))


def test_a_module_that_moves_describes_its_functions_as_before(tmp_path: Path) -> None:
    source = Path(functions.__file__).read_text()

    def loaded(folder: str) -> Any:
        path = tmp_path / folder / "functions.py"
        path.parent.mkdir()
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("tests.graph.functions", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    here, there = loaded("a"), loaded("b")
    for name in ("plain", "with_default", "scaled", "calling"):
        assert text(getattr(here, name)) == text(getattr(there, name)) == text(getattr(functions, name))
    assert text(here.adder(1)) == text(there.adder(1))


def test_a_callable_is_an_argument_like_any_other() -> None:
    assert with_argument(adder(1)).sha256 == with_argument(adder(1)).sha256
    assert with_argument(adder(1)).sha256 != with_argument(adder(2)).sha256
    with pytest.raises(Uncacheable, match="Callee"):
        with_argument(functions.Callee())
