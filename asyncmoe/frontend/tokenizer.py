"""The tokenizer of a checkpoint: text to ids, ids to text, chat messages to ids.

`tokenizer.json` is read with the `tokenizers` library itself, for transformers takes seconds to
import; transformers comes in only for checkpoints in older formats. Special tokens are completed
from the other files as transformers does, so that ids are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from asyncmoe.errors import CheckpointError, RequestError
from asyncmoe.frontend.chattemplate import ChatTemplates
from asyncmoe.frontend.tokenbytes import BROKEN, byte_level_bytes, spelled_bytes

_FAST_FILE: Final = "tokenizer.json"
_CONFIG_FILE: Final = "tokenizer_config.json"
_SPECIAL_FILE: Final = "special_tokens_map.json"
# Files that only transformers can make a tokenizer of.
_OLDER_FILES: Final = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_NAMED: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")

Encode = Callable[[str, bool], list[int]]
Decode = Callable[[list[int], bool], str]
Spell = Callable[[int], str | None]


class TokenBytes(dict[int, bytes]):
    """What each token adds to the bytes of a text, made when it is first asked for."""

    def __init__(self, spell: Spell, special_ids: frozenset[int]) -> None:
        super().__init__()
        self._spell, self._special_ids = spell, special_ids

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._special_ids else self._spell(token_id)
        found = self[token_id] = b"" if token is None else byte_level_bytes(token)
        return found


class Tokenizer:
    """Text to ids and back. Its calls may be made from several threads at once."""

    def __init__(
        self,
        encode: Encode,
        decode: Decode,
        spell: Spell,
        special_ids: frozenset[int],
        longest_token_bytes: int,
        templates: ChatTemplates,
        is_byte_level: bool = False,
    ) -> None:
        """`encode(text, add_special)`; `decode(ids, skip_special)`; `spell(id)` is the token as
        the vocabulary has it. `is_byte_level`: a text's bytes are those of its tokens, joined."""
        self.special_ids = special_ids  # tokens without text: BOS, EOS, role marks …
        self.longest_token_bytes = longest_token_bytes  # no token stands for more text
        # None: a token's text depends on its neighbours.
        self.bytes_of = TokenBytes(spell, special_ids) if is_byte_level else None
        self._encode = encode
        self._decode = decode
        self._spell = spell
        self._templates = templates

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """The tokenizer in a checkpoint directory; None if there are no tokenizer files.

        Raises `CheckpointError` naming the file that cannot be read.
        """
        directory = Path(directory)
        if (directory / _FAST_FILE).is_file():
            return _load_fast(directory)
        if any((directory / name).is_file() for name in _OLDER_FILES):
            return _load_older(directory)
        return None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with those that the model's prompts begin (and end) with by default.

        Raises `RequestError` for text that is not valid Unicode.
        """
        try:
            return self._encode(text, add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"prompt is not valid Unicode text: {error}", "prompt") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no character become U+FFFD, unknown ids nothing."""
        return self._decode(list(ids), skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What one token stands for, also if it is only a part of a character; None if unknown."""
        text = self.decode([token_id], skip_special_tokens=False)
        if BROKEN not in text:
            return text.encode()
        return spelled_bytes(self._spell(token_id) or "")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The prompt for chat messages; see `ChatTemplates.render` for options and errors."""
        return self._templates.render(messages, **options)


def _load_fast(directory: Path) -> Tokenizer:
    path = directory / _FAST_FILE
    try:
        core = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    core.no_truncation()
    core.no_padding()
    config = _read_json(directory / _CONFIG_FILE)
    if "added_tokens_decoder" not in config:
        config |= _read_json(directory / _SPECIAL_FILE)
    _add_tokens(core, config)
    return _wrap(core, ChatTemplates.load(directory, config, _special_texts(config)))


def _load_older(directory: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # whatever its many readers raise
        raise CheckpointError(f"the tokenizer of {directory} cannot be read: {error}") from error
    texts = {name: str(text) for name, text in slow.special_tokens_map.items()}
    templates = ChatTemplates.load(directory, _read_json(directory / _CONFIG_FILE), texts)
    core = getattr(slow, "backend_tokenizer", None)
    if isinstance(core, tokenizers.Tokenizer):
        core.no_truncation()
        core.no_padding()
        return _wrap(core, templates)
    return Tokenizer(
        lambda text, add: list(slow.encode(text, add_special_tokens=add)),
        lambda ids, skip: str(slow.decode(ids, skip_special_tokens=skip)),
        lambda token_id: str(slow.convert_ids_to_tokens(token_id)),
        frozenset(slow.all_special_ids),
        _longest(slow.get_vocab()),
        templates,
    )


def _wrap(core: tokenizers.Tokenizer, templates: ChatTemplates) -> Tokenizer:
    special = (i for i, token in core.get_added_tokens_decoder().items() if token.special)
    return Tokenizer(
        # Of the library's calls only those for batches let other threads run meanwhile.
        lambda text, add: list(core.encode_batch_fast([text], add_special_tokens=add)[0].ids),
        lambda ids, skip: str(core.decode(ids, skip_special_tokens=skip)),
        core.id_to_token,
        frozenset(special),
        _longest(core.get_vocab()),
        templates,
        isinstance(core.decoder, tokenizers.decoders.ByteLevel),
    )


def _longest(vocab: Iterable[str | bytes]) -> int:
    """Bytes of the longest token. A vocabulary's spelling is never shorter than the text."""
    return max((len(t if isinstance(t, bytes) else t.encode()) for t in vocab), default=1)


def _add_tokens(core: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add what tokenizer.json lacks: listed tokens in order of their ids, then named ones."""
    listed = config.get("added_tokens_decoder") or {}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        core.add_tokens([_added(token, token.get("special", False))])
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    named = [config.get(f"{name}_token") for name in _NAMED]
    known = {token.content for token in core.get_added_tokens_decoder().values()}
    for token in [*named, *(extra.values() if isinstance(extra, dict) else extra)]:
        if token is not None and _text(token) not in known:
            core.add_tokens([_added(token, True)])


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and every other token that the configuration names."""
    return {
        key: _text(value)
        for key, value in config.items()
        if key.endswith("_token") and (isinstance(value, str) or _is_token(value))
    }


def _added(token: str | Mapping[str, Any], special: bool) -> tokenizers.AddedToken:
    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=special)
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return tokenizers.AddedToken(
        token["content"], special=special, **{flag: token[flag] for flag in flags if flag in token}
    )


def _is_token(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str)


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {value!r:.80}; allowed: an object")
    return value
