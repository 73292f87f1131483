"""How many steps and characters may a chat template take, counted before the work is done?"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, update_wrapper
from pathlib import Path
from types import BuiltinMethodType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar

from jinja2 import Environment, Template, nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.lexer import Token, TokenStream
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined, markup_join, str_join
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Joiner, Namespace
from markupsafe import Markup, escape

from trimtab.engine.templates import costs
from trimtab.engine.templates.costs import (
    GLOBALS,
    KINDS,
    Cost,
    Meter,
    SpentError,
    digits,
    is_iterator,
    length,
    method_cost,
    sum_cost,
    times,
)  # fmt: skip
from trimtab.errors import CheckpointError

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import ChatTemplateOwner

# Steps of a macro call.
_CALL_STEPS = 20
# A sum of this many texts is counted after it is made.
_PARTS = 4
_DICT_NAMES = frozenset(dir(dict))
_LOOP_NAMES = frozenset(("first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0"))
_CALLABLE = (Macro, BlockReference, LoopContext, Joiner, Undefined)


class _Formatter(SandboxedFormatter):
    """`str.format`: widths count before they are written."""

    _env: _Metered

    def format_field(self, value: object, format_spec: str) -> str:
        meter: Meter = self._env.meter
        meter.spend(1, meter.size(value) + digits(format_spec))
        return str(super().format_field(value, format_spec))

    def convert_field(self, value: object, conversion: Any) -> object:
        self._env.meter.weighed(value)
        return super().convert_field(value, conversion)


class _Generator(CodeGenerator):
    """Template code that counts."""

    _repeats = True  # whether the next block is one that runs several times
    _is_left = False  # whether the next sum is the left part of another one, which frees it

    def blockvisit(self, nodes_: Iterable[nodes.Node], frame: Frame) -> None:
        if self._repeats:
            steps, chars = _block_cost(nodes_)
            self.writeline(f"environment.meter.spend({steps}, {chars})")
        self._repeats = False
        super().blockvisit(nodes_, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # the loop that tests is not a block
            node.test = nodes.Call(nodes.EnvironmentAttribute("tested"), [node.test], [], None, None, lineno=node.lineno)
        self._repeats = True
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, MacroRef]:
        self._repeats = True
        return super().macro_body(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if isinstance(node.node, nodes.EnvironmentAttribute):
            self.write(f"environment.{node.node.name}(")
            self.visit(node.args[0], frame)
            self.write(")")
            return
        super().visit_Call(node, frame, forward_caller=forward_caller)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: object) -> None:
        if frame.eval_ctx.volatile:
            self.write("(environment.escaped if context.eval_ctx.autoescape else environment.text)(")
        elif frame.eval_ctx.autoescape:
            self.write("environment.escaped(")
        else:  # a counted text needs neither again
            self.write("(" if _is_text(node) else "environment.text(")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        """A sum of few parts is counted once, by its result: it is no larger than _PARTS of its parts."""
        parts: list[nodes.Expr] = [node.right]
        left: nodes.Expr = node.left
        while isinstance(left, nodes.Add) and len(parts) < _PARTS - 1:
            parts.append(left.right)
            left = left.left
        self.write(f"environment.{'passed' if self._is_left else 'added'}(")
        for part in [left, *reversed(parts)]:
            self.write("" if part is left else " + ")
            self._is_left = part is left and isinstance(part, nodes.Add)
            self.visit(part, frame)
        self._is_left = False
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        markup = "context.eval_ctx.autoescape" if frame.eval_ctx.volatile else str(bool(frame.eval_ctx.autoescape))
        self.write("environment.concatenated((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write(f"), {markup})")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        sides = [node.expr, *(op.expr for op in node.ops)]
        is_cheap = all(
            (op.op in ("eq", "ne", "lt", "lteq", "gt", "gteq") and _is_short(one, other))
            or (op.op in ("in", "notin") and isinstance(op.expr, (nodes.List, nodes.Tuple)) and all(map(_is_const, op.expr.items)))
            for op, one, other in zip(node.ops, sides, sides[1:], strict=False)
        )  # fmt: skip
        if is_cheap:
            super().visit_Compare(node, frame)
            return
        self.write("(")
        self._weighed(node.expr, frame, "weighed")
        for op in node.ops:
            self.write(f" {_OPERATORS[op.op]} ")
            self._weighed(op.expr, frame, "searched" if op.op in ("in", "notin") and _is_const(node.expr) else "weighed")
        self.write(")")

    def _weighed(self, node: nodes.Expr, frame: Frame, how: str) -> None:
        if isinstance(node, (nodes.Const, nodes.Compare, nodes.Test, nodes.Not)):
            self.visit(node, frame)
            return
        self.write(f"environment.{how}(")
        self.visit(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self.write("environment.sliced(")
            self.visit(node.node, frame)
            self.write(")[")
            self.visit(node.arg, frame)
            self.write("]")
            return
        self.write("environment.getitem(")
        self.visit(node.node, frame)
        self.write(", ")
        self._weighed(node.arg, frame, "key")
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for item in node.items:
            self._weighed(item.key, frame, "key")
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")


_OPERATORS = {
    "eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in",
}  # fmt: skip


def _block_cost(block: Iterable[nodes.Node]) -> tuple[int, int]:
    """Return the most steps of a block and the characters of its literals; blocks that are repeated count for themselves."""
    steps, chars = 4, 0
    for node in block:
        branches: list[Sequence[nodes.Node]] = []
        if isinstance(node, nodes.Output):
            chars += sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            chars += sum(len(one.value) for one in node.find_all(nodes.Const) if isinstance(one.value, str))
        elif isinstance(node, nodes.If):
            branches = [node.body, *(one.body for one in node.elif_), node.else_]
        elif isinstance(node, (nodes.With, nodes.FilterBlock, nodes.AssignBlock, nodes.Scope, nodes.ScopedEvalContextModifier)):
            branches = [node.body]
        elif isinstance(node, nodes.For):
            branches = [node.else_]
        costs = [_block_cost(branch) for branch in branches if branch]
        steps += max((cost[0] * 4 for cost in costs), default=1)
        chars += max((cost[1] for cost in costs), default=0)
    return steps // 4, chars


def _is_text(node: nodes.Node) -> bool:
    """Whether an expression surely is a text that was counted."""
    if isinstance(node, nodes.Add):
        sides = (node.left, node.right)
        return any(isinstance(side, nodes.Const) and isinstance(side.value, str) for side in sides) or any(map(_is_text, sides))
    return isinstance(node, nodes.Concat)


def _is_const(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const)


def _is_short(one: nodes.Node, other: nodes.Node) -> bool:
    """Whether a comparison reads at most a short constant."""
    return any(_is_const(side) and len(str(side.value)) < 1000 for side in (one, other))  # type: ignore[attr-defined]


class _Template(Template):
    """A template whose every rendering has a separate budget."""

    environment: _Metered

    def render(self, *args: Mapping[str, object], **kwargs: object) -> str:
        with self.environment.meter.fresh(dict(*args, **kwargs)):
            return super().render(*args, **kwargs)

    def generate(self, *args: Mapping[str, object], **kwargs: object) -> Iterator[str]:
        with self.environment.meter.fresh(dict(*args, **kwargs)):
            return iter(list(super().generate(*args, **kwargs)))


class _Metered(SandboxedEnvironment):
    """A sandbox that counts."""

    code_generator_class = _Generator
    template_class = _Template
    intercepted_binops: ClassVar[frozenset[str]] = frozenset(costs.BINOPS)  # type: ignore[misc]
    meter: Meter

    def count(self, base: Environment) -> None:
        """Let it count what another one's filters, tests and functions of templates do; it has no others."""
        self.meter = meter = Meter()
        self.filters = {
            name: _metered_call(meter, function, costs.FILTERS[name], name=name, passed=_is_passed(function))
            for name, function in base.filters.items() if name in costs.FILTERS
        }  # fmt: skip
        self.tests = {
            name: _metered_call(meter, test, times(1), passed=_is_passed(test)) if name in costs.TESTS else test
            for name, test in base.tests.items()
        }
        self.globals = {name: _global(meter, name, base.globals[name]) for name in GLOBALS if name in base.globals}

    def getattr(self, obj: Any, attribute: str) -> object:
        """As jinja2's, at once where the answer is known: a key of a message, an allowed method."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind in KINDS and attribute in KINDS[kind]) or (kind is LoopContext and attribute in _LOOP_NAMES):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def compile(
        self, source: object, name: object = None, filename: object = None, raw: bool = False, defer_init: bool = False
    ) -> Any:
        """As jinja2's, with a budget: constants are folded here."""
        if isinstance(source, str) and len(source) > costs.MAX_TEMPLATE_CHARS:
            raise SpentError(f"it has {len(source)} characters, a chat template may have {costs.MAX_TEMPLATE_CHARS}")
        with self.meter.fresh({}):
            return super().compile(source, name, filename, raw, defer_init)  # type: ignore[call-overload]

    def _tokenize(self, source: str, name: str | None, filename: str | None = None, state: str | None = None) -> TokenStream:
        return TokenStream(_few(super()._tokenize(source, name, filename, state)), name, filename)

    def call_binop(self, context: object, operator: str, left: object, right: object) -> object:
        """As jinja2's, counted."""
        is_read = operator != "%" or type(left) is not int
        self.meter.spend(1, costs.BINOPS[operator](self.meter, left, right) if is_read else 0)
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: object) -> object:  # noqa: N805
        """As jinja2's, counted. Errors: SpentError; SecurityError for an operation without a rule."""
        meter = __self.meter
        kind = type(__obj)
        if kind is BuiltinMethodType:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            if __obj.__name__ == "join":
                args = tuple(list(value) if is_iterator(value) else value for value in args)
            __self._count_method(__obj, args, kwargs)
            return __obj(*args, **kwargs)
        meter.spend(_CALL_STEPS + len(args) + len(kwargs), 0)
        if kind is MethodType:
            __self._count_method(__obj, args, kwargs)
        elif kind is not Macro and not (isinstance(__obj, _CALLABLE) or getattr(__obj, "is_metered", False)):
            raise SecurityError(f"a chat template may not call {getattr(__obj, '__name__', kind.__name__)!r}")
        meter.enter()
        try:
            if kind is Macro:  # as `Context.call` does for one
                kwargs.pop("_loop_vars", None)
                kwargs.pop("_block_vars", None)
                return __obj(__context.eval_ctx, *args, **kwargs)
            return __context.call(__obj, *args, **kwargs)
        finally:
            meter.leave()

    def _count_method(self, method: MethodType | BuiltinMethodType, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        owner, name, meter = method.__self__, method.__name__, self.meter
        costs = KINDS.get(type(owner))
        cost = costs.get(name) if costs is not None else method_cost(method)
        if cost is None:
            raise SecurityError(f"a chat template may not call {name!r} of {type(owner).__name__!r}")
        meter.spend(1, cost(meter, owner, *args, **{key: kwargs[key] for key in kwargs if key[0] != "_"} if kwargs else kwargs))

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        """As jinja2's, with widths counted."""
        if not isinstance(value, (MethodType, BuiltinMethodType)) or value.__name__ not in ("format", "format_map"):
            return None
        text = value.__self__
        if not isinstance(text, str):
            return None
        is_map = value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: object) -> str:
            self.meter.read(len(text))
            names = args[0] if is_map and len(args) == 1 else kwargs
            return _Formatter(self).vformat(str(text), () if is_map else args, names)

        formatted.is_metered = True  # type: ignore[attr-defined]
        return formatted if not isinstance(text, Markup) else None

    def text(self, value: object) -> str:
        """Return a value as the text that a template writes."""
        if type(value) is str:
            self.meter.read(len(value))
            return value
        return str(self.meter.weighed(value))

    def added(self, value: object) -> object:
        """Return a sum."""
        self.meter.read(len(value) if type(value) is str else sum_cost(value))
        return value

    def passed(self, value: object) -> object:
        """Return a sum that is a part of another sum, and freed after it."""
        if type(value) is str:
            self.meter.free(len(value))
        return self.added(value)

    def escaped(self, value: object) -> Markup:
        """Return a value as the text that a template writes where it escapes."""
        self.meter.read(6 * self.meter.size(value))
        return escape(value)

    def concatenated(self, parts: tuple[object, ...], is_markup: bool) -> str:
        """Return the texts of values in one."""
        self.meter.spend(1, (6 if is_markup else 1) * sum(map(self.meter.size, parts)))
        return markup_join(parts) if is_markup else str_join(parts)

    def weighed(self, value: object) -> object:
        """Return a value that is read whole."""
        return value if type(value) in costs.SCALARS else self.meter.weighed(value)

    def searched(self, value: object) -> object:
        """Return a value in which a short constant is looked for."""
        if not isinstance(value, Mapping):
            self.meter.read(length(value))
        return value

    def key(self, value: object) -> object:
        """Return a value by which another is looked up: texts and numbers know their hash, tuples read all elements."""
        return value if type(value) in costs.SCALARS or type(value) is str else self.meter.weighed(value)

    def sliced(self, value: object) -> object:
        """Return a value of which a part is copied."""
        self.meter.spend(1, length(value))
        return value

    def tested(self, value: object) -> object:
        """Return the value of a loop's condition for one element: a step."""
        self.meter.step()
        return value


def _metered_call(meter: Meter, function: Any, cost: Cost, *, name: str = "", passed: bool = False) -> Any:
    """Return a filter, test or function that counts before it runs. passed: whether jinja2 gives it its context first."""

    def counted(*args: object, **kwargs: object) -> object:
        given = args[1:] if passed else args
        meter.spend(1, cost(meter, *given, **kwargs))
        return function(*args, **kwargs)

    def read_whole(*args: Any, **kwargs: object) -> object:
        if args[passed:] and is_iterator(args[passed]):
            args = (*args[:passed], list(args[passed]), *args[passed + 1 :])
        return counted(*args, **kwargs)

    def lazy(*args: object, **kwargs: object) -> object:
        """Generators in generators would nest on the C stack: elements are made at once."""
        made = counted(*args, **kwargs)
        if not is_iterator(made):
            return made
        elements = list(made)
        meter.spend(len(elements), 0)
        return iter(elements)

    made: Callable[..., object] = read_whole if name in costs.READ_WHOLE else lazy if name in costs.LAZY else counted
    if not isinstance(function, type):
        update_wrapper(made, function)
    made.is_metered = True  # type: ignore[attr-defined]
    return made


def _few(tokens: Iterable[Token]) -> Iterator[Token]:
    """Yield the tokens of a template. Errors: SpentError for too many: Python takes 0.1 ms for each."""
    for count, token in enumerate(tokens):
        if count == costs.MAX_TEMPLATE_TOKENS:
            raise SpentError(f"it has more than {costs.MAX_TEMPLATE_TOKENS} words and signs")
        yield token


def _is_passed(function: object) -> bool:
    """Whether jinja2 gives a filter or test its context, evaluation context or environment first."""
    return getattr(function, "jinja_pass_arg", None) is not None


def _alone() -> int:
    value = "".join(("ab", "cd"))
    return sys.getrefcount(value)


_ALONE = _alone()  # references of a value that only the variable of a function holds


def _namespace(meter: Meter, base: Any) -> type:
    """Return a namespace (transformers has another one) that counts the texts which an assignment frees."""

    class Metered(base):  # type: ignore[misc]
        def __setitem__(self, name: str, value: object) -> None:
            before = object.__getattribute__(self, "_Namespace__attrs").get(name)
            super().__setitem__(name, value)
            if type(before) is str and sys.getrefcount(before) <= _ALONE:
                meter.free(len(before))

    return Metered


def _global(meter: Meter, name: str, function: Any) -> object:
    if isinstance(function, type) and issubclass(function, Namespace):
        function = _namespace(meter, function)
    counted = _metered_call(meter, function, GLOBALS[name])
    fromkeys = getattr(function, "fromkeys", None)
    if fromkeys is not None:  # `dict` in templates is an object that is called
        counted.fromkeys = _metered_call(meter, fromkeys, GLOBALS[name])
    return counted


def metered(base: Environment) -> SandboxedEnvironment:
    """Return an environment that renders as another one does and counts. base: keeps its filters, globals and extensions. jinja2's
    sandbox does not bound time and memory: `'a' * 10**9` is a valid template. It counts a step for each block, iteration, call and
    filter, and the characters that each operation reads and writes (costs.py). Counts depend on template and messages alone."""
    environment = base.overlay()
    environment.__class__ = type("MeteredEnvironment", (_Metered, type(base)), {})
    assert isinstance(environment, _Metered)
    environment.count(base)
    return environment


# Places of a template, in the order of reading.
FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
# Errors of a template that refuses messages: on purpose (`raise_exception`), or for messages of another form.
REFUSALS = (TemplateError, ValueError, TypeError, KeyError)
# How jinja2 names the code of a template in tracebacks.
_CODE_NAMES = ("<template>", "<unknown>")
_HINT = "Correct the template, or use the one of another copy of the model"


_is_metered = ContextVar("_is_metered", default=False)  # in this thread
_installing = threading.Lock()


def render(owner: ChatTemplateOwner, messages: Sequence[object], folder: Path, **options: object) -> str:
    """Return the text that `owner.apply_chat_template` renders: a processor's or tokenizer's. folder: where its files are.

    Errors: REFUSALS as they are; CheckpointError, with the template's line, for one that cannot be compiled, that fails, or that
    takes more steps, characters or depth than its budget (budget.py).
    """
    try:
        with _metered():
            return str(owner.apply_chat_template(messages, tokenize=False, **options))
    except Exception as exc:
        if isinstance(exc, REFUSALS) and not isinstance(exc, (SecurityError, TemplateSyntaxError)):
            raise
        line = _line(exc)
        where = f" in line {line}" if line else ""
        kind = "" if isinstance(exc, TemplateError) else f"{type(exc).__name__.removesuffix('Error')}: "
        reason = f"{kind}{exc}".strip(": ") if not type(exc).__module__.startswith("trimtab") else str(exc)
        path = next((folder / name for name in FILES if (folder / name).is_file()), folder)
        raise CheckpointError(f"its chat template fails{where} ({reason})", path=path, hint=_HINT) from exc


def _line(error: BaseException) -> int | None:
    """Return the line of a template in which an error was raised."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    line, step = getattr(error, "template_line", None), error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename in _CODE_NAMES:
            line = step.tb_lineno
        step = step.tb_next
    return line


@contextmanager
def _metered() -> Iterator[None]:
    """Let transformers render with the budget, in this thread."""
    _install()
    before = _is_metered.set(True)
    try:
        yield
    finally:
        _is_metered.reset(before)


def _install() -> None:
    """Put a switch where transformers compiles templates: only threads inside `_metered` get the budget, stock in the same
    process stays stock."""
    from transformers.utils import chat_template_utils

    with _installing:
        stock = chat_template_utils._compile_jinja_template
        if getattr(stock, "is_switch", False):
            return

        def compile_template(chat_template: str) -> object:
            if not _is_metered.get():
                return stock(chat_template)
            compiled = _compiled(chat_template, stock)
            if isinstance(compiled, Exception):
                raise compiled
            return compiled

        compile_template.is_switch = True  # type: ignore[attr-defined]
        chat_template_utils._compile_jinja_template = compile_template


@lru_cache(maxsize=16)
def _compiled(template: str, stock: Callable[[str], Template]) -> Template | Exception:
    """Return a compiled template, or why it cannot be compiled: a failure is not tried again at every request."""
    try:
        return _environment(stock).from_string(template)
    except Exception as exc:
        return exc.with_traceback(None)


@lru_cache(maxsize=1)
def _environment(stock: Callable[[str], Template]) -> SandboxedEnvironment:
    return metered(stock("").environment)
