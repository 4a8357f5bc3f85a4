"""Grouping of value tokens: online k-means and the permutation it gives (method, section 1, points 1 and 2)."""

import pytest
import torch
from vc_attention import Grouping, InvalidArgument, UnsupportedCall, group_values
from vc_attention.group import blocks, reference
from vc_attention.group.api import COLD_ITERATIONS, WARM_ITERATIONS, automatic_clusters
from vc_attention.group.reference import assign, chain, cold_start, group_reference, update
from vc_attention.group.sampling import SAMPLED_FROM, sample_step
from vc_attention.testing import clustered_qkv

# The paper's worked example: four tokens of four channels; t1 and t3 are alike.
FOUR_TOKENS = torch.tensor(
    [[1.2, 1.0, 0.3, 0.1], [-1.5, 1.3, -1.1, -1.6], [0.3, -0.1, -1.1, 1.1], [-1.6, 0.9, -0.7, -1.2]]
)
FOUR = FOUR_TOKENS[None, None]


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kmeans(v: torch.Tensor, centroids: torch.Tensor, iterations: int):
    """Our steps put together on [S, D]: labels and centroids."""
    for _ in range(iterations):
        centroids = update(v, assign(v, centroids), centroids)
    return assign(v, centroids), centroids


def loop_kmeans(v: torch.Tensor, centroids: torch.Tensor, iterations: int):
    """Lloyd's algorithm on [S, D] token by token in float64: labels and centroids."""
    v, centroids = v.double(), centroids.double().clone()

    def nearest(token):
        distances = [(token - centroid).square().sum().item() for centroid in centroids]
        return distances.index(min(distances))

    for _ in range(iterations):
        labels = [nearest(token) for token in v]
        for cluster in range(len(centroids)):
            members = [token for token, label in zip(v, labels, strict=True) if label == cluster]
            if members:
                centroids[cluster] = torch.stack(members).sum(0) / len(members)
    return torch.tensor([nearest(token) for token in v]), centroids


def spread(v: torch.Tensor, centroids: torch.Tensor) -> float:
    """What k-means minimizes: summed squared distance of tokens to their centroid."""
    return torch.cdist(v.double(), centroids.double()).amin(1).square().sum().item()


# The worked example


def test_worked_example_groups_t1_with_t3():
    grouping = group_values(FOUR, clusters=2)
    order = grouping.permutation[0, 0].tolist()
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 2}), frozenset({1, 3})}
    torch.testing.assert_close(
        grouping.centroids[0, 0].sort(0).values,
        torch.stack([FOUR_TOKENS[[1, 3]].mean(0), FOUR_TOKENS[[0, 2]].mean(0)]).sort(0).values,
    )


def test_worked_example_gives_the_papers_order_from_the_papers_start():
    permutation, _ = group_reference(FOUR, FOUR_TOKENS[:2][None, None], 2, 4)
    assert permutation.tolist() == [[[0, 2, 1, 3]]]


def test_worked_example_in_blocks_of_two(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 2)
    v = FOUR.half()  # fp16 holds the example's means to 1e-3
    in_sequence = blocks.demean(v)
    assert in_sequence.means[0, 0, 0].tolist() == pytest.approx([-0.15, 1.15, -0.40, -0.75], abs=1e-3)
    grouped = blocks.demean(blocks.permute_tokens(v, torch.tensor([[[0, 2, 1, 3]]])))
    assert grouped.means[0, 0, 1].tolist() == pytest.approx([-1.55, 1.10, -0.90, -1.40], abs=1e-3)
    assert grouped.residual[0, 0, 2].tolist() == pytest.approx([0.05, 0.20, -0.20, -0.20], abs=2e-3)
    assert grouped.residual[0, 0, 2:].abs().max() < 0.202
    assert in_sequence.residual[0, 0, :2].abs().max() > 0.6
    assert torch.equal(grouped.restore()[0, 0], v[0, 0, [0, 2, 1, 3]].float())
    left = blocks.removed_energy(v.float(), torch.tensor([[[0, 2, 1, 3]]]))
    assert left.item() > 2 * blocks.removed_energy(v.float()).item()


# Against the loop


@pytest.mark.parametrize(("tokens", "clusters"), [(1, 1), (2, 2), (7, 1), (40, 3), (40, 40), (65, 8), (130, 17)])
@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_kmeans_is_lloyds_algorithm(tokens, clusters, iterations):
    v = values(tokens, 8, seed=tokens + clusters)
    start = cold_start(v, clusters)
    labels, centroids = kmeans(v, start, iterations)
    expected_labels, expected_centroids = loop_kmeans(v, start, iterations)
    assert torch.equal(labels, expected_labels)
    torch.testing.assert_close(centroids.double(), expected_centroids, rtol=1e-5, atol=1e-5)


def test_permutation_is_the_stable_sort_of_the_labels():
    v = values(2, 3, 150, 8)
    grouping = group_values(v, clusters=9)
    for b in range(2):
        for h in range(3):
            labels = assign(v[b, h], grouping.centroids[b, h]).tolist()
            expected = sorted(range(150), key=lambda token: labels[token])
            assert grouping.permutation[b, h].tolist() == expected


def test_cold_start_takes_tokens_at_equal_spacing():
    v = torch.arange(12.0)[:, None]
    assert cold_start(v, 1).flatten().tolist() == [0]
    assert cold_start(v, 3).flatten().tolist() == [0, 5, 11]
    assert cold_start(v, 12).flatten().tolist() == list(range(12))
    assert cold_start(v[:5], 2).flatten().tolist() == [0, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_are_compared_with_centroids_rounded_to_their_dtype(dtype):
    v = values(100, 8).to(dtype)
    centroids = values(7, 8, seed=1)
    expected, _ = loop_kmeans(v.float(), centroids.to(dtype).float(), 0)
    assert torch.equal(assign(v, centroids), expected)


def test_chain_starts_with_the_longest_and_goes_on_to_the_nearest_left():
    centroids = values(20, 4)
    order = chain(centroids, torch.float32).tolist()
    assert sorted(order) == list(range(20))
    assert order[0] == max(range(20), key=lambda cluster: centroids[cluster].norm().item())
    for place in range(1, 19):
        here = centroids[order[place - 1]]
        distances = {cluster: (centroids[cluster] - here).norm().item() for cluster in order[place:]}
        assert distances[order[place]] == min(distances.values())


def test_chain_of_equal_centroids_keeps_their_order():
    assert chain(torch.ones(5, 3), torch.float32).tolist() == [0, 1, 2, 3, 4]
    assert chain(torch.ones(1, 3), torch.float32).tolist() == [0]


def test_neighbouring_clusters_are_alike_after_a_cold_start_and_stay_in_place_after_a_warm_one():
    v = clustered_qkv((4, 16, 16), head_dim=16)[2]
    cold = group_values(v, clusters=16)
    assert chain(cold.centroids[0, 0], v.dtype).tolist() == list(range(16))
    warm = group_values(v, cold, iterations=0)
    assert torch.equal(warm.centroids, cold.centroids)
    assert torch.equal(warm.permutation, cold.permutation)


def test_long_sequences_update_from_a_sample_and_assign_all_tokens():
    assert sample_step(SAMPLED_FROM - 1) == 1
    step = sample_step(SAMPLED_FROM)
    assert step > 1
    v = values(1, 1, SAMPLED_FROM, 4)
    expected = group_values(v, clusters=2)
    other = v.clone()
    other[0, 0, 1] = expected.centroids[0, 0, 1] * 5  # no sampled token, no start
    other[0, 0, 2] = expected.centroids[0, 0, 0] * 5
    got = group_values(other, clusters=2)
    assert torch.equal(got.centroids, expected.centroids)
    assert sorted(got.permutation[0, 0].tolist()) == list(range(SAMPLED_FROM))
    labels = assign(other[0, 0], got.centroids[0, 0])
    assert torch.equal(got.permutation[0, 0].long(), labels.argsort(stable=True))


def test_equally_near_centroids_give_the_first():
    centroids = torch.tensor([[4.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    assert assign(torch.tensor([[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [9.0, 0.0]]), centroids).tolist() == [1, 1, 2, 0]


def test_a_common_offset_a_thousand_times_the_spread_changes_no_label():
    # |v|^2 - 2 v.c + |c|^2 would lose all digits here; half steps keep the moved values exact in float32.
    v = (values(300, 16) * 64).round() / 64
    start = cold_start(v, 12)
    assert torch.equal(assign(v + 1024, start + 1024), assign(v, start))


def test_chunks_of_tokens_change_nothing_but_rounding(monkeypatch):
    v = values(500, 8)
    whole = kmeans(v, cold_start(v, 6), 3)
    monkeypatch.setattr(reference, "TOKENS_PER_PASS", 77)
    chunked = kmeans(v, cold_start(v, 6), 3)
    assert torch.equal(whole[0], chunked[0])
    torch.testing.assert_close(whole[1], chunked[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_iterations_never_widen_the_spread(seed):
    v = clustered_qkv((4, 8, 8), head_dim=16, seed=seed)[2][0, 0]
    centroids = cold_start(v, 10)
    before = spread(v, centroids)
    for _ in range(6):
        centroids = update(v, assign(v, centroids), centroids)
        after = spread(v, centroids)
        assert after <= before * (1 + 1e-6)
        before = after


# Every cluster count, odd inputs


@pytest.mark.parametrize("tokens", [1, 2, 31, 128, 129])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_permutation_is_a_permutation_for_any_cluster_count(tokens, share, dtype):
    clusters = max(1, round(share * tokens))
    grouping = group_values(values(2, 2, tokens, 8).to(dtype), clusters=clusters)
    assert grouping.permutation.dtype == torch.int32
    assert grouping.centroids.dtype == torch.float32
    assert grouping.permutation.shape == (2, 2, tokens)
    assert grouping.centroids.shape == (2, 2, clusters, 8)
    assert (grouping.tokens, grouping.clusters) == (tokens, clusters)
    everything = torch.arange(tokens, dtype=torch.int32).expand(2, 2, tokens)
    assert torch.equal(grouping.permutation.sort(-1).values, everything)


def test_one_cluster_keeps_the_order_and_finds_the_mean():
    v = values(1, 1, 50, 8)
    grouping = group_values(v, clusters=1)
    assert grouping.permutation.flatten().tolist() == list(range(50))
    torch.testing.assert_close(grouping.centroids[0, 0, 0], v[0, 0].mean(0))


def test_as_many_clusters_as_tokens_are_the_tokens():
    v = values(1, 1, 20, 8)
    grouping = group_values(v, clusters=20)
    assert torch.equal(grouping.centroids[0, 0], v[0, 0, grouping.permutation[0, 0].long()])


def test_empty_clusters_keep_their_centroid():
    v = torch.cat([values(10, 4), values(10, 4) + 50])
    far = torch.full((1, 4), -1e4)
    start = torch.cat([v[:1], far, v[10:11]])
    labels, centroids = kmeans(v, start, 3)
    assert set(labels.tolist()) == {0, 2}
    assert torch.equal(centroids[1:2], far)


@pytest.mark.parametrize("clusters", [1, 5, 64])
@pytest.mark.parametrize("constant", [0.0, 3.25, 60000.0])
def test_equal_tokens_keep_their_order(clusters, constant):
    grouping = group_values(torch.full((1, 2, 64, 8), constant), clusters=clusters)
    assert grouping.permutation[0, 1].tolist() == list(range(64))
    assert torch.equal(grouping.centroids, torch.full((1, 2, clusters, 8), constant))


@pytest.mark.parametrize("clusters", [1, 3, 6, 50])
def test_equal_tokens_share_a_cluster(clusters):
    v = (values(6, 8) * 10).repeat(20, 1)
    labels = assign(v, group_values(v[None, None], clusters=clusters).centroids[0, 0])
    assert torch.equal(labels, labels[:6].repeat(20))


def test_runs_of_equal_tokens_are_found():
    kinds = (torch.arange(120) * 49 % 120) // 20  # mixed so that the six places of the cold start are of six kinds
    v = (values(6, 8) * 10)[kinds]
    order = group_values(v[None, None], clusters=6).permutation[0, 0].long()
    changes = (kinds[order][1:] != kinds[order][:-1]).sum().item()
    assert changes == 5


def test_fp16_near_its_largest_number():
    v = (torch.rand(1, 1, 200, 8, generator=torch.Generator().manual_seed(0)) * 131008 - 65504).half()
    grouping = group_values(v, clusters=7)
    assert grouping.centroids.isfinite().all()
    assert sorted(grouping.permutation[0, 0].tolist()) == list(range(200))
    labels, _ = loop_kmeans(v[0, 0].float(), grouping.centroids[0, 0].half().float(), 0)
    assert torch.equal(grouping.permutation[0, 0].long(), labels.argsort(stable=True))


# Warm start


def test_warm_start_continues_from_the_previous_centroids():
    v = values(2, 2, 200, 8)
    first = group_values(v, clusters=10, iterations=2)
    continued = group_values(v, first, iterations=3)
    for b in range(2):
        for h in range(2):
            labels, centroids = loop_kmeans(v[b, h], first.centroids[b, h], 3)
            assert torch.equal(continued.permutation[b, h].long(), labels.argsort(stable=True))
            torch.testing.assert_close(continued.centroids[b, h].double(), centroids, rtol=1e-5, atol=1e-5)


def test_default_iterations_are_fewer_when_warm():
    v = values(1, 1, 200, 8)
    cold = group_values(v, clusters=10)
    assert torch.equal(cold.centroids, group_values(v, clusters=10, iterations=COLD_ITERATIONS).centroids)
    warm = group_values(v, cold)
    assert torch.equal(warm.centroids, group_values(v, cold, iterations=WARM_ITERATIONS).centroids)
    assert WARM_ITERATIONS < COLD_ITERATIONS


def test_warm_start_on_drifted_values_is_as_good_as_a_cold_one():
    v = clustered_qkv((4, 16, 16), head_dim=32)[2]
    drifted = v + 0.1 * values(*v.shape, seed=9)
    warm = group_values(drifted, group_values(v))
    cold = group_values(drifted)
    removed = [blocks.removed_energy(drifted, one.permutation).item() for one in (warm, cold)]
    assert removed[0] > removed[1] - 0.02


def test_warm_start_after_the_length_changed():
    previous = group_values(values(1, 1, 200, 8), clusters=10)
    grouping = group_values(values(1, 1, 37, 8, seed=1), previous)
    assert sorted(grouping.permutation[0, 0].tolist()) == list(range(37))
    assert grouping.clusters == 10


def test_previous_is_left_alone():
    v = values(1, 1, 50, 8)
    previous = group_values(v, clusters=4)
    kept = previous.permutation.clone(), previous.centroids.clone()
    group_values(v + 1, previous)
    group_values(v, previous, iterations=0)
    assert torch.equal(previous.permutation, kept[0])
    assert torch.equal(previous.centroids, kept[1])


def test_no_iterations_return_centroids_of_their_own():
    v = values(1, 1, 50, 8)
    previous = group_values(v, clusters=4)
    again = group_values(v, previous, iterations=0)
    assert torch.equal(again.centroids, previous.centroids)
    assert again.centroids.data_ptr() != previous.centroids.data_ptr()


# Same input, same result


def test_two_runs_are_equal_bit_for_bit():
    v = values(2, 2, 700, 16)
    one, two = group_values(v), group_values(v.clone())
    assert torch.equal(one.permutation, two.permutation)
    assert torch.equal(one.centroids, two.centroids)


def test_batch_rows_and_heads_do_not_see_each_other():
    v = values(2, 3, 300, 16)
    v[1] = v[1] * 100 + 30
    together = group_values(v, clusters=11)
    for b in range(2):
        for h in range(3):
            alone = group_values(v[b : b + 1, h : h + 1], clusters=11)
            assert torch.equal(alone.permutation[0, 0], together.permutation[b, h])
            assert torch.equal(alone.centroids[0, 0], together.centroids[b, h])


def test_views_and_layouts_are_equal_bit_for_bit():
    v = values(2, 3, 300, 16)
    expected = group_values(v)
    bshd = v.transpose(1, 2).contiguous()
    padded = torch.full((2, 3, 310, 20), torch.nan)
    padded[:, :, 5:305, 2:18] = v
    for view, layout in (
        (bshd.transpose(1, 2), "BHSD"),
        (bshd, "BSHD"),
        (v.transpose(1, 2), "BSHD"),
        (padded[:, :, 5:305, 2:18], "BHSD"),
    ):
        got = group_values(view, layout=layout)
        assert torch.equal(got.permutation, expected.permutation)
        assert torch.equal(got.centroids, expected.centroids)


def test_autocast_around_the_call_changes_nothing():
    # Distances in bf16 would sort 9 of 10 tokens elsewhere (measured).
    v = clustered_qkv((4, 16, 16), head_dim=64)[2]
    expected = group_values(v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = group_values(v)
    assert torch.equal(got.permutation, expected.permutation)
    assert torch.equal(got.centroids, expected.centroids)


def test_inputs_are_left_alone():
    v = values(1, 1, 50, 8)
    before = v.clone()
    group_values(v)
    assert torch.equal(v, before)


# Worth of it


def test_sorting_removes_several_times_the_energy_of_the_sequence_order():
    v = clustered_qkv((8, 16, 16), heads=2, head_dim=64)[2]
    order = group_values(v).permutation
    # Measured 0.167 and 0.202 against 0.022 and 0.032.
    assert (blocks.removed_energy(v, order) > 4 * blocks.removed_energy(v)).all()


@pytest.mark.parametrize(
    ("tokens", "clusters"), [(1, 1), (127, 1), (128, 1), (256, 2), (8192, 64), (32768, 256), (75600, 256)]
)
def test_automatic_cluster_count(tokens, clusters):
    assert automatic_clusters(tokens) == clusters


def test_selecting_and_joining_batch_rows():
    v = values(3, 2, 60, 8)
    grouping = group_values(v, clusters=4)
    parts = [grouping.select(slice(row, row + 1)) for row in range(3)]
    assert torch.equal(parts[1].permutation, grouping.permutation[1:2])
    joined = Grouping.concat([parts[0], parts[1], parts[2]])
    assert torch.equal(joined.permutation, grouping.permutation)
    assert torch.equal(joined.centroids, grouping.centroids)


# Refusals: each names the argument, what was expected and what came


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clusters": 0}, ("clusters", "1 to S = 50", "0")),
        ({"clusters": 51}, ("clusters", "1 to S = 50", "51")),
        ({"clusters": 2.0}, ("clusters", "integer", "2.0")),
        ({"iterations": -1}, ("iterations", "0 or more", "-1")),
        ({"iterations": "2"}, ("iterations", "integer", "'2'")),
        ({"layout": "SBHD"}, ("layout", "'BHSD', 'BSHD'", "'SBHD'")),
        ({"implementation": "triton9"}, ("implementation", "'reference'", "'triton9'")),
        ({"v": torch.zeros(2, 3, 4)}, ("v", "[B, H, S, D]", "(2, 3, 4)")),
        ({"v": torch.zeros(1, 2, 0, 8)}, ("v", "empty", "(1, 2, 0, 8)")),
        ({"v": torch.zeros(1, 2, 50, 8, dtype=torch.int32)}, ("v", "float16", "int32")),
        ({"v": [1.0]}, ("v", "torch.Tensor", "list")),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    arguments = {"v": torch.zeros(1, 2, 50, 8), **arguments}
    with pytest.raises(InvalidArgument) as raised:
        group_values(arguments.pop("v"), **arguments)
    for word in words:
        assert word in str(raised.value)


def made_grouping(*shape, device="cpu", dtype=torch.float32):
    batch, heads, tokens, clusters, head_dim = shape
    permutation = torch.arange(tokens, dtype=torch.int32, device=device).expand(batch, heads, tokens)
    return Grouping(permutation, torch.zeros(batch, heads, clusters, head_dim, device=device, dtype=dtype))


@pytest.mark.parametrize(
    ("previous", "clusters", "words"),
    [
        (made_grouping(1, 3, 50, 4, 8), None, ("previous", "[1, 2, *, 8]", "[1, 3, 4, 8]")),
        (made_grouping(2, 2, 50, 4, 8), None, ("previous", "[1, 2, *, 8]", "[2, 2, 4, 8]")),
        (made_grouping(1, 2, 50, 4, 16), None, ("previous", "[1, 2, *, 8]", "[1, 2, 4, 16]")),
        (made_grouping(1, 2, 50, 4, 8), 5, ("clusters", "4", "5")),
        (torch.zeros(1, 2, 4, 8), None, ("previous", "Grouping", "Tensor")),
        ("yesterday's", None, ("previous", "Grouping", "str")),
        (made_grouping(1, 2, 50, 0, 8), None, ("previous", "[1, 2, *, 8]", "[1, 2, 0, 8]")),
        (made_grouping(1, 2, 50, 4, 8, dtype=torch.int64), None, ("previous", "floating-point", "int64")),
        (made_grouping(1, 2, 50, 4, 8, device="meta"), None, ("previous", "cpu", "meta")),
    ],
    ids=["heads", "batch", "head_dim", "clusters", "a tensor", "a string", "no clusters", "integers", "another device"],
)
def test_a_previous_grouping_that_does_not_fit_is_named(previous, clusters, words):
    with pytest.raises(InvalidArgument) as raised:
        group_values(torch.zeros(1, 2, 50, 8), previous, clusters=clusters)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_are_refused_by_name(bad):
    v = values(1, 2, 50, 8)
    v[0, 1, 17, 3] = bad
    with pytest.raises(UnsupportedCall) as raised:
        group_values(v)
    assert raised.value.reasons["reference"] == "v holds NaN or infinity"
