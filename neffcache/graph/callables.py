"""Functions as values: what they are called, and everything that is bound into them.

A function that its module gives back under its own name, in torch, in Python or in its standard library, is that name:
the toolchain's identity pins its code. Any other function is name, code, defaults, closure and the globals it reads.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import json
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from neffcache.graph.uncacheable import Uncacheable

_NAMED = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)
# A builtin whose __self__ is one of these is a plain function; any other __self__ is bound into it.
_HOMES = (types.ModuleType, type, type(None))
# Through these a function gets at code and values that its own text does not name.
_REACHING = frozenset(
    {"importlib", "sys", "builtins", "runpy", "gc", "inspect", "__import__", "eval", "exec", "globals", "vars"}
)
_PINNED_MODULES = sys.stdlib_module_names | {"torch", "builtins"}


def is_callable_value(value: object) -> bool:
    """Whether `describe` has a form for values of this kind (it may still refuse this one)."""
    kinds = (types.FunctionType, types.MethodType, functools.partial, type, types.MethodWrapperType, *_NAMED)
    return isinstance(value, kinds) or _unwrapped_cache(value) is not None


def _unwrapped_cache(value: object) -> Any:
    """The function inside functools.lru_cache, whose wrapper has a class of its own."""
    return getattr(value, "__wrapped__", None) if isinstance(value, functools._lru_cache_wrapper) else None


def _name(fn: Any) -> str:
    return f"{_module(fn)}.{fn.__qualname__}"


def _module(fn: Any) -> str:
    """Descriptors have no module of their own, and functions of C classes take that of the class."""
    owner = getattr(fn, "__objclass__", None) or getattr(fn, "__self__", None)
    module = getattr(fn, "__module__", None) or (
        getattr(owner, "__module__", None) if isinstance(owner, type) else None
    )
    return module or "builtins"


def _is_pinned(fn: Any) -> bool:
    """Whether the name alone identifies the code: found again under its name in torch or the standard library."""
    module = _module(fn)
    if module == "__main__" or module.partition(".")[0] not in _PINNED_MODULES or module not in sys.modules:
        return False
    found: Any = sys.modules[module]
    for part in fn.__qualname__.split("."):
        found = getattr(found, part, None)
    # torch's own C functions are methods of a class that no module shows; their short name finds them.
    return found is fn or (module == "torch" and getattr(torch, fn.__name__, None) is fn)


def _check_source(fn: types.FunctionType) -> None:
    if fn.__code__.co_filename.startswith("<"):
        raise Uncacheable(f"the function {_name(fn)} comes from {fn.__code__.co_filename}, not from a source file")


def _label(name: str) -> str:
    return name if name.isidentifier() else json.dumps(name)


def _cell_content(cell: types.CellType) -> tuple[bool, Any]:
    """Whether the cell is filled, and with what."""
    try:
        return True, cell.cell_contents
    except ValueError:
        return False, None


def _check_partial(fn: functools.partial[Any]) -> None:
    # A subclass may call in another way, and attributes may be read by whoever gets it.
    if type(fn) is not functools.partial or fn.__dict__:
        raise Uncacheable(f"a partial of the class {type(fn).__qualname__} with attributes {sorted(fn.__dict__)}")


def describe(fn: Any, value: Callable[[Any], str]) -> str:
    """The text of a callable; `value` writes bound values. Uncacheable when something in it has no exact text."""
    return _Description(value).of(fn)


class _Description:
    """One description under way. `_open` holds the functions being written: functions may refer to themselves."""

    def __init__(self, value: Callable[[Any], str]) -> None:
        self._value = value
        self._open: list[Any] = []

    def of(self, fn: Any) -> str:
        if isinstance(fn, functools.partial):
            _check_partial(fn)
            bound = [self._bound(item) for item in fn.args]
            bound += [f"{_label(name)}={self._bound(fn.keywords[name])}" for name in sorted(fn.keywords)]
            return f"partial({','.join([self.of(fn.func), *bound])})"
        if isinstance(fn, types.MethodType):
            owner = type(fn.__self__)
            return f"method({owner.__module__}.{owner.__qualname__},{self.of(fn.__func__)},{self._bound(fn.__self__)})"
        if (wrapped := _unwrapped_cache(fn)) is not None:
            return f"cached({self.of(wrapped)})"
        if isinstance(fn, types.FunctionType):
            return f"function({_name(fn)})" if _is_pinned(fn) else self._function(fn)
        if isinstance(fn, type):
            if _is_pinned(fn):
                return f"class({_name(fn)})"
            raise Uncacheable(f"the class {_name(fn)}, whose code is not pinned by the toolchain")
        if isinstance(fn, types.BuiltinFunctionType) and not isinstance(fn.__self__, _HOMES):
            owner = type(fn.__self__)
            return f"builtin({owner.__module__}.{fn.__qualname__},{self._bound(fn.__self__)})"
        if isinstance(fn, _NAMED) and _is_pinned(fn):
            return f"builtin({_name(fn)})"
        raise Uncacheable(f"a callable of the class {type(fn).__module__}.{type(fn).__qualname__}: {fn!r}")

    def _bound(self, item: Any) -> str:
        return self.of(item) if is_callable_value(item) else self._value(item)

    def _function(self, fn: types.FunctionType) -> str:
        _check_source(fn)
        if fn in self._open:
            return f"recursion({len(self._open) - 1 - self._open.index(fn)})"
        self._open.append(fn)
        try:
            parts = [_name(fn), f"code={code_digest(fn.__code__)}"]
            parts += [f"default={self._bound(item)}" for item in fn.__defaults__ or ()]
            parts += [f"default.{name}={self._bound(item)}" for name, item in sorted((fn.__kwdefaults__ or {}).items())]
            for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
                parts.append(f"closure.{name}={self._cell(cell)}")
            parts += [f"attribute.{_label(name)}={self._bound(item)}" for name, item in sorted(fn.__dict__.items())]
            parts += [part for name in sorted(_globals_read(fn.__code__)) if (part := self._global(fn, name))]
            return f"function({','.join(parts)})"
        finally:
            self._open.pop()

    def _cell(self, cell: types.CellType) -> str:
        full, content = _cell_content(cell)
        return self._bound(content) if full else "empty"

    def _global(self, fn: types.FunctionType, name: str) -> str:
        """What a name of the function's module stands for; "" for a builtin, which the interpreter pins."""
        if name not in fn.__globals__:
            if name in _REACHING:
                raise Uncacheable(f"the function {_name(fn)} calls {name}, which may reach anything")
            return ""
        item = fn.__globals__[name]
        if isinstance(item, types.ModuleType):
            _check_module(item.__name__)
            return f"global.{name}=module({item.__name__})"
        return f"global.{name}={self._bound(item)}"


def _check_module(name: str) -> None:
    root = name.partition(".")[0]
    if root not in _PINNED_MODULES or root in _REACHING:
        raise Uncacheable(f"a function uses the module {name}, which no key covers")


def _globals_read(code: types.CodeType) -> set[str]:
    """Global names that the code, or code inside it, reads. Uncacheable when it imports what no toolchain pins."""
    names = set()
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            _check_module(step.argval)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_read(constant)
    return names


def code_digest(code: types.CodeType) -> str:
    """SHA-256 of what the code does: bytecode, constants, names, signature; not where it stands in which file."""
    return hashlib.sha256(_code_text(code).encode()).hexdigest()


def _code_text(code: types.CodeType) -> str:
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    # Exception tables hold offsets into the bytecode, so they belong to it.
    raw = code.co_code.hex(), code.co_exceptiontable.hex()
    return json.dumps([shape, names, raw, [_constant_text(item) for item in code.co_consts]])


def _constant_text(constant: object) -> str:
    if isinstance(constant, types.CodeType):
        return f"code({_code_text(constant)})"
    if isinstance(constant, tuple):
        return "(" + ",".join(map(_constant_text, constant)) + ")"
    if isinstance(constant, frozenset):
        return "{" + ",".join(sorted(map(_constant_text, constant))) + "}"
    if isinstance(constant, str):
        return json.dumps(constant)
    return repr(constant)  # None, bool, int, float, complex, bytes, Ellipsis: repr tells them apart


def describe_json(fn: Any, encode: Callable[[Any], Any]) -> dict[str, Any]:
    """A callable as JSON for a document that counts sources apart. `encode` writes bound values and raises for others.

    Lambdas and local functions carry a digest of their code all the same: several of them may share one name.
    Raises Uncacheable for functions without a source file and for objects that are merely callable.
    """
    return _Document(encode).of(fn)


class _Document:
    """One JSON description under way, as _Description is one of text."""

    def __init__(self, encode: Callable[[Any], Any]) -> None:
        self._encode = encode
        self._open: list[Any] = []

    def of(self, fn: Any) -> dict[str, Any]:
        if isinstance(fn, functools.partial):
            _check_partial(fn)
            keywords = {name: self._bound(item) for name, item in fn.keywords.items()}
            return {"partial": self.of(fn.func), "args": [self._bound(item) for item in fn.args], "keywords": keywords}
        if isinstance(fn, types.MethodType):
            owner = f"{type(fn.__self__).__module__}.{type(fn.__self__).__qualname__}"
            return {"method": self.of(fn.__func__), "class": owner, "self": self._bound(fn.__self__)}
        if (wrapped := _unwrapped_cache(fn)) is not None:
            return {"cached": self.of(wrapped)}
        if isinstance(fn, types.FunctionType):
            return {"function": _name(fn)} if _is_pinned(fn) else self._function(fn)
        if isinstance(fn, type):
            if "<locals>" in fn.__qualname__ or fn.__module__ == "__main__":
                raise Uncacheable(f"the class {_name(fn)} cannot be found under its name")
            return {"class": _name(fn)}
        if isinstance(fn, _NAMED):
            document: dict[str, Any] = {"builtin": _name(fn)}
            if not isinstance(getattr(fn, "__self__", None), _HOMES):
                document["self"] = self._bound(getattr(fn, "__self__", None))
            return document
        raise Uncacheable(f"a callable of the class {type(fn).__module__}.{type(fn).__qualname__}")

    def _bound(self, item: Any) -> Any:
        return self.of(item) if is_callable_value(item) else self._encode(item)

    def _function(self, fn: types.FunctionType) -> dict[str, Any]:
        if fn in self._open:
            return {"recursion": len(self._open) - 1 - self._open.index(fn)}
        _check_source(fn)
        if fn.__module__ == "__main__":
            raise Uncacheable(f"the function {_name(fn)} lives in the main script, whose source no key counts")
        self._open.append(fn)
        try:
            document: dict[str, Any] = {"function": _name(fn)}
            if "<" in fn.__qualname__:
                document["code"] = code_digest(fn.__code__)
            if fn.__defaults__:
                document["defaults"] = [self._bound(item) for item in fn.__defaults__]
            if fn.__kwdefaults__:
                document["keyword_defaults"] = {name: self._bound(item) for name, item in fn.__kwdefaults__.items()}
            if fn.__closure__:
                cells = zip(fn.__code__.co_freevars, fn.__closure__, strict=True)
                document["closure"] = {name: self._cell(cell) for name, cell in cells}
            return document
        finally:
            self._open.pop()

    def _cell(self, cell: types.CellType) -> Any:
        # A list holds the content, so that no content reads as an empty cell.
        full, content = _cell_content(cell)
        return [self._bound(content)] if full else []
