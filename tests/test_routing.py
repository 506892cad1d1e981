"""The routing command: what it writes for every kind of model, and what it refuses."""

import base64
import csv
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from inference_helpers import bare_command, open_run
from routing_helpers import logits_by_reader, small, write_run

from deltares_jax import config as config_lib
from deltares_jax import load
from deltares_jax.analysis import routing_plots
from deltares_jax.data import dataset
from deltares_jax.data.tokens import ByteTokenizer
from deltares_jax.inference import measured
from deltares_jax.models import readings

FIGURES = ["max_weight", "histogram", "cosine", "norms", "by_depth"]
TEXT = "a\n$é"
READERS = ["layers.1.mlp", "layers.0.mlp", "layers.1.attn"]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""


@pytest.fixture(scope="module")
def folder(corpora, tmp_path_factory):
    """Two runs of one shape."""
    root = tmp_path_factory.mktemp("routing")
    write_run(small(corpora / "long", "delta_attnres"), root / "known", known=True)
    write_run(small(corpora / "long", "attnres_cumulative"), root / "cumulative")
    write_run(small(corpora / "long", "baseline"), root / "baseline")
    return root


@pytest.fixture(scope="module")
def report(folder):
    """A report on both, by the command as on a bare machine."""
    flags = [f"--workdir={folder / 'known'}", f"--compare={folder / 'cumulative'}", "--knockout"]
    flags += [f"--text={TEXT}", f"--readers={','.join(READERS)}", f"--out={folder / 'out'}"]
    out = folder / "out"
    ended = bare_command(folder, "routing", *flags)
    assert ended.returncode == 0, ended.stderr
    assert "report.html" in ended.stdout
    assert not [line for line in ended.stderr.splitlines() if "cpu_aot_loader" not in line]
    return out


def test_numbers_of_the_report(report, folder, corpora):
    values = json.loads((report / "routing.json").read_text())
    known, cumulative = values["runs"]
    assert values["text"] == {"set": "text", "rows": 5, "tokens": 80, "seq_len": 16}
    config = small(corpora / "long", "delta_attnres")
    logits = logits_by_reader(config.model)
    for reader in known["readers"][2:]:
        u, S = np.exp(logits[reader["name"]]), len(reader["sources"])
        expected = np.array([u] + [1] * (S - 1)) / (u + S - 1)
        np.testing.assert_allclose(reader["weights"], expected, rtol=1e-5)
    # The same by another way: the last row's tokens count as all others do.
    rows = dataset.open_eval_sets(config)["text"]
    batch = [rows[number] for number in range(5)]
    one_document = [np.all(row["segments"] == row["segments"][0]) for row in batch]
    assert not all(one_document)  # else documents would not matter
    model = load(folder / "cumulative")
    largest = np.zeros(4)
    for row in batch:
        starts = np.flatnonzero(np.diff(row["segments"], prepend=-1))
        for first, last in zip(starts, [*starts[1:], 16], strict=True):
            ids = np.pad(row["inputs"][first:last], (0, 16 - last + first))[None]
            weights = model.routing(ids)
            largest += [w[:, 0, : last - first].max(axis=0).sum() for w in weights.values()]
    found = [reader["max_weight"] for reader in cumulative["readers"]]
    np.testing.assert_allclose(found, largest / 80, rtol=1e-5)
    assert np.sum(cumulative["histogram"]) == 3 * 80  # the first reader has no choice
    assert len(cumulative["knockout"]["sources"]) == len(cumulative["knockout"]["readers"]) == 4


def test_text_of_the_report(report, folder):
    values = json.loads((report / "routing.json").read_text())
    ids = ByteTokenizer().encode(TEXT.encode())[None]
    weights = load(folder / "cumulative").routing(ids)
    found = values["runs"][1]["text"]
    assert found["tokens"] == ["a", "⏎", r"\$", "[195]", "[169]"]
    assert [reader["name"] for reader in found["readers"]] == READERS
    for reader in found["readers"]:
        np.testing.assert_allclose(reader["weights"], weights[reader["name"]][:, 0], atol=1e-5)


def test_csv_has_the_numbers_of_json(report):
    runs = json.loads((report / "routing.json").read_text())["runs"]

    def rows(name):
        with (report / f"{name}.csv").open() as file:
            return list(csv.DictReader(file))

    weights = [float(row["mean_weight"]) for row in rows("weights")]
    assert weights == [w for run in runs for reader in run["readers"] for w in reader["weights"]]
    assert [row["label"] for row in rows("readers")][:2] == ["layer 0 attention", "layer 0 MLP"]
    assert rows("readers")[0]["max_weight"] == ""  # not defined
    differences = [float(row["difference"]) for row in rows("knockout")]
    parts = [run["knockout"][kind] for run in runs for kind in ("sources", "readers")]
    assert differences == [row["difference"] for part in parts for row in part]
    assert len(rows("text")) == sum(
        len(reader["sources"]) * 5 for run in runs for reader in run["text"]["readers"]
    )
    assert len(rows("sources")) == 8
    assert len(rows("cosines")) == sum(len(run["cosines"]) for run in runs)


def test_the_page_stands_alone_and_shows_every_figure(report):
    page = (report / "report.html").read_text()
    names = re.findall(r'<h2 id="(\w+)">', page)
    own = ["weights", "text", "knockout_sources", "knockout_readers"]
    assert sorted(names) == sorted([*FIGURES, *(f"{name}_{n}" for name in own for n in (0, 1))])
    assert sorted(path.stem for path in report.glob("*.png")) == sorted(names)
    sources = re.findall(r'src="([^"]{0,26})', page)
    assert sources == ["data:image/svg+xml;base64,"] * len(names)
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "<script" not in page
    for drawn in re.findall(r'base64,([^"]+)"', page):
        svg = base64.b64decode(drawn).decode()
        assert svg.startswith("<?xml")
        assert not re.search(r'href="(?!#|data:)', svg)


def test_figures_show_the_numbers(report):
    """By the data of their artists."""
    runs = json.loads((report / "routing.json").read_text())["runs"]
    plots = {plot.name: plot.figure for plot in routing_plots.all_plots(runs)}
    image = plots["weights_1"].axes[0].get_images()[0].get_array()
    for row, reader in enumerate(runs[1]["readers"]):
        S = len(reader["sources"])
        np.testing.assert_allclose(image[row, :S], reader["weights"])
        assert image.mask[row, S:].all() or S == 4
    labels = [tick.get_text() for tick in plots["weights_1"].axes[0].get_yticklabels()]
    assert labels == ["layer 0 attention", "layer 0 MLP", "layer 1 attention", "layer 1 MLP"]
    curves = {line.get_label(): line for line in plots["max_weight"].axes[0].lines}
    for run in runs:
        curve = curves[run["title"]]
        np.testing.assert_allclose(curve.get_xdata(), [0, 0.5, 1, 1.5])
        expected = [reader["max_weight"] for reader in run["readers"]]  # None breaks the line
        np.testing.assert_allclose(curve.get_ydata(), np.array(expected, float))
    heights = [patch.get_data().values for patch in plots["histogram"].axes[0].patches]
    np.testing.assert_allclose([h.sum() for h in heights], 100)
    bars = [bar.get_width() for bar in plots["knockout_readers_1"].axes[1].patches]
    np.testing.assert_allclose(bars, [r["difference"] for r in runs[1]["knockout"]["readers"]])
    points = plots["cosine"].axes[0].lines[1]
    np.testing.assert_allclose(points.get_ydata(), [row["mean"] for row in runs[1]["cosines"]])
    tokens = plots["text_1"].axes[0].get_images()[0].get_array()
    np.testing.assert_allclose(tokens, np.transpose(runs[1]["text"]["readers"][0]["weights"]))


@pytest.mark.slow
@pytest.mark.skipif(not (BROWSER or os.environ.get("CI")), reason="no Chromium here")
def test_the_page_opens_in_a_browser(report, tmp_path):
    """A copy counts its pictures, as nothing in the page itself runs."""
    page = (report / "report.html").read_text()
    count = (
        "<script>onload = () => { const shown = [...document.images].filter(i => i.complete && "
        "i.naturalWidth > 50 && i.naturalHeight > 50 && i.getBoundingClientRect().width > 50); "
        "document.body.setAttribute('data-shown', shown.length); }</script></body>"
    )
    copy = tmp_path / "copy.html"
    copy.write_text(page.replace("</body>", count))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000"]
    command = [BROWSER, *flags, copy.as_uri()]
    environment = {**os.environ, "HOME": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert f'data-shown="{page.count("<img ")}"' in ended.stdout
    assert "CONSOLE" not in ended.stderr


ONE = {"layers": 1, "blocks": 1}
EDGES = [
    pytest.param("delta_block", ONE, "float32", marks=pytest.mark.slow, id="one-layer"),
    pytest.param("attnres_block", ONE, "float32", id="one-block"),
    pytest.param("full_additive", ONE, "float32", marks=pytest.mark.slow, id="nothing-but-one"),
    pytest.param("delta_block_released", {"layers": 7, "blocks": 3}, "bfloat16", id="7-3-bf16"),
    pytest.param("delta_replace", {}, "bfloat16", marks=pytest.mark.slow, id="bf16"),
    pytest.param("attnres_full", {}, "float32", marks=pytest.mark.slow, id="no-stream"),
    pytest.param("delta_block", {"null_source": True, "gate": "scalar"}, "float32",
                 marks=pytest.mark.slow, id="null-and-gate"),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "options", "dtype"), EDGES)
def test_every_shape(corpora, tmp_path, in_process, variant, options, dtype):
    config = config_lib.from_dict(small(corpora / "long", variant, **options).to_dict())
    config.model.dtype = dtype
    config = config_lib.resolve(config)
    run = write_run(config, tmp_path / "run")
    flags = [f"--workdir={run}", "--text=ab", "--knockout", "--tokens=20"]
    code, error = in_process("routing", *flags, f"--out={tmp_path / 'out'}")
    assert code == 0, error
    found = json.loads((tmp_path / "out/routing.json").read_text())
    assert found["text"]["tokens"] == 32  # whole rows
    (own,) = found["runs"]
    sources = {r.name: r.sources for r in readings.readers(config.model)}
    assert {r["name"]: r["sources"] for r in own["readers"]} == sources
    for reader in own["readers"]:
        if reader["sources"]:
            np.testing.assert_allclose(sum(reader["weights"]), 1, rtol=1e-5)
    for reader in own["text"]["readers"]:
        assert np.shape(reader["weights"]) == (len(sources[reader["name"]]), 2)
        np.testing.assert_allclose(np.sum(reader["weights"], axis=0), 1, rtol=1e-5)
    assert (own["histogram"] is None) == all(len(names) < 2 for names in sources.values())
    page = (tmp_path / "out/report.html").read_text()
    assert ('id="histogram"' in page) == (own["histogram"] is not None)
    assert page.count('id="weights"') == page.count('id="text"') == 1


def test_a_baseline_has_the_norm_of_its_stream(folder, tmp_path, in_process):
    out = tmp_path / "out"
    flags = [f"--workdir={folder / 'baseline'}", "--knockout", "--text=ab", f"--out={out}"]
    code, error = in_process("routing", *flags)
    assert code == 0, error
    (own,) = json.loads((out / "routing.json").read_text())["runs"]
    assert all(reader["stream_norm"] > 0 for reader in own["readers"])
    assert [path.stem for path in out.glob("*.png")] == ["norms"]
    assert "nothing is routed" in (out / "report.html").read_text()


@pytest.mark.slow
def test_numbers_are_the_same_on_every_mesh(folder):
    """With batches that the devices do not divide."""

    def measure(devices, mesh=""):
        model = open_run(folder / "cumulative", mesh, devices)
        rows = dataset.open_eval_sets(model.config)["text"]
        table = measured.measure(model, rows, 5, model.batch_size(2))
        weights = measured.of_text(model, np.arange(9), ["layers.1.mlp"])["layers.1.mlp"]
        return table, weights

    (alone, alone_ST), (cut, cut_ST) = measure(1), measure(8, "data=2,fsdp=2,tensor=2")
    assert alone["tokens"] == cut["tokens"] == 80
    for key in ("max_weight", "stream_norm", "routed_ratio"):
        values = [[reader[key] for reader in table["readers"]] for table in (alone, cut)]
        np.testing.assert_allclose(values[0], values[1], rtol=1e-5)
    cosines = [[row["mean"] for row in table["cosines"]] for table in (alone, cut)]
    np.testing.assert_allclose(*cosines, atol=1e-5)
    np.testing.assert_allclose(alone_ST, cut_ST, atol=1e-5)
