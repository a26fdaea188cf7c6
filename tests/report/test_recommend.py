"""Flags for engines: by measurements alone, with what every other value loses, and the engine's own else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from layerzero.measure.model_calls import ModelConfig
from layerzero.report.call_maps import FreshSelector
from layerzero.report.recommend import FlagRecommendation, Load, Recommendation, recommend
from layerzero.selection.policy import EMPTY
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.hardware import Hardware, hypothetical_gpu, probe

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = LLAMA | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
FA3, INFER, FA4 = "vllm_flash_attn_3", "flashinfer", "flash_attn_4"


@dataclasses.dataclass
class Records:
    """What calls cost: microseconds by op and backend; what has none is an estimate of a microsecond."""

    us: dict[tuple[str, str], float]
    captured: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, kernel: Any, work: Any, request: Any, hardware: Any) -> tuple[float, str]:
        if "capture" in request.modes:
            self.captured.append(request.op)
        known = self.us.get((request.op, kernel.id.partition(".")[0]))
        return (1.0, "roofline") if known is None else (known, "measured, interpolated")


def advise(
    engine: str,
    us: dict[tuple[str, str], float],
    config: dict[str, Any] = LLAMA,
    hardware: Hardware | None = None,
    **load: int,
) -> Recommendation:
    chooser = FreshSelector(hardware or hypothetical_gpu(90), Records(us), EMPTY)
    return recommend(engine, ModelConfig.of(config), chooser, Load(**load), tie_band=0.03)


def flag(found: Recommendation, name: str) -> FlagRecommendation:
    return next(advice for advice in found.flags if advice.flag == name)


def losses(advice: FlagRecommendation) -> dict[str, float | None]:
    return {o.value: None if o.loss is None else round(o.loss, 3) for o in advice.options}


def test_the_fastest_of_what_was_measured_is_given_with_what_the_others_lose() -> None:
    """Prefill and decode have flags of their own in SGLang, and may differ."""
    found = advise(
        "sglang",
        {("attention", FA3): 120, ("attention", FA4): 100, ("attention", INFER): 150,
         ("paged_attention", FA3): 20, ("paged_attention", FA4): 25},
    )  # fmt: skip
    prefill, decode = found.flags[:2]
    assert (prefill.value, decode.value) == ("fa4", "fa3")
    untimed = dict.fromkeys(("triton", "torch_native", "flex_attention"))
    assert losses(prefill) == {"fa3": 0.2, "flashinfer": 0.5, "fa4": 0.0, **untimed}
    assert losses(decode)["fa4"] == 0.25 and "fa4 +25%" in decode.why
    assert found.command.endswith("--prefill-attention-backend fa4 --decode-attention-backend fa3")


def test_the_plugin_is_given_where_a_kernel_of_ours_is_faster_than_all_of_the_engines() -> None:
    """In SGLang for decode steps alone; one that would run the engine's kernel is nothing to compare."""
    us = {("paged_attention", FA3): 30.0, ("paged_attention", "triton"): 20.0}
    found = advise("sglang", us | {("attention", FA3): 9.0})
    prefill, decode = found.flags[:2]
    assert decode.value == "layerzero" and "installed beside the engine" in decode.why
    assert losses(decode)["fa3"] == 0.5 and "layerzero" not in losses(prefill)
    assert found.command.endswith(" --decode-attention-backend layerzero")
    us["paged_attention", "triton"] = 31.0
    decode = flag(advise("sglang", us), "--decode-attention-backend")
    assert decode.value == "auto" and "fa3 alone" in decode.why and losses(decode)["layerzero"] == 0.0
    us = {("paged_attention", FA3): 64.0, ("paged_attention", "triton"): 16.0, ("attention", FA3): 256.0}
    both = flag(advise("vllm", us), "--attention-backend")
    assert both.value == "CUSTOM" and losses(both) | {"FLASH_ATTN": 0.6, "CUSTOM": 0.0} == losses(both)


def test_one_flag_for_both_parts_is_compared_where_both_were_timed() -> None:
    """vLLM has one flag: FlashInfer, whose decode has no time of its own, is compared over prompts alone."""
    us = {("attention", FA3): 900.0, ("attention", INFER): 300.0}
    us |= {("paged_attention", FA3): 64.0, ("paged_attention", INFER): 128.0}
    found = flag(advise("vllm", us, answer=100), "--attention-backend")
    assert found.options[0].us == {"decode": 1.0, "prefill": 9.0}
    assert found.value == "auto" and "FLASHINFER is faster where it was measured, not everywhere" in found.why
    us["attention", INFER] = 1200.0
    found = flag(advise("vllm", us), "--attention-backend")
    assert found.value == "FLASH_ATTN" and "FLASHINFER +33% in prefill" in found.why


def test_times_that_hold_a_plan_are_told_and_not_compared() -> None:
    """A kernel that no graph may hold was timed with its planning, which engines do once a step."""
    us = {("paged_attention", FA3): 30.0, ("paged_attention", FA4): 40.0, ("paged_attention", INFER): 20.0}
    decode = flag(advise("sglang", us), "--decode-attention-backend")
    planned = next(o for o in decode.options if o.value == "flashinfer")
    assert decode.value == "fa3" and planned.loss is None and "20.0 us with its planning" in planned.why


def test_a_tie_is_the_engines_first_preference() -> None:
    """Within the band the order of the engine's own values decides."""
    for fa4, value in ((98.0, "fa3"), (90.0, "fa4")):
        us = {("attention", FA3): 100.0, ("attention", FA4): fa4}
        assert flag(advise("sglang", us), "--prefill-attention-backend").value == value


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("config", [LLAMA, MIXTRAL, DEEPSEEK], ids=["llama", "mixtral", "deepseek"])
def test_without_measurements_every_flag_is_left_to_the_engine(engine: str, config: dict[str, Any]) -> None:
    """Estimates move nothing; each flag says why, and what would."""
    found = advise(engine, {}, config)
    assert [advice.value for advice in found.flags] == ["auto"] * len(found.flags)
    assert all(advice.why for advice in found.flags)
    assert not any(option.us for advice in found.flags for option in advice.options)
    assert "--" not in found.command.replace("--model-path", "")
    moe = flag(found, "--moe-backend" if engine == "vllm" else "--moe-runner-backend")
    assert ("no experts" in moe.why) == (config is not MIXTRAL)


def test_one_value_alone_is_nothing_to_compare() -> None:
    """What was measured without a rival is told, and changes nothing."""
    prefill = flag(advise("sglang", {("attention", FA3): 9.0}), "--prefill-attention-backend")
    assert prefill.value == "auto" and "fa3 alone" in prefill.why and losses(prefill)["fa3"] == 0.0


def test_values_of_other_generations_are_not_shown() -> None:
    """FlashAttention 3 is not offered where it cannot run, and nothing is off NVIDIA's GPUs."""
    values = {
        sm: {o.value for o in advise("sglang", {}, hardware=hypothetical_gpu(sm)).flags[0].options}
        for sm in (80, 90, 100)
    }
    assert values[80] >= {"fa3", "flashinfer"} and "fa4" not in values[80]
    blackwell = {
        o.value: o.why for o in advise("sglang", {}, hardware=hypothetical_gpu(100)).flags[0].options
    }
    assert "nothing measured of flashinfer.attention.fa2: " in blackwell["flashinfer"]
    assert "SM_TOO_NEW" in blackwell["fa4"]
    assert "fa3" not in values[100] and "fa4" in values[100]
    found = advise("vllm", {}, hardware=probe("cpu"))
    assert "off NVIDIA" in found.flags[0].why and found.flags[0].options == ()


def test_decode_steps_are_priced_as_graphs_and_prompts_are_not() -> None:
    """Engines replay a captured decode step and launch a prompt."""
    records = Records({("attention", FA3): 9.0})
    chooser = FreshSelector(hypothetical_gpu(90), records, EMPTY)
    recommend("vllm", ModelConfig.of(LLAMA), chooser, Load(), tie_band=0.0)
    assert "paged_attention" in records.captured and "attention" not in records.captured


def test_pages_of_eight_bits_are_never_taken_by_themselves() -> None:
    """They change numbers: the flag stays, and the time of our own kernel over them is told."""
    us = {("paged_attention", "triton"): 3.0, ("paged_attention", FA3): 30.0}
    kv = flag(advise("vllm", us), "--kv-cache-dtype")
    assert kv.value == "auto" and "change the numbers" in kv.why
    assert "triton.paged_attention.decode_codes" in kv.options[0].why


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", 0), ("context", 2**20 + 1), ("answer", True), ("rows", 1.5), ("context", "9")],
)
def test_a_load_that_is_none_is_refused(name: str, value: Any) -> None:
    """By its name, with what was given."""
    with pytest.raises(ConfigurationError, match=f"{name} needs a whole number from 1 to 1048576, got"):
        Load(**{name: value})


def test_an_unknown_engine_is_refused() -> None:
    """With those that there are."""
    with pytest.raises(ConfigurationError, match="engine needs one of vllm, sglang, got 'trtllm'"):
        advise("trtllm", {})
