"""Task files of one's own for the harness: multiple choice, rolling, generation."""

import json
import pathlib

_TASK = """task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files: {{test: {data}}}
output_type: {kind}
test_split: test
doc_to_text: "{text}"
doc_to_target: "{target}"
{more}
metric_list:
  - metric: {metric}
metadata: {{version: 1.0}}
"""
_CHOICE = {
    "kind": "multiple_choice",
    "text": "{{text}}",
    "target": "{{label}}",
    "metric": "acc",
    "more": 'doc_to_choice: "{{choices}}"\ntarget_delimiter: ""',
}
_ROLLING = {
    "kind": "loglikelihood_rolling",
    "text": "",
    "target": "{{text}}",
    "metric": "byte_perplexity",
    "more": "",
}
_GENERATION = {
    "kind": "generate_until",
    "text": "{{text}}",
    "target": "{{answer}}",
    "metric": "exact_match",
    "more": 'generation_kwargs: {until: [" "], max_gen_toks: 8}\ntarget_delimiter: ""',
}


def write_tasks(folder: pathlib.Path) -> pathlib.Path:
    """Tasks on the text `long 12 long 12 …`, in a folder of YAML files."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {
        "own_choice": [
            {"text": f"long {n} ", "choices": ["horse", "long", "zzzz"], "label": 1}
            for n in range(10, 19)
        ],
        "own_rolling": [{"text": f"long {n} " * 4} for n in range(20, 25)],
        "own_generation": [{"text": f"long {n} lo", "answer": "ng"} for n in range(30, 35)],
    }
    for kind, name in zip((_CHOICE, _ROLLING, _GENERATION), rows, strict=True):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (folder / f"{name}.yaml").write_text(_TASK.format(name=name, data=data, **kind))
    return folder
