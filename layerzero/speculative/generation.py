"""Speculative decoding: a small model drafts, a large one verifies several tokens in one forward.

`generate` coordinates the two. Each is a sequence of its own, on the same device or another, with its own
cache and its own selections; what comes out is distributed as the large model alone would have drawn it.
While the large model verifies, the small one already drafts on, as if everything were accepted; where that
holds, nothing is thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import anyio
import torch
from torch import Tensor

from layerzero.api.readback import to_host
from layerzero.calls.awaited import awaitable
from layerzero.ops import checks
from layerzero.ops.sampling.draw import token_weights
from layerzero.ops.table import get

_sample, _verify_chain = awaitable(get("sample")), awaitable(get("verify_chain"))


class SequenceState(Protocol):
    """One sequence of one model, with its cache.

    `rollback` forgets the tokens from `length` on, and gives back what they held.
    """

    @property
    def length(self) -> int: ...

    def rollback(self, length: int) -> None: ...


class Decoder(SequenceState, Protocol):
    """A sequence whose `forward` adds tokens (T,) int64 and gives the logits (T, V) after each of them.

    Those after the last `num_speculative_tokens + 1` are read: a long prompt's others need not be computed.
    """

    async def forward(self, tokens: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn: the seed, the place of the first one, and the filters of `sample`."""

    seed: int
    offset: int
    temperature: float
    top_k: int
    top_p: float


@runtime_checkable
class Drafter(SequenceState, Protocol):
    """A draft that draws by itself, because its logits are dear to fetch.

    `draft` adds `new_tokens` (n,) and gives `num_speculative_tokens` tokens (K,) behind them with their
    distributions (K, V); the last token does not join the sequence.
    """

    async def draft(
        self, new_tokens: Tensor, num_speculative_tokens: int, sampling: SamplingParams
    ) -> tuple[Tensor, Tensor]: ...


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


async def propose_draft(
    decoder: Decoder, tokens_to_add: Tensor, num_speculative_tokens: int, sampling: SamplingParams
) -> tuple[Tensor, Tensor]:
    """`num_speculative_tokens` tokens (K,) behind `new_tokens`, one by one, and the distributions (K, V)
    that they came from."""
    filters: dict[str, Any] = {
        "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p
    }  # fmt: skip
    tokens, rows = [], []
    for index in range(num_speculative_tokens):
        logits = need_logits("draft", await decoder.forward(tokens_to_add), 1)[-1:]
        tokens_to_add = await _sample(logits, seed=sampling.seed, offset=sampling.offset + index, **filters)
        tokens.append(tokens_to_add)
        rows.append(logits.clone())  # the next forward may write its logits there, or the prompt's be many
    return torch.cat(tokens), token_probs(torch.cat(rows), **filters)


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """What decides one verification: nothing else may, so that every rank of a rank group accepts alike.

    `new_tokens` (n,) are certain tokens that the target has not seen, `draft_tokens` (K,) follow them and
    were drawn from `draft_probs` (K, V); `bonus_known` says that the target keeps the distribution of the
    first drafted token. `sampling` is what `verify_chain` and `sample` take.
    """

    new_tokens: Tensor
    draft_tokens: Tensor
    draft_probs: Tensor
    bonus_known: bool
    sampling: SamplingParams


@runtime_checkable
class Verifier(SequenceState, Protocol):
    """A target that verifies by itself: `verify` gives how many drafts stay, and the tokens (K + 1,).

    Behind those that stay and the one drawn after them the tokens are -1. Such a target keeps its
    distribution after the last draft.
    """

    async def verify(self, batch: DraftBatch) -> tuple[int, list[int]]: ...


@dataclass(slots=True)
class SpeculationStats:
    """What a generation has done so far: `num_accepted` of `num_draft_tokens` tokens in `num_rounds` target
    forwards."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_discarded: int = 0  # drafted ahead for nothing

    @property
    def acceptance_rate(self) -> float:
        """The share of verified drafts that stayed."""
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class _Drafts:
    """Drafted tokens (K,) with the distributions (K, V) that each was drawn from."""

    tokens: Tensor
    probs: Tensor


class Generation:
    """The tokens of one speculative generation; a loop over it continues where the last one was left.

    `stats` counts what it took.
    """

    def __init__(
        self,
        draft: Decoder | Drafter,
        target: Decoder | Verifier,
        prompt: Sequence[int],
        *,
        num_speculative_tokens: int,
        max_tokens: int,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int,
        overlap: bool,
        stop_token_ids: Collection[int],
    ) -> None:
        self.stats = SpeculationStats()
        self._draft, self._target = draft, target
        self._tokens = list(prompt)
        self._num_speculative_tokens, self._num_remaining = num_speculative_tokens, max_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._filter: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        self._seed, self._overlap = seed, overlap
        self._busy = False
        self._verified = deque[int]()  # tokens of the text that no loop has read yet
        self._bonus_probs: Tensor | None = None  # the target's, of the next token, where they are known
        self._bonus_known = False  # the same where the target keeps it
        self._drafted_ahead: _Drafts | None = None  # what was drafted beyond the tokens that are certain

    async def __aiter__(self) -> AsyncIterator[int]:
        while self._num_remaining > 0:
            if not self._verified:
                await self._verify_more()
            token = self._verified.popleft()
            self._num_remaining = 0 if token in self._stop_token_ids else self._num_remaining - 1
            yield token

    async def _verify_more(self) -> None:
        if self._busy:
            raise RuntimeError("a generation needs one consumer: another one waits for its next tokens")
        self._busy = True
        try:
            self._verified += await self._next_tokens()
        except BaseException as error:
            self._forget_uncertain()
            if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                raise error.exceptions[0] from None  # a model's own error, not the task group around it
            raise
        finally:
            self._busy = False

    def _forget_uncertain(self) -> None:
        """Take both sequences back to the text, whatever a round that broke off had given them."""
        self._bonus_probs = self._drafted_ahead = None
        self._bonus_known = False
        for decoder in (self._target, self._draft):
            decoder.rollback(min(decoder.length, len(self._tokens)))

    async def _next_tokens(self) -> list[int]:
        """Draft, verify, and settle both sequences on what is certain now; the tokens that are new."""
        num_drafts = min(self._num_speculative_tokens, self._num_remaining)
        drafts = self._drafted_ahead or await self._draft_tokens(None, num_drafts)
        self._drafted_ahead = None
        if len(drafts.tokens) > num_drafts:  # near the end fewer are wanted than were drafted ahead
            self.stats.num_discarded += len(drafts.tokens) - num_drafts
            drafts = _Drafts(drafts.tokens[:num_drafts], drafts.probs[:num_drafts])
        ahead: list[_Drafts] = []

        async def draft_on() -> None:
            ahead.append(await self._draft_tokens(drafts.tokens, self._num_speculative_tokens))

        text, num_accepted, tokens = len(self._tokens), 0, list[int]()
        last: Tensor | None = None
        async with anyio.create_task_group() as group:
            if self._overlap and self._num_remaining > num_drafts:
                group.start_soon(draft_on)
            num_accepted, tokens, last = await self._verify(drafts)
            if min(tokens[: num_accepted + 1]) < 0:
                raise _not_finite(f"{text + num_accepted} tokens")
        self.stats.num_rounds += 1
        self.stats.num_draft_tokens += len(drafts.tokens)
        self.stats.num_accepted += num_accepted
        all_accepted = num_accepted == len(drafts.tokens)
        if all_accepted and ahead:
            # The next token was drafted already: the target's distribution of it waits for that draft.
            self._bonus_probs, self._drafted_ahead, self._bonus_known = last, ahead[0], True
            new = tokens[:num_accepted]
        else:
            self.stats.num_discarded += sum(len(lost.tokens) for lost in ahead)
            self._bonus_probs, self._bonus_known = None, False
            new = tokens[: num_accepted + 1]
            self._target.rollback(min(self._target.length, text + num_accepted))
            self._draft.rollback(min(self._draft.length, text + num_accepted))
        self._tokens += new
        return new

    async def _draft_tokens(self, drafted: Tensor | None, num_drafts: int) -> _Drafts:
        """`num_drafts` tokens behind the text, and behind the tokens `drafted` (K,) after it."""
        new_tokens = torch.tensor(self._tokens[self._draft.length :], dtype=torch.int64, device="cpu")
        offset = len(self._tokens)
        if drafted is not None:  # they stay on their device: nothing waits for them
            unseen = drafted[max(0, self._draft.length - offset) :]
            new_tokens = torch.cat([new_tokens.to(unseen.device), unseen]) if len(new_tokens) else unseen
            offset += len(drafted)
        sampling = SamplingParams(self._seed, offset, **self._filter)
        if isinstance(self._draft, Drafter):
            return _Drafts(*await self._draft.draft(new_tokens, num_drafts, sampling))
        return _Drafts(*await propose_draft(self._draft, new_tokens, num_drafts, sampling))

    async def _verify(self, drafts: _Drafts) -> tuple[int, list[int], Tensor | None]:
        """How many drafts stay, the tokens, and the target's distribution after the last if it is here."""
        text, target = len(self._tokens), self._target
        if isinstance(target, Verifier):
            new_tokens = torch.tensor(self._tokens[target.length :], dtype=torch.int64, device="cpu")
            sampling = SamplingParams(self._seed, text, **self._filter)
            num_accepted, out_tokens = await target.verify(
                DraftBatch(new_tokens, drafts.tokens, drafts.probs, self._bonus_known, sampling)
            )
            return num_accepted, out_tokens, None
        p = await self._target_probs(target, drafts)
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

    async def _target_probs(self, target: Decoder, drafts: _Drafts) -> Tensor:
        """The target's distributions (K + 1, V) at each drafted place and after the last."""
        new_tokens = torch.tensor(self._tokens[target.length :], dtype=torch.int64, device="cpu")
        token_ids = torch.cat([new_tokens.to(drafts.tokens.device), drafts.tokens])
        rows = len(drafts.tokens) + (self._bonus_probs is None)
        logits = need_logits("target", await target.forward(token_ids), rows)
        if logits.shape[-1] != drafts.probs.shape[-1]:
            got = f"{drafts.probs.shape[-1]}"
            raise ValueError(f"draft needs the target's vocabulary of {logits.shape[-1]} tokens, got {got}")
        if logits.device.type == "cpu" and not bool(logits.amax(-1).isfinite().all()):
            raise _not_finite(f"{len(self._tokens)} tokens or later")
        p = token_probs(logits[-len(drafts.tokens) - 1 :], **self._filter)
        return p if self._bonus_probs is None else torch.cat([self._bonus_probs.unsqueeze(0), p])


def _not_finite(where: str) -> ValueError:
    needs = "logits with a finite largest value in each row"
    return ValueError(f"target needs {needs}, got others behind {where}")


def token_probs(logits: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The distributions (T, V) that `sample` draws by, from logits (T, V)."""
    weights = token_weights(logits, temperature, top_k, top_p).double()
    return weights / weights.sum(-1, keepdim=True)


def generate(
    draft: Decoder | Drafter,
    target: Decoder | Verifier,
    prompt: Sequence[int],
    *,
    num_speculative_tokens: int = 4,
    max_tokens: int = 16,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    overlap: bool = True,
    stop_token_ids: Collection[int] = (),
) -> Generation:
    """Continue `prompt` with tokens distributed as `target`'s, `num_speculative_tokens` drafts of `draft`
    to a forward.

    Both decoders start with an empty sequence, or with one that the prompt begins with; both have the same
    vocabulary. temperature, top_k, top_p and seed as in `sample`; the same seed gives the same tokens.
    `overlap` drafts on while the target verifies. It stops after `max_tokens`, or behind a token of
    `stop_token_ids`.
    Raises: ValueError, TypeError: an argument does not fit, by name. What the models raise.
    """
    prompt = _ids("prompt", prompt)
    if not prompt:
        raise ValueError("prompt needs at least one token, got none")
    checks.need_int("num_speculative_tokens", num_speculative_tokens, low=1)
    checks.need_int("max_tokens", max_tokens, low=1)
    checks.need_number("temperature", temperature, low=0.0)
    checks.need_int("top_k", top_k, low=0)
    checks.need_number("top_p", top_p, low=0.0, high=1.0)
    if seed is not None:
        checks.need_any_int("seed", seed)
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
        num_speculative_tokens=num_speculative_tokens,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed if seed is not None else int(torch.randint(1 << 62, (), device="cpu")),
        overlap=overlap,
        stop_token_ids=_ids("stop_token_ids", stop_token_ids),
    )


def _ids(name: str, token_ids: Collection[int]) -> list[int]:
    if not isinstance(token_ids, Collection) or isinstance(token_ids, str | Tensor):
        raise TypeError(f"{name} needs token ids as ints, got {type(token_ids).__name__}")
    return [checks.need_int(name, token, low=0) for token in token_ids]
