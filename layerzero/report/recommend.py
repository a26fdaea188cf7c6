"""Which flags vLLM or SGLang should serve a model with on a device, by what kernels were measured to take.

A value of a flag costs what the fastest of the kernels that it runs takes, per generated token and layer: a
decode step's share of each row, and a prompt's share of each token of its answer. Times are measurements of
this machine or of a shipped table, at the size or interpolated; an estimate moves no flag. Values are
compared over the parts of serving in which both were timed. Where there is nothing to compare, and where
another value would change numbers, the engine's `auto` stays. The engine need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from layerzero._util.strict_yaml import quote
from layerzero.measure.calls import Call, Operand, Plain, tensor
from layerzero.measure.model_calls import ModelConfig, model_calls
from layerzero.report.call_maps import FreshSelector
from layerzero.report.engine_flags import ENGINES, FP8_CACHE, Flag, FlagValue
from layerzero.selection.cost.roofline import MEASURED, SHIPPED
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import ConfigurationError, NoKernelFoundError

AUTO = "auto"
PLANNED = "engines do once a step, and no record parts from it"
_BESIDE = "by this package's plugin, installed beside the engine"
_PARTS = {"paged_attention": "decode", "mla_attention": "decode", "attention": "prefill", "moe": "moe"}
_NOT_ASKED = {
    "moe": "the model has no experts",
    "prefill": "prompts of a latent cache are products; no record holds them apart",
    "kv": "pages of a latent cache in eight bits were not measured here",
    "linear": "the flag is for quantized weights, whose products no record here holds; others run on torch's",
}


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic: `rows` sequences decoded at once, `context` tokens before them, `answer` tokens each."""

    rows: int = 64
    context: int = 2048
    answer: int = 256

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**20:
                message = f"{name} needs a whole number from 1 to {2**20}, got {value!r}"
                raise ConfigurationError(message, field=name)


class Option(msgspec.Struct, frozen=True):
    """One value of a flag: microseconds a token and layer by part, and the loss beside the best value.

    A part that was not timed is missing; `loss` is over the parts that the best value has, too, and None
    where there are none. `why` says what the times rest on, and why others are missing.
    """

    value: str
    us: dict[str, float]
    loss: float | None
    why: str


class FlagRecommendation(msgspec.Struct, frozen=True):
    """What to give one flag, and what every value of it costs."""

    flag: str
    parts: tuple[str, ...]
    value: str
    why: str
    options: tuple[Option, ...]


class Recommendation(msgspec.Struct, frozen=True):
    """An engine's flags for a model on a device."""

    engine: str
    model: str
    device: str
    load: Load
    command: str
    flags: tuple[FlagRecommendation, ...]


class _Part(msgspec.Struct, frozen=True):
    """A part's call: what of it falls on a token, why kernels do not take it, what was measured of others.

    A kernel that takes it has an empty refusal.
    """

    name: str
    share: float
    refusals: dict[str, str]
    times: dict[str, tuple[float, str]]


def recommend(
    engine: str,
    model: ModelConfig,
    chooser: FreshSelector,
    load: Load,
    *,
    tie_band: float,
    folder: str = "MODEL",
) -> Recommendation:
    """The flags of `engine` for a model on the chooser's hardware; `folder` is part of the command.

    Values whose times are within `tie_band` of the best are equal: the engine's first preference counts.

    Raises: ConfigurationError: the engine is unknown.
    """
    if engine not in ENGINES:
        message = f"engine needs one of {', '.join(ENGINES)}, got {quote(engine)}"
        raise ConfigurationError(message, field="engine")
    parts = [_part(name, share, call, chooser) for name, share, call in serving_calls(model, load)]
    chosen_engine = ENGINES[engine]
    sm, is_latent = chooser.hardware.sm, model.latent > 0
    flags = tuple(
        _advice(flag, chosen_engine.choices_of(flag, is_latent=is_latent), parts, sm, tie_band)
        for flag in chosen_engine.flags
    )
    words = [word for each in flags if each.value != AUTO for word in (each.flag, each.value)]
    command = " ".join((chosen_engine.command, folder, *words))
    return Recommendation(engine, model.name, chooser.hardware.name, load, command, flags)


def serving_calls(model: ModelConfig, load: Load) -> Iterator[tuple[str, float, Call]]:
    """The calls of a layer that flags decide, each with its part and its share of a generated token."""
    for each in model_calls(model, (load.rows, load.rows), (load.context, load.context)):
        part = _PARTS.get(each.op)
        if part == "prefill":
            yield part, 1 / load.answer, each
        elif part is not None:
            yield part, 1 / load.rows, each
            if each.op == "paged_attention":
                yield "kv", 1 / load.rows, _coded(each)


def _coded(decode: Call) -> Call:
    """The same step over pages of eight bits."""
    pools: dict[str, Operand | Plain] = {
        name: msgspec.structs.replace(value, dtype=FP8_CACHE)
        for name, value in decode.args.items()
        if isinstance(value, Operand) and name in ("k_cache", "v_cache")
    }
    one = tensor(dtype="float32", fill="constant", bound=1)
    return Call(decode.op, decode.args | pools | {"k_scale": one, "v_scale": one})


def _part(name: str, share: float, call: Call, chooser: FreshSelector) -> _Part:
    request = call.request(chooser.hardware)
    refusals, measured = _refusals(request, chooser), _measured(request, chooser)
    if name != "prefill" and chooser.hardware.sm is not None:  # engines replay graphs of decode steps
        request = request.replace(modes=request.modes | {"capture"})
        for kernel, why in _refusals(request, chooser).items():
            if why and not refusals[kernel] and kernel in measured:
                us, source = measured[kernel]
                refusals[kernel] = f"{kernel} takes {us:.1f} us with its planning ({source}), which {PLANNED}"
        measured = _measured(request, chooser)
    times = {kernel: price for kernel, price in measured.items() if not refusals[kernel]}
    return _Part(name, share, refusals, times)


def _refusals(request: CallSpec, chooser: FreshSelector) -> dict[str, str]:
    """Each kernel's first reason not to take a call, empty where it takes it."""
    try:
        trace = chooser.choose(request).trace
    except NoKernelFoundError as error:
        trace = error.trace
    return {one.kernel: f"{one.kernel}: {one.rejected[0]}" if one.rejected else "" for one in trace}


def _measured(request: CallSpec, chooser: FreshSelector) -> dict[str, tuple[float, str]]:
    """The kernels whose microseconds for a call rest on measurements, with their source."""
    prices = chooser.prices(request).items()
    return {kernel: price for kernel, price in prices if price[1].startswith((MEASURED, SHIPPED))}


def _advice(
    flag: Flag, values: Sequence[FlagValue], parts: Sequence[_Part], sm: int | None, tie: float
) -> FlagRecommendation:
    flag_parts = [part for part in parts if part.name in flag.parts]
    if not flag_parts:
        return FlagRecommendation(flag.name, flag.parts, AUTO, _NOT_ASKED[flag.parts[0]], ())
    choices = [value for value in values if sm is not None and value.sm[0] <= sm <= value.sm[1]]
    options = [_option(choice, flag_parts) for choice in choices]
    whole = [option for option in options if len(option.us) == len(flag_parts)]
    best = min(whole, key=lambda option: sum(option.us.values()), default=None)
    compared = tuple(msgspec.structs.replace(option, loss=_loss(option, best)) for option in options)
    plugins = {choice.value for choice in choices if choice.plugin}
    value, why = _decided(flag, compared, len(flag_parts), sm, tie, plugins)
    return FlagRecommendation(flag.name, flag.parts, value, why, compared)


def _option(choice: FlagValue, parts: Sequence[_Part]) -> Option:
    """One value's microseconds a token in each part, of the fastest kernel that it runs there."""
    us_by_part: dict[str, float] = {}
    grounds = []
    for part in parts:
        timed = [(us, kernel, source) for kernel, (us, source) in part.times.items() if choice.runs(kernel)]
        if timed:
            us, kernel, source = min(timed)
            us_by_part[part.name] = us * part.share
            grounds.append(f"{part.name} {us:.1f} us by {kernel} ({source})")
        else:
            grounds.append(f"{part.name}: {_why_untimed(choice, part)}")
    if choice.plugin:
        grounds.append(_BESIDE)
    return Option(choice.value, us_by_part, None, "; ".join(dict.fromkeys(grounds)))


def _loss(option: Option, best: Option | None) -> float | None:
    """What a value takes more than the best one in the parts that both have, as a share of it."""
    common = option.us.keys() & best.us.keys() if best is not None else ()
    if best is None or not common:
        return None
    return sum(option.us[part] for part in common) / sum(best.us[part] for part in common) - 1


def _why_untimed(choice: FlagValue, part: _Part) -> str:
    verdicts = {kernel: why for kernel, why in sorted(part.refusals.items()) if choice.runs(kernel)}
    unmeasured = [kernel for kernel, why in verdicts.items() if not why]
    if unmeasured:
        return f"nothing measured of {' or '.join(unmeasured)}: --tune-s on the machine"
    if verdicts:
        return next(iter(verdicts.values()))
    like = [(us, kernel, source) for kernel, (us, source) in part.times.items() if choice.resembles(kernel)]
    if like:
        us, kernel, source = min(like)
        return f"the engine's kernel is its own; ours, {kernel}, takes {us:.1f} us ({source})"
    return "the engine's kernel is its own, and nothing like it was measured here"


def _decided(
    flag: Flag, options: Sequence[Option], parts: int, sm: int | None, tie: float, plugins: set[str]
) -> tuple[str, str]:
    """The value of a flag and why: the engine's first preference among those that lose no more than a tie.

    A plugin takes the engine's own kernels, too: it is nothing to compare them with.
    """
    if flag.parts == ("kv",):
        return AUTO, "eight bits change the numbers that keys and values hold: judge answers, then set it"
    if sm is None:
        return AUTO, "off NVIDIA's GPUs the engine's kernels are its own, and are not measured here"
    timed = [option for option in options if option.loss is not None]
    whole = [option for option in timed if len(option.us) == parts and (option.loss or 0) <= tie]
    if not whole:
        return AUTO, "no value's kernels were measured here: --tune-s on the machine does that"
    first_choice, *_ = whole
    rivals = [option for option in timed if option is not first_choice]
    losses = ", ".join(f"{o.value} {o.loss:+.0%} in {' and '.join(o.us)}" for o in rivals)
    faster = [option.value for option in rivals if (option.loss or 0) < -tie]
    if first_choice.value not in plugins and all(rival.value in plugins for rival in rivals):
        rivals = []
    if not rivals:
        return AUTO, f"{first_choice.value} alone was measured here: nothing to compare"
    if faster:
        return AUTO, f"{' and '.join(faster)} is faster where it was measured, not everywhere: {losses}"
    return first_choice.value, f"{first_choice.why}; beside it {losses}"
