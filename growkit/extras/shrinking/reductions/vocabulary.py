"""Fewer tokens: rows of the embedding and of the head are left out, with their tokens.

What is left keeps its rows, so that its logits keep their values; the softmax gives it the
probability of the tokens that are gone. The tokenizer can still make every token
(``growkit.extras.shrinking.tokenizer``); the ids that are left are numbered anew, in order,
also in the config and in the settings of generation.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from growkit.base.errors import InputError
from growkit.base.options import Option
from growkit.base.units import size, spans
from growkit.extras.planned_tokenizer import with_tokenizer
from growkit.extras.shrinking.kept_tokens import kept_tokens, with_tokens
from growkit.extras.shrinking.selecting import Selected
from growkit.extras.shrinking.token_ids import ids_in
from growkit.extras.shrinking.tokenizer import (
    Content,
    ids_by_token,
    needed,
    new_ids,
    read_tokenizer,
    write_trimmed,
)
from growkit.model.checkpoint.folder import GENERATION, Folder
from growkit.model.checkpoint.scratch import in_temporary
from growkit.model.model import Model
from growkit.planning.operation import Change, Operation
from growkit.planning.plan import Plan, Tokens
from growkit.planning.transforms import Kept, Transform

VOCAB = Option(
    "vocab",
    "a UTF-8 file with the tokens to keep, as the tokenizer spells them, one on each line",
    form="FILE",
)
VOCAB_OF = Option("vocab_of", "a UTF-8 text; the tokens that it uses are kept", form="TEXT")
IDS = Option("ids", "ids of the tokens to keep, such as 0-258,300", form="N-N,N,…")

MAX_TEXT = 1 << 30
"""Limit for the bytes of a text whose tokens are kept."""


class Trim(Operation):
    """See the module."""

    name = "vocabulary"
    paper = "-"
    options = (VOCAB, VOCAB_OF, IDS)

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        if len(options) != 1:
            raise InputError("the tokens to keep are named in one way: by vocab, vocab_of or ids")
        with with_tokenizer(source) as folder:
            return _change(source, folder, options)


def _change(source: Model, folder: Folder, options: Mapping[str, str]) -> Change:
    """The change of a model whose tokenizer is in a folder."""
    content = read_tokenizer(folder)
    documents = _documents(options[VOCAB_OF.name]) if VOCAB_OF.name in options else []
    old = source.sizes["vocab"]
    kept = _tokens_to_keep(source, folder, content, options, documents)
    if len(kept) == old:
        raise InputError(f"all {old} tokens of {source.where()} would be kept")
    tokens = kept_tokens(kept, partial(write_trimmed, content=content, kept=kept))
    plan = _plan(source, tokens)
    lost = (
        f"{old - len(kept)} of {old} tokens no longer share the softmax: logits of the "
        f"{len(kept)} others stay, their probabilities do not"
    )
    warnings = _differences(folder, tokens, new_ids(content, kept), documents)
    if documents and Path(options[VOCAB_OF.name]).stat().st_size > MAX_TEXT:
        warnings.append(f"only the tokens of the first {size(MAX_TEXT)} of the text are kept")
    ids = spans(kept, "-")
    settled = {VOCAB.name: None, VOCAB_OF.name: None, IDS.name: ids}
    return Change([plan], lost=lost, settled=settled, warnings=warnings)


def _documents(text: str) -> list[str]:
    from growkit.engine.prompts import documents, read_text  # imports torch

    return documents(read_text(text, MAX_TEXT), strip=False)


def _tokens_to_keep(
    source: Model,
    folder: Folder,
    content: Content,
    options: Mapping[str, str],
    documents: Sequence[str],
) -> list[int]:
    """The ids of all tokens to keep, in ascending order.

    Raises:
        InputError: a token to keep is unknown.
    """
    from growkit.engine.prompts import ids_of, load_tokenizer  # imports torch

    count, tokenizer = source.sizes["vocab"], load_tokenizer(folder)
    used = {*tokenizer.all_special_ids}  # a class may add some that are in no file
    if IDS.name in options:
        used |= {*_numbers(options[IDS.name], count)}
    elif VOCAB.name in options:
        used |= {*_named(options[VOCAB.name], ids_by_token(content))}
    for document in documents:
        used |= {*ids_of(tokenizer, document)}
    settings = folder.json(GENERATION) if folder.has(GENERATION) else {}
    used |= {number for of in (source.config, settings) for number in ids_in(of) if number >= 0}
    return sorted(number for number in needed(content, used) if number < count)


def _named(file: str, ids: Mapping[str, int]) -> list[int]:
    from growkit.engine.prompts import read_text  # imports torch

    names = [line for line in read_text(file, MAX_TEXT).decode().split("\n") if line]
    for name in names:
        if name not in ids:
            raise InputError(
                f"{file} has {name!r}, which is no token of the model; name tokens as its "
                "tokenizer spells them, one on each line"
            )
    return [ids[name] for name in names]


def _numbers(text: str, count: int) -> Iterator[int]:
    """Read ids, e.g. ``0-258,300``."""
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < count):
            raise InputError(
                f"ids has {part!r}; numbers below {count} and ranges of them were expected, such "
                "as 0-258,300"
            )
        yield from range(int(first), int(last) + 1)


def _plan(source: Model, tokens: Tokens) -> Plan:
    config, rows = with_tokens(source, tokens.kept)
    why = "the rows of the tokens that are left"
    transforms: dict[str, Transform] = {
        member.name: Selected(member.name, rows[member.name], why)
        if member.name in rows
        else Kept(member.name)
        for member in source.family.members(source.config)
    }
    return Plan.checked(source, config, transforms, tokens=tokens)


def _differences(
    folder: Folder, tokens: Tokens, new: Mapping[int, int], documents: Sequence[str]
) -> list[str]:
    """Say which parts of a text are encoded in other pieces than before; empty for none."""
    from growkit.engine.prompts import ids_of, load_tokenizer  # imports torch

    def compare(scratch: Path) -> list[str]:
        folder.carry_over(scratch)
        folder.copy("config.json", scratch)  # the class of the tokenizer depends on its type
        assert tokens.write
        tokens.write(Folder(scratch))
        before, after = load_tokenizer(folder), load_tokenizer(scratch)
        return [
            document
            for document in documents
            if [new[number] for number in ids_of(before, document)] != ids_of(after, document)
        ]

    other = in_temporary("tokenizer", compare)
    if not other:
        return []
    return [
        f"{len(other)} of {len(documents)} documents of the text are encoded in other pieces than "
        f"before (first {other[0][:40]!r})"
    ]


OPERATION = Trim()
