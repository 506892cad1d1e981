"""Blocks of the pages: what they say they need, and a shell in which they run at debug size."""

import ast
import dataclasses
import os
import pathlib
import re
import subprocess
import sys

from conftest import ROOT

sys.path.append(str(ROOT / "docs"))
import generate

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "launch/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
LANGUAGES = ("bash", "console", "python", "text")
_BLOCK = re.compile(
    r"^(?:<!-- needs: (?P<needs>.+?) -->\n\n?)?^(?P<indent> *)```(?P<language>.*)\n"
    r"(?P<text>(?:.*\n)*?)^(?P=indent)```$",
    re.MULTILINE,
)
# In place of python, and of the numbers of a run, where they are larger.
_PYTHON = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
if words[:2] == ["-m", "deltares_jax.train"]:
    caps = {{"train.steps": 6, "optim.warmup_steps": 2, "eval.rows": 16}}
    for key, cap in caps.items():
        flag = f"--config.{{key}}="
        given = [word for word in words if word.startswith(flag)]
        numbers = [word.removeprefix(flag) for word in given]
        if all(map(str.isdigit, numbers)):
            words = [word for word in words if word not in given]
            words.append(f"{{flag}}{{min([cap, *map(int, numbers)])}}")
os.execv({sys.executable!r}, [{sys.executable!r}, *words])
"""


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language and text, the words of its `needs`."""

    place: str
    language: str
    text: str
    needs: str

    def runs(self) -> bool:
        return not self.needs and self.language != "text"


def blocks(page: pathlib.Path) -> list[Block]:
    """The blocks of a page; every fence belongs to one."""
    text = page.read_text()
    found = list(_BLOCK.finditer(text))
    assert 2 * len(found) == len(re.findall("^ *```", text, re.MULTILINE)), page
    return [
        Block(
            f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.end())}",
            match["language"],
            match["text"],
            match["needs"] or "",
        )
        for match in found
    ]


def anchors(page: pathlib.Path) -> set[str]:
    """What a link may name of a page: its headings, as code hosts and MkDocs spell them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def pairs(block: Block) -> list[tuple[str, str]]:
    """The commands of a console block, and what is printed after each."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
    found = []
    for part in parts:
        match = re.match(r"(?:.*\\\n)*.*\n", part)
        found.append((match[0], part[match.end() :]))
    return found


def shell_text(block: Block) -> str:
    """What a shell would be given of a block."""
    if block.language == "console":
        return "".join(command for command, _ in pairs(block))
    return block.text if block.language == "bash" else ""


class Shell:
    """Runs blocks in a folder that has what a checkout has, by links.

    Args:
      folder: an empty one, in which runs and results land.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder / "checkout"
        self.folder.mkdir()
        for name in ("configs", "benchmarks", "launch", "tests", "docs"):
            (self.folder / name).symlink_to(ROOT / name)
        small = folder / "bin" / "python"
        small.parent.mkdir()
        small.write_text(_PYTHON)
        small.chmod(0o755)
        self.env = {
            **os.environ,
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        }
        own = str(pathlib.Path(sys.executable).parent)
        self.env["PATH"] = f"{small.parent}:{own}:{os.environ['PATH']}"

    def run(self, words: list[str]) -> tuple[int, str]:
        """The exit code, and all that was printed."""
        done = subprocess.run(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.env,
            cwd=self.folder,
            timeout=900,
        )
        return done.returncode, done.stdout

    def check(self, block: Block) -> None:
        """Runs a block; one that shows what is printed must be right about it."""
        if block.language == "console":
            for command, shown in pairs(block):
                code, printed = self.run(["bash", "-c", command])
                assert code == 2 * shown.startswith("error: "), f"{block.place}: {printed}"
                pattern = re.escape(shown.strip()).replace("…", "(?:.|\n)*?")
                assert re.search(pattern, printed), f"{block.place}: {command}{printed}"
            return
        text = block.text
        words = ["python", "-c", text] if block.language == "python" else ["bash", "-euc", text]
        code, printed = self.run(words)
        assert code == 0, f"{block.place}: {text}{printed}"


def messages() -> list[str]:
    """The texts of the package, with … for what is put into them."""
    found = []
    for path in (ROOT / "deltares_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
    return found


def printed(page: pathlib.Path) -> list[str]:
    """What the tables of a page whose first column is `printed` say is printed."""
    tables = re.findall(r"^\| printed \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text(), re.M)
    cells = [line.split(" | ")[0] for table in tables for line in table.splitlines()]
    return [words for cell in cells for words in re.findall("`([^`]+)`", cell)]


def needed(block: Block) -> None:
    """Refuses unknown words in what a block needs."""
    if block.needs:
        generate.needs(block.needs)
