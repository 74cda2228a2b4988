"""The special tokens around texts, by the name of a template.

Decides: the position and the token type of special tokens. Leaves to others: which tokens have the roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, processors

from flodl.errors import printable
from flodl_hf.errors import TokenizerError

# One text and two texts; a role stands for its token, and a number is a token type.
TEMPLATES: Mapping[str, tuple[str, str]] = {
    "bert": ("cls_token $A sep_token", "cls_token $A sep_token $B:1 sep_token:1"),
    "doubled": ("cls_token $A sep_token", "cls_token $A sep_token sep_token $B sep_token"),
    "doubled ends": ("bos_token $A eos_token", "bos_token $A eos_token eos_token $B eos_token"),
    "none": ("$A", "$A $B:1"),
    "end": ("$A eos_token", "$A $B eos_token"),
    "ends": ("$A eos_token", "$A eos_token $B eos_token"),
    "funnel": ("cls_token:2 $A sep_token", "cls_token:2 $A sep_token $B:1 sep_token:1"),
    "xlnet": ("$A sep_token cls_token:2", "$A sep_token $B:1 sep_token:1 cls_token:2"),
    "splinter": ("cls_token $A sep_token", "cls_token $A question_token . sep_token $B:1 sep_token:1"),
    "splinter left": ("cls_token $A sep_token", "cls_token $A sep_token $B:1 question_token . sep_token:1"),
    "language last": ("$A eos_token src_lang", "$A $B eos_token src_lang"),
    "language first": ("src_lang $A eos_token", "src_lang $A $B eos_token"),
}


def template_ends(template: str) -> tuple[str, str] | None:
    """Return the roles of the first and the last token around one text; None for a template of another form."""
    parts = TEMPLATES.get("doubled" if template == "roberta" else template, ("", ""))[0].split()
    roles = [part.partition(":")[0] for part in parts if not part.startswith("$")]
    return (roles[0], roles[1]) if len(parts) == 3 and len(roles) == 2 and parts[1] == "$A" else None


def frame(
    tokenizer: Tokenizer,
    template: str,
    tokens: Mapping[str, str],
    folder: str,
    *,
    prefix: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Set the special tokens around one text or two.

    Args:
        tokenizer: the tokenizer to change.
        template: a name in `TEMPLATES`, ``"roberta"`` ("doubled" with offsets that leave out leading spaces), or
            ``"bytes"`` (no tokens, and offsets that include spaces).
        tokens: token by role.
        folder: the source of the vocabulary, for messages.
        prefix: whether a space is added before a text.
        settings: ``tokenizer_config.json``, of which ``add_bos_token`` and ``add_eos_token`` extend "none" and
            ``trim_offsets`` applies to "roberta".

    Raises:
        TokenizerError: if the vocabulary lacks a token of the template.
    """
    if template == "bytes":
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        return
    single, pair = TEMPLATES["doubled" if template == "roberta" else template]
    if template == "none":
        ends = (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token"))
        bos, eos = (role if (settings or {}).get(key) is True and role in tokens else "" for key, role in ends)
        single = f"{bos} $A {eos}"
        pair = f"{single} {bos}:1 $B:1 {eos}:1".replace(" :1", "")
    used: dict[str, int | None] = {}

    def piece(part: str) -> str:
        role, _, number = part.partition(":")
        if role.startswith("$"):
            return f"{role}:{number or 0}"
        token = tokens.get(role) or (tokens["eos_token"] if role == "sep_token" else role)
        used[token] = tokenizer.token_to_id(token)
        return f"{token}:{number or 0}"

    # Lists, because a token may contain the space that separates the parts of a template string.
    parts = [[piece(part) for part in text.split()] for text in (single, pair)]
    missing = [printable(token, 40) for token, number in used.items() if number is None]
    if missing:
        raise TokenizerError(
            f"{folder}: the vocabulary lacks {' and '.join(missing)}, expected every token of the template; "
            "name the special tokens of the vocabulary in tokenizer_config.json",
            where=folder,
            missing=missing,
        )
    known = [(token, number) for token, number in used.items() if number is not None]
    if template == "roberta":
        (first, last) = (known[0], known[-1])
        trim = (settings or {}).get("trim_offsets") is not False
        tokenizer.post_processor = processors.RobertaProcessing(last, first, trim_offsets=trim, add_prefix_space=prefix)
        return
    tokenizer.post_processor = processors.TemplateProcessing(single=parts[0], pair=parts[1], special_tokens=known)
