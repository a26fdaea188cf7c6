"""`lz explain` and `lz which` say what a call would run on, and why nothing would."""

import json
import re
from pathlib import Path

import pytest
import torch

import layerzero
from layerzero.cli.explain import nearest_refusal
from layerzero.selection.record import Candidate
from layerzero.spec.reasons import Reason, Rejected
from tests.cli.command import Lz

GQA = (
    "attention",
    "q=1x32x2048x128:bf16",
    "k=1x8x2048x128:bf16",
    "v=1x8x2048x128:bf16",
    "is_causal=true",
    "--device",
    "cpu",
)
EXAMPLES: dict[str, tuple[str, ...]] = {
    "add_layer_norm": ("--shape", "4x8"),
    "add_rms_norm": ("--shape", "4x8"),
    "alibi": ("slopes=8", "q_len=4", "k_len=16"),
    "append_kv": ("k=4x2x8", "v=4x2x8", "k_cache=8x16x2x8", "v_cache=8x16x2x8", "slot_mapping=4:i64"),
    "attention": ("--shape", "1x2x4x8"),
    "cross_entropy": ("logits=4x8", "target=4:i64"),
    "dequantize": ("codes=4x8:i8", "scale=4x1", "dtype=bfloat16"),
    "embedding": ("ids=4:i64", "weight=100x8"),
    "fused_experts": ("x=4x8", "experts=4x2:i32", "scores=4x2", "w_up=3x32x8", "w_down=3x8x16"),
    "layer_norm": ("--shape", "4x8"),
    "linear": ("x=4x8", "weight=16x8"),
    "linear_cross_entropy": ("x=4x8", "weight=100x8", "target=4:i64"),
    "mlp": ("x=4x8", "w_up=32x8", "w_down=8x16"),
    "moe": ("x=4x8", "router_logits=4x3", "w_up=3x32x8", "w_down=3x8x16"),
    "quantize": ("x=4x8:bf16", "format=fp8_e4m3"),
    "quantized_linear": ("x=4x8", "weight=16x8:i8", "scale=16x1"),
    "rms_norm": ("x=4x8", "weight=8"),
    "rms_norm_linear": ("x=4x8", "norm_weight=8", "weight=16x8"),
    "rope_append_kv": (
        "q=4x4x8",
        "k=4x2x8",
        "v=4x2x8",
        "positions=4:i64",
        "cos=128x4",
        "sin=128x4",
        "k_cache=8x16x2x8",
        "v_cache=8x16x2x8",
        "slot_mapping=4:i64",
    ),
    "rope": ("q=4x2x64", "k=4x2x64", "positions=4:i64", "cos=128x32", "sin=128x32"),
    "sample": ("logits=4x100", "top_k=5"),
    "sample_topk": ("logits=4x100", "k=5"),
    "sample_topp": ("logits=4x100", "p=0.9"),
    "select_experts": ("router_logits=4x8",),
    "verify_chain": ("draft_probs=4x3x100", "draft_tokens=4x3:i64", "target_probs=4x4x100"),
    "verify_tree": (
        "draft_probs=4x3x100",
        "draft_tokens=4x3:i64",
        "target_probs=4x3x100",
        "parents=-1,0,0",
    ),
}
FLOAT8 = ("rms_norm", "--shape", "4x8:f8e4m3", "--device", "cpu")


def test_explain_names_every_kernel_and_the_chosen_one_first(lz: Lz) -> None:
    """A row a kernel, the taken one on top, refusals with reasons; one line for kernels of other devices."""
    result = lz("explain", *GQA)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("attention on cpu, bfloat16, B=1 Hq=32 Hk=8 G=4 Sq=2048 Sk=2048")
    assert lines[0].endswith("asking causal gqa")
    chosen = lines[1].removeprefix("-> ").partition(":")[0]
    rows = [line.split() for line in lines if line.startswith("  ")][1:]
    assert rows[0][0] == chosen and rows[0][2] == "taken"
    shown = {row[0] for row in rows}
    others = set(lines[-1].removeprefix("for other kinds of device: ").split(", "))
    assert shown.isdisjoint(others) and "torch.attention.sdpa_flash" in others
    assert shown | others == {k.id for k in layerzero.list_kernels("attention")}
    assert "PLATFORM_MISMATCH" not in result.stdout
    refused = lz("explain", *GQA, "return_lse=true").stdout.splitlines()
    assert any(" no: " in line for line in refused)  # some CPU takes the plain call by every kernel


def test_the_command_answers_as_the_library_does(lz: Lz) -> None:
    """`lz which`, `lz explain --json` and `layerzero.explain` on real tensors agree."""
    q = torch.empty(1, 4, 64, 32)
    words = ("attention", "--shape", "1x4x64x32", "--device", "cpu")
    with layerzero.start(layerzero.Settings(warm="off", device="cpu"), scoped=True):
        expected = layerzero.explain("attention", q, q, q).selection
    assert lz("which", *words).stdout == expected.kernel + "\n"
    plain = json.loads(lz("explain", *words, "--json").stdout)
    assert plain["kernel"] == expected.kernel
    assert [c["kernel"] for c in plain["candidates"]] == [c.kernel for c in expected.trace]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_op_can_be_asked_about_without_data(name: str, lz: Lz) -> None:
    """A compact example gets an answer from meta tensors alone: index tensors and guards included."""
    result = lz("which", name, *EXAMPLES[name], "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() in {kernel.id for kernel in layerzero.list_kernels(name)}


def test_a_shape_beyond_memory_is_no_problem(lz: Lz) -> None:
    """A terabyte of keys can be asked about, since nothing is allocated."""
    size = "1x64x33554432x256:bf16"
    assert lz("which", "attention", "--shape", size, "--sm", "90").exit_code == 0


def test_imagined_hardware_is_judged_as_if_it_were_here(lz: Lz) -> None:
    """`--sm 90` takes a CUDA kernel on a machine without CUDA."""
    plain = json.loads(lz("explain", "attention", "--shape", "1x4x64x64:bf16", "--sm", "90", "--json").stdout)
    assert plain["request"]["platform"] == "cuda"
    reasons = {c["kernel"]: {r["reason"] for r in c["rejected"]} for c in plain["candidates"]}
    assert reasons[plain["kernel"]] == set()
    assert "PLATFORM_MISMATCH" in reasons["torch.attention.sdpa_cpu"]


def test_an_empty_call_runs_nothing(lz: Lz) -> None:
    """No row means no kernel, and that is no problem."""
    result = lz("explain", "rms_norm", "x=0x8", "--device", "cpu")
    assert result.exit_code == 0
    assert "no kernel: nothing to compute" in result.stdout
    assert lz("which", "rms_norm", "x=0x8").stdout == "nothing to compute: no kernel runs\n"


def test_a_merged_batch_is_asked_about_as_one_call(lz: Lz) -> None:
    """`--batch 16` multiplies the rows of a call that batches by rows."""
    plain = json.loads(lz("explain", "linear", "x=3x8", "weight=4x8", "--batch", "16", "--json").stdout)
    assert plain["request"]["dims"]["N"] == 48


def test_nobody_accepting_shows_all_reasons_and_the_nearest_way(lz: Lz) -> None:
    """Every kernel refuses with its reasons, and one sentence says what would do; exit status 1."""
    result = lz("explain", *FLOAT8)
    assert result.exit_code == 1
    assert "no kernel takes this rms_norm call on cpu (float8_e4m3fn" in result.stdout
    for kernel in layerzero.list_kernels("rms_norm"):
        assert any(
            line.split()[0] == kernel.id and "DTYPE_UNSUPPORTED" in line
            for line in result.stdout.splitlines()
            if line.startswith("  ")
        )
    assert re.search(r"nearest: \S+\.rms_norm\S* would take it with dtype bfloat16 or", result.stdout)


def test_nobody_accepting_in_json(lz: Lz) -> None:
    """The same facts for programs: no kernel, the candidates with reasons, the nearest."""
    for command in ("explain", "which"):
        result = lz(command, *FLOAT8, "--json")
        plain = json.loads(result.stdout)
        assert result.exit_code == 1
        assert plain["kernel"] is None and ".rms_norm" in plain["nearest"]
        assert all(candidate["reasons"] for candidate in plain["candidates"])


def test_the_nearest_needs_every_reason_removed() -> None:
    """A kernel with one reason that the caller cannot remove is no way out, whatever else it says."""
    hardware = Rejected(Reason.SM_TOO_OLD, "sm", ">= 90", "80")
    size = Rejected(Reason.SIZE_UNSUPPORTED, "D", "<= 128", "256", "D <= 128")
    causal = Rejected(Reason.CAUSAL_UNSUPPORTED, "causal", "calls without causal", "causal", "no causal")
    stuck = Candidate("a.op", "a", None, (hardware, size))
    both = Candidate("b.op", "b", None, (size, causal))
    assert nearest_refusal([stuck, both]) == "b.op would take it with D <= 128 and no causal"
    assert nearest_refusal([stuck]) is None


def test_a_policy_file_governs_the_answer(lz: Lz, tmp_path: Path) -> None:
    """`--policy` puts a file in force for this command alone."""
    file = tmp_path / "policy.yaml"
    file.write_text("version: 1\nrules:\n  - deny: torch\n    op: rms_norm\n")
    words = ("which", "rms_norm", "--shape", "4x8", "--device", "cpu")
    assert lz(*words).stdout == "torch.rms_norm.native\n"
    assert lz(*words, "--policy", str(file)).stdout == "reference.rms_norm\n"
    assert lz(*words).stdout == "torch.rms_norm.native\n"


def test_a_backend_that_refuses_is_a_problem_and_one_that_is_unknown_a_mistake(lz: Lz) -> None:
    """`--backend` locks the call: exit status 1 if the lock cannot hold, 2 if there is no such backend."""
    locked = lz("explain", "rms_norm", "x=4x8:f64", "--device", "cpu", "--backend", "zentorch")
    assert locked.exit_code == 1 and "the lock" in locked.stdout
    unknown = lz("explain", "rms_norm", "x=4x8", "--device", "cpu", "--backend", "zentroch")
    assert unknown.exit_code == 2 and "zentorch" in unknown.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("atention",), "; did you mean "),
        (("attention", "q=1x2"), "also needs k and v"),
        (("attention", "--shape", "1x2"), "q needs"),
        (("attention", "q=1x2x4x8", "k=1x2x4x16", "v=1x2x4x16"), "attention takes q: Tensor"),
        (("rms_norm", "x=4x8", "eps=small"), "eps needs"),
        (("rms_norm", "x=4x8", "--device", "tpu:0"), "--device"),
        (("rms_norm", "x=4x8", "--sm", "90", "--device", "cpu"), "leave --device out"),
        (("rms_norm", "x=4x8", "--sm", "90", "--backend", "torch"), "leave --sm out"),
        (("rms_norm", "x=4x8", "--sm", "7"), "--sm"),
        (("rms_norm", "x=4x8", "--batch", "0"), "--batch"),
        (("rms_norm", "x=4x8", "--policy", "/no/such/file.yaml"), "--policy"),
    ],
)
def test_a_wrong_command_line_teaches(words: tuple[str, ...], message: str, lz: Lz) -> None:
    """Exit status 2, and a message that names what is wrong and what there is."""
    for command in ("explain", "which"):
        result = lz(command, *words)
        assert result.exit_code == 2, result.output
        assert message in result.output


def test_asking_for_a_device_that_is_missing_names_the_way_out(lz: Lz) -> None:
    """Without CUDA, `--device cuda` points to `--sm`."""
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    result = lz("which", "rms_norm", "--shape", "4x8", "--device", "cuda")
    assert result.exit_code == 2 and "`--sm 90`" in result.output
