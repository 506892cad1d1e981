"""README and docs: blocks run or say what they need; generated parts agree with the code."""

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import xml.etree.ElementTree as ET

import docs_helpers
import pytest
import yaml
from conftest import ROOT
from docs_helpers import PAGES, Shell, blocks, generate, shell_text
from test_variants import EXPECTED

from deltares_jax import command as command_lib
from deltares_jax import config as config_lib

EVERY_BLOCK = [block for page in PAGES for block in blocks(page)]
RUN = [page for page in PAGES if any(block.runs() for block in blocks(page))]


def commands(block: docs_helpers.Block) -> list[tuple[str, list[str]]]:
    """Modules of the package that a block runs, and their flags."""
    text = shell_text(block).replace("\\\n", " ")
    found = re.findall(r"python -m deltares_jax\.(\S+)((?: [^\n|;&>]*)?)", text)
    return [(module, shlex.split(words, comments=True)) for module, words in found]


def test_every_block_has_a_language_and_known_needs():
    for block in EVERY_BLOCK:
        assert block.language in docs_helpers.LANGUAGES, block.place
        docs_helpers.needed(block)
    assert sum(block.runs() for block in EVERY_BLOCK) > 15


def test_links_lead_somewhere_on_a_code_host():
    """There, pages are read as they are; MkDocs checks the built ones."""
    anchors = {page: docs_helpers.anchors(page) for page in PAGES}
    followed = 0
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.is_file() or (file / "README.md").is_file(), f"{page}: {target}"
            assert not anchor or anchor in anchors[file], f"{page}: {target}"
            followed += 1
    assert followed > 50


@pytest.mark.parametrize("text", ["<!-- needs: tpu, luck -->", "<!-- neds: tpu -->"])
def test_unknown_marks_are_refused(text):
    with pytest.raises(ValueError, match="known"):
        generate.filled(f"words\n\n{text}\n\n```bash\nls\n```\n")


def test_blocks_are_found_with_their_marks(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- needs: tpu -->\n```bash\na\n```\n\n```console\n$ b \\\n  c\nd\n$ e\n```\n"
    )
    monkeypatch.setattr(docs_helpers, "ROOT", tmp_path)
    first, second = blocks(page)
    assert (first.text, first.needs, first.runs()) == ("a\n", "tpu", False)
    assert second.runs()
    assert docs_helpers.pairs(second) == [("b \\\n  c\n", "d\n"), ("e\n", "")]
    page.write_text("```bash\nnever closed\n")
    with pytest.raises(AssertionError):
        blocks(page)


def test_shell_blocks_can_be_parsed():
    for block in EVERY_BLOCK:
        done = subprocess.run(
            ["bash", "-n", "-c", shell_text(block)], capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block.place}: {done.stderr}"


def test_commands_of_all_blocks_have_the_flags_they_are_given():
    """Those of blocks that are not run, too; recipes with their overrides pass all checks."""
    known_keys, seen = config_lib.flatten(config_lib.default()), set()
    for block in EVERY_BLOCK:
        for module, words in commands(block):
            path = ROOT / "deltares_jax" / f"{module.replace('.', '/')}.py"
            assert path.is_file(), f"{block.place}: {module}"
            source = path.read_text()
            flags = {"help", "version", *re.findall(r'DEFINE_\w+\(\s*"(\w+)"', source)}
            flags |= set(re.findall(r"define_(\w+)_flag\(\)", source))
            overrides = {}
            for word in words:
                name, _, value = word.lstrip("-").partition("=")
                if name.startswith("config."):
                    overrides[name.removeprefix("config.")] = value
                elif word.startswith("--"):
                    assert name in flags, f"{block.place}: {word}"
            if block.language == "console" or "edit" in block.needs:
                continue  # shows what is refused, or is not there yet
            assert overrides.keys() <= known_keys.keys(), block.place
            recipe = next((w.partition("=")[2] for w in words if w.startswith("--config=")), "$")
            if "$" not in f"{recipe}{overrides}":
                resolved(recipe, overrides)
                seen.add(recipe)
    assert {"configs/debug.py", "configs/7b_delta_block.py"} <= seen


def test_what_is_said_to_be_printed_is_a_text_of_the_package():
    texts = docs_helpers.messages()
    shown = docs_helpers.printed(ROOT / "docs" / "troubleshooting.md")
    assert len(shown) > 30
    for words in shown:
        pattern = re.escape(words).replace("…", ".*").replace(r"\ ", " ")
        assert any(re.search(pattern, text) for text in texts), words


def resolved(recipe: str, overrides: dict[str, str]) -> None:
    """Checks a recipe with overrides as the commands do."""
    config = runpy.run_path(command_lib.find_recipe("config", recipe))["get_config"]()
    defaults = config_lib.flatten(config)
    for key, value in overrides.items():
        kind = type(defaults[key])
        meant = value if kind is str else yaml.safe_load(value.lower())
        config.update_from_flattened_dict({key: float(meant) if kind is float else meant})
    config_lib.resolve(config)


def test_every_page_can_be_filled():
    for page in PAGES:
        text = generate.filled(page.read_text())
        assert not re.search("(?m)^<!-- (table|diagram|page|needs)", text), page
    launching = generate.filled((ROOT / "docs" / "launching.md").read_text())
    assert "*Needs a Google Cloud project, TPUs:*\n\n```bash\nlaunch/tpu_vm.sh create" in launching
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in PAGES if ROOT / "docs" in page.parents]
    assert all(f" {page}\n" in nav for page in pages)


def test_the_configuration_table_tells_each_key_once():
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", generate.configuration(), re.MULTILINE)
    assert sorted(key for key, _ in rows) == sorted(config_lib.flatten(config_lib.default()))
    told = dict(rows)
    assert told["train.steps"].startswith("`300` | int ≥ 1 | upwards |")
    assert told["model.residual.gate"].startswith("`none` | `none`, `scalar`, `alpha` | no |")
    assert told["optim.b2"].startswith("`0.95` | float ≥ 0, < 1 | no |")
    assert told["data.source"].startswith("`py_stdlib` | str | with `data.allow_change` |")
    assert told["mesh.fsdp"] == "`-1` | int ≥ 1, or -1 | yes | -1: the rest of the devices"
    assert told["checkpoint.every"] == "`100` | int ≥ 0 | yes | 0: only the last step"


@pytest.mark.parametrize("variant", EXPECTED)
def test_diagrams_show_what_each_reader_reads(variant):
    """Against the sources that are written out by hand."""
    svg = ET.fromstring(generate.diagrams.diagram(variant))
    squares = [rect.attrib for rect in svg.findall(".//{*}rect") if "data-reader" in rect.attrib]
    drawn = {(square["data-reader"], square["data-source"]) for square in squares}
    assert drawn == {(reader, name) for reader, row in EXPECTED[variant].items() for name in row}
    # One column for each reader, one row for each source.
    assert len({(square["x"], square["data-reader"]) for square in squares}) == len(
        EXPECTED[variant]
    )
    arrows = [line for line in svg.findall(".//{*}line") if "marker-end" in line.attrib]
    inputs = {"add": 8, "none": 8, "replace": 0}[
        generate.diagrams.variants.VARIANTS[variant].routing
    ]
    assert len(arrows) == 8 + inputs + len(EXPECTED[variant])


@pytest.fixture(scope="session")
def debug_run(tmp_path_factory):
    """The folder `runs` after the first command of the first page."""
    shell = Shell(tmp_path_factory.mktemp("debug"))
    first = next(block for block in blocks(ROOT / "docs" / "index.md") if block.runs())
    assert "--config=configs/debug.py" in first.text
    shell.check(first)
    return shell.folder / "runs"


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_blocks_run(page, debug_run, tmp_path):
    shell = Shell(tmp_path)
    shutil.copytree(debug_run, shell.folder / "runs")
    own = [block for block in blocks(page) if block.runs()]
    harness = [block for block in own if "deltares_jax.lm_eval" in block.text]
    if importlib.util.find_spec("lm_eval") or os.environ.get("CI"):
        harness = []
    for block in own:
        if block not in harness:
            shell.check(block)
    if harness:
        pytest.skip(f"{', '.join(block.place for block in harness)}: lm-eval is not installed")
