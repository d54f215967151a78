"""Where compiled kernels are kept from run to run, and what names them.

Numba's own cache looks at the file of the function that is compiled, not at those whose functions
are compiled into it; it numbers its files, so that two processes that compile at once may take
the same number for two kernels. Here a file is named by a digest of all that the machine code
depends on: every source of the kernels, what the function closes over, the processor, the
versions and settings of Numba. So nothing stale is found, and who writes at the same time writes
the same. A damaged file is compiled anew.

The folder is the first of these that can be written: ``NUMBA_CACHE_DIR``, ``RADIXKV_CACHE_DIR``
(``kernels`` in it), ``__pycache__`` beside the sources, ``radixkv/kernels`` in the user's cache.
Where none can, kernels are compiled in every process, and the log says so.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import llvmlite.binding
import numba
import platformdirs
from numba import njit
from numba.core import config, sigutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.ccallback import CFunc
from numba.core.serialize import dumps

from radixkv_kernels import sources

MAX_FOLDERS = 4  # of builds: this one and the last three
_PREFIX = "radixkv-"
_SETTINGS = (
    "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT",
    "FULL_TRACEBACKS", "LLVM_REFPRUNE_PASS", "LLVM_REFPRUNE_FLAGS", "USING_SVML",
)  # fmt: skip
_CHECK_BYTES = 32

logger = logging.getLogger("radixkv")


def compile_callback(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """As `numba.cfunc`, kept on disk: a C function, compiled now; ``cache_hits`` says if found."""
    arguments, result = sigutils.normalize_signature(signature)

    def compile_function(function: Callable[..., Any]) -> Any:
        kernel = CFunc(function, (arguments, result), locals={}, options={"error_model": "numpy"})
        kernel._cache = KernelCache(function)
        with _no_garbage():
            kernel.compile()
        return kernel

    return compile_function


def compile_lazily(function: Callable[..., Any], **options: Any) -> Any:
    """As `numba.njit`, kept on disk: compiled when it is first called with such arguments."""
    dispatcher = njit(**options)(function)
    dispatcher._cache = KernelCache(function)
    return dispatcher


def compile_helper(function: Callable[..., Any]) -> Any:
    """A function that becomes part of the kernels which call it, at each place where they do.

    It is put there before types are inferred: it costs nothing when it runs, and a helper's
    literal arguments stay literal. What calls it pays for copying it, helpers inside it included:
    so helpers are small, and kernels call them themselves.
    """
    return njit(error_model="numpy", inline="always")(function)


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """A compiler makes many objects and few cycles: looking for those is a seventh of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _closed_over(value: Any) -> Any:
    """What a value that compiled code closes over is, the same in every process.

    Of a helper, its name, code, and what it closes over in turn.
    """
    function = getattr(value, "py_func", value)
    if not isinstance(function, FunctionType):
        return dumps(value)
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    name = f"{function.__module__}.{function.__qualname__}"
    return name, function.__code__.co_code, tuple(map(_closed_over, cells))


@cache
def build() -> str:
    """What all kernels of this process have in common: sources, versions, processor, settings."""
    if not sources.digest():
        return ""
    parts = (
        sources.digest(),
        sys.implementation.cache_tag,
        numba.__version__,
        llvmlite.__version__,
        llvmlite.binding.get_host_cpu_name(),
        # Vectors are made as wide as the processor's, whatever Numba is told to compile for.
        llvmlite.binding.get_host_cpu_features().flatten(),
        *(f"{name}={getattr(config, name, None)}" for name in _SETTINGS),
    )
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def folder() -> Path | None:
    """Where this build's kernels are kept; None where no folder can be written."""
    wanted = tuple(os.environ.get(n) for n in ("RADIXKV_CACHE_DIR", "XDG_CACHE_HOME"))
    return _folder(config.CACHE_DIR, *wanted)


@cache
def _folder(numba_dir: str, own_dir: str | None, _user_dir: str | None) -> Path | None:
    if not build():
        logger.warning("kernels: no source files in %s; compiled anew each time", sources.FOLDER)
        return None
    bases = [Path(numba_dir).expanduser().absolute()] if numba_dir else []
    bases += [Path(own_dir).expanduser().absolute() / "kernels"] if own_dir else []
    bases.append(sources.FOLDER / "__pycache__")
    with contextlib.suppress(RuntimeError):  # a user without a home
        user = Path(platformdirs.user_cache_dir("radixkv", appauthor=False)).expanduser()
        bases.append(user.absolute() / "kernels")
    refused = []
    for base in bases:
        found = base / f"{_PREFIX}{build()}"
        try:
            found.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=found).close()
        except OSError as error:
            refused.append(str(error))
            continue
        _drop_others(found)
        return found
    logger.warning(
        "kernels: no folder to keep them in (%s); compiled anew each time: set RADIXKV_CACHE_DIR",
        "; ".join(refused),
    )
    return None


def _drop_others(found: Path) -> None:
    """Remove the folders of all but the builds that were used last."""
    with contextlib.suppress(OSError):  # another process is doing the same
        os.utime(found)
        others = [f for f in found.parent.glob(f"{_PREFIX}*") if f.is_dir() and f != found]
        others.sort(key=lambda f: f.stat().st_mtime, reverse=True)
        for other in others[MAX_FOLDERS - 1 :]:
            shutil.rmtree(other, ignore_errors=True)


class KernelCache(FunctionCache):
    """Of one function; Numba's, but for the files and what names them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = repr(function)
        self._py_func = function
        self._impl = _CompileResult(function)
        self._title = f"{Path(function.__code__.co_filename).stem}.{function.__qualname__}"
        self.enable()

    @property
    def cache_path(self) -> str | None:
        """The folder, as Numba's statistics show it."""
        return None if (found := folder()) is None else str(found)

    def flush(self) -> None:
        """Forget what is kept of this function."""
        if (found := folder()) is not None:
            for file in found.glob(f"{_plain(self._title)}-*.kernel"):
                file.unlink(missing_ok=True)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), _closed_over(self._py_func)

    def _path(self, key: Any) -> Path | None:
        if (found := folder()) is None:
            return None
        digest = hashlib.sha256(repr((build(), self._title, key)).encode()).hexdigest()[:32]
        return found / f"{_plain(self._title)}-{digest}.kernel"

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        path = self._path(self._index_key(sig, target_context.codegen()))
        if not self._enabled or path is None:
            return None
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s: cannot be read (%s); compiled anew", path, error)
            return None
        data = content[_CHECK_BYTES:]
        if hashlib.sha256(data).digest() != content[:_CHECK_BYTES]:
            logger.warning("%s: is damaged; compiled anew", path)
            return None
        return self._impl.rebuild(target_context, pickle.loads(data))

    def _save_overload(self, sig: Any, data: Any) -> None:
        path = self._path(self._index_key(sig, data.codegen))
        if not self._enabled or path is None or not self._impl.check_cachable(data):
            return
        content = dumps(self._impl.reduce(data))
        # Not by `radixkv.disk`, which kernels don't import: nor need it be, since a file that a
        # crash left half written does not match its digest and is compiled anew.
        beside = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            number, beside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
            with os.fdopen(number, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            Path(beside).replace(path)
        except OSError as error:  # a full disk: it runs all the same
            logger.warning("%s: cannot be written (%s); compiled anew next time", path, error)
            if beside:
                Path(beside).unlink(missing_ok=True)


class _CompileResult(CompileResultCacheImpl):
    """How Numba turns a compiled function into bytes and back; it needs no file for that."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator(function)


class _Locator:
    """Where Numba says that a function stands, if it warns of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._py_file = function.__code__.co_filename


def _plain(title: str) -> str:
    """A title as part of a file's name."""
    return title.replace("<", "").replace(">", "")
