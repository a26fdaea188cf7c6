"""Speculative decoding: a small model drafts, a large one verifies several tokens in one forward.

`generate` coordinates the two. Each is a sequence of its own, on the same device or another, with its own
cache and its own selections; what comes out is distributed as the large model alone would have drawn it.
While the large model verifies, the small one already drafts on, as if everything were accepted; where that
holds, nothing is thrown away.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import anyio
import torch
from torch import Tensor

from layerzero.api.readback import to_host
from layerzero.calls.awaited import awaited
from layerzero.ops import checks
from layerzero.ops.sampling.draw import token_weights
from layerzero.ops.table import get

_sample, _verify_chain = awaited(get("sample")), awaited(get("verify_chain"))


class Held(Protocol):
    """One sequence of one model, with its cache.

    `rollback` forgets the tokens from `length` on, and gives back what they held.
    """

    @property
    def length(self) -> int: ...

    def rollback(self, length: int) -> None: ...


class Decoder(Held, Protocol):
    """A sequence whose `forward` adds tokens (T,) int64 and gives the logits (T, V) after each of them."""

    async def forward(self, tokens: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Drawing:
    """How tokens are drawn: the seed, the place of the first one, and the filters of `sample`."""

    seed: int
    offset: int
    temperature: float
    top_k: int
    top_p: float


@runtime_checkable
class Drafter(Held, Protocol):
    """A draft that draws by itself, because its logits are dear to fetch.

    `draft` adds `fresh` (n,) and gives `places` tokens (K,) behind them with their distributions (K, V); the
    last token does not join the sequence.
    """

    async def draft(self, fresh: Tensor, places: int, drawing: Drawing) -> tuple[Tensor, Tensor]: ...


def need_logits(name: str, logits: Any, rows: int) -> Tensor:
    """What the `forward` of a decoder gave, once it is seen to be logits of at least `rows` tokens."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"{name} needs a forward that gives floating point logits, got {got}")
    if logits.dim() != 2 or logits.shape[0] < rows:
        raise ValueError(
            f"{name} needs a forward that gives logits (T, V) of at least {rows} tokens, "
            f"got shape {tuple(logits.shape)}"
        )
    return logits


async def drafted_by(decoder: Decoder, fresh: Tensor, places: int, drawing: Drawing) -> tuple[Tensor, Tensor]:
    """`places` tokens (K,) behind `fresh`, one by one, and the distributions (K, V) that they came from."""
    filters: dict[str, Any] = {
        "temperature": drawing.temperature, "top_k": drawing.top_k, "top_p": drawing.top_p
    }  # fmt: skip
    tokens, probs = [], []
    for place in range(places):
        logits = need_logits("draft", await decoder.forward(fresh), 1)[-1:]
        fresh = await _sample(logits, seed=drawing.seed, offset=drawing.offset + place, **filters)
        tokens.append(fresh)
        probs.append(shares(logits, **filters))
    return torch.cat(tokens), torch.cat(probs)


@dataclass(frozen=True, slots=True)
class Round:
    """What decides one verification: nothing else may, so that every rank of a gang accepts alike.

    `fresh` (n,) are certain tokens that the target has not seen, `drafted` (K,) follow them and were drawn
    from `probs` (K, V); `kept` says that the target keeps the distribution of the first drafted token.
    `drawing` is what `verify_chain` and `sample` take.
    """

    fresh: Tensor
    drafted: Tensor
    probs: Tensor
    kept: bool
    drawing: Drawing


@runtime_checkable
class Verifier(Held, Protocol):
    """A target that verifies by itself: `verify` gives how many drafts stay, and the tokens (K + 1,).

    Behind those that stay and the one drawn after them the tokens are -1. Such a target keeps its
    distribution after the last draft.
    """

    async def verify(self, round_: Round) -> tuple[int, list[int]]: ...


@dataclass(slots=True)
class Speculation:
    """What a generation has done so far: `accepted` of `drafted` tokens in `rounds` target forwards."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    discarded: int = 0  # drafted ahead for nothing

    @property
    def acceptance(self) -> float:
        """The share of verified drafts that stayed."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class _Drafts:
    """Drafted tokens (K,) with the distributions (K, V) that each was drawn from."""

    tokens: Tensor
    probs: Tensor


class Generation:
    """The tokens of one speculative generation; iterate over it. `stats` counts what it took."""

    def __init__(
        self,
        draft: Decoder | Drafter,
        target: Decoder | Verifier,
        prompt: Sequence[int],
        *,
        places: int,
        max_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
        overlap: bool,
        end: Collection[int],
    ) -> None:
        self.stats = Speculation()
        self._draft, self._target = draft, target
        self._text = list(prompt)
        self._places, self._left, self._end = places, max_tokens, frozenset(end)
        self._filter: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        self._seed, self._overlap = seed, overlap
        self._busy = False
        self._known: Tensor | None = None  # the target's distribution of the next token, where it is known
        self._kept = False  # the same where the target keeps it
        self._ahead: _Drafts | None = None  # what was drafted beyond the tokens that are certain

    async def __aiter__(self) -> AsyncIterator[int]:
        while self._left > 0:
            if self._busy:
                raise RuntimeError("a generation needs one consumer: another one waits for its next tokens")
            self._busy = True
            try:
                new = await self._round()
            except BaseException as error:
                self._forget_uncertain()
                if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                    raise error.exceptions[0] from None  # a model's own error, not the task group around it
                raise
            finally:
                self._busy = False
            for token in new:
                self._left -= 1
                yield token
                if token in self._end or self._left <= 0:
                    return

    def _forget_uncertain(self) -> None:
        """Take both sequences back to the text, whatever a round that broke off had given them."""
        self._known = self._ahead = None
        self._kept = False
        for decoder in (self._target, self._draft):
            decoder.rollback(min(decoder.length, len(self._text)))

    async def _round(self) -> list[int]:
        """Draft, verify, and settle both sequences on what is certain now; the tokens that are new."""
        places = min(self._places, self._left)
        drafts = self._ahead or await self._drafted(self._text, places)
        self._ahead = None
        if len(drafts.tokens) > places:  # near the end fewer are wanted than were drafted ahead
            self.stats.discarded += len(drafts.tokens) - places
            drafts = _Drafts(drafts.tokens[:places], drafts.probs[:places])
        ahead: list[_Drafts] = []

        async def draft_on() -> None:
            ahead.append(await self._drafted([*self._text, *drafts.tokens.tolist()], self._places))

        text, stays, found = len(self._text), 0, list[int]()
        last: Tensor | None = None
        async with anyio.create_task_group() as group:
            if self._overlap and self._left > places:
                group.start_soon(draft_on)
            stays, found, last = await self._verified(drafts)
            if min(found[: stays + 1]) < 0:
                raise ValueError(
                    f"target needs logits with a finite largest value in each row, got others behind "
                    f"{text + stays} tokens"
                )
        self.stats.rounds += 1
        self.stats.drafted += len(drafts.tokens)
        self.stats.accepted += stays
        whole = stays == len(drafts.tokens)
        if whole and ahead:
            # The next token was drafted already: the target's distribution of it waits for that draft.
            self._known, self._ahead, self._kept = last, ahead[0], True
            new = found[:stays]
        else:
            self.stats.discarded += sum(len(lost.tokens) for lost in ahead)
            self._known, self._kept = None, False
            new = found[: stays + 1]
            self._target.rollback(min(self._target.length, text + stays))
            self._draft.rollback(min(self._draft.length, text + stays))
        self._text += new
        return new

    async def _drafted(self, text: Sequence[int], places: int) -> _Drafts:
        """`places` tokens behind `text`, one after the other."""
        fresh = torch.tensor(text[self._draft.length :])
        drawing = Drawing(self._seed, len(text), **self._filter)
        if isinstance(self._draft, Drafter):
            return _Drafts(*await self._draft.draft(fresh, places, drawing))
        return _Drafts(*await drafted_by(self._draft, fresh, places, drawing))

    async def _verified(self, drafts: _Drafts) -> tuple[int, list[int], Tensor | None]:
        """How many drafts stay, the tokens, and the target's distribution after the last if it is here."""
        text, target = len(self._text), self._target
        if isinstance(target, Verifier):
            fresh = torch.tensor(self._text[target.length :], dtype=torch.int64)
            drawing = Drawing(self._seed, text, **self._filter)
            stays, found = await target.verify(Round(fresh, drafts.tokens, drafts.probs, self._kept, drawing))
            return stays, found, None
        p = await self._verified_by(target, drafts)
        # The draft may live on another device; its distributions follow the tokens there.
        tokens, accepted = await _verify_chain(
            drafts.probs.to(p.device).unsqueeze(0),
            drafts.tokens.to(p.device).unsqueeze(0),
            p.unsqueeze(0),
            seed=self._seed,
            offset=text,
        )
        row = (await to_host(torch.cat([accepted, tokens[0]]))).tolist()
        return row[0], row[1:], p[-1]

    async def _verified_by(self, target: Decoder, drafts: _Drafts) -> Tensor:
        """The target's distributions (K + 1, V) at each drafted place and after the last."""
        fresh = torch.tensor(self._text[target.length :], dtype=torch.int64)
        run = torch.cat([fresh.to(drafts.tokens.device), drafts.tokens])
        rows = len(drafts.tokens) + (self._known is None)
        logits = need_logits("target", await target.forward(run), rows)
        if logits.shape[-1] != drafts.probs.shape[-1]:
            raise ValueError(
                f"draft needs the target's vocabulary of {logits.shape[-1]} tokens, got "
                f"{drafts.probs.shape[-1]}"
            )
        if logits.device.type == "cpu" and not bool(logits.amax(-1).isfinite().all()):
            place = len(self._text)
            raise ValueError(
                f"target needs logits with a finite largest value in each row, got others behind "
                f"{place} tokens or later"
            )
        p = self._shares(logits[-len(drafts.tokens) - 1 :])
        return p if self._known is None else torch.cat([self._known.unsqueeze(0), p])

    def _shares(self, logits: Tensor) -> Tensor:
        return shares(logits, **self._filter)


def shares(logits: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The distributions (T, V) that `sample` draws by, from logits (T, V)."""
    weights = token_weights(logits, temperature, top_k, top_p).double()
    return weights / weights.sum(-1, keepdim=True)


def generate(
    draft: Decoder | Drafter,
    target: Decoder | Verifier,
    prompt: Sequence[int],
    *,
    places: int = 4,
    max_tokens: int = 16,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    overlap: bool = True,
    end: Collection[int] = (),
) -> Generation:
    """Continue `prompt` with tokens distributed as `target`'s, `places` drafts of `draft` to a forward.

    Both decoders start with an empty sequence, or with one that the prompt begins with; both have the same
    vocabulary. temperature, top_k, top_p and seed as in `sample`; the same seed gives the same tokens.
    `overlap` drafts on while the target verifies. It stops after `max_tokens`, or behind a token of `end`.
    Raises: ValueError, TypeError: an argument does not fit, by name. What the models raise.
    """
    prompt = _ids("prompt", prompt)
    if not prompt:
        raise ValueError("prompt needs at least one token, got none")
    checks.need_int("places", places, low=1)
    checks.need_int("max_tokens", max_tokens, low=1)
    checks.need_number("temperature", temperature, low=0.0)
    checks.need_int("top_k", top_k, low=0)
    checks.need_number("top_p", top_p, low=0.0, high=1.0)
    if seed is not None:
        checks.need_whole("seed", seed)
    if not (hasattr(draft, "forward") or isinstance(draft, Drafter)):
        raise TypeError(f"draft needs `forward`, which gives logits, got {type(draft).__name__} without it")
    if not (hasattr(target, "forward") or isinstance(target, Verifier)):
        raise TypeError(f"target needs `forward`, which gives logits, got {type(target).__name__} without it")
    if draft is target:
        raise ValueError("draft needs to be a sequence of its own, got the target's")
    for name, decoder in (("draft", draft), ("target", target)):
        if not 0 <= decoder.length < len(prompt):
            raise ValueError(
                f"{name} needs less than the prompt's {len(prompt)} tokens, got {decoder.length}"
            )
    return Generation(
        draft,
        target,
        prompt,
        places=places,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed if seed is not None else _new_seed(),
        overlap=overlap,
        end=_ids("end", end),
    )


def _ids(name: str, given: Collection[int]) -> list[int]:
    if not isinstance(given, Collection) or isinstance(given, str | Tensor):
        raise TypeError(f"{name} needs token ids as ints, got {type(given).__name__}")
    return [checks.need_int(name, token, low=0) for token in given]


def _new_seed() -> int:
    drawn: Any = torch.randint(1 << 62, (), device="cpu")
    return int(drawn)
