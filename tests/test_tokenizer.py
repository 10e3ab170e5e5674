"""Tokenizers: ids, text and chat prompts equal to those of transformers on the same files."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncmoe.errors import CheckpointError, RequestError
from asyncmoe.frontend.tokenizer import Tokenizer

TEXTS = [
    "",
    "the quick brown fox",
    "  two  spaces\n",
    "naïve 日本語 🙂",
    "<s> a</s>b <|im_start|>c",
]
CHAT = """{{ bos_token }}{% for m in messages %}
    {% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}
    {% if loop.index > 9 %}{% break %}{% endif %}
<|im_start|>{{ m.role }}
{% generation %}{{ m.content | trim }}{% endgeneration %}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}
{% set ns = namespace(mode='plain') %}
{% if enable_thinking %}{% set ns.mode = 'deep' %}{% endif %}
{{ ns.mode }}{{ strftime_now('%Y') }}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MESSAGES = [
    {"role": "system", "content": " Be <brief> & kind. "},
    {"role": "user", "content": "Héllo"},
]


def make_core(special: tuple[str, ...] = ("<s>", "</s>")) -> Core:
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog, naïve 日本語 🙂"] * 3,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return core


def write(directory: Path, core: Core, config: dict[str, Any] | None = None) -> Path:
    core.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def load(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return tokenizer


BASE = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
TOKEN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


@pytest.mark.parametrize(
    "config",
    [
        BASE,
        {**BASE, "add_bos_token": True},
        {**BASE, "add_bos_token": True, "add_eos_token": True},
        {**BASE, "add_bos_token": False},
        {**BASE, "pad_token": "<pad>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
        {**BASE, "bos_token": {"__type": "AddedToken", "content": "<|im_start|>", **TOKEN}},
        {
            **BASE,
            "added_tokens_decoder": {
                "331": {"content": "</x>", "special": False, **TOKEN},
                "330": {"content": "<|im_start|>", "special": True, **TOKEN},
            },
        },
    ],
)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_ids_and_text_equal_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], adds_bos: bool
) -> None:
    core = make_core()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    write(tmp_path, core, config)
    ours, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.special_ids >= set(theirs.all_special_ids)


def test_a_tokenizer_without_its_config_file_works(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, make_core()))
    assert tokenizer.decode(tokenizer.encode("the fox 🙂")) == "the fox 🙂"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    core = make_core()
    core.enable_truncation(2)
    core.enable_padding(length=50, pad_token="<s>")
    tokenizer = load(write(tmp_path, core))
    assert tokenizer.decode(tokenizer.encode("the quick brown fox")) == "the quick brown fox"


def test_special_tokens_of_an_older_map_file_are_used(tmp_path: Path) -> None:
    write(tmp_path, make_core(), {"tokenizer_class": "PreTrainedTokenizerFast"})
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    ours, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("a<|im_end|>") == theirs.encode("a<|im_end|>")
    assert ours.decode(ours.encode("a<|im_end|>")) == "a"


def test_files_that_only_transformers_reads_give_the_same_ids(tmp_path: Path) -> None:
    core = make_core()
    core.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer"})
    )
    ours, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True
        )


def test_a_directory_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.load(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, make_core(), BASE)
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.load(tmp_path)


def test_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, make_core()))
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("half a pair: \ud83d")


def test_other_threads_run_while_a_long_text_is_tokenised(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, make_core()))
    working = threading.Thread(target=tokenizer.encode, args=("the quick fox " * 60_000,))
    working.start()
    turns = 0
    while working.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10  # two at most if the library kept the interpreter's lock


def test_a_token_has_its_own_bytes_though_it_is_a_part_of_a_character(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, make_core()))
    for text in (*TEXTS, "ÿ\xad\x00\ufffd 한"):
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(each) or b"?" for each in ids) == text.encode()


def test_bytes_of_a_vocabulary_with_byte_fallback(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}, "ab": 257}
    core = Core(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = load(write(tmp_path, core))
    assert [tokenizer.token_bytes(id_) for id_ in (1 + 0xE6, 1 + 0x41, 257)] == [
        b"\xe6",
        b"A",
        b"ab",
    ]


def test_the_longest_token_is_known_in_bytes(tmp_path: Path) -> None:
    core = make_core()
    core.add_tokens(["日" * 50])
    assert load(write(tmp_path, core)).longest_token_bytes == 150


def test_loading_a_fast_tokenizer_does_not_import_transformers(tmp_path: Path) -> None:
    write(tmp_path, make_core(), BASE)
    code = (
        "import sys; from pathlib import Path; from asyncmoe.frontend.tokenizer import Tokenizer; "
        f"Tokenizer.load(Path({str(tmp_path)!r})); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- chat


@pytest.fixture(params=["config", "named", "file"])
def chat_directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    config: dict[str, Any] = {**BASE, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    if request.param == "config":
        config["chat_template"] = CHAT
    elif request.param == "named":
        config["chat_template"] = [
            {"name": "default", "template": CHAT},
            {"name": "tool_use", "template": "{{ tools | tojson(indent=2) }}"},
        ]
    else:
        config["chat_template"] = "not this one"
        (tmp_path / "chat_template.jinja").write_text(CHAT)
    return write(tmp_path, make_core(), config)


@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "enable_thinking": True},
        {"tools": [{"type": "function", "function": {"name": "f<é>", "parameters": {}}}]},
    ],
)
def test_chat_prompts_equal_those_of_transformers(
    chat_directory: Path, options: dict[str, Any]
) -> None:
    options = {"add_generation_prompt": True, **options}
    ours, theirs = load(chat_directory), AutoTokenizer.from_pretrained(chat_directory)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert ours.render_chat(MESSAGES, **options) == expected


def test_text_parts_are_joined(chat_directory: Path) -> None:
    tokenizer = load(chat_directory)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == tokenizer.render_chat(
        [{"role": "user", "content": "one\ntwo"}]
    )


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\] is .* with a role"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "allowed: text parts only"),
        ([{"role": "tool", "content": "x"}], "refuses the messages: no tools"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(
    chat_directory: Path, messages: list[Any], complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        load(chat_directory).render_chat(messages)
    assert caught.value.parameter == "messages"


def test_a_missing_chat_template_is_named_when_it_is_needed(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, make_core(), BASE))
    with pytest.raises(RequestError, match=r"no chat template.*chat_template\.jinja"):
        tokenizer.render_chat(MESSAGES)


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for %}", "{{ 1 // 0 }}"],
)
def test_a_template_cannot_leave_its_sandbox_nor_break_the_engine(
    tmp_path: Path, template: str
) -> None:
    tokenizer = load(write(tmp_path, make_core(), {**BASE, "chat_template": template}))
    with pytest.raises(RequestError, match="template"):
        tokenizer.render_chat(MESSAGES)


def test_a_tokenizer_saved_by_transformers_is_read_back(tmp_path: Path) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=make_core(), bos_token="<s>", eos_token="<|end|>", chat_template=CHAT
    )
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert ours.encode("a<|end|>b") == theirs.encode("a<|end|>b")
    assert ours.render_chat(MESSAGES) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
