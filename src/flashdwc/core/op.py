"""Declares an operator once and derives everything PyTorch wants to know of it.

A call takes one of two ways, both made from the same declaration:

* the registered operator (``torch.library`` define/impl/fake/autograd/vmap/autocast): under ``torch.compile``, export,
  dispatch modes and for tensor subclasses;
* the eager way: a plain ``autograd.Function`` where a gradient, a tangent or a ``torch.func`` transform asks for one, else
  the backend directly. It is three times cheaper on the host, and carries forward-mode AD.

Both end in a plan (backend, specialisation, launch), one for each set of metadata. A public function may go past its own
checks too: :meth:`Operator.recall` answers a call that is like one of the last, as of a layer with the options that its user gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.autograd import forward_ad

from .backend import Backend, Cost, Explanation, Plan, Recorder, choose, floor_ms

NAMESPACE = "flashdwc"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
MAX_PLANS = 4096  # bounds the memory of a program whose shapes never repeat
MAX_CALLS = 4  # under one key: shapes, layouts, with and without a gradient

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
_any_autocast = torch._C._is_any_autocast_enabled
_transforms_active = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor  # of ``torch.autograd.grad(is_grads_batched=True)``


def _differentiable(tensors: Sequence[Tensor | None]) -> bool | None:
    """Whether one of the tensors asks for a gradient; None where one is not plain, so that only the dispatcher knows it."""
    differentiable = False
    for t in tensors:
        if t is not None:
            if t.__class__ not in _PLAIN_TYPES or t.is_neg() or _is_legacy_batched(t):
                return None
            if t.requires_grad:
                differentiable = True
    return differentiable


def _all_differentiable(tensors: Sequence[Tensor | None]) -> bool:
    return all(t is None or t.requires_grad for t in tensors)


class Operator:
    """One operator: its arguments are ``tensors`` tensors (``None`` where optional), then constants, then ``impl``.

    The last of ``backends`` is made of PyTorch's own operators and covers everything.
    """

    def __init__(
        self,
        schema: str,  # "name(Tensor x, Tensor? b, int[] stride, str impl) -> Tensor"
        *,
        tensors: int,
        reference: Callable[..., Tensor],
        backends: Sequence[Backend],
        check: Callable[..., None],
        fake: Callable[..., Tensor],
        setup_context: Callable[[Any, tuple, tuple], None],  # of tensors and of constants
        backward: Callable[[Any, Tensor], tuple],  # gradients of the tensors
        jvp: Callable[..., Tensor],
        vmap: Callable[..., tuple[Tensor, int]],
        cost: Callable[..., Cost],
        samples: Callable[..., Any],
        casts: bool = False,  # to the autocast type, where autocast is on
        gradients: Callable[..., Sequence[tuple[Operator, tuple]]] = lambda *args: (),
    ) -> None:
        self.name = schema[: schema.index("(")]
        self.tensors = tensors
        self.reference, self.backends, self.check, self.fake = reference, tuple(backends), check, fake
        self.cost, self.samples, self.gradients, self.casts = cost, samples, gradients, casts
        self._plans: dict[tuple, tuple[Plan, Plan | None]] = {}  # and the one that autograd had better follow
        # the last calls under a key: what tells tensors alike, plan, constants where our gradient is asked for, and whether
        # the plan holds for aligned addresses only
        self._calls: dict[tuple, tuple[tuple[Callable[..., bool], Plan, tuple | None, bool], ...]] = {}
        self._function, self._transformable = _autograd_functions(self, setup_context, backward, jvp, vmap)
        self._registered = self._register(schema, setup_context, backward, vmap)

    def __call__(self, *args: Any) -> Tensor:
        if _is_compiling():
            return self._compiled(*args)
        tensors, constants = args[: self.tensors], args[self.tensors :]
        y = self.recall(constants, *tensors)
        if y is None:
            y = self._call(tensors, constants, args)
            self.remember(constants, tensors, constants)
        return y

    def _call(self, tensors: tuple, constants: tuple, args: tuple) -> Tensor:
        if args[-1].__class__ is Recorder:
            return self._record(*self._cast(tensors), *constants)
        if forward_ad._current_level >= 0 or _transforms_active():
            # before all else, as the registered operator has no tangents
            return self._past_autocast(self._transformable.apply, args)
        differentiable = _differentiable(tensors)
        if differentiable is None or _dispatch_modes() or _tracing_state() is not None:
            return self._registered(*args)
        function = self._recorded if differentiable and _grad_enabled() else self.run
        return self._past_autocast(function, args) if _any_autocast() else function(*args)

    def recall(self, key: tuple, first: Tensor, second: Tensor, third: Tensor | None = None) -> Tensor | None:
        """The result of a call that is like one of :meth:`remember`'s under that key; None where it is not.

        All in one piece and by position: what the host has to load for each function and tuple costs a small layer more
        than what they do.
        """
        if _is_compiling():
            return None
        try:
            calls = self._calls.get(key)
        except TypeError:  # lists have no hash
            return None
        if calls is None or forward_ad._current_level >= 0 or _dispatch_modes():  # the guards miss PyTorch's own modes
            return None
        if getattr(first, "is_nested", True):  # no tensor, or one whose strides the guards must not ask for
            return None
        for alike, plan, constants, by_address in calls:
            try:
                same = alike(first, second) if third is None else alike(first, second, third)
            except TypeError:  # one is no tensor
                return None
            if same:
                if by_address and (first.data_ptr() | second.data_ptr()) & 15:
                    return None
                if constants is None or not _grad_enabled():
                    return plan(first, second, third) if self.tensors == 3 else plan(first, second)
                tensors = (first, second, third) if self.tensors == 3 else (first, second)
                return self._function(*tensors, constants, plan)
        return None

    def remember(self, key: tuple, tensors: tuple, constants: tuple) -> None:
        """Lets :meth:`recall` answer calls like this one, for which a plan has been made.

        Calls are told alike by the guards of PyTorch's compiler, in all metadata, and in the dispatch keys, which autocast,
        modes, transforms and tracers change. While one of these is active, nothing is remembered: it wants to see a call or
        to change it.
        """
        if constants[-1].__class__ is not str or forward_ad._current_level >= 0:
            return
        active = _transforms_active() or _dispatch_modes() or _any_autocast() or _tracing_state() is not None
        differentiable = _differentiable(tensors)
        if active or differentiable is None:
            return
        by_address = tensors[0].is_cuda  # kernels load as wide as the addresses allow
        if by_address and (tensors[0].data_ptr() | tensors[1].data_ptr()) & 15:
            return
        with suppress(TypeError):  # lists have no hash
            found = self._plans.get(self._key(tensors, constants))
            if found is None:
                return
            plan, followed = found
            recorded = constants if differentiable else None
            if followed is not None and _all_differentiable(tensors):
                plan, recorded = followed, None
            present = [t for t in tensors if t is not None]
            alike = guards.TensorGuards(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[attr-defined]
            if len(self._calls) >= MAX_PLANS:
                self._calls.clear()
            others = self._calls.get(key, ())[: MAX_CALLS - 1]
            self._calls[key] = ((alike, plan, recorded, by_address), *others)

    def _recorded(self, *args: Any) -> Tensor:
        tensors, constants = args[: self.tensors], args[self.tensors :]
        plan, followed = self._plan(tensors, constants)
        if followed is not None and _all_differentiable(tensors):
            return followed(*tensors)
        return self._function(*tensors, constants, plan)

    def _compiled(self, *args: Any) -> Tensor:
        # ONNX knows PyTorch's own operators only, and they alone carry tangents through a compiled graph
        if torch.onnx.is_in_onnx_export() or forward_ad._current_level >= 0:
            return self._decomposed(*args)
        return self._registered(*args)

    def _cast(self, tensors: tuple) -> tuple:
        """As autocast wants it; PyTorch casts for a convolution, not for its gradients."""
        return autocast(tensors) if self.casts and _any_autocast() else tensors

    def _past_autocast(self, function: Callable[..., Tensor], args: tuple) -> Tensor:
        operands = self._cast(args[: self.tensors])
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):  # the backends choose their own types
            return function(*operands, *args[self.tensors :])

    def run_or_dispatch(self, *args: Any) -> Tensor:
        """For what a transform has unwrapped: plain data, or what only the dispatcher knows how to handle."""
        if _is_compiling():
            return self._decomposed(*args)
        special = _differentiable(args[: self.tensors]) is None
        return self._registered(*args) if special or _dispatch_modes() else self.run(*args)

    def run(self, *args: Any) -> Tensor:
        """Runs the plan for these arguments' metadata; makes it first where there is none."""
        if _is_compiling():  # a graph that broke on the way here: plans may take what has no fake
            return self._decomposed(*args)
        tensors = args[: self.tensors]
        return self._plan(tensors, args[self.tensors :])[0](*tensors)

    def prepare(self, *args: Any) -> None:
        """Makes the plan for these arguments' metadata, compiles its kernels, and runs nothing."""
        self._plan(args[: self.tensors], args[self.tensors :])

    def _plan(self, tensors: tuple, constants: tuple) -> tuple[Plan, Plan | None]:
        key = self._key(tensors, constants)
        try:
            plan = self._plans.get(key)
        except TypeError:  # what has no hash is no argument either: the checks say so
            plan = None
        return plan or self._new_plan(key, tensors, constants)

    def _key(self, tensors: tuple, constants: tuple) -> tuple:
        for t in tensors:
            # the address decides how wide a kernel may load
            constants += (None,) if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15)
        return constants

    def _new_plan(self, key: tuple, tensors: tuple, constants: tuple) -> tuple[Plan, Plan | None]:
        args = tensors + constants
        self.check(*args)
        backend = choose(self.name, self.backends, args, args[-1])
        plan = backend.plan(*args), backend.plan_for_autograd(*args)
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def explain(self, *args: Any) -> Explanation:
        self.check(*args)
        *operands, impl = args
        backend = choose(self.name, self.backends, args, impl.impl if isinstance(impl, Recorder) else impl)
        cost, x = self.cost(*args), operands[0]
        reasons = [(b.name, b.why_not(*args) or b.prefer_not(*args)) for b in self.backends]
        floor = floor_ms(cost, x.device, x.dtype)
        return Explanation(self.name, backend.name, reasons, backend.describe(*args), cost.bytes, cost.flops, floor)

    def _decomposed(self, *args: Any) -> Tensor:
        """In PyTorch's own operators, for what traces through to them."""
        return self.backends[-1].plan(*args)(*args[: self.tensors])

    def _record(self, *args: Any) -> Tensor:
        recorder = args[-1]
        explanation = self.explain(*args)
        gradients = self.gradients(*args)
        explanation.gradients = [operator.explain(*inner) for operator, inner in gradients]
        recorder.explanations.append(explanation)
        recorder.calls += [(self, (*args[:-1], recorder.impl)), *gradients]
        return self.fake(*args).to("meta")

    def _register(self, schema: str, setup_context: Callable, backward: Callable, vmap: Callable) -> Any:
        def run(*args: Any) -> Tensor:
            traced = any(t is not None and t.__class__ not in _PLAIN_TYPES for t in args[: self.tensors])
            # a compiled torch.func transform traces through to here
            return self._decomposed(*_tuples(args)) if traced else self.run(*_tuples(args))

        def setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
            inputs = _tuples(inputs)
            setup_context(ctx, inputs[: self.tensors], inputs[self.tensors :])

        def gradients(ctx: Any, g: Tensor) -> tuple:
            return *backward(ctx, g), *[None] * constants

        def batch(info: Any, in_dims: tuple, *args: Any) -> tuple[Tensor, int]:
            return vmap(info, in_dims, *_tuples(args))

        def fake(*args: Any) -> Tensor:
            self.check(*args)
            return self.fake(*args)

        def cast_and_redispatch(*args: Any) -> Tensor:
            return self._past_autocast(registered, args)

        qualified = f"{NAMESPACE}::{self.name}"
        constants = schema[: schema.index("->")].count(",") + 1 - self.tensors
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(self.name, run, "CompositeExplicitAutograd")
        LIBRARY.impl(self.name, cast_and_redispatch, "AutocastCUDA")
        LIBRARY.impl(self.name, cast_and_redispatch, "AutocastCPU")
        torch.library.register_fake(qualified, fake, lib=LIBRARY)
        torch.library.register_autograd(qualified, gradients, setup_context=setup, lib=LIBRARY)
        torch.library.register_vmap(qualified, batch, lib=LIBRARY)
        registered = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        return registered


def _tuples(args: tuple) -> tuple:
    """The dispatcher hands over lists; plans are looked up by hashable constants."""
    return tuple(tuple(a) if a.__class__ is list else a for a in args)


def _autograd_functions(operator: Operator, setup: Callable, grad: Callable, tangent: Callable, batch: Callable) -> Any:
    """The plain function, and the one for tangents and ``torch.func``, whose separate ``setup_context`` costs 30 us a call."""

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:  # type: ignore[override]
            tensors = args[:-2]  # constants are one argument, as each costs half a microsecond
            setup(ctx, tensors, args[-2])
            return args[-1](*tensors)

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple:  # type: ignore[override]
            return *grad(ctx, grad_output), None, None

    class Transformable(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Tensor:
            return operator.run_or_dispatch(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
            ctx.constants = inputs[operator.tensors :]
            setup(ctx, inputs[: operator.tensors], ctx.constants)
            ctx.save_for_forward(*inputs[: operator.tensors])

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple:  # type: ignore[override]
            return *grad(ctx, grad_output), *[None] * len(ctx.constants)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:  # type: ignore[override]
            return tangent(ctx.saved_tensors, tangents[: operator.tensors], *ctx.constants)

        @staticmethod
        def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[Tensor, int]:  # type: ignore[override]
            return batch(info, in_dims, *args)

    # PyTorch names the backward node after the class when it is made
    plain, transformable = (type(operator.name, (function,), {}) for function in (Plain, Transformable))
    # past Function.apply, which prepares for the transforms that have been ruled out
    return super(torch.autograd.Function, plain).apply, transformable  # type: ignore[misc]


_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


def autocast(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Casts as PyTorch does for its convolutions: to the autocast type of the tensors' device; float64 stays."""
    device = next(t.device.type for t in tensors if t is not None)
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tuple(tensors)
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype is not torch.float64 else t for t in tensors
    )
