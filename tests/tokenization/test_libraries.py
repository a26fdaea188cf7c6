"""One `Tokenizer` over four libraries: the ids, offsets and texts are each library's own."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import sentencepiece
import tiktoken
import torch
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

import layerzero as lz
from layerzero.spec.errors import BackendNotAvailableError, ConfigurationError, TokenizerMismatchError
from layerzero.spec.reasons import Reason
from layerzero.tokenization.tokenizer import Tokenizer
from tests.tokenization.made import (
    NUM_RANKS,
    ODD,
    PATTERN,
    SENTENCES,
    SPECIALS,
    encoding,
    model_proto,
    processor,
    ranks,
    tekken,
    trained,
)

TEXTS = [*SENTENCES[:40], *ODD]
LIBRARIES = ("tokenizers", "tiktoken", "sentencepiece", "mistral_common")


@pytest.fixture(scope="module")
def mistral_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tekken.json."""
    return tekken(tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def sources(mistral_file: Path) -> dict[str, Any]:
    """An object of each library."""
    return {
        "tokenizers": trained(),
        "tiktoken": encoding(),
        "sentencepiece": processor(),
        "mistral_common": MistralTokenizer.from_file(str(mistral_file)),
    }


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    """The name of each library."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def tokenizer(library: str, sources: dict[str, Any]) -> Tokenizer:
    """A tokenizer over an object of the library."""
    return Tokenizer(sources[library])


def ids_by_hand(library: str, own: Any, text: str, special: bool) -> list[int]:
    """What the library itself gives for one text."""
    if library == "tokenizers":
        return list(own.encode(text, add_special_tokens=special).ids)
    if library == "tiktoken":
        return list(own.encode(text, disallowed_special=()))
    if library == "sentencepiece":
        return list(own.encode(text, add_bos=special))
    return list(own.instruct_tokenizer.tokenizer.encode(text, bos=special, eos=False))


def text_by_hand(library: str, own: Any, ids: list[int]) -> str:
    """What the library itself makes of ids, without special tokens."""
    if library == "mistral_common":
        return str(own.instruct_tokenizer.tokenizer.decode(ids, SpecialTokenPolicy.IGNORE))
    if library == "tiktoken":
        return str(own.decode([token for token in ids if token < NUM_RANKS]))
    return str(own.decode(ids))


@pytest.mark.parametrize("special", [True, False])
def test_ids_and_texts_are_the_librarys(
    library: str, tokenizer: Tokenizer, sources: dict[str, Any], special: bool
) -> None:
    """For prose and odd text, in a batch, with special tokens around them and without; and back."""
    own = sources[library]
    for text, tokens in zip(TEXTS, tokenizer.encode(TEXTS, special_tokens=special), strict=True):
        ids = ids_by_hand(library, own, text, special)
        assert tokens.ids.tolist() == ids and tokens.ids.dtype == torch.int64
        assert tokenizer.decode([tokens.ids]) == [text_by_hand(library, own, ids)]


def test_offsets_are_the_librarys(library: str, tokenizer: Tokenizer, sources: dict[str, Any]) -> None:
    """The characters of each token; special tokens around a text stand for none."""
    own = sources[library]
    for text, tokens in zip(TEXTS, tokenizer.encode(TEXTS, offsets=True), strict=True):
        assert tokens.offsets is not None and tokens.offsets.shape == (len(tokens.ids), 2)
        spans = [tuple(span) for span in tokens.offsets.tolist()]
        if library == "tokenizers":
            assert spans == own.encode(text).offsets
        elif library == "sentencepiece":
            wanted = own.encode(text, return_type="offset_mapping", add_bos=False)["offsets"]
            assert spans == [(0, 0), *wanted]
        else:
            inner = own if library == "tiktoken" else own.instruct_tokenizer.tokenizer._model
            around = len(tokenizer.codec.before)
            starts = inner.decode_with_offsets(inner.encode_ordinary(text))[1]
            assert [start for start, _ in spans[around:]] == starts
            assert max((end for _, end in spans), default=0) == len(text)
            assert all(start < end for start, end in spans[around:])


def test_long_batches_are_those_of_short_ones(tokenizer: Tokenizer) -> None:
    """Where a library's own threads share the work, each text keeps its tokens and its place."""
    texts = [SENTENCES[at % 50] * (1 + at % 7) for at in range(200)]
    assert sum(map(len, texts)) > 1 << 16
    for text, tokens in zip(texts, tokenizer.encode(texts), strict=True):
        assert torch.equal(tokens.ids, tokenizer.encode([text])[0].ids)


@pytest.mark.parametrize("side", ["right", "left"])
def test_truncation_never_splits_a_character(tokenizer: Tokenizer, side: str) -> None:
    """At every limit whole characters are kept, of the beginning or the end, and what stands around them."""
    text = "naïve 👩‍👩‍👧 中文 naïve"
    whole = tokenizer.encode([text], offsets=True)[0]
    (plain,) = tokenizer.decode([whole.ids])
    around = len(tokenizer.codec.before) + len(tokenizer.codec.after)
    lengths, cut = set(), whole
    for limit in range(max(1, around), len(whole.ids) + 2):
        (cut,) = tokenizer.encode([text], max_tokens=limit, truncation_side=side, offsets=True)
        assert len(cut.ids) <= limit and cut.offsets is not None and len(cut.offsets) == len(cut.ids)
        (kept,) = tokenizer.decode([cut.ids])
        assert "\ufffd" not in kept
        assert plain.startswith(kept) if side == "right" else plain.endswith(kept)
        ids, before = cut.ids.tolist(), list(tokenizer.codec.before)
        assert ids[: len(before)] == before and ids[len(ids) - len(tokenizer.codec.after) :] == list(
            tokenizer.codec.after
        )
        lengths.add(len(ids))
    assert torch.equal(cut.ids, whole.ids) and len(lengths) > 5
    with pytest.raises(ValueError, match=r"max_tokens needs at least \d, got 0"):
        tokenizer.encode([text], max_tokens=0)
    with pytest.raises(TypeError, match="max_tokens needs an int or None, got str"):
        tokenizer.encode([text], max_tokens=cast(Any, "9"))
    with pytest.raises(ValueError, match="truncation_side needs one of right, left, got 'middle'"):
        tokenizer.encode([text], truncation_side="middle")


def test_the_sources_own_truncation_splits_no_character_either() -> None:
    """A tokenizer that cuts at twelve tokens still does, between characters; a call may ask for more."""
    source = trained()
    source.enable_truncation(12, direction="left")
    text = "the end of 👩‍👩‍👧"
    split = source.decode(source.encode(text).ids)
    assert "\ufffd" in split or not text.endswith(split)
    tokenizer = Tokenizer(source)
    assert (tokenizer.max_tokens, tokenizer.truncation_side) == (12, "left")
    (cut,) = tokenizer.encode([text])
    assert len(cut.ids) <= 12 and text.endswith(tokenizer.decode([cut.ids])[0])
    assert tokenizer.decode([tokenizer.encode([text], max_tokens=99)[0].ids]) == [text]


def test_the_identity_follows_what_decides(
    library: str, sources: dict[str, Any], tmp_path: Path, mistral_file: Path
) -> None:
    """Equal for the same parts, another for each that changes the tokens; the library is named."""
    pairs: dict[str, Callable[[], list[Any]]] = {
        "tokenizers": lambda: [trained(300), trained(normalizer="NFKC")],
        "tiktoken": lambda: [
            encoding(pat_str=PATTERN + "| "),
            encoding(special_tokens={"<|end|>": NUM_RANKS}),
            encoding(mergeable_ranks=dict(list(ranks().items())[:-1])),
        ],
        "sentencepiece": lambda: [
            processor(add_eos=True),
            processor(add_bos=False),
            sentencepiece.SentencePieceProcessor(model_proto=model_proto("identity"), add_bos=True),
        ],
        "mistral_common": lambda: [changed_tekken(mistral_file, tmp_path)],
    }
    again = Tokenizer(sources[library]).identity
    assert again == Tokenizer(sources[library]).identity
    assert again.library == library.replace("_", "-")
    digests = {Tokenizer(other).identity.digest for other in pairs[library]()}
    assert len(digests) == len(pairs[library]()) and again.digest not in digests
    if library == "sentencepiece":
        assert again.normalizer == "nmt_nfkc"


def changed_tekken(file: Path, folder: Path) -> Path:
    """The same vocabulary in another version of Mistral's format."""
    other = folder / "tekken.json"
    definition = json.loads(file.read_text())
    definition["config"]["version"] = "v7"
    other.write_text(json.dumps(definition))
    return other


def test_special_tokens_in_a_text_are_read_only_where_that_is_asked(tokenizer: Tokenizer) -> None:
    """Each name becomes its id, the rest is the text that it was, with offsets."""
    token, name = next(iter(tokenizer.codec.special.items()))
    text = f"é {name}naïve"
    (read,) = tokenizer.encode([text], parse_special=True, special_tokens=False, offsets=True)
    at = read.ids.tolist().index(token)
    assert read.offsets is not None and read.offsets[at].tolist() == [2, 2 + len(name)]
    assert name in tokenizer.decode([read.ids], skip_special_tokens=False)[0]
    assert name not in tokenizer.decode([read.ids])[0]
    (plain,) = tokenizer.encode([text], special_tokens=False)
    assert (token in plain.ids.tolist()) == (tokenizer.identity.library == "tokenizers")


def test_tiktoken_reads_special_tokens_as_tiktoken(sources: dict[str, Any]) -> None:
    """As `allowed_special="all"`; an id between its tokens that stands for nothing is refused by name."""
    own = sources["tiktoken"]
    tokenizer = Tokenizer(own)
    text = f"<|user|>hello{' there' * 3}<|end|><|end|>"
    (read,) = tokenizer.encode([text], parse_special=True)
    assert read.ids.tolist() == own.encode(text, allowed_special="all")
    assert tokenizer.decode([read.ids], skip_special_tokens=False) == [text]
    with pytest.raises(
        ValueError, match=rf"rows\[0\] needs ids of tokens, got {NUM_RANKS + 1} at position 1"
    ):
        tokenizer.decode([torch.tensor([1, NUM_RANKS + 1])])
    assert (tokenizer.token_text(NUM_RANKS + 1), tokenizer.token_bytes(NUM_RANKS + 1)) == ("", b"")
    assert tokenizer.token_text(SPECIALS["<|end|>"]) == "<|end|>"


def test_an_encoding_of_the_librarys_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plugin of tiktoken registers is taken as any encoding."""
    from tiktoken import registry

    monkeypatch.setattr(registry, "ENCODINGS", {})
    monkeypatch.setattr(
        registry, "ENCODING_CONSTRUCTORS", {"prose": lambda: {
            "name": "prose", "pat_str": PATTERN, "mergeable_ranks": ranks(), "special_tokens": SPECIALS,
        }},
    )  # fmt: skip
    assert Tokenizer(tiktoken.get_encoding("prose")).identity == Tokenizer(encoding()).identity


def test_the_bytes_of_tokens_are_the_text(tokenizer: Tokenizer) -> None:
    """Those of all tokens behind each other, halves of characters too."""
    for text in ("naïve 中文 end", "a b"):
        (tokens,) = tokenizer.encode([text], special_tokens=False)
        whole = b"".join(tokenizer.token_bytes(token) for token in tokens.ids.tolist()).decode()
        assert whole.removeprefix(" ") == text


# -- files -----------------------------------------------------------------------------------------------


def test_a_folders_tokenizer_is_found(tmp_path: Path, mistral_file: Path) -> None:
    """By the names of its files, the first of several in a fixed order; a file by its own name."""
    (tmp_path / "tokenizer.model").write_bytes(model_proto())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    assert Tokenizer(tmp_path).identity == Tokenizer(processor()).identity
    (tmp_path / "tekken.json").write_bytes(mistral_file.read_bytes())
    assert Tokenizer(tmp_path).identity.library == "mistral-common"
    trained().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).identity == Tokenizer(trained()).identity
    assert Tokenizer(str(tmp_path / "tokenizer.model")).identity.library == "sentencepiece"
    (tmp_path / "other.model").write_bytes(model_proto())
    assert Tokenizer(tmp_path / "other.model").identity.library == "sentencepiece"


@pytest.mark.parametrize("name", ["tokenizer.json", "tekken.json", "tokenizer.model", "a.model.v3"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    """Cut off or of another kind: an error with its name, of whichever library."""
    file = tmp_path / name
    for content in (b"", b"\xff\xfe", b"[]", b'{"config": {}}'):
        file.write_bytes(content)
        with pytest.raises(ConfigurationError, match="source needs"):
            Tokenizer(file)
    (tmp_path / "ranks.tiktoken").write_text("")
    with pytest.raises(
        ConfigurationError, match=r"source needs a file like tokenizer\.json.*ranks\.tiktoken"
    ):
        Tokenizer(tmp_path / "ranks.tiktoken")


def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistral_file: Path
) -> None:
    """With the extra that brings it and a reason code."""
    import sys

    for module, file in (("sentencepiece", tmp_path / "a.model"), ("mistral_common", mistral_file)):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(BackendNotAvailableError, match="pip install 'layerzero-runtime") as refused:
                Tokenizer(file)
        assert refused.value.context["reason"] is Reason.BACKEND_MISSING


def test_a_tokenizer_of_transformers_brings_its_template() -> None:
    """Its backend is wrapped, and its chat template with its special tokens."""
    from transformers import PreTrainedTokenizerFast

    source = PreTrainedTokenizerFast(tokenizer_object=trained(), bos_token="<s>", eos_token="</s>")
    source.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer(source)
    messages = [{"role": "user", "content": "naïve"}]
    right = source.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert tokenizer.encode_chat(messages).ids.tolist() == right


# -- padding and whose it is -------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(sources: dict[str, Any], side: str) -> None:
    """Rows become as long as asked, and the mask says which ids are theirs; tokens stay as they are."""
    tokenizer = Tokenizer(sources["sentencepiece"])
    rows = tokenizer.encode(["a", SENTENCES[0], ""])
    longest = len(rows[1].ids)
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, longest), ({"multiple_of": 8}, -(-longest // 8) * 8), ({"length": 99}, 99),
    ]  # fmt: skip
    for options, wanted in cases:
        padded = tokenizer.pad(rows, side=side, **options)
        assert padded.ids.shape == padded.mask.shape == (3, wanted)
        for row, ids, mask in zip(rows, padded.ids, padded.mask, strict=True):
            assert torch.equal(ids[mask], row.ids) and set(ids[~mask].tolist()) <= {3}
            edge = mask[: len(row.ids)] if side == "right" else mask[wanted - len(row.ids) :]
            assert bool(edge.all())
    with pytest.raises(ValueError, match=rf"length needs at least the longest row's {longest} tokens, got 2"):
        tokenizer.pad(rows, length=2)
    with pytest.raises(ValueError, match="side needs one of"):
        tokenizer.pad(rows, side="both")
    with pytest.raises(ValueError, match="rows needs at least one row"):
        tokenizer.pad([])
    plain = Tokenizer(sources["tiktoken"])
    with pytest.raises(ValueError, match="pad_id needs an id"):
        plain.pad(plain.encode(["a"]))
    assert plain.pad(plain.encode(["a b", "a"]), pad_id=9).ids[1, -1] == 9


def test_another_tokenizer_than_the_one_that_is_meant_is_refused(tokenizer: Tokenizer) -> None:
    """By digest and by a model's vocabulary, each with a reason code; its own are taken."""
    digest = tokenizer.identity.digest
    tokenizer.require(digest=digest, vocabulary=tokenizer.vocabulary)
    with pytest.raises(TokenizerMismatchError, match="TOKENIZER_MISMATCH") as refused:
        tokenizer.require(digest="0" * 64)
    assert refused.value.problem.reason is Reason.TOKENIZER_MISMATCH and digest in str(refused.value)
    with pytest.raises(lz.TokenizerMismatchError, match="TOKENIZER_VOCABULARY"):
        tokenizer.require(vocabulary=tokenizer.vocabulary - 1)


@pytest.mark.asyncio
async def test_awaited_tokens_are_the_blocking_ones(tokenizer: Tokenizer) -> None:
    """With every option, alone and in a crowd, and a text so long that it has a thread of its own."""
    import asyncio

    texts = [*TEXTS, SENTENCES[0] * 200]
    options: list[dict[str, Any]] = [{}, {"offsets": True}, {"max_tokens": 9, "truncation_side": "left"}]
    how: list[dict[str, Any]] = [
        options[at % 3] | {"special_tokens": at % 2 == 0} for at in range(len(texts))
    ]
    crowd = await asyncio.gather(
        *(lz.tokenize(text, tokenizer, **one) for text, one in zip(texts, how, strict=True))
    )
    for text, one, tokens in zip(texts, how, crowd, strict=True):
        (right,) = tokenizer.encode([text], **one)
        assert torch.equal(tokens.ids, right.ids) and (tokens.offsets is None) == (right.offsets is None)
        assert await lz.detokenize(tokens.ids, tokenizer) == tokenizer.decode([right.ids])[0]


@pytest.mark.asyncio
async def test_a_tokenizer_goes_to_another_process(library: str, sources: dict[str, Any]) -> None:
    """After it was used, with its template and without its cache."""
    template = lz.ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"})
    tokenizer = Tokenizer(sources[library], cache=lz.PromptCache(), chat_template=template)
    (right,) = tokenizer.encode([TEXTS[0]])
    await lz.tokenize(TEXTS[0], tokenizer)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.identity == tokenizer.identity and again.cache is None
    assert torch.equal((await lz.tokenize(TEXTS[0], again)).ids, right.ids)
    assert again.render([{"content": "a"}]) == "<s>a"


def test_mistrals_chat_is_mistral_commons(sources: dict[str, Any]) -> None:
    """Ids as of `encode_chat_completion`; what a message holds is text, whatever it is named."""
    own = sources["mistral_common"]
    tokenizer = Tokenizer(own)
    messages: list[Any] = [{"role": "user", "content": "hello [/INST] </s>"}]
    right = own.encode_chat_completion(ChatCompletionRequest.from_openai(messages)).tokens
    ids = tokenizer.encode_chat(messages).ids.tolist()
    assert ids == right and ids.count(tokenizer.codec._ids_of_marks["[/INST]"]) == 1
    unknown: list[dict[str, Any]] = [{"add_generation_prompt": False}, {"tone": "kind"}]
    for values in unknown:
        with pytest.raises(lz.ChatTemplateError, match="mistral-common's chats take messages and tools"):
            tokenizer.encode_chat(messages, **values)
    with pytest.raises(lz.ChatTemplateError, match="messages needs what mistral-common takes"):
        tokenizer.encode_chat([{"role": "nobody", "content": "a"}])
