"""The tokenizer: text to token ids and windows, ids back to text, frozen after loading.

Decides: that ``tokenizer.json`` is used, except its padding and truncation sections, which are kept for saving and of
which only the sides are read (padding and truncation happen here, so one tokenizer serves any number of threads).
Leaves to others: vocabulary files without ``tokenizer.json`` (``tokenization/build.py``), where windows are
cut (``tokenization/rows.py``), names on the Hub (``hub/``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers

from flodl_hf.errors import TokenizerError
from flodl_hf.hub.folders import holds_adapter, resolve_folder
from flodl_hf.keywords.loading import TOKENIZER
from flodl_hf.keywords.taking import taking
from flodl_hf.tokenization.early_cut import beginnings
from flodl_hf.weights.file_names import ADAPTER_CONFIG, BASE_OF_ADAPTER, CONFIG_NAME, is_vocabulary_in

from .tokenization.backend import Backend
from .tokenization.batch import PADDINGS, TRUNCATIONS, as_batch, as_tensors, check_batch, check_multiple, option
from .tokenization.definition import WARNED, read_backend, with_sections
from .tokenization.doctor import contradictions
from .tokenization.encoded import Encoded, pad_rows
from .tokenization.guard import guarded
from .tokenization.rows import Cut, Overflow, Row, cut_each, cut_rows
from .tokenization.settings import read_settings
from .tokenization.source import (
    TOKENIZER_FILES,
    parse_json,
    read_bytes,
    read_source,
    vocabulary_file,
    write_files,
)
from .tokenization.vocabulary import Vocabulary
from .tokenization.words import JOINED

__all__ = ["TOKENIZER_FILES", "Encoded", "Row", "Tokenizer"]


class Tokenizer(Vocabulary):
    """Turns text into rows of token ids and back; frozen after loading, safe to share between threads.

    Make one with [from_folder][] or [from_pretrained][]. ``AutoTokenizer`` is another name of this class.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        files: Mapping[str, bytes] | None = None,
        folder: str | os.PathLike[str] = "tokenizer",
        model_type: str | None = None,
        config: Mapping[str, Any] | None = None,
        notes: Sequence[str] = (),
        overridden: bool = False,
    ) -> None:
        """Take over ``backend``: no one else may change it afterwards.

        Args:
            backend: a tokenizer of the tokenizers library.
            files: the files it came from, by name; they are written back byte for byte.
            folder: where it came from, for messages.
            model_type: family, if known.
            config: the model's ``config.json``, if known.
            notes: contradictions of its files, and which file is used; further ones are added to ``notes``.
            overridden: whether settings replaced parts of ``tokenizer.json``.

        Raises:
            TokenizerError: if a settings file is damaged, or the normalizer would exhaust memory.
        """
        self._files = dict(files or {})
        self._overridden = overridden
        self._config = dict(config or {})
        frozen = Backend(backend, f"{folder}/{vocabulary_file(self._files)}" if self._files else str(folder))
        settings = read_settings(
            self._files,
            lambda token: backend.token_to_id(token) is not None,
            folder=str(folder),
            model_type=model_type,
            config=self._config,
            pad_token=frozen.pad_token,
            sides=frozen.sides,
        )
        super().__init__(frozen, settings, str(folder))
        found = []
        if "tokenizer.json" in self._files and not frozen.by_code:
            name = "special_tokens_map.json"
            mapped = parse_json(self._files[name], f"{folder}/{name}") if name in self._files else {}
            with guarded(f"{folder}/tokenizer.json", "the tokenizer definition is damaged; fetch it again"):
                found = contradictions(backend, settings, mapped, self._config, frozen.pad_token)
        self.notes = (*notes, *found)
        if settings.split_special:
            backend.encode_special_tokens = True
        self._splitting: Backend | None = None
        self._sealed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_sealed" in self.__dict__:
            raise AttributeError(f"a loaded tokenizer does not change; load another one to set {name!r}")
        super().__setattr__(name, value)

    # Loading and saving

    @classmethod
    def from_folder(
        cls, folder: str | os.PathLike[str], *, model_type: str | None = None, byte_fallback: bool = False
    ) -> Tokenizer:
        """Return the tokenizer whose files are in ``folder``.

        ``tokenizer.json`` is used where there is one; otherwise the tokenizer is built from ``vocab.txt``,
        ``vocab.json`` with ``merges.txt``, or a sentencepiece model.

        Args:
            folder: folder with the tokenizer files.
            model_type: family, such as ``"bert"``; read from ``config.json`` or ``tokenizer_config.json`` if
                not given.
            byte_fallback: have a sentencepiece model without ``tokenizer.json`` split characters that it does not
                know into its byte pieces, as sentencepiece does; transformers gives the unknown token.

        Raises:
            TokenizerError: if there is no tokenizer in the folder, or its files are damaged.
        """
        path = Path(folder)
        files = read_source(path)
        config: Mapping[str, Any] = {}
        # A damaged config.json is reported by those who need it; here it only helps to guess the family.
        with contextlib.suppress(TokenizerError):
            config = parse_json(read_bytes(path / "config.json"), str(path / "config.json"))
        return cls.from_files(files, folder=path, model_type=model_type, config=config, byte_fallback=byte_fallback)

    @classmethod
    def from_files(
        cls,
        files: Mapping[str, bytes],
        *,
        folder: str | os.PathLike[str] = "tokenizer",
        model_type: str | None = None,
        config: Mapping[str, Any] | None = None,
        byte_fallback: bool = False,
    ) -> Tokenizer:
        """Return the tokenizer that ``files`` (name to contents) define; arguments as in [from_folder][]."""
        backend, notes, overridden = read_backend(files, str(folder), model_type, config or {}, byte_fallback)
        for note in notes:
            if note.startswith(WARNED) and "the former is used" not in note:
                warnings.warn(f"{folder}: {note}", UserWarning, stacklevel=3)
        return cls(
            backend, files=files, folder=folder, model_type=model_type, config=config, notes=notes,
            overridden=overridden,
        )  # fmt: skip

    @classmethod
    @taking(TOKENIZER, TokenizerError)
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
    ) -> Tokenizer:
        """Return the tokenizer of a local folder or of a repository on the Hub.

        Where the folder has no vocabulary of its own, it is that of the transformer which ``modules.json`` names, or of
        the base model of an adapter.

        Args:
            name_or_path: folder, ``"owner/name"`` or ``"owner/name@revision"``.
            revision: branch, tag or commit.
            subfolder: folder inside the repository.
            token: access token; ``None`` takes the one that is logged in.
            cache_dir: where downloads are kept.
            local_files_only: open no network connection.

        Raises:
            HubError: if the name cannot be resolved.
            TokenizerError: if there is no usable tokenizer.
        """
        hub = {
            "revision": revision, "subfolder": subfolder, "token": token, "cache_dir": cache_dir,
            "local_files_only": local_files_only,
        }  # fmt: skip
        folder, _ = resolve_folder(name_or_path, hub, (*TOKENIZER_FILES, ADAPTER_CONFIG, CONFIG_NAME))
        if is_vocabulary_in(folder):
            return cls.from_folder(folder)
        if holds_adapter(folder):
            base = parse_json(read_bytes(folder / ADAPTER_CONFIG), str(folder / ADAPTER_CONFIG)).get(BASE_OF_ADAPTER)
            if isinstance(base, str) and base:
                return cls.from_pretrained(base, token=token, cache_dir=cache_dir, local_files_only=local_files_only)
        from flodl_hf.sentence.routing import transformer_folder

        return cls.from_folder(transformer_folder(folder))

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer files of the source, and a ``tokenizer.json`` unless Python code splits the words."""
        out = dict(self._files)
        if "tokenizer.json" not in out and not self._backend.by_code:
            out["tokenizer.json"] = self.to_json().encode("utf-8")
        return out

    def to_json(self) -> str:
        """Return the definition as the text of a ``tokenizer.json``.

        Raises:
            TokenizerError: Python code splits the words, as for Japanese BERT and PhoBERT: there is no definition.
        """
        if self._backend.by_code:
            raise TokenizerError(
                f"{self._folder}: the words are split by Python code, which tokenizer.json cannot contain; "
                "save the tokenizer with save_pretrained, which writes its vocabulary files",
                where=self._folder,
            )
        if "tokenizer.json" in self._files and not self._overridden:
            return self._files["tokenizer.json"].decode("utf-8-sig")
        return self._inner.to_str(pretty=True)

    def fingerprint(self) -> str:
        """Return a hash of the definition, or of the files where Python code splits the words."""
        if not self._backend.by_code:
            return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]
        digest = hashlib.sha256()
        for name, data in sorted(self._files.items()):
            digest.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
        return digest.hexdigest()[:32]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> tuple[str, ...]:
        """Write [files][] into ``folder``, each beside its target and then renamed; return the paths."""
        return write_files(self.files(), Path(folder))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (
            type(self),
            None if self._backend.by_code else self._inner.to_str(),
            self._files,
            self._folder,
            self._settings.model_type,
            self._config,
            self._backend.pad_token,
            self._backend.sides,
            self._overridden,
        )

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self

    def __repr__(self) -> str:
        return (
            f"Tokenizer({self._folder!r}, vocab_size={self.vocab_size}, "
            f"model_max_length={self.model_max_length}, "
            f"padding_side={self.padding_side!r}, special_tokens={dict(self._settings.special)!r})"
        )

    # Text to ids

    def encode_rows(
        self,
        texts: Sequence[str] | Sequence[Sequence[str]],
        pairs: Sequence[str] | Sequence[Sequence[str]] | None = None,
        *,
        max_tokens: int | None = None,
        stride: int = 0,
        cut: Cut | None = None,
        words: bool = False,
        add_special_tokens: bool = True,
        overflow: Overflow = "windows",
        snap: bool = True,
        offsets: bool = True,
    ) -> list[list[Row]]:
        """Return for each text its windows in order, without padding.

        Args:
            texts: texts, or lists of words with ``words=True``.
            pairs: second texts, one for each text.
            max_tokens: most tokens in a window, special tokens included; ``None`` never cuts.
            stride: tokens that neighbouring windows share.
            cut: which text is cut; by default the second of a pair, else the first. ``"longest"`` only
                truncates.
            words: the texts are split into words already. ``offsets`` then count characters within the word.
            add_special_tokens: put the template's special tokens around the texts.
            overflow: what happens to a text that does not fit: windows, dropping its end, or an error.
            snap: start and end windows between words where a border is near (see ``plan_windows``).
            offsets: fill ``Row.offsets`` and ``Row.word_ids``; without them encoding is faster.

        Raises:
            TokenizerError: for a text that is not a valid string, or that does not fit with
                ``overflow="error"``.
        """
        check_batch(texts, "text", words)
        if pairs is not None:
            check_batch(pairs, "second text", words)
        cut = cut or ("first" if pairs is None else "second")
        if cut == "second" and pairs is None:
            raise TokenizerError("cut is 'second', but there are no second texts; pass pairs, or cut='first'")
        if stride < 0 or (max_tokens is not None and max_tokens < 1):
            raise TokenizerError(
                f"max_tokens is {max_tokens} and stride is {stride}; expected max_tokens > 0 <= stride"
            )
        if not len(texts):
            return []
        if overflow == "truncate" and max_tokens is not None and not words:
            texts, pairs = self._shorten(texts, pairs, max_tokens, cut)
        rows = self._backend.rows(texts, pairs, words=words, special=add_special_tokens, fast=not offsets)
        if snap and overflow == "windows" and not offsets and max_tokens is not None:
            # Word borders are needed to cut these.
            long = [index for index, row in enumerate(rows) if len(row) > max_tokens]
            if long:
                seconds = None if pairs is None else [pairs[index] for index in long]
                again = self._backend.rows(
                    [texts[index] for index in long], seconds, words=words, special=add_special_tokens
                )
                for index, row in zip(long, again, strict=True):
                    rows[index] = row
        return cut_each(rows, max_tokens, stride=stride, cut=cut, overflow=overflow, snap=snap, side=self._cut_side)

    @property
    def _cut_side(self) -> Literal["left", "right"]:
        return "left" if self._settings.truncation_side == "left" else "right"

    def _shorten(
        self, texts: Sequence[Any], pairs: Sequence[Any] | None, max_tokens: int, cut: Cut
    ) -> tuple[Sequence[Any], Sequence[Any] | None]:
        """Return the texts, very long ones without most of what truncation drops."""
        if self._settings.truncation_side == "left":
            return texts, pairs

        def ids(text: str) -> list[int]:
            return self._backend.encodings([text], special=False, fast=True)[0].ids

        firsts = texts if cut == "second" else beginnings(texts, max_tokens, ids)
        return firsts, pairs if cut == "first" or pairs is None else beginnings(pairs, max_tokens, ids)

    def __call__(
        self,
        text: Any,
        text_pair: Any = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: Literal["pt", "np"] | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool = True,
        return_overflowing_tokens: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        split_special_tokens: bool | None = None,
    ) -> Encoded:
        """Return model inputs for one text or a batch; arguments and ids are those of transformers.

        Args:
            text: a string, a list of strings, a list of pairs, or (lists of) words with
                ``is_split_into_words``.
            text_pair: second text or texts.
            add_special_tokens: put the template's special tokens around the texts.
            padding: ``True`` or ``"longest"``, ``"max_length"``, or ``False``.
            truncation: ``True`` (the longer text gives way), ``"only_first"``, ``"only_second"`` or
                ``False``.
            max_length: limit in tokens; by default ``model_max_length``.
            stride: tokens shared by neighbours when overflowing tokens are returned.
            is_split_into_words: the texts are lists of words.
            pad_to_multiple_of: round the padded length up.
            padding_side: overrides the tokenizer's.
            return_tensors: ``"pt"``, ``"np"``, or lists.
            return_token_type_ids: by default as the family's models take them.
            return_attention_mask: include ``attention_mask``.
            return_overflowing_tokens: return what truncation cut off as further rows, with
                ``overflow_to_sample_mapping``.
            return_special_tokens_mask: include ``special_tokens_mask``.
            return_offsets_mapping: include ``offset_mapping``.
            split_special_tokens: read special tokens in the text as plain text; by default as the folder says.

        Raises:
            TokenizerError: for invalid texts.
            OptionError: for invalid options, or rows of unequal length with ``return_tensors``.
        """
        if truncation is None:
            truncation = "longest_first" if max_length is not None and padding is False else False
        cut = option(TRUNCATIONS, truncation, "truncation")
        pad = option(PADDINGS, padding, "padding")
        if isinstance(text, str) and text_pair == "":
            text_pair = None  # as transformers: an empty second text beside one text is none
        texts, pairs, single = as_batch(text, text_pair, is_split_into_words)
        if is_split_into_words and self._backend.joins_words:
            warnings.warn(JOINED, UserWarning, stacklevel=2)
        limit = max_length if max_length is not None else self._settings.model_max_length
        if cut == "longest" and (pairs is None or return_overflowing_tokens):
            cut = "first"
        if cut is not None and limit is not None and not (return_overflowing_tokens or is_split_into_words):
            texts, pairs = self._shorten(texts, pairs, limit, cut)
        check_multiple(pad_to_multiple_of, limit, cut, pad)
        backend = self._backend if split_special_tokens is None else self._reading(split_special_tokens)
        whole = backend.rows(texts, pairs, words=is_split_into_words, special=add_special_tokens)
        if cut is None and max_length is None and pad != "max_length":
            self._warn_of_long(whole)
        groups = self._cut(whole, cut, limit, stride, windows=return_overflowing_tokens)
        rows: list[Row] = [row for group in groups for row in group]
        width = None
        if pad == "longest":
            width = max((len(row) for row in rows), default=0)
        elif pad == "max_length":
            width = limit
        data, lead = pad_rows(
            rows,
            width,
            multiple=pad_to_multiple_of,
            side=padding_side or self._settings.padding_side,
            pad_id=self._pad_id(rows, width),
            type_ids=self._settings.type_ids if return_token_type_ids is None else return_token_type_ids,
            attention=return_attention_mask,
            special=return_special_tokens_mask,
            offsets=return_offsets_mapping,
        )
        if return_overflowing_tokens:
            data["overflow_to_sample_mapping"] = [index for index, group in enumerate(groups) for _ in group]
        if return_tensors is not None:
            data = as_tensors(data, return_tensors)
        elif single and not return_overflowing_tokens:
            data = {key: values[0] for key, values in data.items()}
        return Encoded(data, rows, lead, self._tokens_of)

    def _cut(
        self, rows: Sequence[Row], cut: Cut | None, limit: int | None, stride: int, *, windows: bool
    ) -> list[list[Row]]:
        """Return what is left of each row within ``limit`` tokens, or its windows, as transformers cuts them."""
        if cut is None or limit is None:
            return [[row] for row in rows]
        overflow: Overflow = "windows" if windows else "truncate"
        how: Any = {"stride": stride, "cut": cut, "overflow": overflow, "snap": False, "side": self._cut_side}
        return [cut_rows(row, limit, **how, where=f"text {index}") for index, row in enumerate(rows)]

    def _pad_id(self, rows: Sequence[Row], width: int | None) -> int:
        """Return the id that fills rows up to ``width``; any where there is none and no row needs it."""
        if self.pad_token_id is not None:
            return self.pad_token_id
        if width is not None and any(len(row) < width for row in rows):
            raise TokenizerError(
                f"{self._folder}: there is no padding token; name one as pad_token in tokenizer_config.json, or encode "
                "without padding"
            )
        return 0

    def _reading(self, split: bool) -> Backend:
        """Return the tokenizer that takes special tokens in a text apart, or does not."""
        if split == self._settings.split_special:
            return self._backend
        other = self.__dict__["_splitting"]
        if other is None:
            if self._backend.by_code:
                again = self.from_files(
                    self._files, folder=self._folder, model_type=self._settings.model_type, config=self._config
                )
                inner = again._inner
            else:
                inner = tokenizers.Tokenizer.from_str(self._inner.to_str())
            inner.encode_special_tokens = split
            other = self.__dict__["_splitting"] = Backend(inner, self._folder)
        return other

    def encode(self, text: str, text_pair: str | None = None, **options: Any) -> list[int]:
        """Return the ids of one text or pair; options as in calling the tokenizer."""
        return list(self(text, text_pair, **options).input_ids)

    def tokenize(self, text: str, pair: str | None = None, *, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text as strings."""
        second = None if pair is None else [pair]
        return self._backend.encodings([text], second, special=add_special_tokens)[0].tokens


def _restore(
    kind: type[Tokenizer],
    text: str | None,
    files: Any,
    folder: str,
    model_type: Any,
    config: Any,
    pad_token: str | None = None,
    sides: Mapping[str, str] | None = None,
    overridden: bool = False,
) -> Tokenizer:
    if text is None:
        return kind.from_files(files, folder=folder, model_type=model_type, config=config)
    backend = with_sections(text, pad_token, sides or {})
    return kind(backend, files=files, folder=folder, model_type=model_type, config=config, overridden=overridden)
