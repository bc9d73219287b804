"""Keys of rules: a name, a regular expression for names, or a type; and the names of types."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

from nc.errors import ConfigError, PatternError

#: Accepted names of each kind of operator; the first is the one shown.
KIND_NAMES: dict[str, tuple[str, ...]] = {
    "linear": ("Linear", "linear", "addmm"),
    "conv1d": ("Conv1d", "conv1d"),
    "conv2d": ("Conv2d", "conv2d"),
    "conv3d": ("Conv3d", "conv3d"),
    "conv_transpose1d": ("ConvTranspose1d", "conv_transpose1d"),
    "conv_transpose2d": ("ConvTranspose2d", "conv_transpose2d"),
    "conv_transpose3d": ("ConvTranspose3d", "conv_transpose3d"),
    "matmul": ("matmul", "bmm", "mm", "baddbmm", "__matmul__"),
    "add": ("add", "iadd", "__add__", "__iadd__", "add_"),
    "lstm": ("LSTM", "lstm"),
    "gru": ("GRU", "gru"),
    "rnn": ("RNN", "rnn", "rnn_tanh", "rnn_relu"),
    "lstm_cell": ("LSTMCell", "lstm_cell"),
    "gru_cell": ("GRUCell", "gru_cell"),
    "rnn_cell": ("RNNCell", "rnn_cell", "rnn_tanh_cell", "rnn_relu_cell"),
}
_KIND_OF_NAME = {name: kind for kind, names in KIND_NAMES.items() for name in names}
#: How Neural Compressor names a function in a fused type: "Linear&<built-in method relu of type object at
#: 0x7f…>".
_BUILT_IN = re.compile(r"<built-in (?:method|function) (\w+)[^>]*>")

RuleKey = str | type | Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedKey:
    """The key of a rule.

    Attributes:
        text: an operator name, a regular expression for names, or a type name.
        is_type: it was given as a class or function, so it can only be a type.
    """

    text: str
    is_type: bool = False

    @property
    def names_type(self) -> bool:
        """Whether it is a type, also as a string: "Linear", "Conv2d&relu"."""
        return self.is_type or kind_of(fused_names(self.text)[0]) is not None


def kind_of(name: str) -> str | None:
    """Return the operator kind of a type name such as "Linear" or "matmul"; None if it is not a type name."""
    return _KIND_OF_NAME.get(name)


def fused_names(text: str) -> tuple[str, ...]:
    """Return the parts of a fused type name.

    They are a type, and the names of the operators after it ("Conv2d&add&ReLU" → Conv2d, add, relu).
    """
    first, *rest = _BUILT_IN.sub(r"\1", text).split("&")
    return first, *(name.lower() for name in rest)


def parse_keys(key: object) -> tuple[ParsedKey, ...]:
    """One key, or a list of them.

    Raises:
        ConfigError: it is neither a string nor a type or function with a kind.
        PatternError: a string is neither a name nor a valid regular expression.
    """
    if isinstance(key, Iterable) and not isinstance(key, (str, type)):
        keys = tuple(_parse(k) for k in key)
        if not keys:
            msg = "Expected a rule to have a key, but got an empty list."
            raise ConfigError(msg)
        return keys
    return (_parse(key),)


def _parse(key: object) -> ParsedKey:
    if isinstance(key, ParsedKey):
        return key
    if isinstance(key, str):
        check_pattern(key)
        return ParsedKey(key)
    if isinstance(key, type):
        name = key.__name__
        return ParsedKey(name if kind_of(name) else f"{key.__module__}.{key.__qualname__}", True)
    function = getattr(key, "__name__", None)
    if callable(key) and function is not None:
        if kind_of(function) is None:
            msg = (
                f"Function {function!r} cannot be the key of a rule; these functions can: "
                f"{', '.join(sorted(_KIND_OF_NAME))}."
            )
            raise ConfigError(msg)
        return ParsedKey(function, True)
    msg = f"Expected the key of a rule to be a name, a pattern, a type or a list of those, but got {key!r}."
    raise ConfigError(msg)


def check_pattern(key: str) -> None:
    """Raise PatternError unless `key` is a name, a fused type name or a valid regular expression."""
    try:
        re.compile(key)
    except re.error as error:
        glob = f"For the glob write {glob_pattern(key)!r}. " if "*" in key or "?" in key else ""
        msg = (
            f"Rule {key!r} is not a valid regular expression: {error}. {glob}Escape special characters if "
            "you mean them literally."
        )
        raise PatternError(msg) from error


def glob_pattern(key: str) -> str:
    """Return the regular expression of a glob, in which `*` stands for any text and `?` for a character."""
    return re.escape(key).replace(r"\*", ".*").replace(r"\?", ".")


def key_text(key: object) -> str:
    """Return a key as messages show it."""
    return key if isinstance(key, str) else getattr(key, "__name__", str(key))
