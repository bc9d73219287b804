"""What functions in C are given: one table, of which the C header and the packer are made.

    python nc/kernels/c_code/abi.py     # prints the header

A function of the table takes (structure, not used, count of tensors, their addresses), as
`dnnl_primitive_execute` does, so that one list of calls has both. The structure is a sequence of 8-byte
numbers, of which the first is its size. C sources include the header first, see `flags.command`. This module
imports nothing of nc: setup.py needs it where torch is not installed.
"""

from __future__ import annotations

import dataclasses
import struct
import textwrap
from collections.abc import Mapping, Sequence

#: Numbers of a field: one, or as many as its shape says.
Value = int | float | Sequence["Value"]
_CODES = {"int64": "q", "double": "d"}
_TYPES = {"int64": "int64_t", "double": "double"}


@dataclasses.dataclass(frozen=True, slots=True)
class Enumeration:
    """Names that C and Python share, and their numbers from 0 on.

    Attributes:
        prefix: of the constants in C.
        members: in the order of their numbers.
    """

    prefix: str
    members: tuple[str, ...]

    def number(self, member: str) -> int:
        """Return the number of a member.

        Raises:
            ValueError: it is none.
        """
        return self.members.index(member)

    def constants(self) -> dict[str, int]:
        """Names in C, with their numbers."""
        return {self.prefix + member.upper(): number for number, member in enumerate(self.members)}


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """Numbers of a structure.

    Attributes:
        name: in C and in Python.
        what: what they are, where the name does not say it.
        shape: sizes of the array; () for one number.
        kind: "int64" or "double".
    """

    name: str
    what: str = ""
    shape: tuple[int, ...] = ()
    kind: str = "int64"

    @property
    def format(self) -> str:
        """Its numbers, as the module `struct` calls them."""
        count = 1
        for size in self.shape:
            count *= size
        return f"{count}{_CODES[self.kind]}"

    def declaration(self) -> str:
        """Return the member of a structure in C."""
        sizes = "".join(f"[{size}]" for size in self.shape)
        comment = f" /* {self.what} */" if self.what else ""
        return f"{_TYPES[self.kind]} {self.name}{sizes};{comment}"

    def numbers(self, value: Value) -> list[int | float]:
        """Return the numbers of a value, in memory order.

        Raises:
            TypeError: it has another shape, or numbers of another kind.
        """
        found = _flat(value, self.shape)
        if found is None:
            size = f"an array of {list(self.shape)}" if self.shape else "one number"
            msg = f"{self.name} is {size}, not {value!r}"
            raise TypeError(msg)
        kind = int if self.kind == "int64" else (int, float)
        if any(not isinstance(number, kind) for number in found):
            msg = f"{self.name} is {self.kind}, not {value!r}"
            raise TypeError(msg)
        return found


def _flat(value: Value, shape: tuple[int, ...]) -> list[int | float] | None:
    """Return the numbers of nested sequences of these sizes; None where their sizes are others."""
    if not isinstance(value, Sequence):
        return None if shape else [value]
    if not shape or len(value) != shape[0]:
        return None
    parts = [_flat(part, shape[1:]) for part in value]
    numbers = [number for part in parts if part is not None for number in part]
    return None if None in parts else numbers


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """Numbers that C reads by their names, preceded by their total size in bytes.

    Attributes:
        name: in C with the prefix `nc_`.
        what: what they describe.
        fields: in their order.
    """

    name: str
    what: str
    fields: tuple[Field, ...]

    @property
    def symbol(self) -> str:
        """Its name in C."""
        return f"nc_{self.name}"

    @property
    def format(self) -> str:
        """All numbers, as the module `struct` calls them."""
        return "<q" + "".join(field.format for field in self.fields)

    @property
    def size(self) -> int:
        """Bytes."""
        return struct.calcsize(self.format)

    def packed(self, **values: Value) -> bytes:
        """Return the structure with these values.

        Raises:
            TypeError: a field is missing, unknown, of another size, or of another kind.
        """
        names = [field.name for field in self.fields]
        missing = [name for name in names if name not in values]
        unknown = [name for name in values if name not in names]
        if missing or unknown:
            texts = ("misses", missing), ("does not know", unknown)
            wrong = " and ".join(f"{text} {', '.join(found)}" for text, found in texts if found)
            msg = f"{self.symbol} {wrong}"
            raise TypeError(msg)
        try:
            numbers = [number for field in self.fields for number in field.numbers(values[field.name])]
            return struct.pack(self.format, self.size, *numbers)
        except (TypeError, struct.error, OverflowError) as error:
            msg = f"{self.symbol}: {error}"
            raise TypeError(msg) from error

    def declaration(self) -> str:
        """Return the structure in C."""
        size = Field("size", "bytes")
        members = [f"    {field.declaration()}" for field in (size, *self.fields)]
        check = f'_Static_assert(sizeof(struct {self.symbol}) == {self.size}, "no gaps");'
        return "\n".join((f"/* {self.what} */", f"struct {self.symbol} {{", *members, "};", check))


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionRow:
    """A function in C.

    Attributes:
        source: its file, without ".c".
        takes: its first argument; both have the same name.
        least, most: how many tensors it takes.
        index: what is wrong with values of a caller where it returns OTHER_INDEX; "" where it never does.
    """

    source: str
    takes: Structure
    least: int
    most: int
    index: str = ""

    @property
    def symbol(self) -> str:
        """Its name in C."""
        return self.takes.symbol

    def packed(self, **values: Value) -> bytes:
        """Return its first argument, see `Structure.packed`."""
        return self.takes.packed(**values)

    def declaration(self) -> str:
        """Return structure, counts of tensors and prototype in C."""
        name = self.symbol
        counts = f"enum {{ {name}_least = {self.least}, {name}_most = {self.most} }}; /* tensors */"
        prototype = f"int {name}(const struct {name} *how, void *unused, int count, char *const *tensors);"
        return "\n".join((self.takes.declaration(), counts, prototype))


def padded(values: Sequence[Value], count: int, fill: Value = 0) -> list[Value]:
    """Return values of a field of fixed size that holds fewer.

    Raises:
        TypeError: there are more.
    """
    if len(values) > count:
        msg = f"{len(values)} values in a field for {count}"
        raise TypeError(msg)
    return [*values, *[fill] * (count - len(values))]


# --- what functions return

#: Name → what it means.
STATUSES = {
    "ok": "it succeeded",
    "other_index": "an index is out of range",
    "no_memory": "there is no memory for its scratch",
    "not_here": "it has no code that it may use for this instruction set",
    "other_numbers": "it takes another count of numbers",
    "other_tensors": "it takes another count of tensors",
    "other_dtype": "it knows no such dtype",
    "other_size": "it has no room for a size, or sizes do not fit each other",
    "other_operation": "it knows no such operation",
}
STATUS = Enumeration("", tuple(STATUSES))

# --- numbers of what has names

#: Instruction sets, the best one last; nc.kernels.c_code.isas has the features of the CPU that each needs.
ISA = Enumeration("ISA_", ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"))
DTYPE = Enumeration("DTYPE_", ("f32", "bf16", "bool", "i64", "u8", "s8", "f16"))
#: Operators of `map`; "not" gives what is 0; "select" takes the second operand where the first is not 0, else
#: the third.
OPERATOR = Enumeration(
    "MAP_",
    (
        *(
            "copy",
            "add",
            "sub",
            "mul",
            "div",
            "neg",
            "abs",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "square",
            "relu",
            "exp",
            "sigmoid",
        ),
        *("silu", "tanh", "gelu_tanh", "gelu_erf", "cos", "sin", "not", "select"),
    ),
)
#: Of an attention: where a mask is false, or what it adds to the scores.
MASK = Enumeration("MASK_", ("none", "bool", "float"))
#: What follows the products of an attention.
FOLLOWER = Enumeration("FOLLOW_", ("add", "mul"))
#: What a product adds to its sums.
ADDED = Enumeration("ADDED_", ("nothing", "codes_in_place", "fp32_in_place", "fp32_other"))
#: Behind a product.
ACTIVATION = Enumeration(
    "ACTIVATION_",
    ("identity", "relu", "leaky_relu", "clip", "hardswish", "swish", "gelu_tanh", "gelu_erf"),
)
NORM = Enumeration("NORM_", ("none", "layer", "rms"))
CELL = Enumeration("CELL_", ("lstm", "gru", "rnn", "rnn_relu"))
#: How `low_bit_blocks` stores codes.
CODING = Enumeration("CODING_", ("table", "integer", "e4m3", "e5m2"))
#: Numbers that are multiplied, and by which instruction set: what `peak` can measure.
PRODUCT = Enumeration(
    "PRODUCT_",
    (
        *("int8_avx2", "int8_avx_vnni", "int8_avx512_vnni", "int8_amx"),
        *("bf16_avx512_bf16", "bf16_amx", "fp32_avx2", "fp32_avx512"),
    ),
)
ENUMERATIONS = (STATUS, ISA, DTYPE, OPERATOR, MASK, FOLLOWER, ADDED, ACTIVATION, NORM, CELL, CODING, PRODUCT)


@dataclasses.dataclass(frozen=True, slots=True)
class Constants:
    """Sizes that C and Python share.

    Attributes:
        most_dims: dimensions that `map` counts through.
        most_operands: its tensors: the result and three that it reads.
        row: elements of a row on the stack: the widest head of `attention`, the longest row of `rotary`.
        score_rows: rows of scores that `int8_attention` and `dynamic_attention` compute at once.
        float_rows: likewise `float_attention`.
        widest_head: of the two with codes.
        most_followers: of its products.
        panel: outputs that are adjacent in a packed weight.
        most_taps: positions of a window of `depthwise`.
        word: inputs whose codes are adjacent for one output of `recurrent`.
        most_normed: elements of a row that `norm_rows` and `row_chain` norm.
        most_inputs: whose products int32 can sum there, and those of keys of `dynamic_attention`.
        low_bit_step: to a multiple of which a row of `low_bit` is padded where it is one group.
        blocks_step: to a multiple of which each group of `low_bit_blocks` is padded.
        most_regions: regions of a call with consecutive parts that are recorded separately.
        most_parts: of each of them.
        flash_rows: queries of a block of `flash`.
        flash_keys: keys of one.
        flash_widest: of its heads.
        block_row: as the length of a block of activations: they have one scale for each row.
        block_bf16: as the length of a block of activations: they are not rounded, and are numbers of bf16.
    """

    most_dims: int = 8
    most_operands: int = 4
    row: int = 512
    score_rows: int = 4
    float_rows: int = 6
    widest_head: int = 512
    most_followers: int = 16
    panel: int = 16
    most_taps: int = 64
    word: int = 4
    most_normed: int = 8192
    most_inputs: int = 65536
    low_bit_step: int = 32
    blocks_step: int = 8
    most_regions: int = 8
    most_parts: int = 64
    flash_rows: int = 96
    flash_keys: int = 128
    flash_widest: int = 256
    block_row: int = -1
    block_bf16: int = -2


CONSTANTS = Constants()

# --- functions, by the name without `nc_`

_INVERSE = Field("inverse", "1 / scale of the codes", kind="double")
_TO = Field("to", "dtype of the result")
_OF = Field("of", "dtype of the input")
_BLOCK = Field(
    "block",
    "0: multiply x as it is; BLOCK_BF16: it is bf16; else round it to int8, by so many or BLOCK_ROW",
)
_PRODUCT = (
    Field("threads"),
    Field("outputs"),
    Field("added", "ADDED_..., before the activation"),
    Field("to", "dtype of the result: DTYPE_U8, DTYPE_S8 or DTYPE_F32"),
    Field("activation", "ACTIVATION_..."),
    Field("alpha", "of the activation", kind="double"),
    Field("beta", "of the activation", kind="double"),
    Field("added_scale", kind="double"),
    Field("added_zero_point"),
    _INVERSE,
    Field(
        "zero_point",
        "of the codes and what is added to results; for int8 codes 128 more: they are made as uint8",
        kind="double",
    ),
)
_ROW_PRODUCT = (
    *(Field("rows"), Field("inputs"), Field("outputs"), Field("threads")),
    Field(
        "isa",
        "ISA_AMX or, for bf16, ISA_AVX512_BF16, else ISA_AVX512_VNNI, ISA_AVX_VNNI or "
        "ISA_AVX2, which takes weights of int16_pairs.py alone; the CPU has it",
    ),
    Field("bf16", "whether rows and weights are bf16"),
    Field("activation", "ACTIVATION_..."),
    Field("alpha", "of the activation", kind="double"),
    Field("beta", "of the activation", kind="double"),
)
_FLOAT_ROWS = (Field("rows"), Field("inputs"), Field("stride", "elements from one row to the next"))
_FOLLOWERS = (
    Field("norm", "NORM_..."),
    Field("epsilon", "of the norm", kind="double"),
    Field("symmetric", "whether the zero point of rounded rows is 128"),
)
#: Of attentions.
_OF_TEXTS = (
    Field("texts", "whether texts follow each other: `batch` of `keys` rows at most, `rows` in all"),
    *(Field("batch"), Field("heads"), Field("rows"), Field("keys")),
    *(Field("width", "of q and k"), Field("wide", "of v and y")),
)
_STRIDES = tuple(
    Field(f"{name}_strides", f"of batch, head and {last}", (3,))
    for name, last in (("q", "row"), ("k", "key"), ("v", "key"), ("y", "row"))
)
_MASK_STRIDES = Field("mask_strides", "of batch, head, row and key", (4,))
_FACTOR = Field("factor", "of the scores", kind="double")
_TASKS = (
    Field("parts", "of the rows of a head, each a task"),
    *(Field("bytes", "of memory for each thread"), Field("threads")),
)
#: Of packed weights.
_OF_WEIGHT = (
    Field("isa", "ISA_..., one that the CPU has"),
    Field("scale_dtype", "DTYPE_F32, DTYPE_F16 or DTYPE_BF16"),
)
_LOW_BIT = (
    Field("rows"),
    Field("stride", "elements from one row of x to the next"),
    _BLOCK,
    Field("threads"),
)
_ROWS = (
    FunctionRow(
        "steps",
        Structure(
            "map",
            "y = op(a, b, c), elementwise.",
            (
                Field("operator", "MAP_..."),
                Field("dims", "how many sizes there are"),
                Field("sizes", shape=(CONSTANTS.most_dims,)),
                Field("dtypes", "of y, a, b, c", (CONSTANTS.most_operands,)),
                Field(
                    "strides",
                    "in elements, of which 0 repeats",
                    (CONSTANTS.most_operands, CONSTANTS.most_dims),
                ),
            ),
        ),
        least=2,
        most=CONSTANTS.most_operands,
    ),
    FunctionRow(
        "steps",
        Structure(
            "mean",
            "Means of rows.",
            (_TO, _OF, Field("rows"), Field("width"), Field("stride", "elements from row to row of x")),
        ),
        least=2,
        most=2,
    ),
    FunctionRow(
        "steps",
        Structure(
            "text_sums",
            "Sums of the rows of each text, in fp32.",
            (
                *(Field("texts"), Field("rows", "of all texts"), Field("width")),
                Field("stride", "elements from row to row of x"),
                Field("step", "elements from column to column of x, 0 or 1"),
                Field("threads"),
            ),
        ),
        least=3,
        most=3,
    ),
    FunctionRow(
        "steps",
        Structure(
            "norm",
            "Layer norm of rows, or RMS norm, which takes no mean off.",
            (
                *(_TO, _OF, Field("rows"), Field("width")),
                Field("centred", "whether it is a layer norm"),
                Field("epsilon", kind="double"),
                *(_INVERSE, Field("zero_point"), Field("threads")),
            ),
        ),
        least=4,
        most=4,
    ),
    FunctionRow(
        "steps",
        Structure(
            "place",
            "Copy rows to, or from, a place that an index in memory names. Strides are in bytes.",
            (
                Field("bytes", "of a row"),
                *(
                    Field("rows"),
                    Field("y_stride"),
                    Field("x_stride"),
                    Field("place_stride"),
                    Field("places"),
                ),
                Field("scatters", "whether y is the one with places, else x is"),
                Field("one_index", "for all rows, else each row has one"),
                Field("threads", "that rows are copied on, unless y is the one with places"),
            ),
        ),
        least=3,
        most=3,
        index="an index is out of range",
    ),
    FunctionRow(
        "steps",
        Structure(
            "round_images",
            "Images of fp32 to uint8 with channels last, and the scale and the zero point of all.",
            (
                *(Field("images"), Field("channels"), Field("pixels")),
                Field("channels_last", "whether x is so too; else its pixels are next to each other"),
                *(Field("symmetric", "whether the zero point is 128"), Field("threads")),
            ),
        ),
        least=4,
        most=4,
    ),
    FunctionRow(
        "steps",
        Structure(
            "spoil",
            "Fill y, fp32, with NaN where the scale of what it was computed from is NaN.",
            (Field("elements"),),
        ),
        least=2,
        most=2,
    ),
    FunctionRow(
        "steps",
        Structure(
            "attention",
            "Attention of few queries per head. Strides are in elements.",
            (
                *(Field("batch"), Field("heads"), Field("rows", "queries of a head")),
                Field("group", "heads that share keys and values"),
                *(Field("keys"), Field("width", "of keys"), Field("value_width")),
                Field("mask", "MASK_..."),
                *(Field(f"{name}_dtype") for name in ("q", "k", "v", "y", "mask")),
                *(*_STRIDES, _MASK_STRIDES, _FACTOR),
                Field("threads"),
            ),
        ),
        least=4,
        most=5,
    ),
    FunctionRow(
        "steps",
        Structure(
            "rotary",
            "Rotary embedding along rows without gaps. Strides are in elements, of which 0 repeats.",
            (
                Field("to", "dtype of the result: DTYPE_F32, DTYPE_U8 or DTYPE_S8"),
                Field("half", "elements of half a row, ROW / 2 at most"),
                Field("sizes", "of the dimensions before the last one", (3,)),
                *(Field(f"{name}_strides", shape=(3,)) for name in ("y", "x", "cosine", "sine")),
                *(_INVERSE, Field("zero_point"), Field("threads")),
            ),
        ),
        least=4,
        most=4,
    ),
    FunctionRow(
        "steps",
        Structure(
            "codes",
            "Codes of fp32 [images, channels, pixels] as [images, pixels, channels].",
            (
                *(_TO, Field("images"), Field("channels", "1 or 3"), Field("pixels")),
                *(_INVERSE, Field("zero_point"), Field("threads")),
            ),
        ),
        least=2,
        most=2,
    ),
    FunctionRow(
        "attention",
        Structure(
            "int8_attention",
            "Attention of int8 codes. Strides are in elements.",
            (
                *_OF_TEXTS,
                *_STRIDES,
                *(Field(f"{name}_zero_point") for name in ("q", "k", "v", "y")),
                Field("score", "what sums of products of q and k are multiplied by", kind="double"),
                Field("inverse_probability", "1 / scale of the probabilities", kind="double"),
                Field("value", "the same of sums of products of probabilities and v", kind="double"),
                Field("inverse", "1 / scale of y", kind="double"),
                Field("to", "dtype of y: DTYPE_U8 or DTYPE_F32"),
                *_TASKS,
                Field("isa", "ISA_... of the products; the CPU has it"),
                Field("before", "how many others follow the scores"),
                Field("behind", "how many follow the sums of values"),
                Field("followers", "FOLLOW_...", (CONSTANTS.most_followers,)),
                Field("follower_strides", "of batch, head, row and column", (CONSTANTS.most_followers, 4)),
            ),
        ),
        least=5,
        most=6 + CONSTANTS.most_followers,
    ),
    FunctionRow(
        "float_attention",
        Structure(
            "float_attention",
            "Attention in fp32, see float_attention.c. Strides are in elements.",
            (
                *(Field("batch"), Field("heads")),
                Field("group", "heads that share keys and values"),
                *(Field("rows"), Field("keys")),
                *(Field("width", "of q and k"), Field("wide", "of v and y")),
                *(Field("mask", "MASK_..."), Field("causal", "whether a row sees keys up to its own only")),
                Field("bf16", "whether both products' results, and the probabilities, are rounded to bf16"),
                *(*_STRIDES, _MASK_STRIDES, _FACTOR),
                *_TASKS,
            ),
        ),
        least=5,
        most=6,
    ),
    FunctionRow(
        "flash",
        Structure(
            "flash",
            "Attention of texts of different lengths, see flash.c. Strides are in elements.",
            (
                *(Field("texts"), Field("heads", "of queries")),
                Field("group", "heads that share keys and values"),
                *(Field("rows", "of all texts"), Field("keys", "of all texts, or of all pages")),
                *(Field("width", "of q and k"), Field("wide", "of v and y")),
                Field("dtype", "of q, k, v and y: DTYPE_F32 or DTYPE_BF16"),
                Field("causal", "whether a row sees no key beyond its own; last rows and keys are aligned"),
                Field("left", "keys before its own that a row sees; -1: all"),
                Field("right", "likewise after it"),
                *(Field(f"{name}_strides", "of row and head", (2,)) for name in ("q", "k", "v", "y")),
                Field("softcap", "c of c * tanh(score / c); 0: none", kind="double"),
                Field("factor", "of the scores", kind="double"),
                Field("block_size", "keys of a page"),
                Field("most_blocks", "pages of a text in the table; 0: there are no pages"),
                Field("block_strides", "from page to page of k and v", (2,)),
                Field(
                    "added_places", "of a query or key, by which something is added to scores; 0: nothing is"
                ),
                Field("added_strides", "of head and row of that; columns are consecutive", (2,)),
                Field("distances", "the most rows of a text, with what is added by distance; 0: nothing is"),
                Field("query_columns", "whose products with queries are added; 0: none are"),
                Field("key_columns", "likewise with keys"),
                *(Field("bytes", "of memory for each thread"), Field("threads")),
                Field("isa", "ISA_AVX2, ISA_AVX512, or for bf16 ISA_AVX512_BF16; the CPU has it"),
            ),
        ),
        least=7,
        most=11,
        index="starts do not rise from 0 to the number of rows, a page is none of the cache, or columns of "
        "distances change by more than 1",
    ),
    FunctionRow(
        "dynamic_attention",
        Structure(
            "dynamic_attention",
            "Attention in int8 with ranges of each call, see dynamic_attention.c. Strides are in elements.",
            (
                *_OF_TEXTS,
                Field("mask", "MASK_..."),
                *(*_STRIDES, _MASK_STRIDES, _FACTOR),
                *_TASKS,
            ),
        ),
        least=5,
        most=7,
    ),
    FunctionRow(
        "depthwise",
        Structure(
            "depthwise",
            "A convolution of images with channels last, each by itself. Pairs are of height and width.",
            (
                *(*_PRODUCT, Field("images")),
                *(Field(name, shape=(2,)) for name in ("image", "result", "window", "steps", "dilations")),
                Field("pads", "in front", (2,)),
            ),
        ),
        least=7,
        most=7,
    ),
    FunctionRow(
        "rows",
        Structure(
            "round_rows",
            "Rows of fp32 to uint8, each with a scale and a zero point, see rows.c.",
            (
                *_FLOAT_ROWS,
                *(Field("symmetric", "whether the zero point is 128"), Field("threads")),
                Field("per_row", "whether each row has its own range"),
                Field("isa", "ISA_... of the product; the CPU has it"),
            ),
        ),
        least=2,
        most=3,
    ),
    FunctionRow(
        "rows",
        Structure(
            "bf16_rows",
            "Rows of fp32 to bf16, see rows.c.",
            (
                *_FLOAT_ROWS,
                Field("threads"),
            ),
        ),
        least=2,
        most=2,
    ),
    FunctionRow(
        "rows",
        Structure(
            "row_product",
            "A linear of rounded rows, see rows.c.",
            _ROW_PRODUCT,
        ),
        least=6,
        most=7,
    ),
    FunctionRow(
        "rows",
        Structure(
            "norm_rows",
            "Norms of rows of fp32, rounded, see rows.c.",
            (
                *_FLOAT_ROWS,
                *(Field("threads"), *_FOLLOWERS, Field("bf16", "whether rows are rounded to bf16")),
                Field("isa", "ISA_... of the product that reads them; the CPU has it"),
            ),
        ),
        least=5,
        most=5,
    ),
    FunctionRow(
        "rows",
        Structure(
            "row_chain",
            "A linear of rounded rows, whose results are rounded again, perhaps after a norm, see rows.c.",
            (*_ROW_PRODUCT, *_FOLLOWERS, Field("keeps", "whether results of the linear are read elsewhere")),
        ),
        least=11,
        most=11,
    ),
    FunctionRow(
        "rows",
        Structure(
            "code_product",
            "Rows of codes times a weight, see rows.c.",
            (
                *_PRODUCT,
                Field("inputs", "a multiple of 4, with AMX of 64"),
                Field("stride", "bytes from one row of codes to the next"),
                Field("rows"),
                Field("isa", "as in row_product"),
            ),
        ),
        least=6,
        most=7,
    ),
    FunctionRow(
        "low_bit", Structure("low_bit", "y = x W^T + bias, see low_bit.c.", _LOW_BIT), least=8, most=8
    ),
    FunctionRow(
        "low_bit_blocks",
        Structure("low_bit_blocks", "y = x W^T + bias, see low_bit_blocks.c.", _LOW_BIT),
        least=8,
        most=8,
    ),
    FunctionRow(
        "recurrent",
        Structure(
            "recurrent",
            "All steps of one direction of one layer. Strides are in elements.",
            (
                *(Field("cell", "CELL_..."), Field("isa", "ISA_..."), Field("threads")),
                Field("reverse", "whether the last step comes first"),
                Field("float_input", "whether the input matrix is fp32, and x is not rounded"),
                *(Field("steps"), Field("rows"), Field("features", "of x")),
                *(Field("hidden", "elements of a cell state"), Field("state", "elements of a hidden state")),
                *(Field("x_step"), Field("x_row"), Field("y_step"), Field("y_row")),
            ),
        ),
        least=17,
        most=17,
    ),
)
FUNCTIONS: Mapping[str, FunctionRow] = {row.takes.name: row for row in _ROWS}
#: Of a packed weight: a tensor that `low_bit` and `low_bit_blocks` read.
LOW_BIT_WEIGHT = Structure(
    "low_bit_weight",
    "A weight of low_bit.c.",
    (
        *(
            Field("outputs"),
            Field("inputs"),
            Field("padded", "inputs as they are stored"),
            Field("group", "inputs that share a scale"),
        ),
        *(Field("bits", "of a code as it is stored: 4 or 8"), Field("middle", "the code of 0")),
        *_OF_WEIGHT,
    ),
)
LOW_BIT_BLOCKS_WEIGHT = Structure(
    "low_bit_blocks_weight",
    "A weight of low_bit_blocks.c.",
    (
        *(
            Field("outputs"),
            Field("inputs"),
            Field("groups", "of a row"),
            Field("held", "inputs of a group as they are stored"),
        ),
        *(
            Field("coding", "CODING_..."),
            Field("parts", "numbers of bf16 that a decoded weight is the sum of; 0: not known to be one"),
        ),
        *_OF_WEIGHT,
    ),
)
#: Of `openmp.h`.
IN_TURN = Structure(
    "in_turn",
    "A call of a function whose parts run consecutively. All are addresses.",
    (
        Field("function"),
        Field("how", "its first argument"),
        Field("turns", "memory for what it does"),
    ),
)
TURNS = Structure(
    "turns",
    "What such a call did.",
    (
        Field("regions", "how often it divided work among threads"),
        Field("parts", "the most parts of a region; 1 where there is none"),
        Field("seconds", "of the call", kind="double"),
        Field("divided", "seconds of all parts", kind="double"),
        Field(
            "each",
            "seconds of each part; what is beyond these sizes is added to the last ones",
            shape=(CONSTANTS.most_regions, CONSTANTS.most_parts),
            kind="double",
        ),
    ),
)
STRUCTURES = (LOW_BIT_WEIGHT, LOW_BIT_BLOCKS_WEIGHT, IN_TURN, TURNS)


def header() -> str:
    """Return the C header of the whole table."""
    tables = [enumeration.constants() for enumeration in ENUMERATIONS]
    tables.append({name.upper(): value for name, value in dataclasses.asdict(CONSTANTS).items()})
    enumerations = [_enumeration(table) for table in tables]
    structures = [structure.declaration() for structure in STRUCTURES]
    functions = [function.declaration() for function in FUNCTIONS.values()]
    begin = "/* Made of abi.py. */", "#include <stdint.h>"
    return "\n\n".join((*begin, *enumerations, *structures, *functions)) + "\n"


def _enumeration(constants: Mapping[str, int]) -> str:
    text = ", ".join(f"{name} = {value}" for name, value in constants.items())
    return textwrap.fill(f"enum {{ {text} }};", 120, subsequent_indent="    ", break_long_words=False)
