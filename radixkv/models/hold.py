"""A model is lent to an engine for a step: what is put into it, and taken out again.

Between steps nothing of ours is in the model: its modules, their types, forwards and flags, its
attention and its parameters are what its owner made them, so that training, saving, copying,
compiling, adapters and resizing do what they do without an engine. For a step, and no longer,

* layers run the forwards of `radixkv.models.decoder_layer`,
* attention goes where `radixkv.models.runner.attending` says, through the model's configs,
* every module is in eval mode, and notes whether its adapters are switched meanwhile,
* what was compiled (`torch.compile`, ``model.compile()``) runs as it was written.

Another thread that calls the model meanwhile gets the same values as ever.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from radixkv.models.adapters import AdapterGuard
from radixkv.models.attention_interface import AttentionHandler
from radixkv.models.decoder_layer import (
    FusedLayer,
    StandIn,
    as_written,
    put_in,
    stand_in,
    take_out,
)
from radixkv.models.huge_pages import use_huge_pages
from radixkv.models.linear import BatchInvariantLinear, linear_kernels

_ATTENTION = "_attn_implementation_internal"  # where a config keeps the name of its attention


def uncompiled(model: Any) -> Any:
    """The model inside of ``torch.compile(model)``; any other as it is."""
    while type(model).__name__ == "OptimizedModule":
        model = model._orig_mod
    return model


class _Attention:
    """The names of the attention in configs, turned to ours while any step runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turned: dict[int, list[Any]] = {}  # by id: users, config, its own name, ours

    def turn(self, configs: list[Any], name: Callable[[str], str]) -> None:
        with self._lock:
            for config in configs:
                turned = self._turned.get(id(config))
                if turned is None:
                    own = config.__dict__.get(_ATTENTION)
                    ours = name(own or "")
                    turned = self._turned[id(config)] = [0, config, own, ours]
                    config.__dict__[_ATTENTION] = ours
                turned[0] += 1

    def turn_back(self, configs: list[Any]) -> None:
        with self._lock:
            for config in configs:
                turned = self._turned[id(config)]
                turned[0] -= 1
                if not turned[0]:
                    del self._turned[id(config)]
                    if config.__dict__.get(_ATTENTION) == turned[3]:  # else it was set meanwhile
                        config.__dict__[_ATTENTION] = turned[2]


_attention = _Attention()


class Hold:
    """What an engine puts into a model for a step, and takes out again.

    Args:
        handler: gives who serves attention on this thread; None if nobody does.
        attention: our name for the attention that has a name of its own.
    """

    def __init__(
        self,
        model: nn.Module,
        handler: Callable[[], AttentionHandler | None],
        attention: Callable[[str], str],
    ) -> None:
        self._model = model
        self._handler, self._name = handler, attention
        self._lock = threading.RLock()  # reentrant: a collection may drop an engine anywhere
        self._num_steps = 0  # that run now
        self._given_back: list[Callable[[], None]] = []
        self._stand_ins: dict[nn.Module, StandIn] = {}
        self._modes = [(weakref.ref(m), m.training) for m in model.modules()]
        self._has_chosen = False  # other modes, its owner, since then
        self._compiled: list[tuple[dict[str, Any], Any, Any]] = []
        self.holders = 0
        self.find()
        if linear_kernels() is not None:
            layers = (
                m for m, own in self._stand_ins.items() if isinstance(own, BatchInvariantLinear)
            )
            use_huge_pages(layer.weight for layer in layers)  # type: ignore[misc]

    def find(self) -> None:
        """Look again at which modules the model has; steps that begin later run what was found."""
        modules = list(self._model.modules())
        known, found = self._stand_ins, {}
        for module in modules:
            own = stand_in(module, self._handler)
            if own is not None:
                before = known.get(module)
                found[module] = before if before is not None and type(before) is type(own) else own
        configs = {id(c): c for c in map(_config_of, modules) if c is not None}
        with self._lock:
            self._stand_ins = found
            self._fused = [own for own in found.values() if isinstance(own, FusedLayer)]
            inner = self._find_inner(found)
            self._guards = [own for own in found.values() if isinstance(own, AdapterGuard)]
            self._forwards = [(m.__dict__, own) for m, own in found.items() if m not in inner]
            self._every = [module.__dict__ for module in modules]
            self._outer = [module.__dict__ for module in modules if module not in inner]
            self._owners = modules
            self._configs = list(configs.values())
        self.look()

    @staticmethod
    def _find_inner(found: dict[nn.Module, StandIn]) -> set[nn.Module]:
        """The modules in fused layers, which these are told of."""
        every: set[nn.Module] = set()
        for layer, own in found.items():
            if isinstance(own, FusedLayer):
                inside = [module for module in layer.modules() if module is not layer]
                own.inside = [module.__dict__ for module in inside]
                own.inner = [(m.__dict__, found[m]) for m in inside if m in found]
                every.update(inside)
        return every

    def look(self) -> None:
        """Look again whether its parts are unchanged, and whether forwards were compiled."""
        with self._lock:
            for own in self._fused:
                own.look()
            # As in ``model.forward = torch.compile(model.forward)``.
            self._compiled = [
                *(one for one in self._compiled if one[0].get("forward") is one[2]),  # in a step
                *(
                    (place, forward, plain)
                    for place in self._every
                    if (forward := place.get("forward")) is not None
                    and (plain := as_written(forward)) is not forward
                ),
            ]

    def rest(self) -> None:
        """Let go of weights that were replaced: nothing runs for now."""
        with self._lock:
            if not self._num_steps:
                for own in self._fused:
                    own.rest()

    @contextmanager
    def step(self) -> Iterator[Step]:
        """Within this block the model stands ready."""
        with self._lock:
            if not self._num_steps:
                self._put()
            self._num_steps += 1
        try:
            yield Step(self._places, self._guards)
        finally:
            with self._lock:
                self._num_steps -= 1
                if not self._num_steps:
                    _undo(self._given_back)

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Within this block the model is uncompiled and in eval mode; else as its owner left it."""
        undo: list[Callable[[], None]] = []
        try:
            with self._lock:
                self._calm(undo, self._every)
            yield
        finally:
            with self._lock:
                _undo(undo)

    def _put(self) -> None:
        undo = self._given_back
        try:
            self._calm(undo, self._places())
            configs = self._configs
            _attention.turn(configs, self._name)
            undo.append(partial(_attention.turn_back, configs))
            forwards = self._forwards
            undo.append(partial(take_out, forwards))
            for guard in self._guards:
                guard.begin()
            put_in(forwards)
        except BaseException:
            _undo(undo)
            raise

    def _places(self) -> list[dict[str, Any]]:
        """The ``__dict__`` of each module that may be called."""
        places = self._outer
        for own in self._fused:
            if not own.is_ready:
                places = [*places, *own.inside]
        return places

    def _calm(self, undo: list[Callable[[], None]], places: list[dict[str, Any]]) -> None:
        """Turn training and compilation off, if they are on in one of ``places``."""
        if any("_compiled_call_impl" in place or place.get("training") for place in places):
            undo.append(self._turn_off())
        for place, forward, plain in self._compiled:
            if place.get("forward") is forward:
                place["forward"] = plain
                undo.append(partial(_give_back, place, "forward", plain, forward))

    def _turn_off(self) -> Callable[[], None]:
        """Put modules in eval mode, uncompiled; what comes back gives them back."""
        in_training, compiled = [], []
        told: dict[nn.Module, bool] = {}  # modes that their owner chose meanwhile

        def train(module: nn.Module, mode: bool = True) -> nn.Module:
            told.update(dict.fromkeys(module.modules(), mode))
            return type(module).train(module, mode)

        for module in self._owners:
            place = module.__dict__
            if place.get("training"):
                place["training"] = False
                in_training.append(module)
            own = place.get("_compiled_call_impl")
            if own is not None:
                place["_compiled_call_impl"] = None
                compiled.append((place, own))
        self._has_chosen |= bool(in_training)
        listening = [
            (module, partial(train, module))
            for module in (self._owners if in_training else ())
            if "train" not in module.__dict__
        ]
        for module, listen in listening:
            module.__dict__["train"] = listen

        def give_back() -> None:
            for module, listen in listening:
                if module.__dict__.get("train") is listen:
                    del module.__dict__["train"]
            for module in in_training:
                if module not in told:
                    module.__dict__["training"] = True
            for place, own in compiled:
                if place.get("_compiled_call_impl", own) is None:
                    place["_compiled_call_impl"] = own

        return give_back

    def restore(self) -> None:
        """Give the modes back that modules were in before, unless their owner chose others."""
        if self._has_chosen or any(module.training for module in self._model.modules()):
            return
        for reference, training in self._modes:
            module = reference()
            if module is not None:
                module.training = training


class Step:
    """A step that runs.

    Args:
        places: gives the ``__dict__`` of each module that was called.
        guards: of the layers that have adapters.
    """

    def __init__(
        self, places: Callable[[], list[dict[str, Any]]], guards: list[AdapterGuard]
    ) -> None:
        self._places, self._guards = places, guards
        self._switches = sum(guard.switches for guard in guards)

    @property
    def is_calm(self) -> bool:
        """Whether modes and adapters stayed: another thread may have called ``train()``, say."""
        return (
            not any(place.get("training") for place in self._places())
            and sum(guard.switches for guard in self._guards) == self._switches
        )


def _config_of(module: nn.Module) -> Any:
    config = module.__dict__.get("config")
    return config if _ATTENTION in getattr(config, "__dict__", ()) else None


def _undo(steps: list[Callable[[], None]]) -> None:
    while steps:
        steps.pop()()


def _give_back(place: dict[str, Any], name: str, ours: Any, own: Any) -> None:
    if place.get(name) is ours:
        place[name] = own


_lock = threading.RLock()  # reentrant: a dropped engine may be collected while one is made
_holds: weakref.WeakKeyDictionary[nn.Module, Hold] = weakref.WeakKeyDictionary()


def hold(
    model: nn.Module,
    handler: Callable[[], AttentionHandler | None],
    attention: Callable[[str], str],
) -> tuple[Hold, Callable[[], None]]:
    """Hold ``model``, in eval mode; engines on one model share one hold.

    Returns:
        The hold, and the function that ends this use of it. After the last one the modes of the
        modules are what they were, unless their owner has chosen others since.
    """
    with _lock:
        held = _holds.get(model)
        if held is None:
            held = _holds[model] = Hold(model, handler, attention)
            model.eval()
        held.holders += 1
    released = False
    reference = weakref.ref(model)

    def release() -> None:
        nonlocal released
        with _lock:
            if released:
                return
            released = True
            held.holders -= 1
            if not held.holders:
                owner = reference()
                if owner is not None:
                    _holds.pop(owner, None)
                held.restore()
        held.rest()

    return held, release
