"""The tokenizer: text to token ids and windows, ids back to text.

``tokenizer.json`` is used, except its padding and truncation sections, which are kept for saving and of which only the
sides are read. Padding and truncation happen in Python, so one tokenizer serves any number of threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import tokenizers

from flodl.errors import printable
from flodl_hf.checkpoints.folders import ADAPTER_CONFIG, BASE_OF_ADAPTER, CONFIG_NAME, holds_adapter, is_vocabulary_in
from flodl_hf.checkpoints.hub.download import resolve_folder
from flodl_hf.checkpoints.keywords import TOKENIZER, accept_keywords
from flodl_hf.errors import TokenizerError
from flodl_hf.tokenization.backend import Backend
from flodl_hf.tokenization.build import WARNED, read_backend
from flodl_hf.tokenization.calls import Calls
from flodl_hf.tokenization.encoded import Encoded
from flodl_hf.tokenization.guard import translated_errors
from flodl_hf.tokenization.settings import (
    ROLES,
    TOKENIZER_FILES,
    Settings,
    content,
    parse_file,
    parse_json,
    read_bytes,
    read_settings,
    read_source,
    vocabulary_file,
    with_settings,
    write_files,
)

__all__ = ["Encoded", "Tokenizer"]


def contradictions(
    backend: Backend, settings: Settings, mapped: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a sentence for each contradiction of settings and ``tokenizer.json``, with the value that is used.

    Args:
        backend: the tokenizer of ``tokenizer.json``.
        settings: values of ``tokenizer_config.json``, as read.
        mapped: ``special_tokens_map.json``.
        config: the model's ``config.json``, or an empty mapping.
    """
    stated = settings.raw
    which = "former" if "added_tokens_decoder" in stated else "latter"
    for role in ROLES:
        one, other = content(stated.get(role)), content(mapped.get(role))
        if one and other and one != other:
            yield (
                f"{role}: {printable(one, 40)} in tokenizer_config.json and {printable(other, 40)} in "
                f"special_tokens_map.json; the {which} is used, as in transformers"
            )
    chosen, pad_token = settings.special.get("pad_token"), backend.pad_token
    if pad_token and chosen and chosen != pad_token:
        yield (
            f"pad_token: {printable(chosen, 40)} by the settings files and {printable(pad_token, 40)} in the padding "
            "section of tokenizer.json; the settings are used, as in transformers"
        )
    old, new = stated.get("max_len"), stated.get("model_max_length")
    if old is not None and new is not None and old != new:
        yield f"max_len: {old} and model_max_length: {new}; the latter is used, as in transformers"
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and settings.model_max_length and settings.model_max_length > positions:
        yield (
            f"model_max_length: {settings.model_max_length} in tokenizer_config.json and {positions} positions in "
            "config.json; predictions use the limit of the model, tokenizer calls the setting, as in transformers"
        )
    rows = config.get("type_vocab_size")
    has_types = isinstance(rows, int) and rows > 1 and not settings.type_ids
    if has_types and any(backend.inner.encode("", "").type_ids):
        why = "model_input_names" if isinstance(stated.get("model_input_names"), list) else "tokenizer_class"
        yield (
            f"token types: the model has {rows} and the template marks a second text; none are returned because of "
            f'{why} (to have them, "model_input_names": ["input_ids", "token_type_ids", "attention_mask"] in the same '
            "file)"
        )


_SETTABLE = ("model_max_length", "padding_side", "truncation_side", *ROLES)


class Tokenizer(Calls):
    """Turns text into rows of token ids and back; safe to share between threads. Its vocabulary does not change after
    loading; ``padding_side``, ``truncation_side``, ``model_max_length`` and the special tokens can be set.

    Make one with `from_folder` or `from_pretrained`. ``AutoTokenizer`` is another name of this class.
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
        """Wrap a tokenizer of the tokenizers library, which must not be changed afterwards.

        Args:
            backend: a tokenizer of the tokenizers library.
            files: contents of its files, which are written back byte for byte.
            folder: the folder of the files, for messages.
            model_type: family, if known.
            config: the model's ``config.json``, if known.
            notes: contradictions of its files, with the file that is used; further ones are added.
            overridden: whether settings replaced parts of ``tokenizer.json``.

        Raises:
            TokenizerError: if a settings file is damaged, or the normalizer would exhaust memory.
        """
        self._files = dict(files or {})
        self._overridden = overridden
        self._config = dict(config or {})
        self._folder = str(folder)
        self._inner = backend
        self._backend = Backend(backend, f"{folder}/{vocabulary_file(self._files)}" if self._files else str(folder))
        self.settings = self._read_settings(self._files, model_type)
        found = []
        if "tokenizer.json" in self._files and not self._backend.by_code:
            mapped = parse_file(self._files, "special_tokens_map.json", self._folder)
            with translated_errors(f"{folder}/tokenizer.json", "the tokenizer definition is damaged; fetch it again"):
                found = [*contradictions(self._backend, self.settings, mapped, self._config)]
        self.notes = (*notes, *found)
        if self.settings.split_special:
            backend.encode_special_tokens = True
        self._splitting: Backend | None = None
        self._sealed = True

    def _read_settings(self, files: Mapping[str, bytes], model_type: str | None) -> Settings:
        return read_settings(
            files, lambda token: self._inner.token_to_id(token) is not None, folder=self._folder,
            model_type=model_type, config=self._config, pad_token=self._backend.pad_token, sides=self._backend.sides,
        )  # fmt: skip

    def __setattr__(self, name: str, value: Any) -> None:
        if "_sealed" not in self.__dict__:
            super().__setattr__(name, value)
        elif name in _SETTABLE:
            self._state({name: value})
        else:
            raise AttributeError(f"a loaded tokenizer does not change; load another one to set {name!r}")

    def _state(self, changes: Mapping[str, Any]) -> None:
        """Change settings, also in the files that are saved.

        Raises:
            TokenizerError: a value is invalid, or the vocabulary does not contain a token; nothing is changed.
        """
        for role, token in changes.items():
            if role in ROLES and (not isinstance(token, str) or self.token_to_id(token) is None):
                raise TokenizerError(
                    f"{role}: found {token!r}, expected a token of the vocabulary. Add it to the files first.",
                    field=role,
                    found=token,
                )
        files = with_settings(self._files, changes, self._folder)
        self.__dict__.update(_files=files, settings=self._read_settings(files, self.settings.model_type))
        self.__dict__.pop("all_special_ids", None)

    # Loading and saving

    @classmethod
    def from_folder(
        cls,
        folder: str | os.PathLike[str],
        *,
        model_type: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """Return the tokenizer of the files in ``folder``.

        ``tokenizer.json`` is used where there is one; otherwise the tokenizer is built from ``vocab.txt``,
        ``vocab.json`` with ``merges.txt``, or a sentencepiece model.

        Args:
            folder: folder with the tokenizer files.
            model_type: family, such as ``"bert"``; read from ``config.json`` or ``tokenizer_config.json`` if
                not given.
            settings: values that replace values of ``tokenizer_config.json``.

        Raises:
            TokenizerError: if there is no tokenizer in the folder, or its files are damaged.
        """
        path = Path(folder)
        files = with_settings(read_source(path), settings or {}, str(path))
        config: Mapping[str, Any] = {}
        # A damaged config.json is reported when the model is loaded; here it only provides the family.
        with contextlib.suppress(TokenizerError):
            config = parse_json(read_bytes(path / "config.json"), str(path / "config.json"))
        return cls.from_files(files, folder=path, model_type=model_type, config=config)

    @classmethod
    def from_files(
        cls,
        files: Mapping[str, bytes],
        *,
        folder: str | os.PathLike[str] = "tokenizer",
        model_type: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """Return the tokenizer that ``files`` (name to contents) define; arguments as in `from_folder`."""
        backend, notes, overridden = read_backend(files, str(folder), model_type, config or {})
        for note in notes:
            if note.startswith(WARNED) and "the former is used" not in note:
                warnings.warn(f"{folder}: {note}", UserWarning, stacklevel=3)
        return cls(
            backend, files=files, folder=folder, model_type=model_type, config=config, notes=notes,
            overridden=overridden,
        )  # fmt: skip

    @classmethod
    @accept_keywords(TOKENIZER, TokenizerError)
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        add_prefix_space: bool | None = None,
        do_lower_case: bool | None = None,
        model_max_length: int | None = None,
        padding_side: str | None = None,
        truncation_side: str | None = None,
        pad_token: str | None = None,
    ) -> Tokenizer:
        """Return the tokenizer of a local folder or of a repository on the Hub.

        If the folder has no vocabulary, the tokenizer of the transformer in ``modules.json`` or of the base model of an
        adapter is returned.

        Args:
            name_or_path: folder, ``"owner/name"`` or ``"owner/name@revision"``.
            revision: branch, tag or commit.
            subfolder: folder inside the repository.
            token: access token; by default the stored one.
            cache_dir: folder of downloads.
            local_files_only: open no network connection.
            add_prefix_space: replaces the setting of the folder, as all that follow.
            do_lower_case: change texts to lower case.
            model_max_length: most tokens of a truncated text.
            padding_side: "left" or "right".
            truncation_side: "left" or "right".
            pad_token: a token of the vocabulary.

        Raises:
            HubError: if the name cannot be resolved.
            TokenizerError: if there is no usable tokenizer.
        """
        given = {
            "add_prefix_space": add_prefix_space, "do_lower_case": do_lower_case, "model_max_length": model_max_length,
            "padding_side": padding_side, "truncation_side": truncation_side, "pad_token": pad_token,
        }  # fmt: skip
        settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        hub: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        wanted = (*TOKENIZER_FILES, ADAPTER_CONFIG, CONFIG_NAME)
        folder, _ = resolve_folder(name_or_path, {**hub, "revision": revision, "subfolder": subfolder}, wanted)
        if not is_vocabulary_in(folder):
            if holds_adapter(folder):
                adapter = parse_json(read_bytes(folder / ADAPTER_CONFIG), str(folder / ADAPTER_CONFIG))
                if isinstance(base := adapter.get(BASE_OF_ADAPTER), str) and base:
                    return cls.from_pretrained(base, **hub, **settings)
            from flodl_hf.checkpoints.sentence.settings import transformer_folder

            folder = transformer_folder(folder)
        tokenizer = cls.from_folder(folder, settings={k: v for k, v in settings.items() if k not in ROLES})
        if pad_token is not None:
            tokenizer._state({"pad_token": pad_token})
        return tokenizer

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
        """Write `files` into ``folder``, each under a temporary name that is then renamed; return the paths."""
        return write_files(self.files(), Path(folder))

    def to_transformers(self) -> Any:
        """Return the same tokenizer as a ``PreTrainedTokenizerFast`` of transformers."""
        config = {**self._config, "model_type": self.settings.model_type}
        return import_module("flodl_hf.compat.transformers").pretrained_tokenizer(self, config)

    def __reduce__(self) -> tuple[Any, ...]:
        files = {"files": self._files, "folder": self._folder, "model_type": self.settings.model_type}
        arguments = {**files, "config": self._config}
        text = None if self._backend.by_code else self._inner.to_str()
        return _restore, (type(self), text, arguments, self._backend.pad_token, self._backend.sides, self._overridden)

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)  # a new setting replaces these objects; nothing changes them
        return other

    def __repr__(self) -> str:
        return (
            f"Tokenizer({self._folder!r}, vocab_size={self.vocab_size}, model_max_length={self.model_max_length}, "
            f"padding_side={self.padding_side!r}, special_tokens={dict(self.settings.special)!r})"
        )


def _restore(
    kind: type[Tokenizer],
    text: str | None,
    arguments: dict[str, Any],
    pad_token: str | None,
    sides: Mapping[str, str],
    overridden: bool,
) -> Tokenizer:
    if text is None:
        return kind.from_files(**arguments)
    inner = tokenizers.Tokenizer.from_str(text)
    # A loaded tokenizer lacks the sections for padding and truncation, from which the settings have defaults.
    if pad_token is not None or "padding_side" in sides:
        inner.enable_padding(
            direction=sides.get("padding_side", "right"), pad_token=pad_token or "",
            pad_id=0 if pad_token is None else inner.token_to_id(pad_token) or 0,
        )  # fmt: skip
    if "truncation_side" in sides:
        inner.enable_truncation(1, direction=sides["truncation_side"])
    return kind(inner, **arguments, overridden=overridden)
