"""What a program asks for: locks as pure operations, layers for a block and for one call."""

from __future__ import annotations

import contextvars
import threading

import pytest

from layerzero.selection.policy import EMPTY, Layer, Policy, merge, parse_policy
from layerzero.selection.policy.program import (
    allow_only,
    exclusion,
    get_locks,
    lock,
    preference,
    request_lock,
    unlock,
)
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import PolicyValidationError

OPS = {"attention", "rms_norm"}
KERNELS = {"flashinfer.attention", "torch_sdpa.attention.math", "liger.rms_norm"}
ATTENTION = CallSpec(op="attention")
FLASHINFER = ("flashinfer.attention", "flashinfer")
TORCH = ("torch_sdpa.attention.math", "torch_sdpa")


def locked(policy: Policy, op: str, target: str) -> Policy:
    return lock(policy, op, target, known_ops=OPS, known_kernels=KERNELS)


def test_lock_and_unlock_are_pure() -> None:
    """Each gives a new policy; the one before is what it was."""
    first = locked(EMPTY, "attention", "flashinfer")
    second = locked(first, "rms_norm", "liger.rms_norm")
    assert get_locks(EMPTY) == {}
    assert get_locks(first) == {"attention": "flashinfer"}
    assert get_locks(second) == {"attention": "flashinfer", "rms_norm": "liger.rms_norm"}
    assert get_locks(unlock(second, "attention", known_ops=OPS)) == {"rms_norm": "liger.rms_norm"}
    assert unlock(second) is EMPTY and unlock(EMPTY, "attention") is EMPTY


def test_locking_again_replaces() -> None:
    """One op, kind and condition has one lock; a kind is another lock."""
    value = locked(locked(EMPTY, "attention", "flashinfer"), "attention", "torch_sdpa")
    value = locked(value, "attention/causal", "flashinfer")
    assert get_locks(value) == {"attention": "torch_sdpa", "attention/causal": "flashinfer"}
    assert len(value.rules) == 2
    assert get_locks(unlock(value, "attention/causal")) == {"attention": "torch_sdpa"}
    assert unlock(value, "attention") is EMPTY
    conditional = lock(value, "attention", "flashinfer", when="Sq > 8")
    assert get_locks(conditional) == get_locks(value) | {"attention when Sq > 8": "flashinfer"}


@pytest.mark.parametrize(
    ("op", "target", "needs"),
    [
        ("atention", "flashinfer", "unknown op 'atention'.*did you mean 'attention'"),
        ("attention", "flashnifer", "no kernel known here: 'flashnifer'; did you mean 'flashinfer'"),
        ("attention", "Flash", "glob"),
        ("*", "flashinfer", "needs an op"),
    ],
)
def test_a_lock_on_what_does_not_exist_raises(op: str, target: str, needs: str) -> None:
    """An explicit request for an unknown op or kernel is an error, not a silent fallback (K19)."""
    with pytest.raises(PolicyValidationError, match=needs):
        locked(EMPTY, op, target)


def test_unlocking_an_unknown_op_raises() -> None:
    """A misspelt op is an error with a near match."""
    with pytest.raises(PolicyValidationError, match="did you mean 'attention'"):
        unlock(EMPTY, "atention", known_ops=OPS)


def test_only_the_program_s_own_locks_are_removed() -> None:
    """A file's lock stays when the program unlocks everything, and below a lock of the program's."""
    file = parse_policy(b"rules:\n  - lock: flashinfer\n    op: attention\n", "p.yaml").policy
    value = merge(file, locked(EMPTY, "rms_norm", "liger"))
    assert get_locks(unlock(value)) == {"attention": "flashinfer"}
    assert get_locks(unlock(value, "attention")) == {"attention": "flashinfer", "rms_norm": "liger"}
    above = locked(file, "attention", "torch_sdpa")
    assert len(above.rules) == 2 and get_locks(above) == {"attention": "torch_sdpa"}
    assert get_locks(unlock(above)) == {"attention": "flashinfer"}


def test_locks_can_be_timeboxed() -> None:
    """A lock with an end is gone after it."""
    value = lock(EMPTY, "attention", "flashinfer", until=5.0)
    assert (
        get_locks(value.active_at(4.9).policy) == {"attention": "flashinfer"}
        and not value.active_at(5.0).policy
    )


def test_prefer_disabled_only_and_backend_make_layers() -> None:
    """A block prefers, denies or narrows; a call's backend= locks above all of them."""
    assert preference("torch_sdpa").verdict(*TORCH, ATTENTION).boost.factor < 1
    assert not exclusion("torch_sdpa").verdict(*TORCH, ATTENTION).allowed
    narrowed = allow_only("torch_sdpa")
    assert (
        narrowed.verdict(*TORCH, ATTENTION).allowed and not narrowed.verdict(*FLASHINFER, ATTENTION).allowed
    )
    asked = request_lock("attention", "flashinfer", known_ops=OPS, known_kernels=KERNELS)
    value = merge(exclusion("flashinfer"), narrowed, asked)
    assert value.verdict(*FLASHINFER, ATTENTION).allowed and not value.verdict(*TORCH, ATTENTION).allowed
    assert {r.layer for r in preference("a").rules} == {Layer.CONTEXT}
    assert [r.source for r in exclusion("a", "b").rules] == ["disable('a', 'b')"]


def test_a_backend_that_does_not_exist_raises() -> None:
    """`backend=` of an unknown name is an error."""
    with pytest.raises(PolicyValidationError, match="did you mean 'flashinfer'"):
        request_lock("attention", "flashnifer", known_ops=OPS, known_kernels=KERNELS)


def test_nested_blocks_and_threads_see_their_own_layers() -> None:
    """Held in a ContextVar, layers nest, end with their block, and do not reach other threads (T38)."""
    layers: contextvars.ContextVar[Policy] = contextvars.ContextVar("layers", default=EMPTY)
    seen: dict[str, bool] = {}

    def allowed() -> bool:
        return layers.get().verdict(*TORCH, ATTENTION).allowed

    outer = layers.set(merge(layers.get(), preference("torch_sdpa")))
    inner = layers.set(merge(layers.get(), exclusion("torch_sdpa")))
    seen["inner"] = allowed()
    thread = threading.Thread(target=lambda: seen.update(thread=allowed()))
    thread.start()
    thread.join()
    layers.reset(inner)
    seen["outer"] = allowed()
    layers.reset(outer)
    assert seen == {"inner": False, "thread": True, "outer": True} and layers.get() is EMPTY


def test_a_policy_swapped_by_assignment_is_never_torn() -> None:
    """Readers of one reference see one whole policy or the other, never a mixture (CS-009, CS-031)."""
    one = merge(lock(EMPTY, "attention", "flashinfer"), exclusion("torch_sdpa"))
    two = merge(lock(EMPTY, "attention", "torch_sdpa"), exclusion("flashinfer"))
    whole = {(True, False), (False, True)}
    # The detector sees a torn read: one verdict from each policy.
    assert (one.verdict(*FLASHINFER, ATTENTION).allowed, two.verdict(*TORCH, ATTENTION).allowed) not in whole
    box = [one]
    stop = threading.Event()
    torn: list[tuple[bool, bool]] = []
    reads = [0]

    def read() -> None:
        while not stop.is_set():
            facing = box[0].for_request(ATTENTION)
            pair = (facing.verdict(*FLASHINFER).allowed, facing.verdict(*TORCH).allowed)
            reads[0] += 1
            if pair not in whole:
                torn.append(pair)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(2_000):
        box[0] = Policy((two if number % 2 else one).rules)
    stop.set()
    for thread in threads:
        thread.join()
    assert torn == [] and reads[0] > 0
