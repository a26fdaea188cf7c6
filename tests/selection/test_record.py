"""What an explanation shows of a choice, and in which order."""

from __future__ import annotations

from layerzero.selection.record import (
    Accepted,
    Candidate,
    Selection,
    Transform,
    fold_other_platforms,
    format_bytes,
    html,
    rank_candidates,
    render,
)
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.reasons import Reason, Rejected


def accepted(name: str, kernel_us: float, transform_us: float = 0.0, factor: float = 1.0) -> Candidate:
    """A kernel that takes the call."""
    total = (kernel_us + transform_us) * factor
    return Candidate(name, name.partition(".")[0], Accepted(kernel_us, transform_us, total, "a test"))


def refused(name: str, reasons: int) -> Candidate:
    """A kernel that refuses it for so many reasons."""
    reason = Rejected(Reason.MISALIGNED, "alignment", "64", "1")
    return Candidate(name, name.partition(".")[0], None, (reason,) * reasons)


def test_kernels_are_shown_from_the_chosen_to_the_least_able() -> None:
    """By the whole price, transforms and boosts included, as they were compared; then by reasons against."""
    trace = [
        refused("far.op", 3),
        accepted("copied.op", 1.0, transform_us=9.0),
        refused("near.op", 1),
        accepted("boosted.op", 40.0, factor=0.1),
        accepted("plain.op", 5.0),
        accepted("chosen.op", 99.0),
    ]
    shown = [candidate.kernel for candidate in rank_candidates(trace, "chosen.op")]
    assert shown == ["chosen.op", "boosted.op", "plain.op", "copied.op", "near.op", "far.op"]


def test_bytes_are_for_people() -> None:
    """Three digits at most below a tebibyte."""
    sizes = (0, 1023, 1024, 10 << 10, 3 << 29, 5 << 50)
    assert [format_bytes(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "10 KiB",
        "1.5 GiB",
        "5120 TiB",
    ]


def selection(*trace: Candidate, kernel: str = "a.op", transforms: tuple[Transform, ...] = ()) -> Selection:
    """A choice among these."""
    request = CallSpec(op="op", device="cpu", dtype="float32", dims={"N": 2})
    return Selection(op="op", kernel=kernel, request=request, why="<b>", trace=trace, transforms=transforms)


def test_a_kernel_that_is_blocked_after_it_was_priced_cannot_be_chosen() -> None:
    """It keeps its price, and its reason counts."""
    reason = Rejected(Reason.MISALIGNED, "alignment", "64", "1")
    priced = Accepted(1.0, 0.0, 1.0, "a test")
    assert accepted("a.op", 1.0).eligible and not refused("b.op", 1).eligible
    assert not Candidate("c.op", "c", priced, (reason,)).eligible


def test_a_price_that_a_policy_changed_is_told_and_memory_is_the_sum() -> None:
    """Nothing is said of a policy where transforms alone make the price; outputs are not counted."""
    cast = Transform("cast", "a", "b", 2.0)
    plain = Candidate("a.op", "a", Accepted(1.0, 2.0, 3.0, "a test", (cast,)))
    boosted = Candidate("b.op", "b", Accepted(1.0, 2.0, 30.0, "a test", (cast,), True, "", 1024, 1024))
    lines = render(selection(plain, boosted, transforms=(cast, cast))).splitlines()
    told = {line.split()[0 if line.split()[0] != "*" else 1]: line for line in lines if "yes" in line}
    assert "policy" not in told["a.op"] and "allocating" not in told["a.op"]
    assert "policy makes it 30.0 us allocating 2.0 KiB" in told["b.op"]
    assert selection(transforms=(cast, cast)).transform_cost_total == 4.0


def test_a_notebook_shows_text_as_text() -> None:
    """What a request or a reason says is no markup."""
    reason = Rejected(Reason.MISALIGNED, "<i>", "64", "1")
    shown = html(selection(accepted("a.op", 1.0), Candidate("<u>", "b", None, (reason,))))
    assert shown.count("<b>") == 2 and "<i>" not in shown and "<u>" not in shown
    assert "&lt;b&gt;" in shown and "&lt;i&gt;" in shown and "&lt;u&gt;" in shown


def test_kernels_of_other_devices_are_folded_where_one_was_chosen() -> None:
    """Where none takes the call, every reason is shown."""
    other = Candidate("far.op", "far", None, (Rejected(Reason.PLATFORM_MISMATCH, "platform", "cuda", "cpu"),))
    chosen = selection(accepted("a.op", 1.0), other)
    assert [c.kernel for c in fold_other_platforms(chosen)[0]] == ["a.op"]
    assert fold_other_platforms(chosen)[1].endswith("far.op")
    assert [c.kernel for c in fold_other_platforms(selection(other, kernel=""))[0]] == ["far.op"]
