"""The text of a whole graph: what counts, what does not, and that every process writes the same."""

from __future__ import annotations

import itertools
import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import fx
from torch import library as torch_registry

from neffcache.errors import Unsupported
from neffcache.graph import torch_internals
from neffcache.graph.text import FORMAT, Uncacheable, canonical_text, first_difference
from tests.graph.building import Build, Sizes, aten, opaque, write

higher = torch.ops.higher_order
# Graphs made by hand pass sizes where AOTAutograd passes nodes; both have a text.
pytestmark = pytest.mark.filterwarnings("ignore:Raw Sym:UserWarning")


@pytest.mark.fast
def test_a_small_graph_reads_like_this() -> None:
    build = Build()
    x, _unused = build.input(), build.input(torch.empty(4, dtype=torch.int64), name="y")
    total = build.call(aten.add.Tensor, x, build.get(torch.tensor(2.5)), alpha=2)
    gm = build.output(total, None)
    written = write(gm)
    assert written.text.splitlines() == [
        FORMAT,
        "inputs 2",
        "%0 = input float32[2,3]/[3,1]@cpu",
        "%1 = input int64[4]/[1]@cpu",
        "%2 = get tensor(float32[]/[]@cpu, 0x00002040 = 2.5)",
        "%3 = aten.add.Tensor(%0, %2, alpha=2) : float32[2,3]/[3,1]@cpu",
        "output (%3, None)",
    ]
    assert (written.nodes, written.inputs, written.groups, written.symbolic) == (5, 2, (), False)
    assert len(written.sha256) == 64


@pytest.mark.fast
def test_names_and_metadata_do_not_count() -> None:
    def graph(name: str, **meta: object) -> str:
        build = Build()
        x = build.input(name=name)
        node = build.call(aten.neg.default, x)
        node.name = f"{name}_negated"
        node.meta |= meta
        return write(build.output(node)).sha256

    assert graph("primals_1") == graph("arg0_1", stack_trace="File a.py", nn_module_stack={"a": 1})


@pytest.mark.fast
def test_the_calling_convention_counts() -> None:
    def graph(inputs: int, results: Callable[[fx.Node], object]) -> str:
        build = Build()
        first, *_ = [build.input(name=f"x{n}") for n in range(inputs)]
        gm = build.output()
        next(iter(reversed(gm.graph.nodes))).args = (results(first),)
        return write(gm).text

    texts = [
        graph(1, lambda x: (x,)),
        graph(2, lambda x: (x,)),
        graph(1, lambda x: [x]),
        graph(1, lambda x: x),
        graph(1, lambda x: (x, None)),
        graph(1, lambda x: (x, x)),
        graph(1, lambda x: ()),
        graph(1, lambda x: {"a": x}),
        graph(1, lambda x: {"b": x}),
    ]
    assert len(set(texts)) == len(texts)


@pytest.mark.fast
def test_which_node_is_used_where_counts() -> None:
    def graph(pick: Callable[[fx.Node, fx.Node], tuple[fx.Node, fx.Node]]) -> str:
        build = Build()
        return write(build.output(build.call(aten.sub.Tensor, *pick(build.input(), build.input(name="y"))))).text

    assert len({graph(lambda x, y: (x, y)), graph(lambda x, y: (y, x)), graph(lambda x, y: (x, x))}) == 3


@pytest.mark.fast
def test_a_mutation_of_an_input_is_a_line() -> None:
    def graph(mutate: bool) -> str:
        build = Build()
        x = build.input()
        total = build.call(aten.add.Tensor, x, 1)
        if mutate:
            build.call(aten.copy_.default, x, total)
        return write(build.output(total)).text

    assert "aten.copy_.default(%0, %1)" in graph(True)
    assert graph(True) != graph(False)


def inner(op: object, *, constant: float | None = None) -> fx.GraphModule:
    build = Build()
    x = build.input()
    args = [x] if constant is None else [x, build.get(torch.tensor(constant))]
    return build.output(build.call(op, *args))  # type: ignore[arg-type]


def outer(*bodies: fx.GraphModule, names: tuple[str, ...] = ("true", "false")) -> str:
    build = Build()
    x = build.input()
    branches = [build.get(body, name=name) for name, body in zip(names, bodies, strict=True)]
    return write(build.output(build.call(higher.cond, x, *branches, (x,)))).text


@pytest.mark.fast
def test_sub_graphs_count_by_content_and_not_by_name() -> None:
    neg, relu = aten.neg.default, aten.relu.default
    first = outer(inner(neg), inner(relu))
    assert first == outer(inner(neg), inner(relu), names=("body_7", "body_8"))
    assert "%1 = get graph#0 {\n  %0 = input" in first
    others = [
        outer(inner(relu), inner(neg)),
        outer(inner(neg), inner(neg)),
        outer(inner(aten.mul.Tensor, constant=1.0), inner(neg)),
        outer(inner(aten.mul.Tensor, constant=2.0), inner(neg)),
    ]
    assert len({first, *others}) == 5


@pytest.mark.fast
def test_a_sub_graph_that_is_used_twice_is_written_once() -> None:
    body = inner(aten.neg.default)
    text = outer(body, body)
    assert text.count("aten.neg.default") == 1
    assert "%2 = get graph#0\n" in text


@pytest.mark.fast
def test_a_refusal_inside_a_sub_graph_names_the_inner_node() -> None:
    with pytest.raises(Uncacheable) as refusal:
        outer(inner(higher.triton_kernel_wrapper_mutation), inner(aten.neg.default))
    assert refusal.value.node == "triton_kernel_wrapper_mutation"
    assert refusal.value.to_json()["details"]["node"] == "triton_kernel_wrapper_mutation"


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["call_module", "call_method"])
def test_nodes_that_a_flat_graph_does_not_have_are_refused(kind: str) -> None:
    build = Build()
    x = build.input()
    build.attributes["layer"] = torch.nn.ReLU()
    node = build.graph.create_node(kind, "layer" if kind == "call_module" else "relu", (x,))
    with pytest.raises(Uncacheable, match=kind):
        write(build.output(node))


@pytest.mark.fast
def test_inputs_that_cannot_be_described_are_refused() -> None:
    build = Build()
    del build.input().meta["val"]
    with pytest.raises(Uncacheable, match="without metadata"):
        write(build.output())
    for value in (torch.Generator(), opaque(torch.Generator())):
        build = Build()
        build.input(value)
        with pytest.raises(Uncacheable, match="Generator"):
            write(build.output())
    build = Build()
    gm = build.output(build.graph.get_attr("missing"))
    with pytest.raises(Uncacheable, match="does not exist"):
        write(gm)


@pytest.mark.fast
def test_an_operator_that_is_not_torchs_counts_with_its_schema() -> None:
    def written(schema: str) -> str:
        with torch_registry._scoped_library("neffcache_test", "DEF") as library:
            library.define(schema)
            build = Build()
            node = build.call(torch.ops.neffcache_test.op.default, build.input(), 1)
            text = write(build.output(node)).text
        return text

    texts = [written("op(Tensor x, int n) -> Tensor"), written("op(Tensor(a!) x, int n) -> Tensor")]
    assert texts[0] != texts[1]
    assert "neffcache_test::op(Tensor x, int n) -> Tensor" in texts[0]


def sized(
    build_sizes: Callable[[Sizes], list[torch.SymInt]],
    expression: Callable[..., object] = lambda *sizes: list(sizes),
    condition: Callable[..., object] = lambda *sizes: True,
) -> str:
    """A graph that takes sizes and passes an expression of them to an operator."""
    sizes = Sizes()
    symbols = build_sizes(sizes)
    torch._check(condition(*symbols))
    build = Build()
    for number, symbol in enumerate(symbols):
        build.input(symbol, name=f"size_{number}")
    x = build.input()
    return write(build.output(build.call(aten.view.default, x, expression(*symbols)))).text


@pytest.mark.fast
def test_symbols_are_renamed_by_place() -> None:
    texts = {
        sized(lambda sizes, a=a, b=b: [sizes.backed(a), sizes.backed(b, hint=9)])  # type: ignore[misc]
        for a, b in ["ab", "ba", "xy", "qr", "mn"]
    }
    assert len(texts) == 1
    (text,) = texts
    assert "symbol S0 int positive 2..int_oo hint 7\nsymbol S1 int positive 2..int_oo hint 9\n" in text
    assert "%0 = input symint(S0)\n%1 = input symint(S1)\n" in text


@pytest.mark.fast
def test_terms_of_an_expression_keep_one_order_under_any_names() -> None:
    texts = {
        sized(
            lambda sizes, a=a, b=b: [sizes.backed(a, 5), sizes.backed(b, 6)],  # type: ignore[misc]
            lambda a, b: [a * 2 + b * 3 + 1, (a * b) // 4, torch.sym_max(a, b)],
        )
        for a, b in ["ab", "ba", "xy", "yx", "qr", "rq", "mn", "nm"]
    }
    assert len(texts) == 1


@pytest.mark.fast
def test_what_is_known_about_symbols_counts() -> None:
    texts = [
        sized(lambda sizes: [sizes.backed("a"), sizes.backed("b")]),
        sized(lambda sizes: [sizes.backed("a", span=(2, 100)), sizes.backed("b")]),
        sized(lambda sizes: [sizes.backed("a", span=(2, 101)), sizes.backed("b")]),
        sized(lambda sizes: [sizes.backed("a"), sizes.backed("b", span=(2, 100))]),
        sized(lambda sizes: [sizes.backed("a", hint=8), sizes.backed("b")]),
        sized(lambda sizes: [sizes.unbacked(), sizes.backed("b")]),
        sized(lambda sizes: [sizes.backed("a"), sizes.backed("b")], lambda a, b: [b, a]),
        sized(lambda sizes: [sizes.backed("a"), sizes.backed("b")], lambda a, b: [a, a]),
        sized(lambda sizes: [sizes.backed("a"), sizes.backed("b")], lambda a, b: [a + b, a]),
        sized(lambda sizes: [sizes.backed("a"), sizes.backed("b")], lambda a, b: [a * b, a]),
        sized(lambda sizes: [sizes.backed("a"), sizes.backed("b")], lambda a, b: [a // 2, b]),
        sized(lambda sizes: [sizes.backed("a"), sizes.backed("b")], lambda a, b: [a % 2, b]),
        sized(lambda sizes: [sizes.backed("a"), sizes.backed("b", 14)], condition=lambda a, b: a * 2 <= b),
        sized(lambda sizes: [sizes.backed("a"), sizes.backed("b", 14)], condition=lambda a, b: a * 2 == b),
    ]
    assert len(set(texts)) == len(texts)


@pytest.mark.fast
def test_what_was_assumed_about_symbols_counts() -> None:
    def assuming(condition: Callable[..., object], *, backed: bool) -> str:
        return sized(
            lambda sizes: (
                [sizes.backed("a"), sizes.backed("b", hint=14)] if backed else [sizes.unbacked() for _ in "ab"]
            ),
            condition=condition,
        )

    for backed in (True, False):
        texts = [
            assuming(condition, backed=backed)
            for condition in (
                lambda a, b: True,
                lambda a, b: a * 2 <= b,
                lambda a, b: a + 1 < b,
                lambda a, b: b % 7 == 0,
            )
        ]
        assert len(set(texts)) == len(texts)
        assert "guard" in texts[1]


@pytest.mark.fast
def test_an_assumption_about_symbols_that_the_graph_does_not_show_does_not_count() -> None:
    def text(condition: Callable[..., object]) -> str:
        sizes = Sizes()
        shown, hidden = sizes.backed("a"), sizes.backed("b", hint=14)
        torch._check(condition(shown, hidden))
        build = Build()
        return write(build.output(build.input(shown, name="size"))).text

    assert text(lambda a, b: True) == text(lambda a, b: a + 1 < b) == text(lambda a, b: b % 7 == 0)
    assert text(lambda a, b: True) != text(lambda a, b: a < 9)


@pytest.mark.fast
def test_symbolic_kinds_are_told_apart() -> None:
    def argument(make: Callable[[torch.SymInt], object]) -> str:
        return sized(lambda sizes: [sizes.backed("a")], lambda a: [make(a)])

    texts = [argument(make) for make in (lambda a: a, lambda a: torch.sym_float(a), lambda a: a > 3, lambda a: a > 4)]
    assert len(set(texts)) == len(texts)


@pytest.mark.fast
def test_symbolic_shapes_and_strides_count() -> None:
    def graph(shape: Callable[[torch.SymInt], list[object]], stride: Callable[[torch.SymInt], list[object]]) -> str:
        sizes = Sizes()
        n = sizes.backed("n")
        build = Build()
        build.input(n, name="n")
        return write(build.output(build.input(sizes.fake(shape(n), stride(n))))).text  # type: ignore[arg-type]

    plain = graph(lambda n: [n, 3], lambda n: [3, 1])
    assert "float32[S0,3]/[3,1]@cpu" in plain
    assert len({plain, graph(lambda n: [3, n], lambda n: [n, 1]), graph(lambda n: [n, 3], lambda n: [1, n])}) == 3


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kinds", "depends"), [("", False), ("backed", False), ("backed unbacked", False), ("unbacked unbacked", True)]
)
def test_a_graph_depends_on_data_when_all_its_symbols_are_unbacked(kinds: str, depends: bool) -> None:
    sizes = Sizes()
    build = Build()
    for number, kind in enumerate(kinds.split()):
        build.input(sizes.unbacked() if kind == "unbacked" else sizes.backed(f"s{number}"), name=f"size{number}")
    assert write(build.output(build.input())).data_dependent == depends


@pytest.mark.fast
def test_symbols_of_two_environments_are_refused() -> None:
    build = Build()
    build.input(Sizes().backed("a"), name="a")
    build.input(Sizes().backed("a"), name="b")
    with pytest.raises(Uncacheable, match="two shape environments"):
        write(build.output())


@pytest.mark.fast
def test_the_first_difference_is_a_line_of_both() -> None:
    assert first_difference("a\nb\n", "a\nb\n") is None
    assert first_difference("a\nb\nc\n", "a\nB\nC\n") == (2, "b", "B")
    assert first_difference("a\n", "a\nb\n") == (2, "", "b")


@pytest.mark.fast
def test_a_private_name_of_torch_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_internals.probe()
    monkeypatch.setattr(torch_internals, "TOUCHED", (("torch._ops", "OpOverload"), ("torch._ops", "Vanished.part")))
    with pytest.raises(Unsupported, match=r"torch\._ops\.Vanished\.part") as refusal:
        torch_internals.probe()
    assert refusal.value.exit_code == 8
    assert refusal.value.details["missing"] == "torch._ops.Vanished.part"


@pytest.mark.fast
@pytest.mark.parametrize("name", torch_internals.SHAPE_ENV_TOUCHED)
def test_a_private_attribute_of_shape_environments_that_is_gone_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_internals, "SHAPE_ENV_TOUCHED", (f"{name}_renamed",))
    with pytest.raises(Unsupported, match=f"{name}_renamed"):
        torch_internals.probe()


CAPTURE = """
import hashlib, json, sys
import torch
from torch._dynamo.backends.common import aot_autograd
from neffcache.graph.text import canonical_text

texts = {}
def compiler(kind):
    def keep(gm, _):
        texts.setdefault(name, []).append(kind + " " + canonical_text(gm).text)
        return gm.forward
    return keep

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.seen.add_(1)
        h = torch.nn.functional.gelu(self.first(x)) * torch.tensor([0.5] * 16)
        return self.second(h).view(x.shape[0] * 2, -1)

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in ("query", "key", "value")})
    def forward(self, x):
        found = {name: head(x) for name, head in self.heads.items()}
        return torch.nn.functional.scaled_dot_product_attention(*found.values(), is_causal=True)

backend = aot_autograd(
    fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), keep_inference_input_mutations=True
)
RUNS = {
    "static": lambda: torch.compile(Model(), backend=backend, dynamic=False)(torch.randn(6, 8)),
    "symbolic": lambda: torch.compile(Model(), backend=backend, dynamic=True)(torch.randn(6, 8)),
    "attention": lambda: torch.compile(Attention(), backend=backend)(torch.randn(2, 6, 8)),
}
for name in sys.argv[1:]:
    torch._dynamo.reset()
    RUNS[name]().sum().backward()
print(json.dumps(texts, sort_keys=True))
"""

ORDERS = list(itertools.permutations(["static", "symbolic", "attention"]))


@pytest.mark.integration
@pytest.mark.parametrize("processes", [len(ORDERS), pytest.param(20, marks=pytest.mark.soak)])
def test_fresh_processes_write_the_same_texts_for_real_graphs_in_any_order(tmp_path: Path, processes: int) -> None:
    """K2: a random hash seed, a working directory and a home of its own for each, graphs traced in every order."""
    root = Path(__file__).parents[2]

    def capture(number: int) -> str:
        folder = tmp_path / str(number) / "somewhere"
        folder.mkdir(parents=True)
        script = folder / f"capture_{number}.py"
        script.write_text(CAPTURE)
        done = subprocess.run(
            [sys.executable, str(script), *ORDERS[number % len(ORDERS)]],
            env=os.environ
            | {"PYTHONHASHSEED": "random", "PYTHONPATH": str(root), "HOME": str(folder), "OMP_NUM_THREADS": "1"},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with ThreadPoolExecutor(2) as pool:
        said = set(pool.map(capture, range(processes)))
    assert len(said) == 1
    texts = json.loads(said.pop())
    assert {name: len(found) for name, found in texts.items()} == {"static": 2, "symbolic": 2, "attention": 2}
    assert sum(text.count("aten.copy_.default(") for text in texts["static"] + texts["symbolic"]) == 2
    assert "symbol S0" in "".join(texts["symbolic"])
    assert all(FORMAT in text for found in texts.values() for text in found)
    assert str(tmp_path) not in str(texts)


@pytest.mark.fast
def test_the_default_resolver_knows_no_group_without_torch_distributed() -> None:
    build = Build()
    pair = build.call(torch.ops.aten.split.Tensor, build.input(), 1, val=(torch.empty(1, 3), torch.empty(1, 3)))
    gm = build.output(build.call(operator.getitem, pair, 0, val=torch.empty(1, 3)))
    assert canonical_text(gm).groups == ()
    with pytest.raises(LookupError):
        torch_internals.group_ranks("tp")
