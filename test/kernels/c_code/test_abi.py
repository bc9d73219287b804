"""The table of C functions: the header that is made of it, the packer, and that each function has a row."""

import ctypes
import dataclasses
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from nc.kernels import tuning
from nc.kernels.c_code import abi, build, calls, flags, gelu, isas

C_CODE = Path(abi.__file__).parent
#: How a function of the table is defined.
DEFINITION = re.compile(
    r"^int (nc_\w+)\(const struct (nc_\w+) \*how, void \*unused, int count, char \*const \*tensors\)$",
    re.MULTILINE,
)
STRUCTURES = (*abi.STRUCTURES, *(row.takes for row in abi.FUNCTIONS.values()))


def test_a_program_prints_the_header():
    """`make sanitize` runs it without nc's packages."""
    command = [sys.executable, "-I", "-S", flags.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    parts = abi.header(), tuning.definitions(), gelu.definitions()
    assert done.stdout == flags.made_header() == "\n".join(parts)


def test_each_function_of_this_form_has_a_row_and_each_row_a_function():
    found = []
    for path in sorted(C_CODE.glob("*.c")):
        text = path.read_text()
        assert "int64_t *how" not in text
        for symbol, structure in DEFINITION.findall(text):
            assert symbol == structure
            assert text.count(f"    TAKES({symbol});\n") == text.count(f"\nint {symbol}(")
            found.append((symbol, path.stem))
    assert set(found) == {(row.symbol, row.source) for row in abi.FUNCTIONS.values()}


@pytest.mark.parametrize("name", abi.FUNCTIONS)
def test_the_library_has_the_function(name):
    function = calls.function_of(build.load(abi.FUNCTIONS[name].source), name)
    assert function.address
    assert function.set
    assert function.name == name


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What C says of the header: sizes and places of fields, constants, counts of tensors."""
    if not build._compiler():
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("abi")
    (folder / "abi.h").write_text(flags.made_header())
    lines = []
    for structure in STRUCTURES:
        name = structure.symbol
        places = ", ".join(f"offsetof(struct {name}, {field.name})" for field in structure.fields)
        lines.append(f"int64_t size_of_{name}(void) {{ return sizeof(struct {name}); }}")
        lines.append(f"int64_t places_in_{name}[] = {{{places}}};")
    names = [row.symbol for row in abi.FUNCTIONS.values()]
    lines += [f"int64_t counts_of_{name}[] = {{{name}_least, {name}_most}};" for name in names]
    constants = {name.upper(): value for name, value in dataclasses.asdict(abi.CONSTANTS).items()}
    for enumeration in abi.ENUMERATIONS:
        for name in enumeration.members:
            constants[enumeration.prefix + name.upper()] = enumeration.number(name)
    lines.append(f"int64_t constants[] = {{{', '.join(constants)}}};")
    (folder / "all.c").write_text("\n".join(["#include <stddef.h>", *lines]))
    warnings = ("-Wall", "-Wextra", "-Werror")
    command = [*build._compiler().split(), "-shared", "-fPIC", "-std=gnu11", *warnings, "-include", "abi.h"]
    subprocess.run([*command, "-o", "all.so", "all.c"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "all.so")), constants


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.name)
def test_c_reads_each_field_where_the_packer_puts_it(compiled, structure):
    library, _ = compiled
    places = list((ctypes.c_int64 * len(structure.fields)).in_dll(library, f"places_in_{structure.symbol}"))
    assert library[f"size_of_{structure.symbol}"]() == structure.size

    def numbered(shape):
        """Numbers from 1 on, in the order of memory."""
        if not shape:
            nonlocal count
            count += 1
            return count
        return [numbered(shape[1:]) for _ in range(shape[0])]

    count = 0
    packed = structure.packed(**{field.name: numbered(field.shape) for field in structure.fields})
    assert len(packed) == structure.size == 8 * (1 + count)
    assert struct.unpack_from("<q", packed) == (structure.size,)
    at = 8
    for field, place in zip(structure.fields, places, strict=True):
        assert place == at
        size = struct.calcsize(f"<{field.format}")
        found = struct.unpack_from(f"<{field.format}", packed, place)
        assert found == tuple(range(at // 8, (at + size) // 8))
        at += size


def test_c_has_the_same_constants(compiled):
    library, constants = compiled
    assert list((ctypes.c_int64 * len(constants)).in_dll(library, "constants")) == list(constants.values())
    for row in abi.FUNCTIONS.values():
        assert list((ctypes.c_int64 * 2).in_dll(library, f"counts_of_{row.symbol}")) == [row.least, row.most]


ROTARY = {
    "sizes": (1, 2, 3),
    **{f"{name}_strides": (1, 2, 3) for name in ("y", "x", "cosine", "sine")},
    "to": 0,
    "half": 4,
    "inverse": 0.5,
    "zero_point": -1,
    "threads": 1,
}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"halves": 1}, "nc_rotary does not know halves"),
        ({"half": None}, "nc_rotary misses half"),
        ({"half": None, "halves": 1}, "nc_rotary misses half and does not know halves"),
        ({"sizes": (1, 2)}, r"nc_rotary: sizes is an array of \[3\], not \(1, 2\)"),
        ({"sizes": 3}, r"nc_rotary: sizes is an array of \[3\], not 3"),
        ({"half": [4]}, r"nc_rotary: half is one number, not \[4\]"),
        ({"half": 4.0}, "nc_rotary: half is int64, not 4.0"),
        ({"half": "4"}, "nc_rotary: half is one number, not '4'"),
        ({"half": 2**63}, "nc_rotary: "),
    ],
)
def test_other_fields_are_refused(change, why):
    fields = {name: value for name, value in (ROTARY | change).items() if value is not None}
    with pytest.raises(TypeError, match=f"^{why}"):
        abi.FUNCTIONS["rotary"].packed(**fields)


def test_nested_arrays_must_have_all_sizes():
    fields = {"operator": 0, "dims": 1, "sizes": [1] * 8, "dtypes": [0] * 4}
    assert abi.FUNCTIONS["map"].packed(**fields, strides=[[1] * 8] * 4)
    for strides in ([[1] * 8] * 3, [[1] * 8, [1] * 8, [1] * 8, [1] * 7], [1] * 32):
        with pytest.raises(TypeError, match=r"strides is an array of \[4, 8\]"):
            abi.FUNCTIONS["map"].packed(**fields, strides=strides)


def test_more_values_than_a_field_holds_are_refused():
    assert abi.padded([1, 2], 4) == [1, 2, 0, 0]
    with pytest.raises(TypeError, match="3 values in a field for 2"):
        abi.padded([1, 2, 3], 2)


def test_instruction_sets_are_in_the_order_of_their_numbers():
    """`reversed(ISAS)` begins with the best one."""
    assert tuple(isas.ISAS) == abi.ISA.members


def test_the_hash_of_a_source_covers_the_table(monkeypatch):
    source = C_CODE / "steps.c"
    before = flags.source_hash(source)
    monkeypatch.setattr(flags, "made_header", lambda: abi.header())
    assert flags.source_hash(source) != before
