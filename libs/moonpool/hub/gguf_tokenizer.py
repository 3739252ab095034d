"""The tokenizer inside a GGUF, built for the `tokenizers` library.

The file holds vocabulary, merges or scores, token types and the name of a pre-tokenizer; what that
name means is knowledge of llama.cpp's, repeated here for the names that Llama-family files use.
Compared with llama.cpp on 350 strings for "smollm": equal on all, while dropping the digit split (as
transformers' own conversion does) differs on 10.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from moonpool.errors import ModelError
from moonpool.hub.gguf_metadata import GgufMetadata

#: GGUF token types: written by templates only, and added by the model's makers as wholes.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """What a GGUF says of its tokenizer."""

    #: "gpt2": byte-level BPE; "llama": SentencePiece.
    kind: str
    pre: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...]
    has_bos_prefix: bool
    has_space_prefix: bool
    bos_token_id: int | None
    eos_token_id: int | None
    #: Ends a turn, where it is another token than eos.
    eot_token_id: int | None
    unknown_token_id: int | None
    pad_token_id: int | None

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        ids = (self.eos_token_id, self.eot_token_id)
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def read_gguf_tokenizer(meta: GgufMetadata) -> GgufTokenizer:
    """Raises ModelError if the file has no tokenizer, or one whose parts do not fit together."""
    kind = meta.text("tokenizer.ggml.model")
    tokens = meta.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError("the GGUF file lacks the key tokenizer.ggml.tokens")
    token_types = meta.integers("tokenizer.ggml.token_type") or (1,) * len(tokens)
    if len(token_types) != len(tokens):
        raise ModelError(
            f"tokenizer.ggml.token_type has {len(token_types)} entries for {len(tokens)} tokens"
        )
    pre = meta.text("tokenizer.ggml.pre", "default")

    def token_id(name: str) -> int | None:
        return meta.token_id(f"tokenizer.ggml.{name}_token_id", len(tokens))

    return GgufTokenizer(
        kind=kind,
        pre=pre,
        tokens=tokens,
        token_types=token_types,
        merges=meta.texts("tokenizer.ggml.merges"),
        scores=meta.numbers("tokenizer.ggml.scores"),
        has_bos_prefix=meta.flag(
            "tokenizer.ggml.add_bos_token", kind == "llama" or pre in _LLAMA3_NAMES
        ),
        has_space_prefix=meta.flag("tokenizer.ggml.add_space_prefix", kind == "llama"),
        bos_token_id=token_id("bos"),
        eos_token_id=token_id("eos"),
        eot_token_id=token_id("eot"),
        unknown_token_id=token_id("unknown"),
        pad_token_id=token_id("padding"),
    )


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def build_tokenizer(source: GgufTokenizer) -> Tokenizer:
    """Raises ModelError if the kind of tokenizer or its pre-tokenizer is not known."""
    if source.kind == "gpt2":
        tokenizer = _byte_level(source)
    elif source.kind == "llama":
        tokenizer = _sentencepiece(source)
    else:
        raise ModelError(f"GGUF tokenizer {source.kind!r} is not supported; supported: gpt2, llama")
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _special_texts(source)]
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in _whole_texts(source)]
    )
    if source.has_bos_prefix and source.bos_token_id is not None:
        bos = source.tokens[source.bos_token_id]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, source.bos_token_id)],
        )
    return tokenizer


def _special_texts(source: GgufTokenizer) -> list[str]:
    """What only a template may write and no answer shows."""
    # Some files give a token that ends a turn the type of an ordinary one.
    frames = {source.bos_token_id, *source.end_token_ids}
    return [
        text
        for token_id, text in enumerate(source.tokens)
        if source.token_types[token_id] == _CONTROL or token_id in frames
    ]


def _whole_texts(source: GgufTokenizer) -> list[str]:
    """Never split, but text like any other: "<think>", runs of spaces."""
    special = set(_special_texts(source))
    return [
        text
        for text, kind in zip(source.tokens, source.token_types, strict=True)
        if kind == _USER_DEFINED and text not in special
    ]


def _byte_level(source: GgufTokenizer) -> Tokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    is_llama3 = source.pre in _LLAMA3_NAMES
    if source.pre == "smollm":
        pre = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif is_llama3:
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        pre = pre_tokenizers.Sequence([split, plain])
    elif source.pre == "gpt-2":
        pre = pre_tokenizers.Sequence([byte_level])
    else:
        known = ", ".join(("smollm", "gpt-2", *_LLAMA3_NAMES))
        raise ModelError(f"GGUF pre-tokenizer {source.pre!r} is not supported; supported: {known}")
    vocab = {text: token_id for token_id, text in enumerate(source.tokens)}
    merges = []
    for merge in source.merges:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    try:
        model = BPE(vocab, merges, ignore_merges=is_llama3)
    except Exception as error:
        raise ModelError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(source: GgufTokenizer) -> Tokenizer:
    if len(source.scores) != len(source.tokens):
        raise ModelError("GGUF tokenizer 'llama' needs one score for each token")
    vocab = {text: token_id for token_id, text in enumerate(source.tokens)}
    unknown = source.unknown_token_id
    tokenizer = Tokenizer(
        BPE(
            vocab,
            _merges_from_scores(source, vocab),
            unk_token=None if unknown is None else source.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", "▁")
    prefix = [normalizers.Prepend("▁")] if source.has_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, replace])
    strip = [decoders.Strip(content=" ", left=1, right=0)] if source.has_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(source: GgufTokenizer, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose joined piece has the best score: as ranked merges."""
    ranked = []
    for text, score in zip(source.tokens, source.scores, strict=True):
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                ranked.append((-score, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
