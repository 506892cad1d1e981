"""The harness's requests, answered by a bigram table; and the harness itself on own tasks."""

import json
import os

import jax
import numpy as np
import pytest
from harness_helpers import write_tasks
from inference_helpers import bare_command, log_softmax, open_run, two_processes

from deltares_jax import config as config_lib
from deltares_jax.data import tokens

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the hub's library is imported
pytest.importorskip("lm_eval", reason="needs the extra `eval`")

from lm_eval.api.instance import Instance

from deltares_jax.inference import harness, tasks

END, LONGEST = 256, 32


class Bigrams:
    """A model that looks at one token; every token has a likeliest successor."""

    def __init__(self, size):
        self.log = log_softmax(np.random.default_rng(0).normal(size=(size, size)) * 3)
        self.sampled = []

    def __call__(self, batches):
        for tag, batch in batches:
            log_BTV = self.log[batch["inputs"]]
            loss_BT = -np.take_along_axis(log_BTV, batch["targets"][..., None], axis=-1)[..., 0]
            yield tag, loss_BT, log_BTV.argmax(-1) == batch["targets"]

    def generate(self, prompts, max_tokens, sampling, streams, length):
        self.sampled.append((sampling, [len(prompt) for prompt in prompts], max_tokens))
        last = [prompt[-1] for prompt in prompts]
        for _ in range(max_tokens):
            last = self.log[last].argmax(-1)
            yield last

    def sum(self, ids, start):
        return sum(self.log[ids[at - 1], ids[at]] for at in range(start, len(ids)))


def adapter(tokenizer=None, batch_size=4):
    tokenizer = tokenizer or tokens.ByteTokenizer()
    model = Bigrams(tokenizer.vocab_size)
    return model, harness.HarnessModel(tokenizer, model, model.generate, LONGEST, batch_size)


def ask(kind, *arguments):
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


TEXTS = ("", "a", "bc", "defgh")


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_loglikelihoods_are_hand_sums(batch_size):
    model, adapted = adapter(batch_size=batch_size)
    pairs = [(context, continuation) for context in TEXTS for continuation in TEXTS]
    found = adapted.loglikelihood(ask("loglikelihood", *pairs))
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        before = list(context.encode()) or [END]
        ids = [*before, *continuation.encode()]
        assert score == pytest.approx(model.sum(ids, len(before)), abs=1e-6)
        assert greedy == all(
            model.log[ids[at - 1]].argmax() == ids[at] for at in range(len(before), len(ids))
        )


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation():
    model, adapted = adapter()
    requests = ask("loglikelihood", ("ab ", "cd"), (" ", "x"))
    first, second = adapted.loglikelihood(requests)
    assert first[0] == pytest.approx(model.sum(list(b"ab cd"), 2), abs=1e-6)
    assert second[0] == pytest.approx(model.sum([END, *b" x"], 1), abs=1e-6)


def test_continuation_that_merges_with_its_context(bpe):
    """Scored are the tokens of the whole text after as many as the context has."""
    tokenizer = tokens.get_tokenizer(str(bpe))
    model, adapted = adapter(tokenizer)
    encode = adapted.tok_encode
    pairs = [(text[:at], text[at:]) for text in ("import os", "environ") for at in range(1, 7)]
    merged = [pair for pair in pairs if encode("".join(pair)) != encode(pair[0]) + encode(pair[1])]
    assert merged
    for (context, continuation), (score, _) in zip(
        merged, adapted.loglikelihood(ask("loglikelihood", *merged)), strict=True
    ):
        if context.endswith(" "):
            continue
        before = encode(context)
        after = encode(context + continuation)[len(before) :] or encode(continuation)
        assert score == pytest.approx(model.sum(before + after, len(before)), abs=1e-6)
        assert score < 0


def test_rolling_scores_every_token_once():
    model, adapted = adapter()
    texts = ["", "a", "x" * LONGEST, "0123456789" * 8]
    found = adapted.loglikelihood_rolling(ask("loglikelihood_rolling", *((t,) for t in texts)))
    for text, score in zip(texts, found, strict=True):
        assert score == pytest.approx(model.sum([END, *text.encode()], 1), abs=1e-6)
    assert adapted.counts.split == 1


def greedy_text(model, context, count):
    ids = [context.encode()[-1] if context else END]
    for _ in range(count):
        ids.append(int(model.log[ids[-1]].argmax()))
        if ids[-1] == END:
            return tokens.ByteTokenizer().decode(ids[1:-1])
    return tokens.ByteTokenizer().decode(ids[1:])


def test_generation_stops_at_the_first_stop_text_and_comes_in_order():
    model, adapted = adapter(batch_size=2)
    contexts = ["a", "some longer context", "b", "", "cc", "a"]
    whole = [greedy_text(model, context, 12) for context in contexts]
    until = [whole[0][4], "never there"]
    requests = ask("generate_until", *((c, {"until": until, "max_gen_toks": 12}) for c in contexts))
    found = adapted.generate_until(requests)
    assert found == [text.split(until[0])[0] for text in whole]
    assert len(found[0]) < len(whole[0])
    assert all(sampling.temperature == 0 for sampling, _, _ in model.sampled)


def test_generation_options_are_obeyed_or_refused():
    model, adapted = adapter()
    drawn = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_gen_toks": 3}
    adapted.generate_until(ask("generate_until", ("a", drawn), ("b" * 100, {"max_gen_toks": 12})))
    (sampling, _, most), (greedy, lengths, _) = model.sampled
    assert (sampling.temperature, sampling.top_p, most) == (0.5, 0.9, 3)
    assert greedy.temperature == 0
    assert lengths == [LONGEST - 12]  # what does not fit is cut at the start, and counted
    assert (adapted.counts.cut, adapted.counts.cut_tokens) == (1, 100 - 20)
    assert adapted.counts.shortened == 0
    # More than fits at all: half of the row stays for the context, and it is counted.
    adapted.generate_until(ask("generate_until", ("c" * 20, {}), ("d", {"max_gen_toks": LONGEST})))
    assert [(lengths, most) for _, lengths, most in model.sampled[2:]] == [([16, 1], 16)]
    assert adapted.counts.shortened == 2
    assert any("2 of 4 requests may take 16" in x for x in tasks.cut_lines(adapted.counts, LONGEST))
    for options, why in (
        ({"num_beams": 2}, "num_beams is not of do_sample, max_gen_toks"),
        ({"max_gen_toks": "many"}, "invalid literal"),
        ({"do_sample": True, "temperature": -2}, "temperature=-2.0 must be 0, or from"),
    ):
        with pytest.raises(ValueError, match=rf"generation_kwargs=.*: {why}"):
            adapted.generate_until(ask("generate_until", ("a", options)))


@pytest.mark.slow  # the harness reads all its task files
def test_paper_tasks_are_known():
    chosen = tasks.Tasks("paper")
    assert chosen.paper
    assert chosen.chosen == list(tasks.PAPER)


def test_unknown_tasks_are_named(tmp_path, monkeypatch):
    folder = write_tasks(tmp_path)
    assert not tasks.Tasks("own_choice," + str(folder / "own_rolling.yaml"), str(folder)).paper
    real = tasks.TaskManager.__init__

    def few(self, include_path=None, include_defaults=True):
        real(self, include_path=include_path, include_defaults=False)

    monkeypatch.setattr(tasks.TaskManager, "__init__", few)
    with pytest.raises(ValueError, match=r"'own_choise' is neither .* \(did you mean own_choice"):
        tasks.Tasks("own_choise", str(folder))
    with pytest.raises(ValueError, match="--task_path=nowhere: no such folder"):
        tasks.Tasks("paper", "nowhere")


def test_paper_table_has_both_means():
    rows = {name: {"acc,none": 0.5} for name in tasks.PAPER}
    rows["piqa"] = {"acc,none": 0.3, "acc_norm,none": 0.7}
    lines = tasks.paper_lines({"results": rows})
    assert lines[-2].split() == ["mean", "47.5", "52.5"]
    assert "baseline 55.0, attnres_block 54.1, delta_block 55.6" in lines[-1]


@pytest.fixture(scope="module")
def trained(corpora, tmp_path_factory):
    """A model that has learnt `long 12 long 12 …`."""
    from deltares_jax.training import loop

    config = config_lib.default()
    config.model.update({"width": 64, "num_layers": 2, "head_dim": 16, "mlp_width": 128})
    config.data.update({"source": "text", "dir": str(corpora / "long"), "seq_len": LONGEST})
    config.train.update({"steps": 150, "batch_size": 16})
    config.optim.update({"warmup_steps": 10, "learning_rate": 1e-2, "final_learning_rate": 1e-3})
    config.eval.every = 0
    config.metrics.tensorboard = False
    folder = tmp_path_factory.mktemp("trained") / "run"
    loop.train(config_lib.resolve(config), str(folder), devices=jax.devices()[:1])
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workdir=nowhere"], "--tasks is missing; for example --tasks=paper"),
        (["--tasks=paper"], "--workdir is missing"),
        (["--tasks=paper", "--workdir=nowhere"], "--workdir=nowhere: nowhere is no run"),
        (["--tasks=paper", "--limit=0"], "--limit=0 must be"),
        (["--tasks=paper", "--batch_size=0"], "--batch_size=0 must be"),
    ],
)
def test_bad_input_is_one_line(flags, message, in_process):
    code, error = in_process("lm_eval", *flags)
    assert code == 2
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_harness_runs_offline_on_own_tasks(trained, tmp_path):
    folder = write_tasks(tmp_path / "tasks")
    names = "own_choice,own_rolling," + str(folder / "own_generation.yaml")
    flags = [f"--workdir={trained}", f"--tasks={names}", f"--task_path={folder}"]
    done = bare_command(tmp_path, "lm_eval", *flags)
    assert done.returncode == 0, done.stderr
    path = trained / "lm_eval" / "step_150.json"
    written = json.loads(path.read_text())
    results = written["results"]
    assert results["own_choice"]["acc,none"] == 1.0
    assert results["own_generation"]["exact_match,none"] == 1.0
    assert results["own_rolling"]["byte_perplexity,none"] < 3
    assert "|own_choice" in done.stdout
    assert written["deltares_jax"]["requests"]["requests"] == 9 * 3 + 5 + 5
    assert written["n-samples"]["own_rolling"]["effective"] == 5
    # On eight devices, here in this process, and by two processes.
    model = open_run(trained, "data=2,fsdp=2,tensor=2", 8)
    chosen = tasks.Tasks("own_choice,own_rolling,own_generation", str(folder))
    sharded, _ = tasks.run(chosen, model, tokens.ByteTokenizer(), 8, None)
    first, second = two_processes("lm_eval", *flags)
    assert "on 2 cpu (fsdp 2)" in first
    assert "own_choice" not in second
    for other in (sharded, json.loads(path.read_text())):
        for name, row in results.items():
            for metric in ("acc,none", "exact_match,none", "byte_perplexity,none"):
                if metric in row:
                    assert other["results"][name][metric] == pytest.approx(row[metric], rel=1e-5)


@pytest.mark.parametrize("source", ["json", "nobody/nothing"])
def test_data_that_is_not_there_is_one_line(tmp_path, source):
    path = write_tasks(tmp_path) / "own_choice.yaml"
    path.write_text(path.read_text().replace("dataset_path: json", f"dataset_path: {source}"))
    (tmp_path / "own_choice.jsonl").unlink()
    with pytest.raises(ValueError, match=r"own_choice cannot be loaded .*without network"):
        tasks.Tasks("own_choice", str(tmp_path)).load(["own_choice"])
