"""When to group: ComfyUI's schedules and samplers replayed on kernels/schedule.py, without torch.

Noise scales are rebuilt from their definitions: flow models by ``shift t / (1 + (shift - 1) t)``, eps models by the
1000-level table of Stable Diffusion (highest level 14.61).
"""

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vc_attention.errors import InvalidArgument
from vc_attention.schedule import GroupingPolicy, Schedule

WAN_SHIFT = 5.0


def flow_sigma(shift: float, t: float) -> float:
    return shift * t / (1 + (shift - 1) * t)


def flow_percent(shift: float):
    """ComfyUI's ModelSamplingDiscreteFlow.percent_to_sigma."""

    def percent_to_sigma(percent: float) -> float:
        if percent <= 0.0:
            return 1.0
        if percent >= 1.0:
            return 0.0
        return flow_sigma(shift, 1.0 - percent)

    return percent_to_sigma


def simple(shift: float, steps: int) -> list[float]:
    """ComfyUI's ``simple`` scheduler on a flow model of 1000 levels."""
    return [flow_sigma(shift, (1000 - int(step * 1000 / steps)) / 1000) for step in range(steps)] + [0.0]


def eps_table() -> list[float]:
    low, high = math.sqrt(0.00085), math.sqrt(0.012)
    product, table = 1.0, []
    for index in range(1000):
        product *= 1 - (low + (high - low) * index / 999) ** 2
        table.append(math.sqrt((1 - product) / product))
    return table


EPS = eps_table()
EPS_MAX = EPS[-1]


def eps_percent(percent: float) -> float:
    """ComfyUI's ModelSamplingDiscrete.percent_to_sigma."""
    if percent <= 0.0:
        return 999999999.9
    if percent >= 1.0:
        return 0.0
    place = (1.0 - percent) * 999
    low = min(int(place), 998)
    share = place - low
    return math.exp((1 - share) * math.log(EPS[low]) + share * math.log(EPS[low + 1]))


def karras(steps: int, low: float = EPS[0], high: float = EPS_MAX, rho: float = 7.0) -> list[float]:
    ends = high ** (1 / rho), low ** (1 / rho)
    ramp = [index / max(steps - 1, 1) for index in range(steps)]
    return [(ends[0] + share * (ends[1] - ends[0])) ** rho for share in ramp] + [0.0]


def float32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def wan(sigmas, shift: float = WAN_SHIFT) -> Schedule:
    return Schedule(sigmas, flow_percent(shift), 1.0)


def window_steps(schedule: Schedule, share: float = 0.25) -> list[int]:
    """Steps of the schedule whose first evaluation lies in the window."""
    return [index for index, sigma in enumerate(schedule.sigmas[:-1]) if schedule.in_first(share, sigma)]


def refreshes(schedule: Schedule, evaluations, policy: GroupingPolicy | None = None) -> list[int]:
    """Steps at which one layer regroups when the model is evaluated at these noise levels, in this order."""
    policy = policy or GroupingPolicy()
    last, made = None, []
    for sigma in evaluations:
        step = schedule.step(sigma)
        if policy.regroup(schedule.in_first(policy.window, sigma), step, last):
            last = step
            made.append(step)
    return made


# Wan2.2: two experts


def test_wan22_first_expert_groups_in_the_first_quarter_of_the_whole_schedule():
    stage = wan(simple(WAN_SHIFT, 20)[:11])
    assert stage.sigmas[-1] == pytest.approx(0.8333, abs=1e-4)
    assert window_steps(stage) == [0, 1, 2, 3, 4]
    assert refreshes(stage, stage.sigmas[:-1]) == [0, 4]


def test_wan22_second_expert_never_groups():
    stage = wan(simple(WAN_SHIFT, 20)[10:])
    assert len(stage.sigmas) == 11
    assert stage.sigmas[-1] == 0.0
    assert window_steps(stage) == []
    assert refreshes(stage, stage.sigmas[:-1]) == []


def test_wan22_threshold_is_strict_where_a_step_meets_it():
    sigmas = simple(WAN_SHIFT, 20)
    assert flow_percent(WAN_SHIFT)(0.25) == 0.9375
    assert sigmas[5] == 0.9375
    stage = wan(sigmas[:11])
    assert not stage.in_first(0.25, sigmas[5])
    assert stage.in_first(0.25, sigmas[4])


@pytest.mark.parametrize("noise", [-3e-7, -6e-8, 6e-8, 3e-7, 1e-6])
def test_float_noise_at_the_threshold_adds_no_step(noise):
    sigmas = [sigma * (1 + noise) for sigma in simple(WAN_SHIFT, 20)[:11]]
    assert window_steps(wan(sigmas)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("share", "steps"), [(0.25, 5), (0.3, 6), (0.5, 10)])
def test_slice_and_whole_agree_on_the_window_of_a_simple_schedule(share, steps):
    sigmas = [float32(sigma) for sigma in simple(WAN_SHIFT, 20)]
    assert window_steps(wan(sigmas), share) == list(range(steps))
    assert window_steps(wan(sigmas[:11]), share) == list(range(min(steps, 10)))


def test_a_late_slice_just_below_the_top_is_a_slice():
    # Shift 8, split after the second of 40 steps: the second expert starts at 0.993 of the model's highest level.
    sigmas = simple(8.0, 40)
    stage = wan(sigmas[2:], 8.0)
    assert sigmas[2] > 0.99
    assert not stage.whole
    assert window_steps(stage) == list(range(8))


# Whole schedules


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(40, [0, 4, 8]), (50, [0, 4, 8, 12]), (20, [0, 4]), (8, [0]), (4, [0]), (1, [0])],
)
@pytest.mark.parametrize("shift", [1.0, 5.0, 8.0, 12.0])
def test_refreshes_of_a_whole_schedule(steps, expected, shift):
    schedule = wan(simple(shift, steps), shift)
    assert schedule.whole
    assert refreshes(schedule, schedule.sigmas[:-1]) == expected


def test_four_step_lora_groups_at_its_first_step_only():
    sigmas = simple(WAN_SHIFT, 4)
    assert sigmas == pytest.approx([1.0, 0.9375, 0.8333, 0.625, 0.0], abs=1e-4)
    assert window_steps(wan(sigmas)) == [0]
    assert window_steps(wan(sigmas[:3])) == [0]
    assert window_steps(wan(sigmas[2:])) == []


@pytest.mark.parametrize(("interval", "expected"), [(1, list(range(10))), (3, [0, 3, 6, 9]), (10, [0]), (50, [0])])
def test_refresh_interval(interval, expected):
    schedule = wan(simple(WAN_SHIFT, 40))
    assert refreshes(schedule, schedule.sigmas[:-1], GroupingPolicy(interval=interval)) == expected


def test_schedule_made_before_the_shift_was_changed_goes_by_steps():
    # HunyuanVideo 1.5 template: sigmas of shift 7, model patched to shift 9 afterwards.
    schedule = wan(simple(7.0, 20), 9.0)
    assert schedule.whole
    assert window_steps(schedule) == [0, 1, 2, 3, 4]


def test_percent_map_is_read_at_each_call():
    shift = [WAN_SHIFT]
    schedule = Schedule(simple(WAN_SHIFT, 20)[:11], lambda percent: flow_percent(shift[0])(percent), 1.0)
    assert schedule.in_first(0.25, 0.94)
    shift[0] = 12.0  # threshold 0.973
    assert not schedule.in_first(0.25, 0.94)


@pytest.mark.parametrize(
    ("sigmas", "percent", "sigma_max", "whole"),
    [
        ([1.0, 0.5, 0.0], True, 1.0, True),
        ([0.9999995, 0.5, 0.0], True, 1.0, True),
        ([0.986, 0.5, 0.0], True, 1.0, False),
        ([1.0, 0.8333], True, 1.0, False),
        ([1.0, 0.5, 0.0], True, None, False),
        ([1.0, 0.5, 0.0], False, None, True),
        ([14.61, 3.0, 0.0], True, EPS_MAX, True),
        ([1.0], True, 1.0, False),
        ([], True, 1.0, False),
    ],
)
def test_whole_or_slice(sigmas, percent, sigma_max, whole):
    assert Schedule(sigmas, flow_percent(WAN_SHIFT) if percent else None, sigma_max).whole is whole


def test_without_a_percent_map_steps_decide():
    schedule = Schedule(simple(WAN_SHIFT, 20)[:11])
    assert window_steps(schedule, 0.3) == [0, 1, 2]


# Samplers


def test_every_level_is_its_own_step():
    schedule = wan([float32(sigma) for sigma in simple(WAN_SHIFT, 50)])
    assert [schedule.step(sigma) for sigma in schedule.sigmas[:-1]] == list(range(50))
    assert schedule.step(schedule.sigmas[-1]) == 49


def test_heun_repeats_each_level_and_regroups_once_per_interval():
    schedule = wan(simple(WAN_SHIFT, 40))
    levels = schedule.sigmas
    evaluations = [sigma for step in range(39) for sigma in (levels[step], levels[step + 1])] + [levels[39]]
    steps = [schedule.step(sigma) for sigma in evaluations]
    assert steps[:7] == [0, 1, 1, 2, 2, 3, 3]
    assert refreshes(schedule, evaluations) == [0, 4, 8]


def test_heunpp2_goes_backwards_and_holds_the_grouping():
    schedule = wan(simple(WAN_SHIFT, 20))
    order = [0, 1, 2, 1, 2, 3, 2, 3, 4]
    evaluations = [schedule.sigmas[index] for index in order]
    assert [schedule.step(sigma) for sigma in evaluations] == order
    assert refreshes(schedule, evaluations) == [0, 4]
    assert refreshes(schedule, evaluations, GroupingPolicy(1.0, 2)) == [0, 2, 4]


def test_backward_step_holds_the_grouping():
    assert not GroupingPolicy(interval=1).regroup(True, 2, 5)


def test_levels_between_two_steps_belong_to_the_earlier():
    # dpm_2, dpmpp_sde, seeds_2 evaluate at geometric means of neighbouring levels.
    schedule = wan(simple(WAN_SHIFT, 20))
    levels = schedule.sigmas
    between = [math.sqrt(levels[step] * levels[step + 1]) for step in range(19)]
    assert [schedule.step(sigma) for sigma in between] == list(range(19))
    evaluations = [sigma for step in range(19) for sigma in (levels[step], between[step])]
    assert refreshes(schedule, evaluations) == [0, 4]


@pytest.mark.parametrize("steps", [5, 20, 40])
def test_adaptive_sampler_that_ignores_the_schedule(steps):
    # dpm_adaptive: 48 evaluations at levels of its own, three to a stride.
    schedule = Schedule(karras(steps), eps_percent, EPS_MAX)
    walk = [EPS_MAX * (EPS[0] / EPS_MAX) ** (index / 15) for index in range(16)]
    evaluations = [sigma * factor for sigma in walk for factor in (1.0, 0.93, 0.87)]
    assert len(evaluations) == 48
    steps_seen = [schedule.step(sigma) for sigma in evaluations]
    assert all(0 <= step < steps for step in steps_seen)
    made = refreshes(schedule, evaluations)
    assert made
    assert made[0] == 0
    assert len(made) <= math.ceil(0.25 * steps / 4)


def test_levels_outside_the_schedule():
    schedule = wan(simple(WAN_SHIFT, 20)[5:11])
    assert schedule.step(1.0) == 0
    assert schedule.step(1e9) == 0
    assert schedule.step(0.5) == 4
    assert schedule.step(0.0) == 4


def test_skipped_evaluations_refresh_at_the_next_seen_step():
    # EasyCache: 10 steps, 4 forwards; `step % 4` would miss steps 5 and 9.
    schedule = wan(simple(WAN_SHIFT, 10))
    forwards = [schedule.sigmas[index] for index in (0, 1, 5, 9)]
    assert refreshes(schedule, forwards, GroupingPolicy(window=1.0)) == [0, 5, 9]


def test_a_prompt_that_appears_late_groups_when_first_seen():
    schedule = wan(simple(WAN_SHIFT, 40))
    assert refreshes(schedule, schedule.sigmas[3:-1]) == [3, 7]
    assert refreshes(schedule, schedule.sigmas[10:-1]) == []


def test_flipped_schedule_stays_in_range():
    # FlipSigmas (unsampling) hands the levels over in ascending order.
    schedule = wan(simple(WAN_SHIFT, 20)[::-1])
    steps = [schedule.step(sigma) for sigma in schedule.sigmas]
    assert all(0 <= step < 20 for step in steps)
    assert not schedule.whole
    assert [schedule.in_first(0.25, sigma) for sigma in schedule.sigmas] == [
        sigma > 0.9376 for sigma in schedule.sigmas
    ]


# denoise < 1, and models with other noise scales


def test_denoise_below_one_keeps_to_the_models_own_scale():
    # denoise 0.6 of 10 steps: the last 10 of int(10 / 0.6) = 16.
    schedule = wan(simple(WAN_SHIFT, 16)[-11:])
    assert schedule.sigmas[0] == pytest.approx(0.8929, abs=1e-3)
    assert not schedule.whole
    assert window_steps(schedule) == []
    assert window_steps(schedule, 0.5) == [0, 1]  # 0.892, 0.865 above percent_to_sigma(0.5) = 0.8333
    assert window_steps(schedule, 1.0) == list(range(10))


def test_eps_model_whole_schedule_goes_by_steps():
    assert pytest.approx(14.61, abs=0.01) == EPS_MAX
    schedule = Schedule(karras(20), eps_percent, EPS_MAX)
    assert schedule.whole
    assert [schedule.step(float32(sigma)) for sigma in schedule.sigmas[:-1]] == list(range(20))
    assert window_steps(schedule) == [0, 1, 2, 3, 4]


def test_eps_model_slice_goes_by_the_noise_scale():
    threshold = eps_percent(0.25)
    assert 4.0 < threshold < 6.0
    sigmas = karras(20)
    early, late = Schedule(sigmas[:11], eps_percent, EPS_MAX), Schedule(sigmas[10:], eps_percent, EPS_MAX)
    assert window_steps(early) == [index for index, sigma in enumerate(sigmas[:10]) if sigma > threshold]
    assert window_steps(early)
    assert window_steps(late) == []


@pytest.mark.parametrize("share", [1e-9, 0.25, 0.999])
def test_eps_percent_map_with_its_huge_start(share):
    # percent_to_sigma(0) is 999999999.9 on eps models.
    schedule = Schedule(karras(20)[:11], eps_percent, EPS_MAX)
    assert schedule.between(0.0, 1.0, EPS_MAX)
    assert schedule.in_first(share, 1e9)


# Window ends, start and end percent


@pytest.mark.parametrize("sigmas", [simple(WAN_SHIFT, 20), simple(WAN_SHIFT, 20)[:11], [1.0, 0.0], [0.7], []])
def test_window_zero_never_and_window_one_always(sigmas):
    schedule = wan(sigmas)
    for sigma in (1e9, 1.0, 0.9375, 0.5, 1e-6, 0.0):
        assert not schedule.in_first(0.0, sigma)
        assert schedule.in_first(1.0, sigma)


def test_window_zero_refreshes_never_and_window_one_over_the_whole_schedule():
    schedule = wan(simple(WAN_SHIFT, 20))
    assert refreshes(schedule, schedule.sigmas[:-1], GroupingPolicy(window=0.0)) == []
    assert refreshes(schedule, schedule.sigmas[:-1], GroupingPolicy(window=1.0)) == [0, 4, 8, 12, 16]


def test_no_schedule_at_all_is_step_zero():
    assert Schedule([]).step(0.5) == 0
    assert Schedule([0.5]).step(0.5) == 0
    assert Schedule([]).in_first(0.25, 0.5)


@pytest.mark.parametrize("sigmas", [simple(WAN_SHIFT, 20), simple(WAN_SHIFT, 20)[:16]])
def test_between_takes_the_start_and_leaves_the_end(sigmas):
    schedule = wan(sigmas)
    inside = [index for index, sigma in enumerate(sigmas[:-1]) if schedule.between(0.2, 0.5, sigma)]
    assert inside == [4, 5, 6, 7, 8, 9]
    assert not any(schedule.between(0.5, 0.5, sigma) for sigma in sigmas)


# The two knobs


def test_defaults_are_the_papers():
    assert GroupingPolicy() == GroupingPolicy(window=0.25, interval=4)


@pytest.mark.parametrize("window", [-0.01, 1.01, math.nan, math.inf, "0.5", None])
def test_window_out_of_range_is_named(window):
    with pytest.raises(InvalidArgument, match=r"window must be between 0 and 1, got"):
        GroupingPolicy(window=window)


@pytest.mark.parametrize("interval", [0, -4, 2.5, math.nan, "4", None])
def test_interval_out_of_range_is_named(interval):
    with pytest.raises(InvalidArgument, match=rf"interval must be a whole number of steps from 1, got {interval!r}"):
        GroupingPolicy(interval=interval)


def test_outside_the_window_nothing_is_grouped_even_without_a_grouping():
    assert not GroupingPolicy().regroup(False, 3, None)
    assert GroupingPolicy().regroup(True, 3, None)


# Properties. Shifts and step counts up to 17 and 100: neighbouring levels differ by 6e-4 of their size or more.

whole_schedules = st.builds(
    lambda shift, steps: wan(simple(shift, steps), shift), st.floats(1.0, 17.0), st.integers(1, 100)
)
shares = st.floats(0.0, 1.0)
levels = st.floats(0.0, 1.2)


@given(whole_schedules, levels, levels)
def test_step_never_falls_as_noise_falls(schedule, one, other):
    high, low = max(one, other), min(one, other)
    assert 0 <= schedule.step(high) <= schedule.step(low) < schedule.steps


@given(whole_schedules, st.floats(-1e-6, 1e-6))
def test_step_withstands_float_noise(schedule, noise):
    steps = [schedule.step(sigma * (1 + noise)) for sigma in schedule.sigmas[:-1]]
    assert steps == list(range(schedule.steps))


@given(whole_schedules, st.integers(0, 99), shares, shares, levels, levels)
def test_window_grows_with_its_share_and_holds_all_noisier_levels(schedule, cut, one, other, sigma, more):
    wide, narrow = max(one, other), min(one, other)
    for part in (schedule, wan(schedule.sigmas[min(cut, schedule.steps) :])):
        if part.in_first(narrow, sigma):
            assert part.in_first(wide, sigma)
            assert part.in_first(narrow, max(sigma, more))


@given(whole_schedules, shares, st.integers(1, 50), st.lists(st.integers(0, 99), max_size=200))
def test_refreshes_have_a_ceiling_in_any_order_of_evaluations(schedule, window, interval, order):
    evaluations = [schedule.sigmas[index % schedule.steps] for index in order]
    made = refreshes(schedule, evaluations, GroupingPolicy(window, interval))
    assert len(made) <= math.ceil(window * schedule.steps / interval)
    assert all(later - earlier >= interval for earlier, later in zip(made, made[1:], strict=False))


@given(whole_schedules, shares, st.integers(1, 50))
def test_refreshes_of_a_full_run_are_every_interval_of_the_window(schedule, window, interval):
    made = refreshes(schedule, schedule.sigmas[:-1], GroupingPolicy(window, interval))
    assert made == list(range(0, math.ceil(window * schedule.steps - 1e-9), interval))


@settings(max_examples=200)
@given(st.floats(1.0, 12.0), st.integers(4, 60), st.data())
def test_cutting_a_schedule_moves_no_step_across_the_window(shift, steps, data):
    # Both experts of a cut schedule decide by the same noise threshold, wherever the cut lies.
    sigmas = simple(shift, steps)
    cut = data.draw(st.integers(1, steps - 1))
    first, second = wan(sigmas[: cut + 1], shift), wan(sigmas[cut:], shift)
    threshold = flow_percent(shift)(0.25)
    grouped = [first.in_first(0.25, sigma) for sigma in sigmas[:cut]]
    grouped += [second.in_first(0.25, sigma) for sigma in sigmas[cut:-1]] if not second.whole else []
    clear = [abs(sigma / threshold - 1) > 2e-4 for sigma in sigmas]
    for index, inside in enumerate(grouped):
        if clear[index]:
            assert inside is (sigmas[index] > threshold)
