"""Log-likelihoods against sums by hand: a bigram table stands for the model."""

import numpy as np
import pytest
from inference_helpers import log_softmax, open_run, write_run

from deltares_jax.inference import scorer, scoring

V, LONGEST = 97, 16
TABLE = log_softmax(np.random.default_rng(0).normal(size=(V, V)) * 3)


def by_table(batches):
    """Scores batches by the table; the targets of padding are scored, too, as a model would."""
    for tag, batch in batches:
        logits_BTV = TABLE[batch["inputs"]]
        loss_BT = -np.take_along_axis(logits_BTV, batch["targets"][..., None], axis=-1)[..., 0]
        yield tag, loss_BT, logits_BTV.argmax(-1) == batch["targets"]


def by_hand(context, continuation):
    tokens, greedy, total = [*context, *continuation], True, 0.0
    for at in range(len(context), len(tokens)):
        total += TABLE[tokens[at - 1], tokens[at]]
        greedy &= int(TABLE[tokens[at - 1]].argmax()) == tokens[at]
    return total, greedy


def ids(count, seed):
    return np.random.default_rng(seed).integers(0, V, count).tolist()


def greedy_ids(start, count):
    tokens = [start]
    for _ in range(count):
        tokens.append(int(TABLE[tokens[-1]].argmax()))
    return tokens[1:]


@pytest.mark.parametrize("before", [1, 2, 5])
@pytest.mark.parametrize("after", [0, 1, 2, 5, 15, 16, 17, 40])
def test_sum_is_over_the_continuation_alone(before, after):
    context = ids(before, before)
    requests = [(context, ids(after, 99 + after)), (context, greedy_ids(context[-1], after))]
    scores, counts = scoring.score(by_table, requests, LONGEST, 4)
    for (score, greedy), request in zip(scores, requests, strict=True):
        expected = by_hand(*request)
        assert score == pytest.approx(expected[0], abs=1e-6)
        assert greedy == expected[1]
    assert scores[1][1]
    assert counts.requests == 2
    assert counts.split == (2 if after > LONGEST else 0)
    assert counts.cut == (2 if after <= LONGEST < before + after - 1 else 0)


def test_context_is_cut_at_its_start_and_counted():
    """A row holds the last inputs; a bigram table does not see what is cut."""
    context, continuation = ids(30, 1), ids(4, 2)
    (window,) = scoring.windows(0, context, continuation, LONGEST)
    assert list(window.tokens) == [*context, *continuation][-LONGEST - 1 :]
    scores, counts = scoring.score(by_table, [(context, continuation)], LONGEST, 2)
    assert scores[0][0] == pytest.approx(by_hand(context, continuation)[0], abs=1e-6)
    assert (counts.cut, counts.cut_tokens, counts.split) == (1, 17, 0)


def test_long_texts_are_scored_once_each_token_with_context_where_there_is_any():
    """Rows of 16 inputs: targets 1-16 and 17-32 of their own, 33-40 with eight tokens before."""
    rows = scoring.windows(3, [7], list(range(40)), LONGEST)
    assert [row.scored for row in rows] == [16, 16, 8]
    assert [len(row.tokens) - 1 for row in rows] == [16, 16, 16]
    scored = [token for row in rows for token in row.tokens[-row.scored :]]
    assert scored == list(range(40))
    assert rows[0].tokens[0] == 7


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_order_and_duplicates(batch_size):
    requests = [(ids(1 + n % 7, n), ids(n % 20, n + 50)) for n in range(20)]
    requests += [requests[3], requests[0], requests[3]]
    lengths = []

    def recorded(batches):
        def watched():
            for tag, batch in batches:
                lengths.append(batch["inputs"].shape)
                yield tag, batch

        yield from by_table(watched())

    scores, _ = scoring.score(recorded, requests, LONGEST * 4, batch_size)
    for (score, greedy), request in zip(scores, requests, strict=True):
        expected = by_hand(*request)
        assert (score, greedy) == (pytest.approx(expected[0], abs=1e-6), expected[1])
    assert scores[-1] == scores[-3] == scores[3]
    assert {shape[0] for shape in lengths} == {batch_size}
    assert {shape[1] for shape in lengths} <= {16, 32, 64}


def test_few_lengths():
    assert scoring.lengths(2048, 1) == [16, 32, 64, 128, 256, 512, 1024, 2048]
    assert scoring.lengths(48, 3) == [12, 24, 48]
    assert scoring.lengths(10, 1) == [10]
    assert all(n % 6 == 0 for n in scoring.lengths(600, 6))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from deltares_jax import config as config_lib

    config = config_lib.default()
    config.model.update({"width": 32, "num_layers": 2, "num_heads": 4, "head_dim": 16})
    config.model.update({"mlp_width": 64})
    config.data.seq_len = LONGEST
    return write_run(config, tmp_path_factory.mktemp("scoring") / "run")


def first_after(run, token):
    from deltares_jax import load

    return load(run).logits(np.full((1, 17), token))[0, 0].argmax()


def packed_scores(model, requests):
    """Requests one after another in rows, each in a segment of its own, by one batch."""
    keys = ("inputs", "targets", "positions", "segments")
    batch = {key: np.zeros((len(requests), LONGEST), np.int32) for key in keys}
    places, row, at = [], 0, 0
    for number, (context, continuation) in enumerate(requests, 1):
        tokens = np.array([*context, *continuation])
        size = len(tokens) - 1
        if at + size > LONGEST:
            row, at = row + 1, 0
        values = (tokens[:-1], tokens[1:], np.arange(size), number)
        for key, value in zip(keys, values, strict=True):
            batch[key][row, at : at + size] = value
        places.append((row, slice(at + len(context) - 1, at + size)))
        at += size
    assert row < len(requests) - 5
    ((_, loss_BT, _),) = scorer.Scorer(model)([(None, batch)])
    return [-loss_BT[place].sum(dtype=np.float64) for place in places]


def test_scores_of_a_model_are_its_logits_whatever_the_batch_packing_or_mesh(run):
    from deltares_jax import load

    requests = [(ids(1 + n % 5, n), ids(n % 11, n + 50)) for n in range(20)]
    requests += [(ids(1, 5), ids(16, 6)), requests[7], ([5], [int(first_after(run, 5))])]
    model, expected, likeliest = load(run), [], []
    for context, continuation in requests:
        tokens = np.array([*context, *continuation])
        logits_TV = model.logits(np.pad(tokens, (0, 17 - len(tokens)))[None])[0]
        log_TV = log_softmax(logits_TV)
        at = np.arange(len(context), len(tokens))
        expected.append(log_TV[at - 1, tokens[at]].sum())
        likeliest.append(bool((log_TV[at - 1].argmax(-1) == tokens[at]).all()))
    alone = None
    for mesh, devices, batch_size in (
        ("", 1, 1),
        ("", 1, 4),
        ("", 1, 7),
        ("data=2,fsdp=2,tensor=2", 8, 8),
    ):
        trained = open_run(run, mesh, devices)
        found, _ = scoring.score(
            scorer.Scorer(trained), requests, LONGEST, batch_size, trained.mesh.shape["tensor"]
        )
        scores, greedy = zip(*found, strict=True)
        np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=5e-5)
        alone = alone or (scores, greedy)
        np.testing.assert_allclose(scores, alone[0], rtol=1e-6, atol=1e-5)
        assert greedy == alone[1] == tuple(likeliest)
    packed = packed_scores(open_run(run), requests)
    np.testing.assert_allclose(packed, alone[0], rtol=1e-6, atol=1e-5)
