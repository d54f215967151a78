"""Whether a model was changed since its K and V were cached.

`WeightWatch` looks at weights, adapters and modules when requests come, and at the cheaper part
of that in every step. After a change all cached KV is dropped, and no request ends half with the
old weights and half with the new.
What a model writes in its own forward (tables of RoPE, masks, counters) is no change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from radixkv.models.adapters import adapter_state, is_adapted
from radixkv.models.decoder_layer import is_stand_in, own_forward

_HASH_BYTES = 1 << 26  # of a tensor that are copied at a time to be hashed
_SAMPLES = 4  # elements of each tensor that are compared, spread over it
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (bool, int, float, str, type(None))
_COPY_BYTES = 1 << 22  # of a buffer whose content is kept, to be put back
_TURNS = 4  # steps in which all of these elements are compared
_version_of, _address_of = operator.attrgetter("_version"), Tensor.data_ptr
_TIMES = 2  # that a forward writes a buffer before that is taken for its habit


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold what ``tensor`` is: itself, or those inside of a quantizer's."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def feed(digest: Any, tensor: Tensor) -> None:
    """Hash every byte of a tensor into ``digest``."""
    for one in plain_tensors(tensor):
        digest.update(f"{one.dtype} {tuple(one.shape)}\n".encode())
        if one.device.type == "meta":
            continue
        if one.is_quantized:
            one = one.int_repr()
        if one.layout != torch.strided:
            one = one.to_dense()
        flat = _bare(one).reshape(-1)
        for part in flat.split(max(1, _HASH_BYTES // flat.element_size())):
            digest.update(part.contiguous().view(torch.uint8).cpu().numpy().data)


def _bare(tensor: Tensor) -> Tensor:
    """Its values, without gradients or a subclass's behaviour."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data if tensor.is_inference() else tensor.detach()


def _digest(tensor: Tensor) -> bytes:
    digest = xxhash.xxh3_128()
    feed(digest, tensor)
    return digest.digest()


def _version(tensor: Tensor) -> int | None:
    """How often torch has written to it; None if torch does not count."""
    return None if tensor.is_inference() else tensor._version


@dataclass(eq=False, slots=True)
class _Buffer:
    """A buffer, or a tensor that a module has as an attribute, as it was after the last pass.

    Attributes:
        place, name: where the module holds it.
        value: the tensor.
        versions: of the tensors that hold its content.
        digest: of its content.
        content: a copy of that, if it is small.
        same, other: passes of the engine's own that wrote the same content, or another.
    """

    place: dict[str, Any]
    name: str
    value: Tensor
    versions: list[int | None]
    digest: bytes
    content: Tensor | None
    same: int = 0
    other: int = 0

    @classmethod
    def of(cls, place: dict[str, Any], name: str, value: Tensor) -> _Buffer:
        return cls(place, name, value, _versions(value), _digest(value), _copy(value))

    @property
    def is_touched(self) -> bool:
        if self.place.get(self.name) is not self.value:
            return True
        versions = _versions(self.value)
        if None in versions:  # nobody counts
            return _digest(self.value) != self.digest
        return versions != self.versions

    @property
    def is_free(self) -> bool:
        """Whether forwards write another content each time: then it says nothing."""
        return self.other >= _TIMES

    def now(self) -> bytes:
        """The digest of what is there now; empty if there is no tensor."""
        value = self.place.get(self.name)
        return _digest(value) if isinstance(value, Tensor) else b""

    @property
    def has_other_content(self) -> bool:
        """Whether what is there says another thing; a table that grew or shrank does not."""
        value, before = self.place.get(self.name), self.content
        if not isinstance(value, Tensor):
            return True
        if before is None or value.shape == before.shape or value.dim() != before.dim():
            return _digest(value) != self.digest
        if value.dtype != before.dtype or value.device != before.device or 0 in value.shape:
            return True
        common = tuple(slice(min(sizes)) for sizes in zip(value.shape, before.shape, strict=True))
        return not torch.equal(_bare(value)[common], before[common])

    def note(self, digest: bytes | None = None) -> None:
        """Take what is there now, of which ``digest`` is known, for what it was."""
        value = self.place.get(self.name)
        if isinstance(value, Tensor):
            if value is not self.value and value.is_inference() and not self.value.is_inference():
                value = self.place[self.name] = _normal(value)
            self.value, self.versions = value, _versions(value)
            if digest != self.digest:
                self.content = None if self.is_free else _copy(value)
        self.digest = self.now() if digest is None else digest

    def put_back(self) -> bool:
        """Bring the content back that was noted; whether that could be done."""
        if _versions(self.value) == self.versions:
            self.place[self.name] = self.value
            return True
        if self.content is None or self.content.shape != self.value.shape:
            return False
        with torch.inference_mode():  # where every tensor may be written to
            self.value.copy_(self.content)
        self.place[self.name] = self.value
        return True


def _copy(tensor: Tensor) -> Tensor | None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.nbytes > _COPY_BYTES:
        return None
    return None if tensor.device.type == "meta" else _normal(tensor)


def _normal(tensor: Tensor) -> Tensor:
    """A copy that is no inference tensor, in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def inference_places(model: nn.Module) -> set[tuple[int, str]]:
    """Where modules hold inference tensors that are no parameters."""
    return {(id(place), name) for place, name, value in _tensors(model) if value.is_inference()}


def make_normal(model: nn.Module, but: set[tuple[int, str]]) -> None:
    """Give the model normal tensors for those that passes in inference mode have left in it.

    Args:
        but: `inference_places` of before, which are its owner's.
    """
    for place, name, value in list(_tensors(model)):
        if value.is_inference() and (id(place), name) not in but:
            place[name] = _normal(value)


def _tensors(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for module in model.modules():
        for place in (module._buffers, module.__dict__):
            for name, value in place.items():
                if isinstance(value, Tensor):
                    yield place, name, value


def _versions(tensor: Tensor) -> list[int | None]:
    if type(tensor) in (Tensor, nn.Parameter):
        return [_version(tensor)]
    return [_version(one) for one in plain_tensors(tensor)]


class _Registrations:
    """Counts what torch is told of: modules and parameters that any module gets."""

    def __init__(self) -> None:
        self.count = 0
        self._is_told = False

    def begin(self) -> None:
        if not self._is_told:
            self._is_told = True
            register_module_module_registration_hook(self._add)
            register_module_parameter_registration_hook(self._add)

    def _add(self, module: nn.Module, name: str, part: Any) -> None:
        self.count += 1


_registrations: Final = _Registrations()


class WeightWatch:
    """Notices that a model's weights, adapters or layers were changed since the last look.

    It sees: writes through torch (version counters; of weights that are inference tensors, which
    have none, every byte is read), tensors, parameters, modules and forwards that were put in
    place of others, other active adapters, factors that modules hold (a norm's epsilon, a scale:
    floats among their attributes, but those that forwards write), and, on a CPU, writes past
    torch's counters (``.data``, NumPy) where they touch one of the spread elements that it
    compares. It does not see a write past the counters that touches none of these, or that is on
    a GPU, nor hooks, of which most only look: after such a one, call `Engine.reset_cache`.
    Buffers that were written are no change if a forward makes of them what they were.

    Args:
        probe: runs the model once, as an engine does; without it any other buffer is a change.

    Attributes:
        layers_replaced: whether modules were put in place of others since it was made: what
            was measured of the model then may not hold of them.
        is_checked: whether the model is known to be served rightly; False once its modules,
            or types, shapes or devices of its weights, were changed. For the engine to set.

    Complexity: O(tensors + modules) a look; docs/snapshot-format.md has what that takes.
    """

    def __init__(self, model: nn.Module, probe: Callable[[], None] | None = None) -> None:
        self._model, self._probe = model, probe
        self.layers_replaced = False
        self.is_checked = True
        self._registrations, self._turn = 0, 0
        _registrations.begin()
        self._note()

    # -- looks -------------------------------------------------------------------------------

    def changed(self) -> bool:
        """Whether anything was changed since this was made or last said so."""
        if not (
            self._has_other_parts()
            or self._has_other_state()
            or self.changed_unseen()
            or self._has_other_factors()
            or self._look_closely() != self._close
            or self._has_foreign()
        ):
            return False
        self.accept()
        return True

    def changed_in_step(self) -> bool:
        """The cheap part of `changed`, for after each pass: weights, modules, active adapters.

        Modules and parameters that were put in place of others are noticed if torch was told;
        of the elements that are compared, a part is each time (all by `changed_unseen`).
        """
        if self._registrations != _registrations.count:
            if self._has_other_parts():
                return True
            self._registrations = _registrations.count
        self._turn = (self._turn + 1) % _TURNS
        return self._has_other_state() or self._has_other_samples(self._turn)

    def changed_unseen(self) -> bool:
        """Whether weights were written past torch's counters, for before a request ends."""
        return any(map(self._has_other_samples, range(_TURNS)))

    def has_foreign_buffers(self) -> bool:
        """The other part, for before each pass: whether buffers were written between passes."""
        return self._has_foreign()

    def accept(self) -> None:
        """Take the model as it is now for unchanged: later looks compare with this."""
        before, shapes = self._children, self._shapes
        self._note()
        replaced = len(before[2]) != len(self._children[2]) or not all(
            map(operator.is_, before[2], self._children[2])
        )
        self.layers_replaced |= replaced
        if replaced or self._shapes != shapes:
            self.is_checked = False

    def _has_other_parts(self) -> bool:
        return not (_in_place(self._children) and _in_place(self._weights))

    def _has_other_state(self) -> bool:
        return (
            _numbers(map(_version_of, self._counted)) != self._versions
            or _numbers(map(_address_of, self._plain)) != self._addresses
            or [adapter_state(place) for place in self._adapted] != self._adapters
        )

    def _has_other_samples(self, turn: int) -> bool:
        return any(
            np.concatenate(samples).tobytes() != seen for samples, seen in self._samples[turn]
        )

    def _has_other_factors(self) -> bool:
        return any(
            place.get(name) is not value and place.get(name) != value
            for place, name, value in self._factors
        )

    def _look_closely(self) -> list[Any]:
        return [
            [len(module._modules) for module in self._modules],
            [
                forward
                for module in self._modules
                if "forward" in module.__dict__ and not is_stand_in(forward := own_forward(module))
            ],
            [_plain_state(place) for place in self._adapted],
            [_digest(tensor) for tensor in self._uncounted],
        ]

    def _note(self) -> None:
        self._registrations = _registrations.count
        modules = self._modules = list(self._model.modules())
        self._children = _places(
            (module._modules, name, child)
            for module in modules
            for name, child in module._modules.items()
        )
        self._weights = _places(
            (module._parameters, name, weight)
            for module in modules
            for name, weight in module._parameters.items()
        )
        self._plain = [
            one
            for weight in self._weights[2]
            if isinstance(weight, Tensor) and weight.numel()
            for one in plain_tensors(weight)
        ]
        self._shapes = [(one.dtype, one.shape, one.device) for one in self._plain]
        self._counted = [one for one in self._plain if not one.is_inference()]
        self._uncounted = [one for one in self._plain if one.is_inference()]
        self._versions = _numbers(map(_version_of, self._counted))
        self._addresses = _numbers(map(_address_of, self._plain))
        self._adapted = [module.__dict__ for module in modules if is_adapted(module)]
        self._adapters = [adapter_state(place) for place in self._adapted]
        samples = [_spread(tensor) for tensor in self._plain if _readable(tensor)]
        widths = sorted({sample.dtype.itemsize for sample in samples})
        self._samples = [
            [
                (views, np.concatenate(views).tobytes())
                for width in widths
                if (views := [s for s in samples[turn::_TURNS] if s.dtype.itemsize == width])
            ]
            for turn in range(_TURNS)
        ]
        self._factors: list[tuple[dict[str, Any], str, float]] = [
            (module.__dict__, name, value)
            for module in modules
            for name, value in module.__dict__.items()
            if type(value) is float
        ]
        self._knows_factors = False  # which of them forwards write
        self._close = self._look_closely()
        known = {(id(b.place), b.name): b for b in getattr(self, "_buffers", ())}
        self._buffers: list[_Buffer] = []
        self._suspects: list[tuple[_Buffer, Tensor, Tensor | None]] = []
        for place, name, value in _tensors(self._model):
            buffer = _Buffer.of(place, name, value)
            former = known.get((id(place), name))
            if former is not None:
                buffer.same, buffer.other = former.same, former.other
            self._buffers.append(buffer)

    # -- buffers -----------------------------------------------------------------------------

    def _has_foreign(self) -> bool:
        """Whether somebody else than a pass of the model has written to a buffer."""
        others = self._others()
        if not others or self._probe is None:
            return bool(others)
        self._probe()
        first = {id(buffer): buffer.now() for buffer in others}
        others = self._others(among=others)
        if others:  # what a forward makes another each time says nothing
            self._probe()
            for buffer in others:
                if buffer.now() != first[id(buffer)]:
                    buffer.other = _TIMES
            others = self._others(among=others)
        return bool(others)

    def _others(self, among: list[_Buffer] | None = None) -> list[_Buffer]:
        """Buffers, all or of ``among``, whose content is another than it was; the rest is noted."""
        found = []
        for buffer in self._buffers:
            if not buffer.is_touched:
                continue
            if (
                not buffer.is_free
                and (among is None or buffer in among)
                and buffer.has_other_content
            ):
                found.append(buffer)
            else:
                buffer.note(buffer.digest if buffer.is_free else None)
        return found

    def after_pass(self) -> bool:
        """Note what a pass of the engine's own has left in buffers.

        Returns:
            Whether some of it is not known to be of the pass: another thread may have written
            to them meanwhile. They are as before the pass now, as far as that can be; run the
            same pass again, and call `judge`.
        """
        self._suspects.clear()  # of a pass that failed
        if not self._knows_factors:
            self._factors = [one for one in self._factors if one[0].get(one[1]) == one[2]]
            self._knows_factors = True
        for buffer in self._buffers:
            if not buffer.is_touched:
                continue
            now = buffer.place.get(buffer.name)
            is_steady = buffer.same >= _TIMES and getattr(now, "shape", 0) == buffer.value.shape
            if buffer.is_free or is_steady:
                buffer.note(buffer.digest)
            elif isinstance(now, Tensor) and buffer.has_other_content:
                content = _copy(now)
                if buffer.put_back():
                    self._suspects.append((buffer, now, content))
                else:
                    buffer.note()
            else:
                buffer.same += 1
                buffer.note()
        return bool(self._suspects)

    def judge(self) -> bool:
        """After the pass was run again: whether what it did not write is somebody else's."""
        foreign = False
        for buffer, value, content in self._suspects:
            if buffer.now() != buffer.digest:  # it was written again
                buffer.other += 1
                buffer.note()
                continue
            foreign = True
            if value is buffer.value and content is not None:
                with torch.inference_mode():
                    value.copy_(content)
            buffer.place[buffer.name] = value
        self._suspects.clear()
        return foreign


_Places = tuple[list[dict[str, Any]], list[str], list[Any]]  # where modules hold something; what


def _places(found: Iterable[tuple[dict[str, Any], str, Any]]) -> _Places:
    lists = [list(column) for column in zip(*found, strict=True)]
    return (lists[0], lists[1], lists[2]) if lists else ([], [], [])


def _numbers(found: Iterable[int]) -> bytes:
    return np.fromiter(found, np.int64).tobytes()


def _in_place(places: _Places) -> bool:
    dicts, names, values = places
    return all(map(operator.is_, map(dict.get, dicts, names), values))


def _plain_state(place: dict[str, Any]) -> dict[str, Any]:
    """All plain values among a module's attributes, copied."""
    found: dict[str, Any] = {}
    for name, value in place.items():
        if name == "training":
            continue
        if type(value) in _PLAIN:
            found[name] = value
        elif type(value) in (list, tuple, set) and all(type(one) in _PLAIN for one in value):
            found[name] = tuple(value)
        elif type(value) is dict and all(type(one) in _PLAIN for one in value.values()):
            found[name] = dict(value)
    return found


def _readable(tensor: Tensor) -> bool:
    """Whether NumPy can look at the tensor's own memory."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.element_size() in _INTEGERS
    )


def _spread(tensor: Tensor) -> NDArray[Any]:
    """Some elements over the whole of a tensor, as integers of their bits: a view."""
    flat = _bare(tensor).reshape(-1).view(_INTEGERS[tensor.element_size()])
    picked: NDArray[Any] = flat.numpy()[:: max(1, flat.numel() // _SAMPLES)]
    return picked
