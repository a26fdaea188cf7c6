"""The loader, the input generator and the measures, on definitions written here."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import children
from tests.references.definitions import DefinitionError, parse
from tests.references.experts import routing
from tests.references.measures import check_close, errors
from tests.references.ours import CALLS, MEDIUM, SMALL, axes_of, inputs_of, why_not
from tests.references.truths import need_agreement, truths_on

ROOT = Path(__file__).resolve().parents[2]


def doubling(**changes: Any) -> str:
    """A norm's definition as JSON, small, with parts replaced."""
    made: dict[str, Any] = {
        "name": "norm_h8",
        "op_type": "rmsnorm",
        "axes": {
            "batch_size": {"type": "var"},
            "hidden_size": {"type": "const", "value": 8},
            "twice": {"type": "expr", "expression": "2 * hidden_size"},
        },
        "inputs": {
            "hidden_states": {"shape": ["batch_size", "hidden_size"], "dtype": "float32"},
            "weight": {"shape": ["hidden_size"], "dtype": "float32"},
        },
        "outputs": {"output": {"shape": ["batch_size", "hidden_size"], "dtype": "float32"}},
        "reference": "EPS = 1e-3\ndef run(hidden_states, weight):\n"
        "    return hidden_states * (hidden_states.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight\n",
    }
    return json.dumps({**made, **changes})


def test_a_definition_runs_through_our_op() -> None:
    """Constants, expressions, the written epsilon and the outputs come from the file."""
    definition = parse(doubling())
    assert axes_of(definition, SMALL)["twice"] == 16
    inputs = inputs_of(definition, SMALL)
    check_close(CALLS["rmsnorm"](definition, inputs), definition.compiled()(**inputs), ["output"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError"),
        (json.dumps({"name": "x"}), "KeyError: 'axes'"),
        (
            doubling(inputs={"x": {"shape": ["nowhere"], "dtype": "float32"}}),
            "x has a shape over unknown axes",
        ),
        (doubling(axes={"batch_size": {"type": "odd"}}), "const, var or expr, got odd"),
    ],
)
def test_a_broken_definition_is_reported(text: str, message: str) -> None:
    """The error names the file and what is wrong."""
    with pytest.raises(DefinitionError, match=r"bad\.json") as caught:
        parse(text, "bad.json")
    assert message in str(caught.value)


@pytest.mark.parametrize("source", ["def run(:", "x = 1"])
def test_a_reference_that_is_no_function_is_reported(source: str) -> None:
    """It does not compile, or defines no `run`."""
    with pytest.raises(DefinitionError, match="norm_h8: reference"):
        parse(doubling(reference=source)).compiled()


def test_index_inputs_keep_the_constraints() -> None:
    """Offsets end at the number of pages, ids are distinct, last lengths fit the lengths."""
    ports = {
        "kv_indptr": ["len_indptr"],
        "kv_indices": ["num_kv_indices"],
        "kv_last_page_len": ["batch_size"],
    }
    given = doubling(
        op_type="gqa_paged",
        axes={"page_size": {"type": "const", "value": 16},
              **{a: {"type": "var"} for a in ("len_indptr", "num_kv_indices", "batch_size", "num_pages")}},
        inputs={n: {"shape": s, "dtype": "int32"} for n, s in ports.items()},
        outputs={},
    )  # fmt: skip
    made = inputs_of(parse(given), MEDIUM)
    counts = made["kv_indptr"].diff()
    assert made["kv_indptr"][-1] == len(made["kv_indices"]) == len(set(made["kv_indices"].tolist()))
    lengths = (counts - 1) * 16 + made["kv_last_page_len"]
    assert lengths.tolist() == list(MEDIUM.lengths)


def test_what_has_no_op_says_what_was_searched() -> None:
    """Known kinds without an op, unknown kinds, and sizes beyond a CPU run."""
    assert "gated delta net" in why_not(parse(doubling(op_type="gdn")), SMALL)
    assert "unknown kind" in why_not(parse(doubling(op_type="teleport")), SMALL)
    wide = {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": 1 << 30}}
    assert "MiB" in why_not(parse(doubling(axes=wide)), SMALL)
    assert why_not(parse(doubling()), SMALL) == ""


def ports(**dtypes: str) -> dict[str, Any]:
    """Inputs of two axes by name and dtype."""
    return {name: {"shape": ["batch_size", "hidden_size"], "dtype": dtype} for name, dtype in dtypes.items()}


def test_inputs_that_no_call_reads_are_a_reason() -> None:
    """Not dropped: a product would be of codes without scales, a draw of what a filter removes."""
    scaled = ports(A="float8_e4m3fn", B="float8_e4m3fn", A_scale="float32")
    assert "A_scale" in why_not(parse(doubling(op_type="gemm", inputs=scaled)), SMALL)
    codes = ports(A="float8_e4m3fn", B="float8_e4m3fn")
    assert "without scales" in why_not(parse(doubling(op_type="gemm", inputs=codes)), SMALL)
    filtered = ports(probs="float32", min_p="float32")
    assert "min_p" in why_not(parse(doubling(op_type="sampling", inputs=filtered)), SMALL)


def test_other_norms_of_a_family_run_as_their_source_says() -> None:
    """One whose weight is around zero, and one that gives the sum back, too."""
    around = doubling(
        reference="EPS = 1e-6\ndef run(hidden_states, weight):\n    x = hidden_states\n"
        "    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1.0 + weight)\n"
    )
    both = doubling(
        inputs=json.loads(doubling())["inputs"] | ports(residual="float32"),
        outputs=ports(output="float32", residual_out="float32"),
        reference="EPS = 1e-6\ndef run(hidden_states, weight, residual):\n    x = hidden_states + residual\n"
        "    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight, x\n",
    )
    for text in (around, both):
        definition = parse(text)
        inputs = inputs_of(definition, SMALL)
        wanted = definition.compiled()(**inputs)
        check_close(CALLS["rmsnorm"](definition, inputs), wanted, list(definition.outputs))
        truths = {name: truth(definition, inputs) for name, truth in truths_on(torch.device("cpu")).items()}
        need_agreement({name: outs for name, outs in truths.items() if outs}, list(definition.outputs), 1.0)


def test_neighbours_that_turn_together_are_seen() -> None:
    """GPT-J's pairs are no halves."""
    source = (
        "import torch\ndef run(q, k, cos_sin_cache, positions):\n"
        "    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)\n"
        "    def turn(x):\n        a, b = x[..., ::2], x[..., 1::2]\n"
        "        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)\n"
        "    return turn(q), turn(k)\n"
    )
    heads = {"shape": ["num_tokens", "heads", "head"], "dtype": "float32"}
    given = doubling(
        op_type="rope", reference=source, outputs={"q_out": heads, "k_out": heads},
        axes={"num_tokens": {"type": "var"}, "heads": {"type": "var"}, "max_seq_len": {"type": "var"},
              "head": {"type": "const", "value": 8}},
        inputs={"q": heads, "k": heads,
                "cos_sin_cache": {"shape": ["max_seq_len", "head"], "dtype": "float32"},
                "positions": {"shape": ["num_tokens"], "dtype": "int64"}},
    )  # fmt: skip
    definition = parse(given)
    inputs = inputs_of(definition, SMALL)
    check_close(CALLS["rope"](definition, inputs), definition.compiled()(**inputs), ["q_out", "k_out"])


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("divided", [False, True])
def test_routing_without_a_bias_is_that_of_the_source(function: str, divided: bool) -> None:
    """Scores of all experts, divided by the chosen ones' sum where the source divides."""
    scores = "logits.softmax(-1)" if function == "softmax" else "torch.sigmoid(logits)"
    source = f"scores = {scores}\nweights, chosen = scores.topk(2)\n"
    source += "weights = weights / weights.sum(-1, keepdim=True)\n" if divided else ""
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    scope: dict[str, Any] = {"torch": torch, "logits": logits}
    exec(source, scope)
    axes = {"top_k": {"type": "const", "value": 2}, "batch_size": {"type": "var"},
            "hidden_size": {"type": "const", "value": 8}, "twice": {"type": "var"}}  # fmt: skip
    definition = parse(doubling(op_type="moe", axes=axes, reference=source))
    experts, weights = routing(definition, {"routing_logits": logits})
    assert torch.equal(experts.long(), scope["chosen"])
    torch.testing.assert_close(weights, scope["weights"])


def test_measures_find_what_was_planted() -> None:
    """Largest and mean errors, their place, the ratio within tolerance."""
    wanted = torch.ones(4, 25)
    got = wanted.clone()
    got[2, 3], got[1, 0] = 1.5, 0.75
    found = errors(got, wanted, 1e-5, 1e-5)
    assert (found.max_abs, found.max_rel) == (0.5, 0.5)
    assert found.mean_abs == pytest.approx(0.0075) and found.mse == pytest.approx(0.003125)
    assert found.hit_ratio == pytest.approx(0.98) and found.cosine < 1
    assert found.worst == (((2, 3), 1.5, 1.0), ((1, 0), 0.75, 1.0))


def test_of_several_truths_the_odd_one_is_named() -> None:
    """Three that agree hold; one that differs from both others is named, with how far it is apart."""
    one = (torch.ones(2, 2),)
    need_agreement({"a": one, "b": one, "c": one}, ["output"], 1.0)
    with pytest.raises(AssertionError, match=r"b is alone.*a and b: output.*b and c: output"):
        need_agreement({"a": one, "b": (torch.full((2, 2), 1.5),), "c": one}, ["output"], 1.0)
    with pytest.raises(AssertionError, match=r"^a and b: output"):
        need_agreement({"a": one, "b": (torch.zeros(2, 2),)}, ["output"], 1.0)


def test_flashinfer_is_a_truth_on_a_card_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is not asked; on a card it is wherever it is installed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flashinfer")
    assert list(truths_on(torch.device("cpu"))) == ["published", "torch", "float64"]
    assert list(truths_on(torch.device("cuda")))[-1] == "flashinfer"


def test_plain_torch_and_float64_are_truths_of_a_norm() -> None:
    """Both say what the source says, and neither is the source."""
    definition = parse(doubling())
    inputs = inputs_of(definition, SMALL)
    truths = {name: truth(definition, inputs) for name, truth in truths_on(torch.device("cpu")).items()}
    need_agreement({name: outs for name, outs in truths.items() if outs}, ["output"], 1.0)
    assert all(truths.values()) and len(truths) == 3


def test_chosen_tokens_are_pages_of_one() -> None:
    """Attention over the tokens that each query was given, wherever the padding stands."""
    picks = torch.tensor([[5, -1, 0, 3], [-1, -1, -1, 2]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 1, 8), (2, 1, 4), (2, 4, 8), (2, 4, 4))
    q, q_pe, ckv, kpe = (torch.randn(shape, generator=generator) for shape in shapes)
    given = {"q_nope": q, "q_pe": q_pe, "ckv_cache": ckv, "kpe_cache": kpe, "sparse_indices": picks}
    out, lse = CALLS["dsa_sparse"](parse(doubling()), {**given, "sm_scale": 0.5})
    for row in range(2):
        own = picks[row][picks[row] >= 0].long()
        keys, rotary = ckv.flatten(0, 1)[own], kpe.flatten(0, 1)[own]
        scores = (q[row, 0] @ keys.T + q_pe[row, 0] @ rotary.T) * 0.5
        torch.testing.assert_close(out[row, 0], scores.softmax(-1) @ keys)
        torch.testing.assert_close(lse[row, 0], scores.logsumexp(-1) / math.log(2))


CHOICES: list[tuple[tuple[str, ...], str]] = [
    (("--op-type", "rmsnorm", "--all"), "1 passed"),
    (("--definition-name", "norm_*", "--tolerance", "3", "--on", "cpu"), "1 passed"),
    (("--op-type", "gemm"), "--op-type needs what a definition has, got 'gemm'; kinds of ops: rmsnorm"),
    (("--definition-name", "norm_h9"), "--definition-name needs what a definition has, got 'norm_h9'"),
    (("--tolerance", "0"), "ERROR: --tolerance needs a factor above 0, got 0"),
    (("--on", "tpu"), "ERROR: --on needs cpu or cuda, got 'tpu'"),
    (("--on", "cuda"), "ERROR: --on needs a card for cuda, got a machine without one"),
]
# One process collects, for what that imports, and forks for each.
COMMANDS = f"""
import json, os, sys, pytest
os.chdir({str(ROOT)!r})
given, *choices = json.loads(sys.argv[1])
assert pytest.main([*given, "--collect-only"]) == 0
sys.stdout.flush()
for number, words in enumerate(choices):
    child = os.fork()
    if not child:
        os.dup2(os.open(os.path.join(sys.argv[2], str(number)), os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        status = pytest.main([*given, *words])
        sys.stdout.flush()
        os._exit(status)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], str]:
    """What the tests of the definitions print for each of the choices."""
    root = tmp_path_factory.mktemp("choices")
    (folder := root / "definitions" / "rmsnorm").mkdir(parents=True)
    (folder / "norm_h8.json").write_text(doubling())
    given = ["-q", "-p", "no:cacheprovider", "tests/references/test_definitions.py", "-k", "truths"]
    asked = json.dumps([given, *(words for words, _ in CHOICES)])
    variables = os.environ | {"LZ_DEFINITIONS": str(root)}
    ended = children.run(COMMANDS, asked, str(root), folder=root, variables=variables)
    assert ended.returncode == 0, ended.stdout
    return {words: (root / str(number)).read_text() for number, (words, _) in enumerate(CHOICES)}


@pytest.mark.parametrize(("words", "said"), CHOICES)
def test_definitions_are_chosen_on_the_command_line(
    words: tuple[str, ...], said: str, answers: dict[tuple[str, ...], str]
) -> None:
    """Kinds and names choose, a wrong one is an error that names those there are, and nothing is ignored."""
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("asks what happens without a card")
    assert said in answers[words]


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ((torch.ones(2, 3),), "shape"),
        ((torch.ones(2, 2), torch.ones(1)), "2 results, wanted 1"),
        ((torch.tensor([[1.0, 1.0], [1.0, 9.0]]),), r"worst \(1, 1\): 9 for 1"),
        ((torch.full((2, 2), float("nan")),), "0.00%"),
    ],
)
def test_a_divergence_fails(got: tuple[torch.Tensor, ...], message: str) -> None:
    """Another shape, another number of results, a wrong element, NaN: each is an assertion with a report."""
    with pytest.raises(AssertionError, match=message):
        check_close(got, (torch.ones(2, 2),), ["output"])


def test_low_precision_is_held_to_a_ratio() -> None:
    """Nine of ten elements near are enough for eight bits, eight of ten are not."""
    wanted = torch.ones(10).to(torch.float8_e4m3fn)
    got = torch.ones(10)
    got[0] = 4
    check_close((got,), (wanted,), ["output"])
    got[1] = 4
    with pytest.raises(AssertionError, match="needs 85%"):
        check_close((got,), (wanted,), ["output"])


def test_without_the_variable_everything_is_skipped_not_passed(tmp_path: Path) -> None:
    """A run without definitions reports skips; with a planted divergence, a failure."""
    folder = tmp_path / "definitions" / "rmsnorm"
    folder.mkdir(parents=True)
    wrong = doubling(reference="def run(hidden_states, weight):\n    return hidden_states * 2 * weight\n")
    (folder / "norm_h8.json").write_text(wrong)

    def ran(definitions: str) -> str:
        words = ["-q", "-p", "no:cacheprovider", "tests/references/test_definitions.py", "-k", "agree"]
        program = f"import os, pytest; os.chdir({str(ROOT)!r}); raise SystemExit(pytest.main({words}))"
        variables = os.environ | {"LZ_DEFINITIONS": definitions}
        return children.run(program, folder=tmp_path, variables=variables).stdout

    without = ran("")
    assert "skipped" in without and "names no folder of definitions" in without and "passed" not in without
    diverging = ran(str(tmp_path))
    assert "FAILED" in diverging and "worst" in diverging
