"""`lz recommend`: an engine's flags for a model, by measurements."""

from __future__ import annotations

import click
import msgspec

from layerzero.api.tune import tune_blocking
from layerzero.cli.common import output
from layerzero.cli.common.options import SecondsRange, json_option, runtime_of
from layerzero.measure.model_calls import ModelConfig
from layerzero.report.call_maps import FreshSelector, tables_for
from layerzero.report.engine_flags import ENGINES
from layerzero.report.recommend import FlagRecommendation, Load, serving_calls
from layerzero.report.recommend import recommend as recommended
from layerzero.spec.hardware import probe


@click.command()
@click.argument("engine", metavar=f"{{{'|'.join(ENGINES)}}}")
@click.argument("model_config", type=click.Path(exists=True))
@click.option(
    "--device",
    default=None,
    help="cpu, cuda or cuda:<index>; or the name of a table that comes with the package, such as h200.",
)
@click.option("--rows", type=int, default=64, show_default=True, help="Sequences decoded at once.")
@click.option("--context", type=int, default=2048, show_default=True, help="Tokens before them.")
@click.option("--answer", type=int, default=256, show_default=True, help="Tokens of an answer.")
@click.option("--tune-s", type=SecondsRange(min=1), help="Measure the calls first, so many seconds.")
@json_option
def recommend(
    engine: str, model_config: str, device: str | None, rows: int, context: int, answer: int,
    tune_s: float | None, json_: bool,
) -> None:  # fmt: skip
    """Print the flags that ENGINE should serve a model with, each with its reason and what others lose.

    MODEL_CONFIG is a config.json of transformers, or its folder. Times are this machine's measurements and
    those of shipped tables; neither the engine nor its libraries need be installed.
    """
    tables = {name.partition("_")[2]: table for name, table in tables_for(probe("cpu"), every=True)}
    table = tables.get(device or "")
    if table is not None and tune_s is not None:
        raise click.UsageError(f"--tune-s measures a device that is here, --device {device} is a table")
    try:
        with runtime_of(None if table is not None else device, None, False) as runtime:
            model, load = ModelConfig.load(model_config), Load(rows=rows, context=context, answer=answer)
            opened = runtime.device()
            if tune_s is not None:
                calls = [call for _, _, call in serving_calls(model, load)]
                tune_blocking(calls, device=str(opened.device), budget_s=tune_s, missing=True)
            opened.wait_for_costs()
            chooser = (
                FreshSelector.of_table(table, runtime.policy)
                if table is not None
                else FreshSelector(opened.hardware, opened.costs, runtime.policy)
            )
            recommendation = recommended(
                engine, model, chooser, load, tie_band=runtime.settings.tie_band, folder=model_config
            )
    except click.UsageError as error:
        hint = f"; or the name of a table: {', '.join(sorted(tables))}" if "--device" in error.message else ""
        raise click.UsageError(f"{error.message}{hint}") from error
    model_name, device_name = recommendation.model, recommendation.device
    title = f"{engine} for {model_name} on {device_name}: {rows} rows, {context} tokens before them"
    parts = [part for advice in recommendation.flags for part in _parts_of(advice)]
    output.show(json_, msgspec.to_builtins(recommendation), title, *parts, recommendation.command)


def _parts_of(advice: FlagRecommendation) -> list[str | output.Table]:
    line = f"{advice.flag} {advice.value}: {advice.why}"
    rows = [
        (
            option.value,
            " + ".join(f"{us:.2f}" for us in option.us.values()) or "-",
            "-" if option.loss is None else f"{option.loss:+.1%}",
            option.why,
        )
        for option in advice.options
    ]
    columns = ("value", "us a token", "loss", "rests on")
    return [line, output.Table(" and ".join(advice.parts), columns, rows, advice.value)] if rows else [line]
