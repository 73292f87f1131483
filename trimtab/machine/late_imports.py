"""Imports of torch and transformers that a start never uses: made at their first use, in processes that trimtab itself starts.

transformers' model classes import torch's compiler, distributed tensors, FSDP and accelerate: 450 modules, a third of a start's CPU
time, for code that answers never run. `torch._dynamo` becomes a module that loads itself at its first use. transformers is told,
once, that this process has neither `torch.distributed` nor accelerate. It supports both installations: some builds of torch have no
`torch.distributed`, and accelerate is optional. Source: transformers 5.6.2 to 5.23.0, utils/import_utils.py; torch 2.13,
_dynamo/decorators.py.

torchvision imports the whole compiler for one question of `torchvision.ops.roi_align` (0.26 to 0.28, of torch 2.11 to 2.13). That
file is run with a stand-in that asks the compiler when it is called. transformers imports torchvision wherever it is installed.

torch's operators on the meta device import symbolic shapes, and with them sympy (500 modules), to ask whether True is true.
transformers' losses import `scipy.optimize` (400 modules) for one function that training calls. They load themselves, too.

Every captured function has run once before its capture, and nothing is imported in the capture. With `TRIMTAB_LATE_IMPORTS=check`
imports are late, and one that is made while the thread captures kernels is a LateImportError.

A program that imports trimtab never gets this: it may compile or distribute models of its own. Nor does a process that may compute
with a ROCm build of torch, where it was never run. `TRIMTAB_LATE_IMPORTS=1` uses it in every process of trimtab, `0` in none.
Imports no torch itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

from trimtab.machine.installed import torch_build

COMPILER = "torch._dynamo"
# transformers' masks import this file of the compiler alone; it needs no other one (torch 2.6 to 2.13).
ALONE = ("torch._dynamo._trace_wrapped_higher_order_op",)
# What imports a file of the compiler for one function, that file, and that function.
ASKS, ASKED_FILE, ASKED = "torchvision.ops.roi_align", "torch._dynamo.utils", "is_compile_supported"
SHAPES, SYMPY, OPTIMIZE = "torch.fx.experimental.symbolic_shapes", "sympy", "scipy.optimize"
HIDDEN = "accelerate"
VARIABLE = "TRIMTAB_LATE_IMPORTS"

_is_on = False
_capturing = threading.local()


class LateImportError(RuntimeError):
    """A module was first needed while this thread captured kernels."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is first imported while kernels are captured; use it once before the capture")


def use(device: str) -> None:
    """Make these imports late from now on, in this process. A second call does nothing; what is imported already stays.

    device: on which the process computes, as in a LoadRequest.
    """
    global _is_on
    if _is_on or "torch" in sys.modules or "transformers" in sys.modules:
        return
    wanted = os.environ.get(VARIABLE)
    if wanted in ("1", "check") or (wanted != "0" and not _may_use_rocm(device)):
        _is_on = True
        sys.meta_path.insert(0, _Finder())


def _may_use_rocm(device: str) -> bool:
    """Whether the process may compute with ROCm; True where that cannot be known."""
    build = torch_build()
    return device != "cpu" and (build is None or build.has_hip)


@contextmanager
def capturing() -> Iterator[None]:
    """While the block runs, this thread captures kernels: with `TRIMTAB_LATE_IMPORTS=check` it must import nothing.

    Errors: LateImportError, from the import.
    """
    before = getattr(_capturing, "is_checked", False)
    _capturing.is_checked = os.environ.get(VARIABLE) == "check"
    try:
        yield
    finally:
        _capturing.is_checked = before


def _check_may_import(name: str) -> None:
    if getattr(_capturing, "is_checked", False):
        raise LateImportError(name)


def is_on() -> bool:
    """Return whether this process imports them late: it takes less host memory than others."""
    return _is_on


class LateModule(ModuleType):
    """A module that runs its file when a name is asked for that it does not have. `stand_ins`: makes names that it has before."""

    def __init__(self, spec: ModuleSpec, stand_ins: Callable[[LateModule], Mapping[str, Any]]) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self.__package__ = spec.parent
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        names = stand_ins(self)
        self.__dict__.update(names)
        self.__dict__["_late"] = _Late(tuple(names))

    def __getattr__(self, name: str) -> Any:
        # What asks every module for its own attributes (inspect, warnings) uses none.
        if not (name.startswith("__") and name.endswith("__")):
            load(self)
            if name in self.__dict__:
                return self.__dict__[name]
        own = self.__dict__.get("__getattr__")
        if own is not None:
            return own(name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _Late:
    def __init__(self, stand_ins: Sequence[str]) -> None:
        self.stand_ins = stand_ins
        self.lock = threading.RLock()
        self.has_begun = self.is_loaded = False
        self.marked: list[tuple[str, Any]] = []  # (decorator, function) of what was decorated before


def load(module: LateModule) -> None:
    """Run the module's file, once. Other threads wait; the file's own imports of it see what it has so far."""
    late: _Late = module.__dict__["_late"]
    if late.is_loaded:
        return
    _check_may_import(module.__name__)
    with late.lock:
        if late.has_begun:
            return
        late.has_begun = True
        kept = {name: module.__dict__.pop(name) for name in late.stand_ins}
        try:
            assert module.__spec__ is not None and module.__spec__.loader is not None
            module.__spec__.loader.exec_module(module)
        except BaseException:
            module.__dict__.update(kept)
            late.has_begun = False
            raise
        late.is_loaded = True
        for decorator, function in late.marked:
            getattr(module, decorator)(function)


def make_late(name: str, stand_ins: Callable[[LateModule], Mapping[str, Any]]) -> LateModule | None:
    """Put a module into `sys.modules` that loads itself at its first use; None if it is imported already, or not installed."""
    if name in sys.modules:
        return None
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return None
    sys.modules[name] = module = LateModule(spec, stand_ins)
    return module


def real_name(module: LateModule, name: str) -> Any:
    """Return what a module has under a name once it is loaded, which it is after this."""
    load(module)
    return getattr(module, name)


def compiler_stand_ins(module: LateModule) -> dict[str, Any]:
    """Return decorators for functions that the compiler should treat in a way of their own, once there is a compiler."""

    def mark(name: str, function: Any) -> Any:
        if not isinstance(function, FunctionType):
            return real_name(module, name)(function)
        module.__dict__["_late"].marked.append((name, function))
        return function

    def disable(fn: Any = None, *args: Any, **options: Any) -> Any:
        if fn is None:
            return lambda function: disable(function, *args, **options)
        if not isinstance(fn, FunctionType):
            return real_name(module, "disable")(fn, *args, **options)
        disabled: list[Any] = []

        @wraps(fn)
        def call(*given: Any, **named: Any) -> Any:
            if not module.__dict__["_late"].is_loaded:  # nothing is compiled without a compiler
                return fn(*given, **named)
            if not disabled:
                disabled.append(real_name(module, "disable")(fn, *args, **options))
            return disabled[0](*given, **named)

        return call

    marks = {name: partial(mark, name) for name in ("allow_in_graph", "assume_constant_result")}
    return {"disable": disable, **marks}


def shape_stand_ins(module: LateModule) -> dict[str, Any]:
    """Return what torch's operators on the meta device ask of symbolic shapes, for numbers and truths that are none."""

    def asked(name: str, plain: tuple[type, ...], answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*given: Any, **named: Any) -> Any:
            if not named and _are(plain, given):
                return answer(*given)
            return real_name(module, name)(*given, **named)

        return ask

    truths = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")
    numbers = (bool, int, float)
    return {
        **{name: asked(name, (bool,), lambda truth: truth) for name in truths},
        "sym_and": asked("sym_and", (bool,), lambda *truths: all(truths)),
        "sym_or": asked("sym_or", (bool,), lambda *truths: any(truths)),
        "sym_eq": lambda one, other: (
            list(one) == list(other) if _are_shapes(one, other) else real_name(module, "sym_eq")(one, other)
        ),
        "is_nested_int": asked("is_nested_int", numbers, lambda number: False),
        **{name: asked(name, numbers, lambda number: True) for name in ("has_hint", "has_guarding_hint")},
        "size_hint": asked("size_hint", (int,), lambda number, fallback=None: number),
        "guarding_hint_or_throw": asked("guarding_hint_or_throw", (bool, int), lambda number: number),
    }


def _are(plain: tuple[type, ...], given: Sequence[Any]) -> bool:
    return bool(given) and all(type(one) in plain for one in given)


def _are_shapes(*given: Any) -> bool:
    return all(isinstance(one, (tuple, list)) and all(type(size) is int for size in one) for one in given)


def optimize_stand_ins(module: LateModule) -> dict[str, Any]:
    """Return the function that transformers' losses import."""

    def linear_sum_assignment(*given: Any, **named: Any) -> Any:
        return real_name(module, "linear_sum_assignment")(*given, **named)

    return {"linear_sum_assignment": linear_sum_assignment}


class _LateClass:
    """A class of a late module that others ask for only to learn that nothing is an instance of it."""

    def __init__(self, module: LateModule, name: str) -> None:
        self._module, self._name = module, name

    def __instancecheck__(self, given: object) -> bool:
        return self._module.__dict__["_late"].is_loaded and isinstance(given, getattr(self._module, self._name))

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (real_name(self._module, self._name),)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_name(self._module, self._name), name)


def sympy_stand_ins(module: LateModule) -> dict[str, Any]:
    """Return the classes that torch's operators on the meta device compare their arguments with."""
    return {name: _LateClass(module, name) for name in ("Basic",)}


# What others reach through its parent, because it has always imported it.
BROUGHT = {SHAPES: ("torch.fx.experimental._config",)}
STAND_INS = {SHAPES: shape_stand_ins, SYMPY: sympy_stand_ins, OPTIMIZE: optimize_stand_ins}


class _Finder(MetaPathFinder):
    """Finds modules that load themselves at their first use, and the file that asks the compiler one thing.

    Before another file of a package among them is imported, the package's own file is run.
    """

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        _check_may_import(fullname)
        if fullname in STAND_INS:
            return _with_loader(fullname, path, target, _Deferring)
        for name in (COMPILER, *STAND_INS):
            module = sys.modules.get(name)
            if fullname.startswith(f"{name}.") and fullname not in ALONE and isinstance(module, LateModule):
                load(module)  # its files import each other in an order that the package decides
        if fullname == ASKS and ASKED_FILE not in sys.modules and isinstance(sys.modules.get(COMPILER), LateModule):
            return _with_loader(fullname, path, target, _WithoutCompiler)
        return None


def _with_loader(
    fullname: str, path: Any, target: ModuleType | None, make: Callable[[Loader], Loader]
) -> ModuleSpec | None:
    spec = PathFinder.find_spec(fullname, path, target)
    if spec is not None and spec.loader is not None:
        spec.loader = make(spec.loader)
    return spec


class _Deferring(Loader):
    """Makes a module that its real loader fills at its first use."""

    def __init__(self, real: Loader) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return LateModule(spec, STAND_INS[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.real
        for name in BROUGHT.get(module.__name__, ()):
            importlib.import_module(name)


class _WithoutCompiler(Loader):
    """Runs a file that imports one function of the compiler, with a function that asks the compiler when it is called."""

    def __init__(self, real: Loader) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.real
        stand_in = ModuleType(ASKED_FILE)
        stand_in.__dict__[ASKED] = _ask_compiler
        sys.modules[ASKED_FILE] = stand_in
        try:
            self.real.exec_module(module)
        except ImportError:  # another release, which imports more of it
            if sys.modules.get(ASKED_FILE) is stand_in:
                del sys.modules[ASKED_FILE]
            self.real.exec_module(module)
        finally:
            if sys.modules.get(ASKED_FILE) is stand_in:
                del sys.modules[ASKED_FILE]


def _ask_compiler(device_type: str) -> bool:
    return bool(getattr(importlib.import_module(ASKED_FILE), ASKED)(device_type))


@contextmanager
def importing_transformers() -> Iterator[None]:
    """While the block imports transformers, torch being imported: prepare what it imports. Does nothing without `use`."""
    if not _is_on or "transformers" in sys.modules:
        yield
        return
    make_late(COMPILER, compiler_stand_ins)
    distributed = sys.modules["torch.distributed"]
    real, known = distributed.is_available, sys.modules.get(HIDDEN)
    distributed.is_available = lambda: False  # type: ignore[attr-defined]
    if known is None:
        sys.modules[HIDDEN] = None  # type: ignore[assignment]
    try:
        yield
        _ask(sys.modules.get("transformers.utils.import_utils"))
    finally:
        distributed.is_available = real  # type: ignore[attr-defined]
        if known is None:
            del sys.modules[HIDDEN]


def _ask(questions: ModuleType | None) -> None:
    for name in ("is_accelerate_available", "is_torch_distributed_available"):
        answer = getattr(questions, name, None)
        # Only an answer that is kept: files that were told different things do not fit together.
        if answer is not None and hasattr(answer, "cache_info"):
            answer()
