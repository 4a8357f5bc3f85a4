"""The two places where a sampling run passes by: its start and end, and each evaluation of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..kernels import Schedule
from .override import TOKEN_ATTRIBUTE
from .position import Forward, schedule_of
from .record import RECORD, entry_of
from .report import report
from .run_state import FORWARD_KEY, RUN_KEY, RunState
from .settings import Settings
from .status import LiveStatus

log = logging.getLogger("VC Attention")


def make_run_wrapper(token: str, settings: Settings, node_id: str | None) -> Callable:
    """An OUTER_SAMPLE wrapper: a run's state lives from here to here, also when the render is stopped or fails."""

    def vc_attention_run(executor, *args, **kwargs):
        guider = executor.class_obj
        original = guider.model_options
        run = _begin_run(token, settings, guider, args, kwargs)
        run.live = LiveStatus(node_id)
        guider.model_options = _with(original, RUN_KEY, run)
        completed = False
        try:
            output = executor(*args, **kwargs)
            completed = True
            return output
        finally:
            guider.model_options = original
            run.free()
            _report(run, _replaced_by(original, token), completed, node_id)

    return vc_attention_run


def _begin_run(token: str, settings: Settings, guider, args: tuple, kwargs: dict) -> RunState:
    """A run's state; switched off from the start in a sampler whose noise levels cannot be read."""
    try:
        sigmas = kwargs["sigmas"] if "sigmas" in kwargs else args[3]
        return RunState(token, settings, schedule_of(guider, sigmas))
    except Exception as error:  # noqa: BLE001 - logged by switch_off
        run = RunState(token, settings, Schedule([]))
        run.switch_off(error)
        return run


def forward_wrapper(executor, x, t, *args, **kwargs):
    """An APPLY_MODEL wrapper: tells the attention calls inside one forward from those of the next."""
    if "transformer_options" in kwargs:
        kwargs["transformer_options"] = _in_new_forward(kwargs["transformer_options"], t)
    elif len(args) > _OPTIONS:
        args = (*args[:_OPTIONS], _in_new_forward(args[_OPTIONS], t), *args[_OPTIONS + 1 :])
    return executor(x, t, *args, **kwargs)


_OPTIONS = 3  # apply_model(x, t, c_concat, c_crossattn, control, transformer_options, ...), counted after t


def _in_new_forward(transformer_options: dict, t) -> dict:
    run = transformer_options.get(RUN_KEY)
    if run is None:
        return transformer_options
    sigma = transformer_options.get("sigmas")
    forward = _begin_forward(run, t if sigma is None else sigma)
    _try_to_say(run.live.tick, run)
    return {**transformer_options, FORWARD_KEY: forward}


def _begin_forward(run: RunState, sigma) -> Forward | None:
    """None where the noise level cannot be read: the model runs on without us."""
    try:
        return run.begin_forward(sigma)
    except Exception as error:  # noqa: BLE001 - logged by switch_off
        run.switch_off(error)
        return None


def _with(model_options: dict, key: str, value) -> dict:
    """A copy with one more transformer option, so that the guider's own options stay as they are."""
    options = {**model_options.get("transformer_options", {}), key: value}
    return {**model_options, "transformer_options": options}


def _replaced_by(model_options: dict, token: str) -> str | None:
    """The module of an override that a later node put in the place of ours."""
    override = model_options.get("transformer_options", {}).get("optimized_attention_override")
    if getattr(override, TOKEN_ATTRIBUTE, None) == token:
        return None
    return str(getattr(override, "__module__", None) or type(override).__name__).rsplit("/", 1)[-1]


def _report(run: RunState, replaced_by: str | None, completed: bool, node_id: str | None) -> None:
    """A render is never lost to its report, and no row goes on saying that it runs."""
    try:
        lines = report(run, replaced_by, completed, node_id)
        RECORD.keep_run(run.live.prompt, entry_of(run, node_id, completed, lines))
        run.live.finish(run, completed, lines)
    except Exception:
        log.exception("VC Attention could not report on this render")
        _try_to_say(run.live.finish_unreported, run, completed)


def _try_to_say(say: Callable, *args) -> None:
    try:
        say(*args)
    except Exception:
        log.debug("the node's status could not be sent", exc_info=True)
