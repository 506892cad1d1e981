"""Fills the pages with what the code knows, when MkDocs builds them.

A marker is an HTML comment of one line, `<!-- kind: argument -->`:

  table: configuration    every key, from the defaults, their comments and their rules
  table: sizes            the sizes, their parameters and FLOPs
  diagram: VARIANT        drawn from the table of variants
  page: FILE              a page that is kept elsewhere in the repository
  needs: WORD, …          what the block below needs that a test on a CPU has not
"""

import ast
import io
import pathlib
import re
import sys
import tokenize
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import diagrams  # noqa: E402

from deltares_jax import config as config_lib  # noqa: E402
from deltares_jax import config_checks, config_resume  # noqa: E402
from deltares_jax.models import sizes  # noqa: E402

MARKER = re.compile(r"^<!-- (\w+): (.+?) -->$", re.MULTILINE)

# The words of `needs`, and how a page says them.
NEEDS = {
    "checkout": "a checkout of the released code, and a Python with torch and transformers",
    "cloud": "a Google Cloud project",
    "docker": "Docker",
    "edit": "the edit above",
    "gpu": "GPUs",
    "hosts": "several machines",
    "hours": "hours of processor time",
    "install": "an installation by pip or uv",
    "libtpu": "the extra `tpu` and minutes of compilation",
    "minutes": "minutes of processor time",
    "network": "the network",
    "run": "a run of that recipe",
    "tpu": "TPUs",
    "weights": "weights of Qwen3",
}
# What comments in config.py name in the code, and where a page tells of it.
_TOLD = {
    "depth.REMAT_POLICIES": "[memory](scaling.md#memory)",
    "depth.FORMS": "[memory](scaling.md#memory)",
    "attention.IMPLEMENTATIONS": "[memory](scaling.md#memory)",
    "variants.VARIANTS": "[variants](concepts.md#variants)",
    "residual.block_logits": "[memory](scaling.md#memory)",
}
_RESUME = {
    "free": "yes",
    "fixed": "no",
    "upwards": "upwards",
    "data": "with `data.allow_change`",
}


def needs(words: str) -> str:
    """The line above a block that says what it needs; refuses unknown words."""
    given = [word.strip() for word in words.split(",")]
    unknown = sorted(set(given) - NEEDS.keys())
    if unknown:
        raise ValueError(f"needs: {', '.join(unknown)}: known are {', '.join(NEEDS)}")
    return f"*Needs {', '.join(NEEDS[word] for word in given)}:*\n"


def comments() -> dict[str, str]:
    """{dotted key: the comment beside its default in config.py}."""
    source = pathlib.Path(config_lib.__file__).read_text()
    notes = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    functions = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
    found: dict[str, str] = {}

    def collect(node: Any, key: str) -> None:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in functions:  # a section that a function of its own returns
                node = functions[node.func.id].body[-1].value  # type: ignore[attr-defined]
            node = node.args[0]
        if isinstance(node, ast.Dict):
            for name, value in zip(node.keys, node.values, strict=True):
                collect(value, f"{key}.{name.value}")  # type: ignore[union-attr]
        else:
            found[key] = notes.get(node.end_lineno, "")

    for statement in functions["default"].body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
            collect(statement.value, statement.targets[0].attr)
    return found


def _rule(key: str, default: Any) -> str:
    if key in config_checks.CHOICES:
        return ", ".join(
            f"`{choice}`" if choice else "empty" for choice in config_checks.CHOICES[key]
        )
    if key in config_checks.MESH_AXES:
        return "int ≥ 1, or -1"
    kind = type(default).__name__
    low = f" ≥ {config_checks.AT_LEAST[key]:g}" if key in config_checks.AT_LEAST else ""
    low = " > 0" if key in config_checks._ABOVE_ZERO else low
    high = f", ≤ {config_checks.AT_MOST[key]:,}" if key in config_checks.AT_MOST else ""
    high = ", < 1" if key in config_checks._BELOW_ONE else high
    return f"{kind}{low}{high}"


def configuration() -> str:
    """A table for each section of the config: key, default, rule, resume, comment."""
    notes, lines, section = comments(), list[str](), None
    defaults = config_lib.flatten(config_lib.default())
    for key in sorted(defaults, key=[*notes].index):  # the order of config.py
        default = defaults[key]
        first = key.split(".")[0] if "." in key else ""
        if first != section:
            section = first
            heading = f"`{section}.*`" if section else "Where a run starts"
            lines += [
                "",
                f"### {heading}",
                "",
                "| key | default | value | may change on resume | |",
            ]
            lines.append("|---|---|---|---|---|")
        shown = f"`{default}`" if default != "" else "empty"
        resume = _RESUME[config_resume.resume_rule(key)]
        note = re.sub(r"(?<=see )\S+$", lambda m: _TOLD[m[0]], notes[key].replace("|", "\\|"))
        lines.append(f"| `{key}` | {shown} | {_rule(key, default)} | {resume} | {note} |")
    return "\n".join(lines) + "\n"


def size_table() -> str:
    """The sizes with parameters and FLOPs at the paper's vocabulary and sequence length."""
    lines = [
        "| name | width | layers | heads / KV heads / head_dim | MLP width | parameters "
        "| GFLOPs per token |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sizes.SIZES:
        config = config_lib.paper(name, "baseline")
        model = config.model
        parameters = sum(sizes.parameter_counts(model).values()) / 1e6
        flops = sizes.flops_per_token(model, config.data.seq_len)["model"] / 1e9
        lines.append(
            f"| {name} | {model.width} | {model.num_layers} | {model.num_heads} / "
            f"{model.num_kv_heads} / {model.head_dim} | {model.mlp_width} | {parameters:.1f} M | "
            f"{flops:.2f} |"
        )
    return "\n".join(lines) + "\n"


def page(name: str) -> str:
    """A page from elsewhere; links to files beside it become their paths."""
    folder = pathlib.PurePosixPath(name).parent
    text = (ROOT / name).read_text()
    return re.sub(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)", rf"`{folder}/\2`", text)


_TABLES = {"configuration": configuration, "sizes": size_table}
_KINDS = {
    "table": lambda name: _TABLES[name](),
    "diagram": lambda variant: f"<figure>{diagrams.diagram(variant)}</figure>\n",
    "page": page,
    "needs": needs,
}


def filled(markdown: str) -> str:
    """A page with its markers replaced; an unknown one is an error."""

    def fill(match: re.Match[str]) -> str:
        if match[1] not in _KINDS:
            raise ValueError(f"{match[0]}: known kinds are {', '.join(_KINDS)}")
        return _KINDS[match[1]](match[2])

    whole = [m[2] for m in MARKER.finditer(markdown) if m[1] == "page"]
    return MARKER.sub(fill, page(whole[0]) if whole else markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with the text of each page."""
    return filled(markdown)
