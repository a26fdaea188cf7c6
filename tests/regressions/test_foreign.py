"""Transforms, traces, modes and hooks of the caller's: right results, and no kernel pays for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import layerzero as lz
from layerzero._util import foreign
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.scope import SCOPE
from layerzero.ops import table as ops_table
from layerzero.spec.settings import Settings
from tests.clocks import FakeClock
from tests.kernels import device, kernel
from tests.waiting import LIMIT_S

RMS = ops_table.get("rms_norm")
X, W = torch.randn(4, 8, 64), torch.randn(64)
NORMED = F.rms_norm(X, (64,), W, 1e-6)


@pytest.fixture
def own() -> Iterator[LocalDevice]:
    """The device of a runtime whose kernels are compiled before they are chosen, natives first."""
    settings = lz.Settings.load(warm="eager", device="cpu")
    with lz.start(settings, scoped=True), lz.prefer("native"):
        lz.sync.rms_norm(X, W)
        scope = SCOPE.get()
        assert scope is not None and scope.runtime is not None
        device = scope.runtime.device(X.device)
        # Measurements and free memory that are known later have calls decided again.
        device.wait_for_costs()
        looked = threading.Event()
        device._refresh_workspace_budget()
        device.loader.submit(looked.set)
        assert looked.wait(LIMIT_S)
        lz.sync.rms_norm(X, W)
        yield device


def trouble(own: LocalDevice) -> Any:
    """What may not change: breakers that ever moved, and counts."""
    return own.health.statuses(), own.counters.snapshot()


class Norm(torch.nn.Module):
    """One op."""

    def forward(self, x: Tensor) -> Tensor:
        return lz.sync.rms_norm(x, W)


@pytest.mark.parametrize("before", ["a plain call of the same shape", "nothing"])
def test_three_vmaps_cost_no_kernel_its_service(own: LocalDevice, before: str) -> None:
    """A mapped call is computed, whether a plan of its shape is there or not."""
    lz.sync.rms_norm(X[0] if before != "nothing" else X, W)
    for _ in range(3):
        torch.testing.assert_close(torch.func.vmap(lambda x: lz.sync.rms_norm(x, W))(X), NORMED)
    assert own.health.statuses() == () and not own.counters.total("failures")


@pytest.mark.parametrize("sizes", [None, ({0: torch.export.Dim.DYNAMIC},)])
def test_three_exports_cost_no_kernel_its_service(own: LocalDevice, sizes: Any) -> None:
    """An exported program computes the same, for sizes of its own too."""
    counted = trouble(own)
    programs = [torch.export.export(Norm(), (X,), dynamic_shapes=sizes).module() for _ in range(3)]
    assert trouble(own) == counted and counted[0] == ()
    for program in programs:
        torch.testing.assert_close(program(X), NORMED)
        if sizes is not None:
            torch.testing.assert_close(program(X[:3]), NORMED[:3])
    assert own.health.statuses() == () and not own.counters.total("failures")


class Broken(TorchDispatchMode):
    """A mode of the caller's that raises."""

    seen = 0

    def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
        self.seen += 1
        raise LookupError("the mode's own")


class BrokenFunctions(TorchFunctionMode):
    """The same one level above; attributes of tensors are left alone."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "stride", "dim", "size"):
            return func(*args, **(kwargs or {}))
        self.seen += 1
        raise LookupError("the mode's own")


@pytest.mark.parametrize("make", [Broken, BrokenFunctions])
def test_a_mode_that_raises_is_heard_once(own: LocalDevice, make: Any) -> None:
    """Its exception arrives as it was raised, and nothing is run a second time."""
    q = torch.randn(1, 2, 4, 64)
    lz.sync.attention(q, q, q)
    counted = trouble(own)
    for _ in range(3):
        mode = make()
        with pytest.raises(LookupError, match="the mode's own"), mode:
            lz.sync.attention(q, q, q)
        assert mode.seen == 1
    assert trouble(own) == counted and counted[0] == ()
    torch.testing.assert_close(lz.sync.attention(q, q, q), F.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("op", ["attention", "rms_norm", "mlp"])
def test_activation_checkpointing_works(own: LocalDevice, op: str, reentrant: bool) -> None:
    """Gradients equal those without it, both ways of doing it, in every round."""
    q = torch.randn(2, 4, 16, 32, requires_grad=True)
    up, down = torch.randn(48, 32, requires_grad=True), torch.randn(32, 24, requires_grad=True)
    ops: dict[str, Callable[[Tensor], Tensor]] = {
        "attention": lambda x: lz.sync.attention(x, x, x, is_causal=True) * 1.0,
        "rms_norm": lambda x: lz.sync.rms_norm(x, up[0]) * 1.0,
        "mlp": lambda x: lz.sync.mlp(x, up, down) * 1.0,
    }
    call = ops[op]
    call(q).sum().backward()
    assert q.grad is not None
    plain, q.grad = q.grad, None
    counted = trouble(own)[0]
    for _ in range(3):
        checkpoint(call, q, use_reentrant=reentrant).sum().backward()
        torch.testing.assert_close(q.grad, plain)
        q.grad = None
    assert trouble(own)[0] == counted == ()


class Elsewhere(Tensor):
    """A tensor that keeps its values in another one, and has no memory itself."""

    backing: Tensor

    @staticmethod
    def __new__(cls, backing: Tensor) -> Elsewhere:
        made = Tensor._make_wrapper_subclass(cls, backing.shape, dtype=backing.dtype, device=backing.device)
        made.backing = backing
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = tree_map(lambda t: t.backing if isinstance(t, Elsewhere) else t, (args, kwargs or {}))
        return tree_map(lambda t: cls(t) if isinstance(t, Tensor) else t, func(*plain[0], **plain[1]))


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "linear", "mlp", "rope", "attention"])
def test_a_tensor_without_memory_is_not_read(own: LocalDevice, op: str) -> None:
    """A wrapper's null pointer is nobody's operand, after a plain call of its shape too."""
    flat, matrix = torch.randn(16, 64), torch.randn(64, 64)
    heads = torch.randn(16, 4, 64)
    calls: dict[str, tuple[Any, ...]] = {
        "rms_norm": (flat, W),
        "add_rms_norm": (flat, flat, W),
        "linear": (flat, matrix),
        "mlp": (flat, torch.randn(128, 64), matrix),
        "rope": (heads, heads, torch.arange(16), torch.randn(32, 32), torch.randn(32, 32)),
        "attention": (heads[None], heads[None], heads[None]),
    }
    call, args = getattr(lz.sync, op), calls[op]
    plain = call(*args)
    counted = trouble(own)
    for _ in range(3):
        wrapped = call(*(Elsewhere(a) if a.is_floating_point() else a for a in args))
        parts = wrapped if isinstance(wrapped, tuple) else (wrapped,)
        for part, whole in zip(parts, plain if isinstance(plain, tuple) else (plain,), strict=True):
            inner = part.backing if isinstance(part, Elsewhere) else part
            torch.testing.assert_close(inner, whole, atol=1e-4, rtol=1e-4)
    assert trouble(own) == counted and counted[0] == ()


def failing(error: Exception) -> LocalDevice:
    """A device whose first kernel raises `error`."""

    def run(*_: Any) -> Any:
        raise error

    return device([kernel("bad.rms_norm", run, launch_us=0.1), kernel("good.rms_norm", launch_us=9.0)])


class Forwarding(TorchDispatchMode):
    """A mode that looks on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("error", [StopIteration(1), StopAsyncIteration()])
def test_control_flow_passes(error: Exception) -> None:
    """What is raised to steer a program reaches who waits for it."""
    own = failing(error)
    full = RMS.build(X, W)[1]
    for _ in range(4):
        with pytest.raises(type(error)):
            own.launch(RMS, full)
    assert own.health.statuses() == ()


def test_a_kernel_that_fails_under_a_mode_is_replaced_and_not_blamed() -> None:
    """The next one answers, and the circuit stays closed; without the mode it opens."""
    own = failing(RuntimeError("planted"))
    full = RMS.build(X, W)[1]
    with Forwarding():  # type: ignore[no-untyped-call]
        for _ in range(6):
            torch.testing.assert_close(own.launch(RMS, full), NORMED)
    assert own.health.statuses() == ()
    for _ in range(own.settings.failures_to_open):
        own.launch(RMS, full)
    assert "bad.rms_norm" in own.health.blocked_kernels()


def test_an_operator_that_fails_beneath_a_mode_is_the_operators() -> None:
    """A mode that passes operators on is not taken for who raised."""

    def run(x: Tensor, *_: Any) -> Tensor:
        return x @ torch.zeros(3, 3)

    own = device([kernel("bad.rms_norm", run, launch_us=0.1), kernel("good.rms_norm", launch_us=9.0)])
    with Forwarding():  # type: ignore[no-untyped-call]
        torch.testing.assert_close(own.launch(RMS, RMS.build(X, W)[1]), NORMED)


def test_a_hook_that_raises_is_heard() -> None:
    """What a hook of saved tensors raises is not a kernel's failure."""

    def pack(_: Tensor) -> Any:
        raise LookupError("the hook's own")

    def run(x: Tensor, *_: Any) -> Tensor:
        return x * x

    own = device([kernel("first.rms_norm", run, launch_us=0.1), kernel("good.rms_norm", launch_us=9.0)])
    full = RMS.build(X.clone().requires_grad_(), W)[1]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), pytest.raises(LookupError):
        own.launch(RMS, full)
    assert own.health.statuses() == ()


def test_a_probe_is_not_spent_on_a_transformed_call() -> None:
    """A kernel on probation is asked by plain calls alone."""
    clock = FakeClock()
    broken = [True]

    def run(*full: Any) -> Any:
        if broken[0]:
            raise RuntimeError("planted")
        return RMS.reference(*full)

    kernels = [kernel("bad.rms_norm", run, launch_us=0.1), kernel("good.rms_norm", launch_us=9.0)]
    own = device(kernels, Settings(failures_to_open=1), clock=clock)
    full = RMS.build(X, W)[1]
    own.launch(RMS, full)
    assert "bad.rms_norm" in own.health.blocked_kernels()
    clock.advance(own.settings.cooldown_s * 2)
    assert own.health.probing_kernels() == {"bad.rms_norm"}
    with Forwarding():  # type: ignore[no-untyped-call]
        torch.testing.assert_close(own.launch(RMS, full), NORMED)
    assert own.health.probing_kernels() == {"bad.rms_norm"}


def test_a_kernel_is_loaded_outside_the_callers_modes() -> None:
    """What a load makes is plain, and a raising mode does not block the kernel."""
    loaded: list[Tensor] = []

    def load() -> Callable[..., Any]:
        loaded.append(torch.zeros(2) + 1)
        return RMS.reference

    own = device([kernel("first.rms_norm", load=load)])
    with torch.device("meta"), pytest.raises(LookupError), Broken():  # type: ignore[no-untyped-call]
        own.launch(RMS, RMS.build(X, W)[1])
    assert own.registry.blocked() == {} and type(loaded[0]) is Tensor and loaded[0].device.type == "cpu"


def test_a_default_device_is_no_foreign_mode() -> None:
    """`torch.device` as a context says where new tensors go, and nothing more."""
    with torch.device("cpu"):
        assert not foreign.in_foreign_mode() and not foreign.has_transformed((X,))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_holds_the_computation(own: LocalDevice) -> None:
    """A traced function computes its result from its input, not from the example."""
    lz.sync.rms_norm(X[0], W)
    traced: Any = torch.jit.trace(lambda x: lz.sync.rms_norm(x, W), (X[0],), check_trace=False)
    torch.testing.assert_close(traced(X[1]), NORMED[1])
