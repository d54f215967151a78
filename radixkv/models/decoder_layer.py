"""What stands in for the forwards of a model's layers while an engine runs a step.

Linear layers and activations run as `radixkv.models.linear` has them. Decoder layers of known
models run as two compiled calls, one before their attention and one after it: a step that decodes
few sequences would spend more time between its many small operations than in them. A layer that is
not known, or that was changed, runs as transformers runs it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from radixkv.models.adapters import AdapterGuard, is_adapted
from radixkv.models.attention_interface import AttentionHandler, Served
from radixkv.models.linear import (
    BatchInvariantActivation,
    BatchInvariantLinear,
    can_multiply,
    linear_kernels,
)

# What the attention of each known family is told of a sliding window.
_WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "llama.modeling_llama.Llama": lambda attention: None,
    "mistral.modeling_mistral.Mistral": lambda attention: getattr(
        attention.config, "sliding_window", None
    ),
    "qwen2.modeling_qwen2.Qwen2": lambda attention: attention.sliding_window,
    "qwen3.modeling_qwen3.Qwen3": lambda attention: attention.sliding_window,
}
_BLOCK_ROWS = 512  # that run at a time: what lies between the products stays in a cache
_MAX_PROGRAMS = 64  # that a layer keeps, by numbers of rows
_MAX_WORKSPACES = 64  # that a thread keeps, by numbers of rows
_FEW_ROWS = 64  # that a step's layers run from one place: then time between calls counts
_IN_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_IN_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_SILU = ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation")


def _family(layer: nn.Module) -> str:
    """The known family of a decoder layer; empty if there is none."""
    kind = type(layer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    family = name.removeprefix("transformers.models.").removesuffix("DecoderLayer")
    return family if family != name and family in _WINDOWS else ""


@dataclass(frozen=True)
class _Part:
    """A module of a layer as it was when it was looked at."""

    siblings: dict[str, nn.Module | None]
    name: str
    module: nn.Module
    weight: Tensor | None
    bias: Tensor | None
    weight_at: int
    bias_at: int

    @classmethod
    def of(cls, parent: nn.Module, name: str, module: nn.Module) -> _Part:
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        places = _address(weight), _address(bias)
        return cls(parent._modules, name, module, weight, bias, *places)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class _Parts:
    """What a fused layer is made of; all of it known and fit for the compiled calls.

    Raises:
        LookupError: it is not.
    """

    def __init__(self, layer: Any, family: str) -> None:
        prefix = f"transformers.models.{family}"
        self.all: list[_Part] = []
        self._factors: list[tuple[dict[str, Any], str, Any]] = []  # that programs hold

        def take(parent: nn.Module, name: str, *kinds: str) -> Any:
            module = parent._modules.get(name)
            if module is None or _kind(module) not in kinds or not is_bare(module):
                raise LookupError(name)
            part = _Part.of(parent, name, module)
            self.all.append(part)
            return part

        def take_norm(parent: nn.Module, name: str) -> Any:
            part = take(parent, name, f"{prefix}RMSNorm")
            if not (part.weight is not None and part.weight.dim() == 1 and _is_plain(part.weight)):
                raise LookupError(name)
            epsilon = part.module.variance_epsilon
            self._factors.append((part.module.__dict__, "variance_epsilon", epsilon))
            return part.weight_at, linear_kernels().bits_of(epsilon)

        def take_linear(parent: nn.Module, name: str) -> Any:
            part = take(parent, name, "torch.nn.modules.linear.Linear")
            if (
                not (can_multiply(part.weight) and part.weight.is_contiguous())
                or "bias" not in part.module._parameters  # it is computed
                or not (part.bias is None or _is_plain(part.bias))
            ):
                raise LookupError(name)
            return part

        attention = take(layer, "self_attn", f"{prefix}Attention").module
        mlp = take(layer, "mlp", f"{prefix}MLP").module
        self.norm, self.post_norm = (take_norm(layer, name) for name in _NORMS)
        self.q, self.k, self.v, self.o = (take_linear(attention, f"{name}_proj") for name in "qkvo")
        self.q_norm = self.k_norm = (0, 0)
        if "q_norm" in attention._modules:
            self.q_norm, self.k_norm = (take_norm(attention, f"{name}_norm") for name in "qk")
        self.gate, self.up, self.down = (
            take_linear(mlp, f"{name}_proj") for name in ("gate", "up", "down")
        )
        take(mlp, "act_fn", *_SILU)
        if set(attention._modules) - _IN_ATTENTION or set(mlp._modules) - _IN_MLP:
            raise LookupError("set of modules")
        self.attention = attention
        self.head_dim: int = attention.head_dim
        self.hidden_size: int = self.q.weight.shape[1]
        self.num_inner: int = self.gate.weight.shape[0]
        self._factors.append((attention.__dict__, "scaling", attention.scaling))
        self.keywords = {
            "scaling": attention.scaling,
            "sliding_window": _WINDOWS[family](attention),
        }

        self.widths = [part.weight.shape[0] for part in (self.q, self.k, self.v)]
        self.geometry = (self.hidden_size, self.head_dim, self.num_inner, *self.widths)
        self.sizes = {  # of a row of what lies between the operations
            "joint": sum(self.widths), "attended": self.widths[0], "cos": self.head_dim,
            "sin": self.head_dim, "normed": self.hidden_size, "middle": self.hidden_size,
            "gate": self.num_inner, "up": self.num_inner,
        }  # fmt: skip
        self._seen = [
            (p.siblings, p.name, p.module, p.module._parameters, p.weight, p.weight_at, p.bias,
             p.bias_at)
            for p in self.all
        ]  # fmt: skip
        self._memory: list[Any] = []
        self._programs: dict[tuple[int, int], tuple[Any, Any]] = {}
        # Weakly: a thread's workspaces end with it.
        self.placed: weakref.WeakKeyDictionary[_Workspace, tuple[Any, Any]]
        self.placed = weakref.WeakKeyDictionary()

    def are_unchanged(self) -> bool:
        for siblings, name, module, parameters, weight, weight_at, bias, bias_at in self._seen:
            if (
                siblings.get(name) is not module
                or module._forward_hooks
                or module._forward_pre_hooks
                or type(module.__dict__.get("forward")) not in _OWN_FORWARDS
                or parameters.get("weight") is not weight
                or parameters.get("bias") is not bias
                or (weight is not None and weight.data_ptr() != weight_at)
                or (bias is not None and bias.data_ptr() != bias_at)
            ):
                return False
        return all(place.get(name) == value for place, name, value in self._factors)

    def keep(self) -> None:
        """Keep what the programs read, though a parameter may be given other memory."""
        if not self._memory:
            tensors = (one for part in self.all for one in (part.weight, part.bias))
            self._memory = [one.untyped_storage() for one in tensors if one is not None]

    def rest(self) -> None:
        """Let go of it; nothing runs until `keep`."""
        self._memory.clear()

    def programs(self, num_rows: int, num_threads: int) -> tuple[Any, Any]:
        """What runs before the attention, and after it."""
        made = self._programs.get((num_rows, num_threads))
        if made is None:
            if len(self._programs) == _MAX_PROGRAMS:
                self._programs.clear()
            made = self._before(num_rows, num_threads), self._after(num_rows, num_threads)
            self._programs[num_rows, num_threads] = made
        return made

    def place(self, workspace: _Workspace) -> tuple[Any, Any]:
        """Both programs of a workspace, with all addresses filled in except x and out."""
        made = self.placed.get(workspace)
        if made is None:
            before, after = self.programs(workspace.num_rows, workspace.num_threads)
            made = (
                before.place("x", **workspace.places),
                after.place("x", "out", **workspace.places),
            )
            self.placed[workspace] = made
        return made

    def heads_of(self, joint: Tensor) -> Iterator[Tensor]:
        """q, k and v, [1, num_heads, num_rows, head_dim], in their joint rows."""
        _, num_rows, width = joint.shape
        place, head_dim = 0, self.head_dim
        for part in self.widths:
            shape = (1, part // head_dim, num_rows, head_dim)
            yield joint.as_strided(shape, (num_rows * width, head_dim, width, 1), place)
            place += part

    def _before(self, num_rows: int, num_threads: int) -> Any:
        size, head_dim = self.hidden_size, self.head_dim
        row, joint_row = 4 * size, 4 * sum(self.widths)
        program = linear_kernels().Program(num_rows, num_threads)
        program.norm(size, ("x", 0), row, *self.norm, ("normed", 0), row)
        program.then()
        place = 0
        for part, width in zip((self.q, self.k, self.v), self.widths, strict=True):
            out = ("joint", place)
            program.product(
                width, size, ("normed", 0), row, part.weight_at, part.bias_at, out, joint_row
            )
            place += 4 * width
        program.then()
        turn = ("cos", 0), ("sin", 0), 4 * head_dim
        place = 0
        for width, norm in zip(self.widths, (self.q_norm, self.k_norm), strict=False):
            program.rope(width // head_dim, head_dim, ("joint", place), joint_row, *turn, *norm)
            place += 4 * width
        return program

    def _after(self, num_rows: int, num_threads: int) -> Any:
        size, inner, wide = self.hidden_size, self.num_inner, self.o.weight.shape[1]
        row, inner_row = 4 * size, 4 * inner
        normed, middle, gate = ("normed", 0), ("middle", 0), ("gate", 0)
        program = linear_kernels().Program(num_rows, num_threads)
        program.product(
            size, wide, ("attended", 0), 4 * wide, self.o.weight_at, self.o.bias_at,
            middle, row, ("x", 0), row,
        )  # fmt: skip
        program.then()
        program.norm(size, middle, row, *self.post_norm, normed, row)
        program.then()
        program.gated(
            inner, size, normed, row, self.gate.weight_at, self.gate.bias_at,
            self.up.weight_at, self.up.bias_at, gate, ("up", 0), inner_row,
        )  # fmt: skip
        program.then()
        program.product(
            size, inner, gate, inner_row, self.down.weight_at, self.down.bias_at,
            ("out", 0), row, middle, row,
        )  # fmt: skip
        return program


class _Workspace:
    """Where a thread runs the layers of steps of ``num_rows`` rows: all that they need but x.

    Args:
        memory: by name, what lies there for each of `_FEW_ROWS` rows; workspaces share it, as only
            one of a thread is in use at a time.
    """

    def __init__(
        self, memory: Mapping[str, Tensor], parts: _Parts, num_rows: int, num_threads: int
    ) -> None:
        self.num_rows, self.num_threads = num_rows, num_threads
        self._memory = memory  # its addresses are in the programs that are placed here
        self.places = {name: rows.data_ptr() for name, rows in memory.items()}
        joint, attended = (
            memory[name][:num_rows].unflatten(1, (-1, parts.head_dim))
            for name in ("joint", "attended")
        )
        self.q, self.k, self.v = joint.split([n // parts.head_dim for n in parts.widths], dim=1)
        self.attended = attended
        self._turn_bytes = 4 * num_rows * parts.head_dim

    def turn(self, cos: Tensor, sin: Tensor) -> None:
        """Take the RoPE of a step."""
        ctypes.memmove(self.places["cos"], cos.data_ptr(), self._turn_bytes)
        ctypes.memmove(self.places["sin"], sin.data_ptr(), self._turn_bytes)


class _Workspaces(threading.local):
    """What a thread keeps from step to step.

    Of the thread, not of a step: compiled programs hold addresses in this memory, and are made once
    for all steps; and two threads that run steps of one model must not share it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], _Workspace] = {}
        self._memory: dict[tuple[int, ...], dict[str, Tensor]] = {}
        self._space = np.empty(0, np.uint8)

    def space(self, num_bytes: int) -> int:
        """The address of so much memory, whose content is anything."""
        if self._space.nbytes < num_bytes:
            self._space = np.empty(num_bytes, np.uint8)  # NumPy asks for huge pages
        return self._space.ctypes.data

    def workspace(self, parts: _Parts, num_rows: int) -> _Workspace:
        num_threads = torch.get_num_threads()
        key = (num_rows, num_threads, *parts.geometry)
        workspace = self._known.get(key)
        if workspace is None:
            if len(self._known) == _MAX_WORKSPACES:
                self._known.clear()
                self._memory.clear()
            if parts.geometry not in self._memory:
                with torch.inference_mode(False):  # or only inference could use it again
                    self._memory[parts.geometry] = {
                        name: torch.empty(_FEW_ROWS, size, dtype=torch.float32, device="cpu")
                        for name, size in parts.sizes.items()
                    }
            workspace = _Workspace(self._memory[parts.geometry], parts, num_rows, num_threads)
            self._known[key] = workspace
        return workspace


_workspaces = _Workspaces()


class _FusedPass:
    """A forward pass that goes from fused layer to fused layer, on one workspace.

    Attributes:
        x: what the last layer gave; who gets that very tensor is the next.
    """

    def __init__(
        self, workspace: _Workspace, serve: Served, x: Tensor, embeddings: tuple[Tensor, Tensor]
    ) -> None:
        self.workspace, self._serve, self.x, self.embeddings = workspace, serve, x, embeddings
        workspace.turn(*embeddings)

    def run(
        self, parts: _Parts, placed: tuple[Any, Any], x: Tensor, keywords: Mapping[str, Any]
    ) -> Tensor:
        before, after = placed
        x_at = x.data_ptr()
        before.run(x_at)
        self._serve(parts.attention, keywords, parts.keywords)
        out = torch.empty_like(x)
        after.run(x_at, out.data_ptr())
        self.x = out
        return out


class FusedLayer:
    """The forward of a pre-norm decoder layer with RoPE and a gated MLP, in two compiled calls.

    It computes what the layer's own forward does, in float32 on a CPU without gradients, while
    an engine's handler serves the attention; else, or if a part of the layer is not as it was,
    it calls the layer's own. Parts are looked at when it runs first, and after `look`: looking
    at all parts of all layers takes a twentieth of a step that decodes one sequence.

    Args:
        layer: of a known family.
        handler: gives who serves attention now; None if nobody does.

    Attributes:
        inner: where in the layer what stands in for which forward, when its own runs.
        inside: the ``__dict__`` of each module in it.

    Accuracy: that of float32; a row's bits do not feel the other rows.
    """

    def __init__(self, layer: nn.Module, handler: Callable[[], AttentionHandler | None]) -> None:
        self._layer = weakref.ref(layer)
        self._family = _family(layer)
        self._handler = handler
        self._parts: _Parts | None = None
        self._is_seen = self._gave_way = False
        self.inner: list[tuple[dict[str, Any], StandIn]] = []
        self.inside: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._num_standing = 0

    @property
    def is_ready(self) -> bool:
        """Whether the compiled calls serve it, so that nothing in it is called by itself."""
        return self._is_seen and self._parts is not None and not self._gave_way

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Within this block stand-ins are in the layer."""
        with self._lock:
            self._num_standing += 1
            put_in(self.inner)
        try:
            yield
        finally:
            with self._lock:
                self._num_standing -= 1
                if not self._num_standing:
                    take_out(self.inner)

    def look(self) -> None:
        """At its next call, see whether the layer is still what it was."""
        self._is_seen = self._gave_way = False

    def rest(self) -> None:
        """Let go of the layer's weights until its next call: they may be replaced meanwhile."""
        self._is_seen = False
        if self._parts is not None:
            self._parts.rest()

    def __call__(self, *args: Any, **keywords: Any) -> Tensor:
        handler, parts = self._handler(), self._parts
        fused_pass: _FusedPass | None = None if handler is None else handler.fused_pass
        if (
            fused_pass is not None
            and self._is_seen
            and parts is not None
            and len(args) == 1
            and args[0] is fused_pass.x
            and keywords.get("position_embeddings") is fused_pass.embeddings
            and not torch.is_grad_enabled()
        ):
            placed = parts.placed.get(fused_pass.workspace)
            if placed is not None:
                return fused_pass.run(parts, placed, args[0], keywords)
        layer = self._layer()
        assert layer is not None  # its forward is what runs
        if (
            handler is not None
            and len(args) == 1
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        ):
            embeddings = keywords.get("position_embeddings")
            if embeddings is not None and self._look(layer, args[0], embeddings):
                parts = self._parts
                assert parts is not None
                fused_pass = self._begin_pass(handler, parts, args[0], embeddings)
                if fused_pass is not None:
                    return fused_pass.run(
                        parts, parts.place(fused_pass.workspace), args[0], keywords
                    )
                cos, sin = embeddings
                return self._run(handler, parts, args[0], cos, sin, keywords)
        if handler is None or torch.compiler.is_compiling():
            return type(layer).forward(layer, *args, **keywords)  # type: ignore[no-any-return]
        self._gave_way = True
        with self.standing():
            return type(layer).forward(layer, *args, **keywords)  # type: ignore[no-any-return]

    def _look(self, layer: nn.Module, x: Tensor, embeddings: Sequence[Tensor]) -> bool:
        """Whether the layer, and what it is called with, are fit for the compiled calls."""
        if not self._is_seen:
            if self._parts is None or not self._parts.are_unchanged():
                try:
                    self._parts = _Parts(layer, self._family)
                except LookupError:
                    self._parts = None
                    return False
            self._parts.keep()
            self._is_seen = True
        assert self._parts is not None
        return (
            x.shape[:-1] == embeddings[0].shape[:-1]
            and x.shape[0] == 1
            and x.shape[1] > 0
            and x.shape[2] == self._parts.hidden_size
            and all(map(_is_plain, (x, *embeddings)))
            and all(tensor.shape[2] == self._parts.head_dim for tensor in embeddings)
        )

    def _begin_pass(
        self, handler: AttentionHandler, parts: _Parts, x: Tensor, embeddings: tuple[Tensor, Tensor]
    ) -> _FusedPass | None:
        """What goes from here to the layers that follow, if there are few rows."""
        if x.shape[1] > _FEW_ROWS:
            return None
        workspace = _workspaces.workspace(parts, x.shape[1])
        fused_pass: _FusedPass | None = handler.fused_pass
        if (
            fused_pass is None
            or fused_pass.workspace is not workspace
            or fused_pass.embeddings is not embeddings
        ):
            serve = handler.prepare(workspace.q, workspace.k, workspace.v, workspace.attended)
            fused_pass = None if serve is None else _FusedPass(workspace, serve, x, embeddings)
            handler.fused_pass = fused_pass
        return fused_pass

    def _run(
        self,
        handler: AttentionHandler,
        parts: _Parts,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        keywords: Mapping[str, Any],
    ) -> Tensor:
        num_rows, widths = x.shape[1], parts.widths
        num_threads, blocks = torch.get_num_threads(), range(0, num_rows, _BLOCK_ROWS)
        block = min(num_rows, _BLOCK_ROWS)
        row, joint_row = 4 * parts.hidden_size, 4 * sum(widths)
        joint = torch.empty(1, num_rows, sum(widths), dtype=torch.float32, device="cpu")
        # What lies between the operations of a block.
        normed = _workspaces.space(block * 8 * (parts.hidden_size + parts.num_inner))
        x_at, joint_at, cos_at, sin_at = (t.data_ptr() for t in (x, joint, cos, sin))
        turn_row = 4 * parts.head_dim
        for first in blocks:
            before, _ = parts.programs(min(block, num_rows - first), num_threads)
            before.run(
                x=x_at + first * row,
                normed=normed,
                joint=joint_at + first * joint_row,
                cos=cos_at + first * turn_row,
                sin=sin_at + first * turn_row,
            )
        q, k, v = parts.heads_of(joint)
        attended = handler(parts.attention, q, k, v, {**keywords, **parts.keywords})
        wanted, layer = None, self._layer()
        if layer is not None and not layer._forward_hooks:
            wanted = handler.wanted(parts.attention)
        if wanted is None or len(wanted) == num_rows:
            return self._after(parts, attended.contiguous(), x, normed)
        out = torch.zeros_like(x)
        if len(wanted):
            few = attended.index_select(1, wanted), x.index_select(1, wanted)
            out.index_copy_(1, wanted, self._after(parts, *few, normed))
        return out

    @staticmethod
    def _after(parts: _Parts, attended: Tensor, x: Tensor, normed: int) -> Tensor:
        """What follows the attention; ``normed`` is where the space of a block begins."""
        num_rows = x.shape[1]
        block, row = min(num_rows, _BLOCK_ROWS), 4 * parts.hidden_size
        middle = normed + block * row
        gate = middle + block * row
        up = gate + 4 * block * parts.num_inner
        attended_at, attended_row = attended.data_ptr(), attended.stride(1) * 4
        out = torch.empty_like(x)
        x_at, out_at = x.data_ptr(), out.data_ptr()
        for first in range(0, num_rows, block):
            _, after = parts.programs(min(block, num_rows - first), torch.get_num_threads())
            after.run(
                attended=attended_at + first * attended_row,
                x=x_at + first * row,
                middle=middle,
                normed=normed,
                gate=gate,
                up=up,
                out=out_at + first * row,
            )
        return out

    def __reduce__(self) -> Any:
        # In a copy the layer runs its own forward.
        layer = self._layer()
        assert layer is not None
        return partial, (type(layer).forward, layer)


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


StandIn = BatchInvariantLinear | BatchInvariantActivation | FusedLayer | AdapterGuard
_OWN_FORWARDS = (
    BatchInvariantLinear,
    BatchInvariantActivation,
    FusedLayer,
    AdapterGuard,
    type(None),
)


def is_stand_in(forward: Any) -> bool:
    """Whether ``forward``, as a module has it in its ``__dict__``, is one of ours, or none."""
    return type(forward) in _OWN_FORWARDS


def put_in(forwards: Sequence[tuple[dict[str, Any], StandIn]]) -> None:
    """Put each into its module, where that has no forward of its own."""
    for place, own in forwards:
        place.setdefault("forward", own)


def take_out(forwards: Sequence[tuple[dict[str, Any], StandIn]]) -> None:
    """Take out what `put_in` has put in."""
    for place, own in forwards:
        if place.get("forward") is own:
            del place["forward"]


def as_written(forward: Any) -> Any:
    """What a function was before ``torch.compile``."""
    while (inner := getattr(forward, "_torchdynamo_orig_callable", None)) is not None:
        forward = inner
    return forward


def own_forward(module: nn.Module) -> Any:
    """The forward that was given to ``module`` itself; None if it is its class's, if compiled."""
    forward = as_written(module.__dict__.get("forward"))
    is_class_s = getattr(forward, "__func__", None) is type(module).forward
    return None if is_class_s and forward.__self__ is module else forward


def stand_in(module: nn.Module, handler: Callable[[], AttentionHandler | None]) -> StandIn | None:
    """What computes ``module`` so that rows do not feel their neighbours; None: it stays.

    Args:
        handler: gives who serves attention at the time; None if nobody does.
    """
    if not is_stand_in(module.__dict__.get("forward")):
        return None  # another forward may do more
    if is_adapted(module):
        return AdapterGuard(module)
    if _is_linear(module):
        return BatchInvariantLinear(module)
    if _is_activation(module):
        return BatchInvariantActivation(module)
    if _family(module) and linear_kernels() is not None and is_bare(module):
        return FusedLayer(module, handler)
    return None


def why_not_fused(layer: nn.Module) -> str:
    """Why a decoder layer runs as transformers runs it, in words; empty if it runs fused.

    Between steps, as it is now; the answer is that of `stand_in` and of `FusedLayer`'s look.
    """
    family = _family(layer)
    if not family:
        known = ", ".join(sorted(name.partition(".")[0] for name in _WINDOWS))
        return f"{type(layer).__name__} is of no family that is fused ({known})"
    if linear_kernels() is None:
        return "Numba or radixkv_kernels is not installed"
    weight = next(layer.parameters(), None)
    if weight is not None and not (weight.is_cpu and weight.dtype is torch.float32):
        dtype = str(weight.dtype).removeprefix("torch.")
        return f"its weights are {dtype} on {weight.device.type}; fused layers take float32 on cpu"
    if is_adapted(layer) or not is_bare(layer):
        return "it has hooks, an adapter or a forward of its own"
    try:
        _Parts(layer, family)
    except LookupError as error:
        return (
            f"its {error.args[0]} is not as transformers makes it (another class, dtype or memory "
            f"layout, a hook, an adapter, or a forward of its own)"
        )
    return ""


def _is_linear(module: nn.Module) -> bool:
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    kinds = (nn.Linear, getattr(pytorch_utils, "Conv1D", nn.Linear))
    # Subclasses may do more than the product.
    return type(module) in kinds and can_multiply(module._parameters.get("weight"))


def _is_activation(module: nn.Module) -> bool:
    home = type(module).__module__
    known = home in ("transformers.activations", "torch.nn.modules.activation")
    stateless = not (module._parameters or module._buffers or module._modules)
    return known and stateless and type(module) in _elementwise()


def is_bare(module: nn.Module) -> bool:
    """Whether a call of ``module`` is its class's forward, or ours, and nothing besides."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return not hooks and is_stand_in(module.__dict__.get("forward"))


def _elementwise() -> set[type]:
    kinds: set[type] = {nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Mish, nn.ReLU6}
    activations = sys.modules.get("transformers.activations")
    names = (
        "AccurateGELUActivation", "FastGELUActivation", "GELUActivation", "GELUTanh",
        "LaplaceActivation", "MishActivation", "NewGELUActivation", "QuickGELUActivation",
        "ReLUSquaredActivation", "SiLUActivation",
    )  # fmt: skip
    for name in names:
        kind = getattr(activations, name, None)
        if kind is not None:
            kinds.add(kind)
    return kinds
